"""When a supervisor takes a node for ready, from what it announces in a real registry."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import COORDINATOR_LOCK, FleetRegistry, NodeRecord, VersionReport, WantedModel
from serving.fleet.local_fleet import ask_lock, ask_node
from serving.fleet.supervisor import NotYetError, RefusedError

WANTED = WantedModel(model="films", epoch=1, live=1, hold=(1, 2), serve=(1, 2), follow=(1, 2))


def asked(folder: Path, kind: str, wanted: WantedModel = WANTED, process_id: int = 7, **fields: Any) -> None:
    """Asks for process 7."""

    async def program() -> None:
        fleet = FleetRegistry(DirectoryRegistry(folder))
        await fleet.put_wanted(wanted, None)
        record = {"node_id": "n", "kind": kind, "process_id": process_id, "address": "h:1", **fields}
        await fleet.announce_node(NodeRecord.model_validate(record), 60)
        await ask_node(fleet, "n", ("films", "not yet rolled out"), 7)

    asyncio.run(program())


def report(version: int, state: str = "ready", reason: str = "") -> VersionReport:
    return VersionReport.model_validate({"model": "films", "version": version, "state": state, "reason": reason})


def test_a_shard_node_is_ready_with_the_live_version(tmp_path: Path) -> None:
    asked(tmp_path, "shard", versions=(report(1), report(2, "staging")))


def test_a_serving_process_is_ready_once_the_live_version_is_what_it_answers_with(tmp_path: Path) -> None:
    with pytest.raises(NotYetError, match="version 1 of 'films' is not live yet"):
        asked(tmp_path / "a", "serving", versions=(report(1),))
    asked(tmp_path / "b", "serving", versions=(report(1),), live={"films": 1})


def test_what_an_earlier_process_announced_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(NotYetError, match="n has not announced itself yet"):
        asked(tmp_path, "shard", process_id=6, versions=(report(1),))


def test_a_version_that_is_not_there_is_waited_for_and_one_that_is_refused_is_not(tmp_path: Path) -> None:
    with pytest.raises(NotYetError, match="version 1 of 'films' is not there yet"):
        asked(tmp_path / "a", "shard")
    with pytest.raises(NotYetError, match="is waiting shard 1 has no replica"):
        asked(tmp_path / "b", "serving", versions=(report(1, "waiting", "shard 1 has no replica"),))
    with pytest.raises(RefusedError, match="version 1 of 'films': SHA-256 is not"):
        asked(tmp_path / "c", "shard", versions=(report(1, "refused", "SHA-256 is not"), report(2)))


def test_a_node_whose_turn_has_come_in_a_rollout_by_replica_needs_the_new_version(tmp_path: Path) -> None:
    rolling = WANTED.model_copy(update={"hold": (1,), "node_hold": {"n": (2,)}})
    with pytest.raises(NotYetError, match="version 2 of 'films' is not there yet"):
        asked(tmp_path / "a", "shard", rolling, versions=(report(1),))
    asked(tmp_path / "b", "shard", rolling, versions=(report(2),))


def test_a_coordinator_is_ready_when_anybody_holds_the_lock(tmp_path: Path) -> None:
    async def program() -> None:
        fleet = FleetRegistry(DirectoryRegistry(tmp_path))
        with pytest.raises(NotYetError, match="nobody holds locks/coordinator yet"):
            await ask_lock(fleet, COORDINATOR_LOCK, 7)
        await fleet.registry.acquire(COORDINATOR_LOCK, "another one", 60)
        await ask_lock(fleet, COORDINATOR_LOCK, 7)

    asyncio.run(program())
