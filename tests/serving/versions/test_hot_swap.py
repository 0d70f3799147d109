"""Versions are flipped under load: no answer fails, none mixes two versions, and what goes is freed."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from loader.registry.fleet import NodeRecord
from router.hot_rows import HotRowsConfig
from shardrank_testing.agent_fleet import AgentFleet, agent_fleet, with_live
from shardrank_testing.nodes import until
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    ApiModel,
    api_request,
    rank_message,
    running_api,
    stats_of,
)

REQUESTS = [api_request(seed) for seed in range(8)]


class Load:
    """Calls over HTTP and gRPC in turn while the block runs, and checks each answer against the version that it names.

    Attributes:
        answers: right ones, by version.
    """

    def __init__(self, api: Api, models: dict[int, ApiModel]) -> None:
        self._api = api
        self._expected = {version: [model.scores(request) for request in REQUESTS] for version, model in models.items()}
        self._calls, self._is_over = itertools.count(), False
        self._callers = asyncio.TaskGroup()
        self.answers: Counter[int] = Counter()

    async def __aenter__(self) -> Load:
        await self._callers.__aenter__()
        for _ in range(4):
            self._callers.create_task(self._call())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await self._callers.__aexit__(*error)

    async def some_more(self, count: int = 40) -> None:
        """Wait for that many further answers."""
        enough = self.answers.total() + count
        await until(lambda: self.answers.total() >= enough)

    async def _call(self) -> None:
        while not self._is_over:
            number = next(self._calls)
            request = REQUESTS[number % len(REQUESTS)]
            if number % 2:
                response = await self._api.http.post(f"/v1/models/{MODEL}:rank", json=request)
                assert response.status_code == 200, response.text
                version, scores = response.json()["version"], response.json()["scores"]
            else:
                message = await self._api.stub.Rank(rank_message(request))
                version, scores = message.version, list(message.scores)
            np.testing.assert_allclose(scores, self._expected[version][number % len(REQUESTS)], rtol=1e-3)
            self.answers[version] += 1


async def swap(fleet: AgentFleet, old: int, new: int) -> None:
    """What a coordinator does, step by step."""
    await fleet.want(MODEL, hold=(old, new))
    for node in fleet.nodes:
        await fleet.until_state(node, MODEL, new, "ready")
    await fleet.want(MODEL, serve=(old, new))
    await fleet.until_state("serve-0", MODEL, new, "ready")
    wanted = await fleet.want(MODEL, live=new)
    await fleet.until("serve-0", lambda node: node.live.get(MODEL) == new and node.applied[MODEL] >= wanted.epoch)
    await fleet.want(MODEL, serve=(new,))
    await fleet.until_state("serve-0", MODEL, old, None)
    await fleet.want(MODEL, hold=(new,))
    for node in fleet.nodes:
        await fleet.until_state(node, MODEL, old, None)


@pytest.mark.parametrize(
    ("hot_rows", "flips"),
    [
        pytest.param(None, [(1, 2), (2, 1)], marks=pytest.mark.nightly),
        (HotRowsConfig(size_bytes=200_000), [(1, 2)]),
    ],
    ids=["no hot rows", "hot rows"],
)
async def test_flips_under_load_fail_nothing_and_mix_nothing(versions, store, folder, hot_rows, flips):
    async with agent_fleet(folder, store) as fleet:
        node, service = await with_live(fleet, versions, hot_rows=hot_rows)
        async with running_api(service) as api:
            await service.watch.refresh()
            readiness = []
            async with Load(api, versions) as load:
                for old, new in flips:
                    await swap(fleet, old, new)
                    await load.some_more()
                    readiness.append((await api.http.get("/readyz")).status_code)
            assert min(load.answers[1], load.answers[2]) >= 40
            assert set(readiness) == {200}
            last = flips[-1][1]
            assert [generation.version for generation in service.generations.all()] == [last]

            def is_counted(node: NodeRecord) -> bool:
                return len(node.versions) == 1 and (hot_rows is None or node.versions[0].hot.hits > 0)

            # What it counted is in one of its next reports.
            (report,) = (await fleet.until(node.agent._node_id, is_counted)).versions
            assert (report.hot is not None) == (hot_rows is not None)
            if report.hot is not None:
                assert 0 < report.hot.hits <= report.hot.lookups
                assert report.hot.rows > 0
            metrics = service.metrics.render().decode()
            assert ("shardrank_hot_hits_total{" in metrics) == (hot_rows is not None)
            assert re.findall(r"shardrank_hot_rows\{.*version=\"(\d+)\"", metrics) == [str(last)] * (
                hot_rows is not None
            )


async def test_nodes_leave_join_and_die_under_load_and_nothing_fails(versions, store, folder):
    async with agent_fleet(folder, store) as fleet:
        _, service = await with_live(fleet, versions)
        async with running_api(service) as api, Load(api, versions) as load:
            for name in ("shard-0-0", "shard-1-1"):
                await fleet.nodes.pop(name).leave()
                await load.some_more()
            joined = await fleet.start_node(0, 2)
            await fleet.until_state("shard-0-2", MODEL, 1, "ready")
            await until(lambda: any(table.rows for table in joined.node.info().lookups))
            # The newcomer is now sent lookups like the others, so the first one may go without a word.
            await fleet.nodes.pop("shard-0-1").die()
            await load.some_more(100)


@pytest.mark.nightly
async def test_the_version_before_answers_while_the_live_one_has_no_replica(versions, store, folder):
    """In a by-replica rollout: by itself, request by request, but nobody who names the live version."""
    async with agent_fleet(folder, store, shards=1, replicas=3) as fleet:
        _, service = await with_live(fleet, versions)
        await fleet.want(MODEL, node_hold={"shard-0-0": (2,)}, serve=(1, 2))
        await fleet.until_state("serve-0", MODEL, 2, "ready")
        async with running_api(service) as api, Load(api, versions) as load:
            wanted = await fleet.want(MODEL, live=2, fallback=1)
            await fleet.until("serve-0", lambda node: node.applied[MODEL] >= wanted.epoch)
            await load.some_more()
            requests, errors = stats_of(service, 2).requests, stats_of(service, 2).errors
            assert (requests > 0, errors) == (True, 0)
            # As if the second one had retired the old version, to load the new one.
            await fleet.nodes.pop("shard-0-1").leave()
            await fleet.nodes.pop("shard-0-0").die()
            before = load.answers.copy()
            await load.some_more()
            assert load.answers[1] > before[1]
            # Each try that failed counts as an error of the live version, for guards to see.
            assert stats_of(service, 2).errors > 0
            assert stats_of(service, 1).errors == 0
            await service.watch.refresh()
            assert (await api.http.get("/readyz")).status_code == 200
            found = await api.http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": [[1]]}})
            assert (found.status_code, found.json()["version"]) == (200, 1)
            named = await api.http.post(f"/v1/models/{MODEL}:rank", json=REQUESTS[0] | {"version": 2})
            assert (named.status_code, named.json()["error"]["kind"]) == (503, "shard_unavailable")
            await fleet.start_node(0)
            await fleet.until_state("shard-0-0", MODEL, 2, "ready")
            before = load.answers.copy()
            await until(lambda: load.answers[2] > before[2] + 20)
        # The watch of readiness may hold one while it asks.
        await until(lambda: [generation.leases for generation in service.generations.all()] == [0, 0])
