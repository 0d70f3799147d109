"""What a fleet on one machine makes of a registry before it starts, and when its supervisor takes a node for ready."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest

from loader.errors import SnapshotNotFoundError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import (
    COORDINATOR_LOCK,
    FleetRecord,
    FleetRegistry,
    NodeRecord,
    VersionReport,
    WantedModel,
    rollout_key,
)
from loader.rollout.plan import Rollout
from router.errors import PlanError
from serving.errors import FleetError
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import Beginning, GiveWay, ask_coordinator, ask_node, begin
from serving.fleet.supervisor import NotYetError, RefusedError
from shardrank_testing.registries import with_open
from shardrank_testing.snapshots import make_spec, one_table_spec, write_snapshot

T = TypeVar("T")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for seed in range(3):
        write_snapshot(tmp_path / "store", one_table_spec(260), seed=seed)
    return tmp_path / "store"


def on(store: Path, work: Callable[[FleetRegistry], Awaitable[T]]) -> T:
    return with_open(str(store / ".registry"), lambda registry: work(FleetRegistry(registry)))


async def no_sleep(seconds: float) -> None:
    del seconds


def begun(store: Path, **settings: object) -> tuple[Beginning, ...]:
    config = FleetConfig.model_validate({"store": store, "models": ("small",), **settings})
    return on(store, lambda fleet: begin(fleet, config, clock=lambda: 5.0, sleep=no_sleep))


def wanted(store: Path) -> WantedModel:
    return on(store, lambda fleet: fleet.wanted())["small"]


def node(node_id: str, kind: str = "shard") -> NodeRecord:
    return NodeRecord.model_validate({"node_id": node_id, "kind": kind, "process_id": 1, "address": "h:1"})


def test_the_first_time_the_latest_version_is_published_and_live(store: Path) -> None:
    (one,) = begun(store)
    assert (one.model, one.version, one.latest, one.plan.num_shards) == ("small", 3, 3, 2)
    record = wanted(store)
    assert (record.live, record.hold, record.serve, record.follow, record.canary) == (3, (3,), (3,), (3,), None)
    published = on(store, lambda fleet: fleet.versions())
    assert [(one.version, one.published_at) for one in published] == [(3, 5.0)]
    assert on(store, lambda fleet: fleet.fleet()) == FleetRecord(num_shards=2, sharding="hash", replicate_bytes=1 << 20)


def test_afterwards_what_was_live_last_is_live_again(store: Path) -> None:
    begun(store, versions={"small": 1})
    before = wanted(store)
    (one,) = begun(store)
    assert (one.version, one.latest) == (1, 3)
    assert wanted(store) == before


def test_what_nobody_runs_may_begin_with_any_version_and_shape(store: Path) -> None:
    begun(store)
    (one,) = begun(store, versions={"small": 2}, shards=4)
    assert (one.version, one.plan.num_shards) == (2, 4)
    assert (wanted(store).live, wanted(store).hold, wanted(store).epoch) == (2, (2,), 2)
    assert wanted(store).num_shards == {2: 4}
    assert on(store, lambda fleet: fleet.fleet()).num_shards == 4
    begun(store, shards=3)
    assert (wanted(store).live, wanted(store).num_shards) == (2, {2: 3})


def test_running_nodes_get_no_other_version_or_shape(store: Path) -> None:
    begun(store)
    on(store, lambda fleet: fleet.announce_node(node("elsewhere"), 60))
    with pytest.raises(FleetError, match=r"nodes run and have version 3 live; .* shardrank rollout start small 2"):
        begun(store, versions={"small": 2})
    with pytest.raises(FleetError, match=r"shard nodes run with .*'num_shards': 2.* not .*'num_shards': 3"):
        begun(store, shards=3)
    assert wanted(store).live == 3


def test_a_rollout_that_was_interrupted_is_not_overruled(store: Path) -> None:
    begun(store)
    rollout = Rollout(
        model="small", epoch=1, rollout_id="0" * 32, from_version=3, to_version=2, steps=("flip",), started_at=0,
        step_began_at=0, delta_base=2, last_delta=0, from_shards=2, to_shards=2,
    )  # fmt: skip
    on(store, lambda fleet: fleet.registry.put(rollout_key("small"), rollout.encode(), 0))
    with pytest.raises(FleetError, match="a rollout from version 3 has not ended"):
        begun(store, versions={"small": 1})
    with pytest.raises(FleetError, match="the rollout of version 2 has not ended and is over 2 shards"):
        begun(store, shards=3)
    assert begun(store)[0].version == 3


def test_a_second_fleet_of_the_same_nodes_is_refused(store: Path) -> None:
    on(store, lambda fleet: fleet.announce_node(node("serve-0", "serving"), 60))
    with pytest.raises(FleetError, match=r"a fleet with nodes \['serve-0'\] runs with registry .* already"):
        begun(store)


def test_nodes_of_a_killed_fleet_are_waited_for(store: Path) -> None:
    async def work(fleet: FleetRegistry) -> None:
        await fleet.announce_node(node("shard-0-0"), 60)

        async def sleep(seconds: float) -> None:
            del seconds
            await fleet.withdraw_node("shard-0-0")

        await begin(fleet, FleetConfig(store=store, models=("small",)), sleep=sleep)

    on(store, work)
    assert wanted(store).live == 3


def test_several_models_begin_each_with_its_own_version(store: Path) -> None:
    write_snapshot(store, make_spec())
    first, second = begun(store, models=("films", "small"), versions={"small": 2})
    assert [(first.model, first.version), (second.model, second.version)] == [("films", 1), ("small", 2)]


def test_what_a_snapshot_does_not_allow_is_refused_first(store: Path) -> None:
    with pytest.raises(PlanError, match="sharding 'hash'"):
        begun(store, sharding="hash", replicate_bytes=0)
    with pytest.raises(SnapshotNotFoundError, match="has no version 9"):
        begun(store, versions={"small": 9})
    assert on(store, lambda fleet: fleet.wanted()) == {}
    assert on(store, lambda fleet: fleet.versions()) == []
    assert on(store, lambda fleet: fleet.fleet()) is None


def test_without_models_all_of_the_store_begin_each_with_the_newest_that_can_be_read(store: Path) -> None:
    write_snapshot(store, make_spec())
    (store / "small" / "3" / "dense.safetensors").write_bytes(b"")
    assert [(one.model, one.version, one.latest) for one in begun(store, models=())] == [
        ("films", 1, 1),
        ("small", 2, 3),
    ]


BAD = "RankingModelError: golden scores differ"


def gives_way(store: Path, *refused: tuple[str, int], reason: str = BAD, **settings: object) -> list[bool]:
    """Whether another version is expected after refusals by several nodes, at the start of a fleet."""
    config = FleetConfig.model_validate({"store": store, **settings})

    async def work(fleet: FleetRegistry) -> list[bool]:
        give_way = GiveWay(fleet, config, await begin(fleet, config, sleep=no_sleep))
        return await asyncio.gather(*(give_way(*version, reason) for version in refused))

    return on(store, work)


def test_a_version_that_is_refused_gives_way_to_the_next_older_one(store: Path) -> None:
    assert gives_way(store, ("small", 3), ("small", 3)) == [True, True]
    record = wanted(store)
    assert (record.live, record.hold, record.num_shards) == (2, (2,), {2: 2})
    assert record.refused == {3: BAD}


def test_a_version_that_has_no_room_or_was_live_before_does_not_give_way(store: Path) -> None:
    assert gives_way(store, ("small", 3), reason="MemoryBudgetError: 3 GB of 2") == [False]
    begun(store, versions={"small": 2})
    assert gives_way(store, ("small", 2)) == [False]
    assert wanted(store).live == 2


def test_a_version_that_is_on_record_as_another_one_is_passed_over(store: Path) -> None:
    begun(store, versions={"small": 2})
    on(store, lambda fleet: fleet.update_wanted("small", lambda now: now.replaced(2, None, "")))
    shutil.rmtree(store / "small" / "2")
    write_snapshot(store, one_table_spec(260), seed=9, version=2)
    assert gives_way(store, ("small", 3)) == [True]
    assert wanted(store).live == 1


def test_a_model_that_the_store_has_no_more_is_not_wanted(store: Path) -> None:
    write_snapshot(store, make_spec())
    begun(store, models=())
    shutil.rmtree(store / "films")
    begun(store, models=())
    assert on(store, lambda fleet: fleet.wanted_model("films")).live is None
    assert wanted(store).live == 3


def test_a_version_that_was_named_does_not_give_way(store: Path) -> None:
    assert gives_way(store, ("small", 3), versions={"small": 3}) == [False]


def test_a_model_without_a_version_that_passes_keeps_no_other_from_being_served(store: Path) -> None:
    write_snapshot(store, make_spec())
    assert gives_way(store, ("films", 1)) == [True]
    assert on(store, lambda fleet: fleet.wanted_model("films")).live is None
    # One that was named is to be served.
    assert gives_way(store, ("films", 1), models=("films", "small")) == [False]


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
        ("shard", {}, WANTED, "version 1 of 'films' is not loaded yet"),
        ("serving", {"versions": (report(1),), "live": {"films": 1}}, WANTED, None),
        ("serving", {"versions": (report(1),)}, WANTED, "version 1 of 'films' is not live yet"),
        ("serving", {"versions": (NO_REPLICA,)}, WANTED, "is waiting shard 1 has no replica"),
        # Its turn has come in a rollout by replica.
        ("shard", {"versions": (report(1),)}, ROLLING, "version 2 of 'films' is not loaded yet"),
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


async def test_a_coordinator_is_ready_when_anybody_holds_the_lock(tmp_path: Path) -> None:
    fleet = FleetRegistry(DirectoryRegistry(tmp_path))
    with pytest.raises(NotYetError, match="no coordinator leads yet"):
        await ask_coordinator(fleet, 7)
    await fleet.registry.acquire(COORDINATOR_LOCK, "another one", 60)
    await ask_coordinator(fleet, 7)
