"""When a supervisor takes a node for ready, from what it announces in a real registry."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import COORDINATOR_LOCK, FleetRegistry, NodeRecord, VersionReport, WantedModel
from serving.fleet.local_fleet import ask_lock, ask_node
from serving.fleet.supervisor import NotYetError, RefusedError

WANTED = WantedModel(model="films", epoch=1, live=1, hold=(1, 2), serve=(1, 2), follow=(1, 2))


def report(version: int, state: str = "ready", reason: str = "") -> VersionReport:
    return VersionReport.model_validate({"model": "films", "version": version, "state": state, "reason": reason})


NO_REPLICA = report(1, "waiting", "shard 1 has no replica")
ROLLING = WANTED.model_copy(update={"hold": (1,), "node_hold": {"n": (2,)}})


@pytest.mark.parametrize(
    ("kind", "fields", "wanted", "problem"),
    [
        ("shard", {"versions": (report(1), report(2, "staging"))}, WANTED, None),
        ("shard", {"versions": (report(1),), "process_id": 6}, WANTED, "n has not announced itself yet"),
        ("shard", {}, WANTED, "version 1 of 'films' is not there yet"),
        ("serving", {"versions": (report(1),), "live": {"films": 1}}, WANTED, None),
        ("serving", {"versions": (report(1),)}, WANTED, "version 1 of 'films' is not live yet"),
        ("serving", {"versions": (NO_REPLICA,)}, WANTED, "is waiting shard 1 has no replica"),
        # Its turn has come in a rollout by replica.
        ("shard", {"versions": (report(1),)}, ROLLING, "version 2 of 'films' is not there yet"),
        ("shard", {"versions": (report(2),)}, ROLLING, None),
    ],
)
def test_a_node_is_ready_with_the_live_version(
    tmp_path: Path, kind: str, fields: dict[str, Any], wanted: WantedModel, problem: str | None
) -> None:
    with nullcontext() if problem is None else pytest.raises(NotYetError, match=problem):
        probe_of(tmp_path, wanted, kind, **fields)


def probe_of(folder: Path, wanted: WantedModel, kind: str, **fields: Any) -> None:
    """Ask for process 7 of a node that has announced `fields`."""

    async def program() -> None:
        fleet = FleetRegistry(DirectoryRegistry(folder))
        await fleet.put_wanted(wanted, None)
        record = {"node_id": "n", "kind": kind, "process_id": 7, "address": "h:1", **fields}
        await fleet.announce_node(NodeRecord.model_validate(record), 60)
        await ask_node(fleet, "n", ("films", "not yet rolled out"), 7)

    asyncio.run(program())


def test_a_version_that_a_node_refuses_is_not_waited_for(tmp_path: Path) -> None:
    refused = report(1, "refused", "SHA-256 is not")
    with pytest.raises(RefusedError, match="version 1 of 'films': SHA-256 is not"):
        probe_of(tmp_path, WANTED, "shard", versions=(refused, report(2)))


def test_a_coordinator_is_ready_when_anybody_holds_the_lock(tmp_path: Path) -> None:
    async def program() -> None:
        fleet = FleetRegistry(DirectoryRegistry(tmp_path))
        with pytest.raises(NotYetError, match="nobody holds locks/coordinator yet"):
            await ask_lock(fleet, COORDINATOR_LOCK, 7)
        await fleet.registry.acquire(COORDINATOR_LOCK, "another one", 60)
        await ask_lock(fleet, COORDINATOR_LOCK, 7)

    asyncio.run(program())
