"""Versions are flipped under load: no answer fails, none mixes two versions, and what goes is freed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loader.registry.fleet import NodeRecord
from router.hot_rows import HotRowsConfig
from shardrank_testing.agent_fleet import AgentFleet, agent_fleet
from shardrank_testing.golden import golden_of
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    ApiModel,
    api_request,
    rank_message,
    running_api,
    write_api_model,
)

REQUESTS = [api_request(seed) for seed in range(8)]
STATUS_OK = 200


@pytest.fixture
def short_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("f")


class Load:
    """Asks over HTTP and gRPC in turn until stopped, and checks each answer against the version that it names."""

    def __init__(self, api: Api, models: dict[int, ApiModel]) -> None:
        self._api = api
        self._expected = {version: [model.scores(request) for request in REQUESTS] for version, model in models.items()}
        self._stop, self._news = asyncio.Event(), asyncio.Event()
        self._turn = itertools.count()
        self.answers: Counter[int] = Counter()
        self.wrong: list[object] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(4)]

    async def some_more(self, count: int = 40) -> None:
        """Waits for that many further answers."""
        until = self.answers.total() + count
        while self.answers.total() < until and not self.wrong:
            self._news.clear()
            await self._news.wait()

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        while not self._stop.is_set():
            turn = next(self._turn)
            number = turn % len(REQUESTS)
            try:
                version, scores = await (self._over_http if turn % 2 else self._over_grpc)(REQUESTS[number])
                np.testing.assert_allclose(scores, self._expected[version][number], rtol=1e-3)
            except Exception as error:
                self.wrong.append(error)
                self._news.set()
                return
            self.answers[version] += 1
            self._news.set()

    async def _over_http(self, request: dict) -> tuple[int, list[float]]:
        answer = await self._api.http.post(f"/v1/models/{MODEL}:rank", json=request)
        assert answer.status_code == STATUS_OK, answer.text
        return answer.json()["version"], answer.json()["scores"]

    async def _over_grpc(self, request: dict) -> tuple[int, list[float]]:
        answer = await self._api.stub.Rank(rank_message(request))
        return answer.version, list(answer.scores)


async def swap(fleet: AgentFleet, old: int | None, new: int, serving: str = "serve-0", shards: bool = True) -> None:
    """What a coordinator does, step by step."""
    nodes = list(fleet.nodes) if shards else []
    both = (new,) if old is None else (old, new)
    await fleet.want(MODEL, hold=both)
    for node in nodes:
        await fleet.until_state(node, MODEL, new, "ready")
    await fleet.want(MODEL, serve=both)
    await fleet.until_state(serving, MODEL, new, "ready")
    wanted = await fleet.want(MODEL, live=new)
    await fleet.until(serving, lambda node: node.live.get(MODEL) == new)
    await fleet.until(serving, lambda node: node.applied.get(MODEL, 0) >= wanted.epoch)
    await fleet.want(MODEL, serve=(new,))
    if old is not None:
        await fleet.until_state(serving, MODEL, old, None)
    await fleet.want(MODEL, hold=(new,))
    for node in nodes:
        if old is not None:
            await fleet.until_state(node, MODEL, old, None)


@pytest.mark.parametrize(
    ("hot_rows", "rounds"), [(None, 2), (HotRowsConfig(size_bytes=200_000), 1)], ids=["no hot rows", "hot rows"]
)
async def test_flips_under_load_fail_nothing_and_mix_nothing(versions, short_folder, hot_rows, rounds):
    store = versions[1].path.parent.parent
    async with agent_fleet(short_folder, store) as fleet:
        for model in versions.values():
            await fleet.publish(model.path)
        node, service = fleet.serving(hot_rows=hot_rows)
        async with running_api(service) as api:
            assert (await api.http.get("/readyz")).status_code == 503
            loading = asyncio.create_task(node.load())
            await swap(fleet, None, 1)
            await loading
            await service.watch.refresh()
            load, readiness = Load(api, versions), []
            for old, new in [(1, 2), (2, 1)] * rounds:
                await swap(fleet, old, new)
                await load.some_more()
                readiness.append((await api.http.get("/readyz")).status_code)
            await load.stop()
            assert load.wrong == []
            assert min(load.answers[1], load.answers[2]) >= 40
            assert set(readiness) == {STATUS_OK}
            assert [one.version for one in service.generations.all()] == [1]

            def is_told(one: NodeRecord) -> bool:
                return len(one.versions) == 1 and (hot_rows is None or one.versions[0].hot.hits > 0)

            # What it counted is in one of its next reports.
            (report,) = (await fleet.until(node.agent._node_id, is_told)).versions
            assert (report.hot is not None) == (hot_rows is not None)
            if report.hot is not None:
                assert 0 < report.hot.hits <= report.hot.lookups
                assert report.hot.rows > 0
            told = service.metrics.render().decode()
            assert ("shardrank_hot_hits_total{" in told) == (hot_rows is not None)
            assert re.findall(r"shardrank_hot_rows\{.*version=\"(\d+)\"", told) == ["1"] * (hot_rows is not None)


async def test_nodes_leave_join_and_die_under_load_and_nothing_fails(versions, short_folder):
    store = versions[1].path.parent.parent
    async with agent_fleet(short_folder, store) as fleet:
        await fleet.publish(versions[1].path)
        node, service = fleet.serving()
        async with running_api(service) as api:
            await fleet.want(MODEL, live=1, hold=(1,), serve=(1,))
            await node.load()
            load = Load(api, versions)
            await load.some_more()
            for name in ("shard-0-0", "shard-1-1"):
                await fleet.nodes.pop(name).leave()
                await load.some_more()
            joined = await fleet.start_node(0, 2)
            await fleet.until_state("shard-0-2", MODEL, 1, "ready")
            while not any(one.rows for one in joined.node.info().lookups) and not load.wrong:
                await load.some_more(4)
            # The newcomer is now asked like the others, so the first one may go without a word.
            await fleet.nodes.pop("shard-0-1").die()
            await load.some_more(100)
            await load.stop()
            assert load.wrong == []


async def test_with_rows_in_the_process_versions_are_swapped_the_same_way(versions, short_folder):
    store = versions[1].path.parent.parent
    async with agent_fleet(short_folder, store, shards=1, replicas=0) as fleet:
        for model in versions.values():
            await fleet.publish(model.path)
        node, service = fleet.serving(local=True)
        async with running_api(service) as api:
            loading = asyncio.create_task(node.load())
            await swap(fleet, None, 1)
            await loading
            load = Load(api, versions)
            for old, new in [(1, 2), (2, 1), (1, 2)]:
                await swap(fleet, old, new)
                await load.some_more()
            await load.stop()
            assert load.wrong == []
            assert min(load.answers[1], load.answers[2]) >= 40
            (report,) = node.reports()
            assert (report.version, report.state) == (2, "ready")
            assert report.memory_bytes > 0


async def test_a_version_with_wrong_golden_scores_is_refused_and_the_live_one_serves_on(
    versions, short_folder, tmp_path
):
    draft = write_api_model(tmp_path / "draft", 1, seed=1)
    golden = golden_of(draft)
    good = write_api_model(tmp_path / "store", 1, seed=1, golden=golden)
    wrong = dataclasses.replace(golden, scores=(golden.scores + 0.5) % 1)
    bad = write_api_model(tmp_path / "store", 2, seed=1, golden=wrong)

    async with agent_fleet(short_folder, tmp_path / "store", replicas=1) as fleet:
        for model in (good, bad):
            await fleet.publish(model.path)
        node, service = fleet.serving()
        async with running_api(service) as api:
            await fleet.want(MODEL, live=1, hold=(1,), serve=(1,))
            await node.load()
            load = Load(api, {1: good})
            await fleet.want(MODEL, hold=(1, 2))
            for name in fleet.nodes:
                await fleet.until_state(name, MODEL, 2, "ready")
            await fleet.want(MODEL, serve=(1, 2))
            record = await fleet.until_state("serve-0", MODEL, 2, "refused")
            assert "golden scores differ by up to 0.5" in record.report(MODEL, 2).reason
            assert record.live == {MODEL: 1}
            await load.some_more()
            await load.stop()
            assert load.wrong == []
            await service.watch.refresh()
            assert (await api.http.get("/readyz")).json()["problems"] == {}
