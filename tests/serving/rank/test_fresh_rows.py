"""Requests say how old rows may be: no answer is older, other replicas are asked, or the request is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import UnavailableError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry
from loader.registry.registry import Registry
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.client import Client, RetryPolicy
from serving.embedded import Ranker
from serving.proto.shardrank.v1 import ranking_pb2
from serving.rank.service import RankingService
from shard_node.agent.delta_follower import Followers
from shard_node.answer import Answer
from shard_node.node import DeltaPosition, ShardNode
from shard_node.wire.address import Address
from shardrank_testing import nodes
from shardrank_testing.client_calls import calling, rank_arguments
from shardrank_testing.deltas import register_version
from shardrank_testing.errors import raises_kind
from shardrank_testing.serving_api import (
    FILMS,
    MODEL,
    Api,
    ApiModel,
    api_request,
    api_service,
    ask,
    rank_message,
    refused_call,
    running_api,
    stats_of,
)
from shardrank_testing.standalone import serving_alone
from shardrank_testing.topologies import make_node

REQUEST = api_request(1)
LOOKUP = {"sparse": {"film": [[3], [9]]}}
MAX_AGE_MS = 1000


def local_deltas(service: RankingService) -> DeltaPosition:
    """How far the rows are that a service has in its own process."""
    (ranking,) = service.generations.payload(MODEL, 1).rankings
    return ranking.shards[0].node.generations.payload(MODEL, 1).deltas


@pytest.fixture
async def aged(api_model: ApiModel) -> AsyncIterator[Api]:
    """Rows of delta 5 that are 40 s old."""
    with api_service(api_model) as service:
        deltas, at = local_deltas(service), time.time() - 40
        deltas.applied(5, at, 1, at)
        async with running_api(service) as api:
            yield api


@pytest.mark.parametrize(
    ("bound", "field"),
    [
        ({}, ""),
        ({"max_age_ms": 600_000}, ""),
        ({"min_sequence": 5, "max_age_ms": 600_000}, ""),
        ({"max_age_ms": 0}, "max_age_ms"),
        ({"min_sequence": 5, "max_age_ms": 30_000}, "max_age_ms"),
        ({"min_sequence": 6}, "min_sequence"),
    ],
)
async def test_every_api_has_the_age_and_takes_the_bound(aged, bound, field):
    for method, body in (("rank", REQUEST), ("lookup", LOOKUP)):
        reply = await aged.http.post(f"/v1/models/{MODEL}:{method}", json={**body, **bound})
        document = reply.json()
        if field:
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert (document["error"]["kind"], document["error"]["field"]) == ("rows_stale", field)
        else:
            assert reply.status_code == 200
            assert (document["delta_sequence"], 40_000 <= document["age_ms"] < 600_000) == (5, True)
    message = rank_message(REQUEST | bound)
    lookup = ranking_pb2.LookupRequest(model=MODEL, **bound)
    lookup.sparse["film"].ids.extend([3, 9])
    for call in (aged.stub.Rank(message), aged.stub.Lookup(lookup)):
        if field:
            with refused_call(grpc.StatusCode.UNAVAILABLE, "rows_stale", field):
                await call
            assert dict(await call.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        else:
            answer = await call
            assert (answer.delta_sequence, 40_000 <= answer.age_ms < 600_000) == (5, True)
    for address in (f"http://{aged.http_address}", f"grpc://{aged.grpc_address}"):
        async with calling(Client, address, retry=RetryPolicy(max_attempts=1)) as client:
            for method, arguments in (("rank", rank_arguments(REQUEST)), ("lookup", LOOKUP)):
                if field:
                    with pytest.raises(
                        UnavailableError, match=rf"rows of delta 5 are 4\d+ ms old; {field} is "
                    ) as stale:
                        await client(method, MODEL, **arguments, **bound)
                    assert stale.value.retry_after_s == 1
                else:
                    result = await client(method, MODEL, **arguments, **bound)
                    assert (result.delta_sequence, 40_000 <= result.age_ms < 600_000) == (5, True)
    text = aged.service.metrics.render().decode()
    assert ('kind="rows_stale"' in text) == bool(field)
    # What clients ask for says nothing about the version.
    assert stats_of(aged.service, 1).errors == 0


def test_unknown_ages_are_refused_and_rows_of_the_snapshot_are_of_delta_0(api_model):
    with Ranker.open(api_model.path, dtype="float32") as ranker:
        arguments = rank_arguments(REQUEST)
        result = ranker.rank(MODEL, **arguments, min_sequence=0)
        assert (result.delta_sequence, result.age_ms) == (0, -1)
        with raises_kind("rows_stale", match="rows of delta 0 are -1 ms old"):
            ranker.rank(MODEL, **arguments, max_age_ms=2**62)


@pytest.mark.parametrize(
    "bound",
    [{"max_age_ms": -1}, {"min_sequence": -1}, {"max_age_ms": 2**63}, {"min_sequence": "5"}, {"max_age_ms": 0.5}],
)
async def test_bounds_that_are_no_whole_numbers_from_0_on_are_refused_by_name(aged, bound):
    (field,) = bound
    for method, body in (("rank", REQUEST), ("lookup", LOOKUP)):
        reply = await aged.http.post(f"/v1/models/{MODEL}:{method}", content=json.dumps({**body, **bound}))
        assert (reply.status_code, reply.json()["error"]["field"]) == (400, field)
    async with calling(Client, f"grpc://{aged.grpc_address}") as client:
        for method, arguments in (("rank", rank_arguments(REQUEST)), ("lookup", LOOKUP)):
            with raises_kind("invalid_field", match=f"^{field}: "):
                await client(method, MODEL, **arguments, **bound)


async def test_each_request_of_a_batch_is_judged_by_its_own_bound(api_model):
    bounds = [{"max_age_ms": 1000}, {}, {"max_age_ms": 600_000}, {"min_sequence": 6}, {"min_sequence": 5}]
    with api_service(api_model) as service:
        deltas, at = local_deltas(service), time.time() - 40
        deltas.applied(5, at, 1, at)
        unknown = api_request(9)
        unknown["candidates"]["sparse"]["film"][0] = FILMS
        requests = [api_request(seed) | bound for seed, bound in enumerate(bounds)]
        calls = [service.admit("embedded", "rank", None) for _ in range(len(bounds) + 1)]
        asking = [ask(service, request, call=call) for request, call in zip([*requests, unknown], calls, strict=True)]
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    kinds = [getattr(outcome, "kind", "") for outcome in outcomes]
    assert kinds == ["rows_stale", "", "", "rows_stale", "", "unknown_id"]
    for request, outcome, kind in zip(requests, outcomes, kinds, strict=False):
        if not kind:
            np.testing.assert_allclose(outcome.scores, api_model.scores(request).reshape(-1), rtol=1e-5, atol=1e-5)


class HeldRegistry:
    """A real registry whose streams are not read while `is_read` is unset."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.is_read = registry, asyncio.Event()
        self.is_read.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)

    async def read(self, *arguments: Any) -> Any:
        await self.is_read.wait()
        return await self.registry.read(*arguments)

    async def bounds(self, stream: str) -> Any:
        await self.is_read.wait()
        return await self.registry.bounds(stream)


