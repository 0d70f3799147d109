"""Ranking replicas under load and at their end."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.errors import NotReadyError, ServingError, ShuttingDownError
from serving.limits import RequestLimits
from serving.rank.service import RankingService
from serving.versions.served_model import ServedModel
from shard_node.bags import KeyedBags
from shard_node.errors import DeadlineExceededError
from shard_node.node import LocalShard, NodeInfo, ShardNode
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, ask, ask_in_thread, run
from shardrank_testing.topologies import make_node

NUM_WAITING = 100


class CountingShard(LocalShard):
    """Holds its thread in the first lookup until it is let go, and tells how many there were when it is asked."""

    def __init__(self, node: ShardNode) -> None:
        super().__init__(node)
        self.go = threading.Event()
        self.lookups = 0
        self.lookups_when_asked: list[int] = []

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[np.ndarray]:
        self.lookups += 1
        self.go.wait()
        return await super().pool(model, version, bags, deadline)

    async def info(self) -> NodeInfo:
        self.lookups_when_asked.append(self.lookups)
        return await super().info()


def served_over(api_model: ApiModel, service: RankingService, make_shard, **options) -> ServedModel:
    snapshot = Snapshot.open(api_model.path)
    plan = Plan.make(snapshot.spec)
    node = make_node(snapshot, plan, 0)
    options = {"clock": service.clock, **options}
    return ServedModel.load(
        snapshot,
        plan,
        lambda on_retry: [make_shard(node)],
        limits=service.limits,
        dtype="float32",
        metrics=service.metrics,
        on_close=node.close,
        **options,
    )


rank = ask


class PatientShard(CountingShard):
    """Takes as many turns of the loop to be asked as one behind a socket may."""

    async def info(self) -> NodeInfo:
        for _ in range(30):
            await asyncio.sleep(0)
        return await super().info()


@pytest.mark.parametrize(("kind", "most"), [(CountingShard, 10), (PatientShard, 15)])
def test_a_replica_that_never_runs_out_of_work_still_tells_what_its_shards_say(api_model, kind, most):
    service = RankingService(RequestLimits(max_batch_requests=1, max_queue=1000))
    shards: list[CountingShard] = []

    def make_shard(node: ShardNode) -> CountingShard:
        shards.append(kind(node))
        return shards[0]

    async def main() -> None:
        served = served_over(api_model, service, make_shard)
        service.install(served)
        requests = [
            asyncio.create_task(rank(service, api_request(seed) | {"timeout_ms": 60_000}))
            for seed in range(NUM_WAITING)
        ]
        await asyncio.sleep(0)
        asked = asyncio.create_task(served.nodes())
        await asyncio.sleep(0)
        shards[0].go.set()
        await asked
        await asyncio.gather(*requests)
        assert shards[0].lookups == NUM_WAITING
        assert shards[0].lookups_when_asked[0] < most
        await asyncio.to_thread(service.close)

    run(main())


def test_a_batch_whose_requests_expired_during_the_lookup_is_not_scored(api_model):
    now = 0.0

    class LateShard(LocalShard):
        async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[np.ndarray]:
            nonlocal now
            blocks = await super().pool(model, version, bags, 1e9)
            now += 10.0
            return blocks

    service = RankingService(clock=lambda: now)
    service.install(served_over(api_model, service, LateShard))
    with pytest.raises(DeadlineExceededError, match="while the rows were looked up"):
        ask_in_thread(service, api_request(0) | {"timeout_ms": 5000})
    assert (
        'shardrank_stage_seconds_count{method="rank",model="films",stage="rank"}'
        not in service.metrics.render().decode()
    )
    service.close()


def test_a_replica_that_has_ended_makes_its_model_not_ready(api_model, caplog):
    class DeadlyShard(LocalShard):
        async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[np.ndarray]:
            raise SystemExit("out of a thread")

    before = set(threading.enumerate())
    service = RankingService()
    served = served_over(api_model, service, DeadlyShard)
    service.install(served)

    async def main() -> None:
        with pytest.raises(ServingError, match="the ranking replica ended"):
            await rank(service, api_request(0))
        while set(threading.enumerate()) - before:  # noqa: ASYNC110  # a thread does not tell when it has ended
            await asyncio.sleep(0.001)
        with pytest.raises(ShuttingDownError, match="all its ranking replicas have ended"):
            await rank(service, api_request(1))
        with pytest.raises(NotReadyError, match="1 of 1 ranking replicas"):
            await served.nodes()
        await service.watch.refresh()
        assert service.watch.problems()[MODEL].startswith("not_ready: ")

    run(main())
    assert "ranking replica rank-films-1-0 ended" in caplog.text
    assert service.generations.all()[0].leases == 0
    service.close()
