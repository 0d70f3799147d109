"""Replicas, on a thread or on the loop of the APIs, answer every request once."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from loader.errors import OverloadedError, UnavailableError
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.embedded import ModelSource, load_served_model
from serving.errors import InternalError
from serving.formats.requests import LookupRequest
from serving.limits import RequestLimits
from serving.observe.calls import Call
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion, LoadOptions
from shard_node.answer import Answer, ReplyEncoding
from shard_node.bags import Bags
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.requests import ServerLimits
from shard_node.wire.server import NodeServer
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import NEVER_S, NearShard, until
from shardrank_testing.serving_api import (
    MODEL,
    ApiModel,
    api_request,
    ask,
    running_api,
)
from shardrank_testing.standalone import serving_alone
from shardrank_testing.topologies import make_node
from shardrank_testing.waiting import EMPTY


async def test_a_replica_that_has_ended_makes_its_model_not_ready(api_model, caplog):
    class DeadlyShard(NearShard):
        def pool(self, *lookup: object) -> asyncio.Future[Answer]:
            raise SystemExit("out of a thread")

    before = set(threading.enumerate())
    snapshot = Snapshot.open(api_model.path)
    plan = Plan.make(snapshot.spec)
    node = make_node(snapshot, plan, 0)
    served = LoadedVersion.load(
        snapshot, plan, lambda on_retry: [DeadlyShard(node)], LoadOptions(dtype="float32"), on_close=node.close
    )
    service = RankingService()
    service.install(served)
    with pytest.raises(InternalError, match="ranking was broken off"):
        await ask(service, api_request(0))
    while set(threading.enumerate()) - before:  # noqa: ASYNC110  # a thread does not tell when it has ended
        await asyncio.sleep(0.001)
    with raises_kind("shutting_down", match="all its ranking replicas have ended"):
        await ask(service, api_request(1))
    with raises_kind("not_ready", match="1 of 1 ranking replicas"):
        await served.nodes()
    await service.watch.refresh()
    assert service.watch.problems()[MODEL].startswith("not_ready: ")

    assert "ranking replica rank-films-1-0 ended" in caplog.text
    assert service.generations.all()[0].leases == 0
    service.close()


async def loaded(model, limits: RequestLimits | None = None, num_replicas: int = 0) -> RankingService:
    service = RankingService(limits, expected_models=[MODEL])
    source, loop = (
        ModelSource(snapshot=model.path, num_replicas=num_replicas, dtype="float32"),
        asyncio.get_running_loop(),
    )
    service.install(await asyncio.to_thread(load_served_model, source, service, loop=loop))
    return service


async def closed(service: RankingService) -> None:
    await asyncio.to_thread(service.close)


@pytest.mark.parametrize("num_replicas", [0, 1])
async def test_a_bug_fails_its_batch_and_the_replica_goes_on(api_model, num_replicas, caplog):
    service = await loaded(api_model, num_replicas=num_replicas)
    deadline, future = service.clock() + NEVER_S, Future()
    # Without a time of parsing the time in the queue can't be worked out.
    call = Call("embedded", "lookup", 0.0, parsed_at=None, deadline=deadline, future=future)
    call.request, call.lease = LookupRequest(EMPTY, timeout_s=1.0, num_floats=0), service.lease(MODEL)
    call.lease.payload.batcher.submit(call)
    with pytest.raises(InternalError, match="ranking was broken off"):
        await asyncio.wrap_future(future)
    assert_scores(api_model, [await ask(service, api_request(1))], [1])
    await service.watch.refresh()
    assert not service.watch.problems()
    await closed(service)

    assert "a batch of 1 requests was broken off" in caplog.text
    assert "TypeError" in caplog.text


def batches(service: RankingService) -> tuple[float, float]:
    """Batches so far, and the requests in them."""
    text = service.metrics.render().decode()
    count, total = re.findall(r"^shardrank_batch_requests_(?:count|sum){.*} (.*)$", text, re.MULTILINE)
    return float(count), float(total)


async def test_the_loop_goes_on_between_two_batches(api_model):
    service = await loaded(api_model, RequestLimits(max_batch_requests=1))
    asking, seen = ranking_in_task(service, *range(10)), set()
    while not all(task.done() for task in asking):
        seen.add(sum(task.done() for task in asking))
        await asyncio.sleep(0)
    # Another task had an iteration after each of the batches.
    assert seen == set(range(10))
    assert batches(service) == (10, 10)
    await closed(service)


async def test_requests_of_one_loop_iteration_are_one_batch(api_model):
    before = set(threading.enumerate())
    service = await loaded(api_model)
    seeds = list(range(12)) * 2
    assert_scores(api_model, await asyncio.gather(*ranking_in_task(service, *seeds)), seeds)
    assert batches(service) == (1, 24)
    async with running_api(service) as api:
        body = {"sparse": {"film": [[1], [2]]}}
        assert (await api.http.post(f"/v1/models/{MODEL}:lookup", json=body)).status_code == 200
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rank-")]
    await closed(service)


async def test_rows_on_disk_are_not_ranked_on_the_loop(tmp_path):
    source = ModelSource(snapshot=tmp_path, num_replicas=0, memory_budget_bytes=1000)
    with pytest.raises(InternalError, match="num_replicas 0 ranks rows in RAM"):
        load_served_model(source, RankingService(), loop=asyncio.get_running_loop())


class HeldNode(ShardNode):
    """A node that answers when it is let go, and fails at those calls that it is told to, by number."""

    def __init__(self, node: ShardNode, fails: tuple[int, ...] = ()) -> None:
        super().__init__(node.identity)
        self.generations = node.generations
        self.go = threading.Event()
        self.asked: list[int] = []
        self._fails = fails

    def answer(self, model: str, version: int, bags: Bags, forms: ReplyEncoding) -> Answer:
        number = len(self.asked)
        self.asked.append(bags.num_values)
        assert self.go.wait(NEVER_S)
        if number in self._fails:
            raise OverloadedError(f"call {number} is one too many", kind="node_overloaded")
        return super().answer(model, version, bags, forms)


@contextlib.asynccontextmanager
async def ranked_on_loop(
    api_model: ApiModel, folder: Path, *nodes: HeldNode
) -> AsyncIterator[tuple[RankingService, list[NodeServer]]]:
    """A service that ranks on this loop what nodes behind sockets answer, in their own threads."""
    # An event loop's own pooling would hold up the test.
    limits = ServerLimits(max_inline_bytes=0, threads=8)
    servers = [NodeServer(node, limits) for node in nodes]
    addresses = [Address(path=f"{folder}/{number}.sock") for number in range(len(nodes))]
    for server, address in zip(servers, addresses, strict=True):
        await server.start([address])
    service, shards = RankingService(expected_models=[MODEL]), [[address] for address in addresses]
    try:
        async with serving_alone(service, api_model.path, shards, num_replicas=0):
            yield service, servers
    finally:
        for node in nodes:
            node.go.set()
        await closed(service)
        for server in servers:
            await server.close()


def held_nodes(api_model: ApiModel, count: int = 1, fails: tuple[int, ...] = ()) -> list[HeldNode]:
    snapshot = Snapshot.open(api_model.path)
    plan = Plan.make(snapshot.spec, count, "hash", 1, 0)
    return [HeldNode(make_node(snapshot, plan, number), fails) for number in range(count)]


def ranking_in_task(service: RankingService, *seeds: int) -> list[asyncio.Task]:
    """Rank requests whose heads have all come before the first of them is ranked."""
    calls = [service.admit("embedded", "rank", None) for _ in seeds]
    return [
        asyncio.create_task(ask(service, api_request(seed), call=call)) for seed, call in zip(seeds, calls, strict=True)
    ]


def assert_scores(api_model: ApiModel, answers: list, seeds: range | list[int]) -> None:
    for seed, answer in zip(seeds, answers, strict=True):
        np.testing.assert_allclose(answer.scores, api_model.scores(api_request(seed)), rtol=1e-5, atol=1e-5)


async def test_a_request_that_is_alone_is_ranked_without_queue(api_model, tmp_path):
    """Its own task ranks it; one that comes meanwhile is queued, and begun beside it."""
    (node,) = held_nodes(api_model)
    async with ranked_on_loop(api_model, tmp_path, node) as (service, _):
        tasks = len(asyncio.all_tasks())
        (alone,) = ranking_in_task(service, 0)
        await until(lambda: len(node.asked) == 1)
        with service.lease(MODEL) as lease:
            assert lease.payload.batcher._estimate.in_flight
        assert len(asyncio.all_tasks()) - tasks <= 2  # the call's, and that of its shard
        others = ranking_in_task(service, 1, 2)
        await until(lambda: len(node.asked) == 2)
        node.go.set()
        assert_scores(api_model, await asyncio.gather(alone, *others), range(3))
        assert batches(service) == (2, 3)
        assert [generation.leases for generation in service.generations.all()] == [0]


@pytest.mark.parametrize("num_shards", [1, 2])
async def test_a_third_batch_forms_while_two_wait_for_shards(api_model, tmp_path, num_shards):
    nodes = held_nodes(api_model, num_shards)

    before = set(threading.enumerate())
    async with ranked_on_loop(api_model, tmp_path, *nodes) as (service, _):
        assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("rank-")]
        asking = ranking_in_task(service, 0, 1)
        await until(lambda: all(len(node.asked) == 1 for node in nodes))
        asking += ranking_in_task(service, 2)
        await until(lambda: all(len(node.asked) == 2 for node in nodes))
        for seed in range(3, 12):
            asking += ranking_in_task(service, seed)
            for _ in range(50):
                await asyncio.sleep(0)
        assert [len(node.asked) for node in nodes] == [2] * num_shards
        assert not any(task.done() for task in asking)
        with service.lease(MODEL) as lease:
            assert lease.payload.batcher.num_waiting == 9
            # The loop goes on meanwhile, so whoever asks for the nodes is told.
            assert len(await lease.payload.nodes()) == num_shards
        for node in nodes:
            node.go.set()
        assert_scores(api_model, await asyncio.gather(*asking), range(12))
        assert batches(service) == (3, 12)


async def test_an_error_of_a_shard_fails_one_batch(api_model, tmp_path):
    (node,) = held_nodes(api_model, fails=(0, 3))

    async with ranked_on_loop(api_model, tmp_path, node) as (service, _):
        failing = ranking_in_task(service, 0, 1)
        await until(lambda: len(node.asked) == 1)
        others = ranking_in_task(service, 2, 3)
        await until(lambda: len(node.asked) == 2)
        waiting = ranking_in_task(service, 4, 5, 6)
        node.go.set()
        for answer in await asyncio.gather(*failing, return_exceptions=True):
            assert isinstance(answer, UnavailableError)
            assert "call 0 is one too many" in str(answer)
        assert_scores(api_model, await asyncio.gather(*others, *waiting), range(2, 7))
        assert batches(service)[1] == 5
        # Errors take nothing away: there is room for two batches again, and for one after the other.
        for seed in range(7, 12):
            (task,) = ranking_in_task(service, seed)
            if len(node.asked) == 3:
                with raises_kind("shard_unavailable", match="call 3 is one too many"):
                    await task
            else:
                assert_scores(api_model, [await task], [seed])


async def test_closing_a_version_ends_its_connections_to_shards(api_model, tmp_path):
    nodes = held_nodes(api_model, 2)

    async with ranked_on_loop(api_model, tmp_path, *nodes) as (service, servers):
        asking = ranking_in_task(service, 0)
        await until(lambda: all(node.asked for node in nodes))
        assert [server.num_connections for server in servers] == [1, 1]
        closing = asyncio.create_task(closed(service))
        await until(lambda: not service.generations.live_versions())
        # It waits for what is out, and nothing more is begun.
        with raises_kind("not_ready"):
            await ask(service, api_request(1))
        assert not closing.done()
        for node in nodes:
            node.go.set()
        assert_scores(api_model, await asyncio.gather(*asking), [0])
        await closing
        await until(lambda: not any(server.num_connections for server in servers))
        assert [len(node.asked) for node in nodes] == [1, 1]