class Replicas:
    """Two replicas of one shard that follow a stream, each by a registry that can be held, and a process over them."""

    def __init__(self, model: ApiModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.registries = [HeldRegistry(open_registry(folder / "registry")) for _ in range(2)]
        self.nodes: list[ShardNode] = []
        # When each state of the rows was published: state n by delta n.
        self.published = [time.time()]

    @contextlib.asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[RankingService]:
        snapshot, addresses = Snapshot.open(self.model.path), list[Address]()
        async with contextlib.AsyncExitStack() as stack:
            await register_version(self.registries[0].registry, snapshot)
            for number, registry in enumerate(self.registries):
                stack.push_async_callback(registry.close)
                self.nodes.append(make_node(snapshot, Plan.make(snapshot.spec, 1, "hash", 1, 0), 0))
                addresses.append(Address(path=f"{self.folder}/{number}.sock"))
                await stack.enter_async_context(nodes.serving(addresses[-1], self.nodes[-1]))
                followers = Followers(FleetRegistry(registry))
                await followers.reconcile(MODEL, {1: self.nodes[-1].generations.payload(MODEL, 1)})
                stack.push_async_callback(followers.close)
            service = RankingService(expected_models=[MODEL])
            stack.push_async_callback(asyncio.to_thread, service.close)
            await stack.enter_async_context(
                serving_alone(service, self.model.path, [addresses], num_replicas=0, **options)
            )
            yield service

    async def publish(self) -> None:
        """Publish another state of the films' rows."""
        publisher = AsyncDeltaPublisher(self.registries[0].registry, MODEL, 1)
        rows = np.full((FILMS, 8), 0.5 * len(self.published), np.float32)
        await publisher.publish("films", np.arange(FILMS), rows)
        self.published.append(time.time())

    def age_ms(self, number: int) -> int:
        return self.nodes[number].generations.payload(MODEL, 1).deltas.now.age_ms(time.time())

    async def until(self, service: RankingService, *, answers: bool, **bound: int) -> None:
        """Rank until a request is answered, or until one is refused."""
        while await self.rank(service, **bound) is not answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def rank(self, service: RankingService, **bound: int) -> bool:
        """Return whether a request is answered. The answer has all that was published before its age, and bound."""
        sent_at = time.time()
        (answer,) = await asyncio.gather(ask(service, REQUEST | bound), return_exceptions=True)
        if isinstance(answer, BaseException):
            assert getattr(answer, "kind", answer) == "rows_stale"
            return False
        states = [
            {**self.model.tables, "films": np.full((FILMS, 8), 0.5 * state, np.float32)} if state else self.model.tables
            for state in range(len(self.published))
        ]
        scores = [replace(self.model, tables=tables).scores(REQUEST).reshape(-1) for tables in states]
        (state,) = [n for n, each in enumerate(scores) if np.allclose(answer.scores, each, rtol=1e-3, atol=1e-4)]
        assert state >= answer.delta_sequence
        max_age_ms = min(bound.get("max_age_ms", answer.age_ms), answer.age_ms)
        for published_at in self.published[state + 1 :]:
            assert published_at > sent_at - max_age_ms / 1000
        return True


@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, {"max_age_ms": MAX_AGE_MS}), ({"when_stale": {MODEL: "refuse"}, "max_staleness": {MODEL: 1.0}}, {})],
)
async def test_no_answer_exceeds_its_bound_while_followers_are_delayed(versions, folder, options, bound):
    """By the request's bound or by the model's: answered by the replica that keeps up, refused where none does."""
    replicas = Replicas(versions[1], folder)
    first, second = replicas.registries
    async with replicas.serving(**options) as service:
        first.is_read.clear()
        await replicas.publish()
        await nodes.until(lambda: replicas.age_ms(0) > 2 * MAX_AGE_MS, pause_s=0.01)
        for _ in range(10):
            await replicas.until(service, answers=True, **bound)
        second.is_read.clear()
        await replicas.publish()
        await replicas.until(service, answers=False, **bound)
        if bound:
            assert await replicas.rank(service)
        first.is_read.set()
        await replicas.until(service, answers=True, **bound)


