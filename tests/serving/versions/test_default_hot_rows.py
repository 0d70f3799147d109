"""Hot rows where nobody sets their memory: which versions have them, in how much, and what the log says."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest

from loader.registry.fleet import FleetRecord
from loader.snapshot.reader import Snapshot
from router.errors import HotRowsError
from router.hot_keeper import default_hot_rows, reason_off
from router.hot_rows import HotRowsConfig
from router.plan import Plan
from serving.config import ServeConfig
from serving.fleet.process import WORKER_VARIABLE
from serving.fleet.workers import Membership
from serving.rank.service import RankingService
from serving.server import fleet_member
from shard_node.engine.memory import RowMemory, total_memory_bytes
from shard_node.errors import MemoryBudgetError
from shardrank_testing.agent_fleet import AgentFleet, agent_fleet
from shardrank_testing.snapshots import one_table_spec, write_snapshot

SPEC = one_table_spec(1000, bucketing="mixed")
TABLE = SPEC.tables[0]
BY_DEFAULT = HotRowsConfig(size_bytes=100_000, is_default=True)
CHOSEN = HotRowsConfig(size_bytes=100_000)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """By whether they have access counts."""
    counts = {TABLE.name: np.arange(TABLE.num_embeddings)}
    counted, _ = write_snapshot(tmp_path_factory.mktemp("c"), SPEC, access_counts=counts)
    plain, _ = write_snapshot(tmp_path_factory.mktemp("p"), SPEC)
    return {True: Snapshot.open(counted), False: Snapshot.open(plain)}


@pytest.mark.parametrize(
    ("config", "shards", "has_counts", "reason"),
    [
        (BY_DEFAULT, 5, True, ""),
        (BY_DEFAULT, 4, True, "4 shards; without hot_rows_gb they are on for more than 4"),
        (BY_DEFAULT, 5, False, "the snapshot has no access counts; without hot_rows_gb they are on where it has"),
        (CHOSEN, 2, False, ""),
        (None, 5, True, "no memory is set aside for them (hot_rows_gb 0)"),
    ],
)
async def test_hot_rows_by_shards_and_counts(snapshots, tmp_path, caplog, config, shards, has_counts, reason):
    caplog.set_level("INFO", "serving.versions.fleet_member")
    snapshot = snapshots[has_counts]
    plan = Plan.make(SPEC, shards, "hash", replicate_bytes=0)
    assert reason_off(config, snapshot, plan) == reason
    async with agent_fleet(tmp_path, tmp_path, shards=0) as fleet:
        assert await connect(fleet, config, snapshot, shards) is (not reason)
    state = f"off: {reason}" if reason else "on, in at most 100000 bytes"
    logged = [record.getMessage() for record in caplog.records if record.name == "serving.versions.fleet_member"]
    assert logged == [f"hot rows of version 1 of model {SPEC.model!r}: {state}"]


async def connect(
    fleet: AgentFleet, config: HotRowsConfig | None, snapshot: Snapshot, shards: int, memory: RowMemory | None = None
) -> bool:
    """Connect a version; return whether it has hot rows."""
    member, _ = fleet.serving(hot_rows=config)
    member._hot_memory = memory or member._hot_memory
    topology = FleetRecord(num_shards=shards, sharding="hash", replicate_bytes=0)
    with ExitStack() as stack:
        return (await asyncio.to_thread(member._connect, snapshot, topology, stack))[2] is not None


@pytest.mark.parametrize(
    ("size_bytes", "available", "reason"),
    [(100_000, 10, "rows take 100000 bytes, but 10 are available"), (10, 1 << 40, "10 bytes have no room for one row")],
)
async def test_no_memory_leaves_a_version_without_by_default(
    snapshots, tmp_path, caplog, size_bytes, available, reason
):
    """Who chose a size is refused the version."""
    memory = RowMemory(available=lambda: available, reserve_bytes=0)
    chosen = HotRowsConfig(size_bytes=size_bytes)
    async with agent_fleet(tmp_path, tmp_path, shards=0) as fleet:
        by_default = chosen.model_copy(update={"is_default": True})
        assert not await connect(fleet, by_default, snapshots[True], 5, memory)
        assert f": off: {reason}" in caplog.text or f": off: hot rows: {reason}" in caplog.text
        with pytest.raises((MemoryBudgetError, HotRowsError), match=reason):
            await connect(fleet, chosen, snapshots[True], 5, memory)


def test_default_size_is_a_part_of_the_memory_limit_of_all_workers():
    of_one = default_hot_rows("static", 64 << 30, 1)
    assert (of_one.size_bytes, of_one.policy, of_one.is_default) == (2 << 30, "static", True)
    # Two versions in each of four workers.
    assert 4 * 2 * default_hot_rows("learning", 64 << 30, 4).size_bytes == (64 << 30) // 16


@pytest.mark.parametrize(
    ("given", "workers", "expected"),
    [
        ({}, 1, default_hot_rows("learning", total_memory_bytes(), 1)),
        ({}, 2, default_hot_rows("learning", total_memory_bytes(), 2)),
        ({"hot_rows_gb": 0}, 1, None),
        ({"hot_rows_gb": 0.5, "hot_rows": "static"}, 2, HotRowsConfig(size_bytes=500_000_000, policy="static")),
        ({"local": True}, 1, None),
    ],
)
def test_settings_choose_hot_rows(tmp_path, monkeypatch, given, workers, expected):
    monkeypatch.setenv(WORKER_VARIABLE, f"0/{workers}")
    values = {"registry": str(tmp_path / "registry"), "store": tmp_path, "device": "cpu"} | given
    options = ServeConfig.model_validate(values, context={"given": {*given}})
    service = RankingService(None, expected_models=None)
    member = fleet_member(options, Membership.of(options), service, None)
    service.close()
    assert member._config.hot_rows == expected


async def test_two_versions_share_what_all_may_take(snapshots, tmp_path):
    async with agent_fleet(tmp_path, tmp_path, shards=0) as fleet:
        member, _ = fleet.serving(hot_rows=BY_DEFAULT)
        assert member._hot_memory.cap_bytes == 2 * BY_DEFAULT.size_bytes
        assert fleet.serving(hot_rows=CHOSEN)[0]._hot_memory.cap_bytes is None
