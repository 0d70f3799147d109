"""The busiest of several shards is told from what each was asked for."""

from __future__ import annotations

import asyncio

import pytest

from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import Snapshot
from loadtest.bench_lookup import LookupShape, make_node, write_snapshot
from loadtest.hot.balance import DIM, looked_up, measure
from router.plan import Plan
from shard_node.node import LocalShard


@pytest.mark.parametrize("num_shards", [4, 16])
def test_copies_of_the_hottest_rows_make_shards_even(tmp_path, num_shards):
    path = write_snapshot(tmp_path, LookupShape(DIM, 1, 60_000 * codec_for("int8", DIM).row_bytes))
    snapshot = Snapshot.open(path)
    plan = Plan.make(snapshot.spec, num_shards)
    shards = [LocalShard(make_node(snapshot, plan, shard)) for shard in range(num_shards)]

    async def main() -> None:
        found = {hot: await measure(snapshot, plan, shards, hot, 1.05, 100, 1) for hot in (0, 1000)}
        # A smaller table is on every shard. Of 60,000 rows the first draws a tenth of the lookups, 1,000 seven tenths.
        assert found[0].hit_rate == 0
        assert found[1000].hit_rate == pytest.approx(0.71, abs=0.02)
        assert found[0].busiest > 1.2
        assert found[1000].busiest < 1.1
        assert (await looked_up(shards)).sum() > 100 * 2000

    asyncio.run(main())