async def test_other_replicas_are_asked_for_a_model_that_answers_with_what_there_is(versions, folder):
    replicas = Replicas(versions[1], folder)
    first, second = replicas.registries
    options = {"when_stale": {MODEL: "other-replica"}, "max_staleness": {MODEL: 1.0}}
    async with replicas.serving(**options) as service:
        first.is_read.clear()
        await nodes.until(lambda: replicas.age_ms(0) > 2 * MAX_AGE_MS, pause_s=0.01)
        await replicas.publish()
        await nodes.until(lambda: replicas.nodes[1].info().versions[0].delta_sequence == 1, pause_s=0.01)
        assert [(await ask(service, REQUEST)).delta_sequence for _ in range(10)] == [1] * 10
        second.is_read.clear()
        await nodes.until(lambda: replicas.age_ms(1) > MAX_AGE_MS, pause_s=0.01)
        assert [(await ask(service, REQUEST)).delta_sequence for _ in range(4)] == [1] * 4


async def test_nodes_of_older_releases_answer_requests_without_a_bound_on_age(versions, folder):
    replicas = Replicas(versions[1], folder)
    async with replicas.serving() as service:
        for node in replicas.nodes:

            def without_age(*lookup: Any, answer: Any = node.answer) -> Answer:
                return replace(answer(*lookup), age_ms=-1)

            node.answer = without_age
        assert (await ask(service, REQUEST)).age_ms == -1
        assert (await ask(service, REQUEST | {"min_sequence": 0})).age_ms == -1
        with raises_kind("rows_stale"):
            await ask(service, REQUEST | {"max_age_ms": 600_000})
