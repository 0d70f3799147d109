"""A served model whose rows are on shard nodes, in processes of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from loader.snapshot.reader import Snapshot
from router.errors import ShardUnavailableError
from router.plan import Plan
from serving.limits import RequestLimits
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model, load_when_possible
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.golden import golden_of
from shardrank_testing.serving_api import MODEL, api_request, rank_message, run, running_api, write_api_model
from shardrank_testing.topologies import make_node

SHARDS = 2


class Fleet:
    """Shard nodes behind Unix sockets that can be stopped and started again."""

    def __init__(self, model, folder: Path) -> None:
        self.snapshot = Snapshot.open(model.path)
        self.plan = Plan.make(self.snapshot.spec, SHARDS, "hash", 1, 0)
        self.addresses = [Address.parse(f"unix:{folder}/{shard}.sock") for shard in range(SHARDS)]
        self.servers: dict[int, NodeServer] = {}

    @property
    def source(self) -> ModelSource:
        return ModelSource(
            snapshot=self.snapshot.path,
            shards=tuple((address,) for address in self.addresses),
            replicate_bytes=0,
            dtype="float32",
        )

    async def start(self, shard: int) -> None:
        server = NodeServer(make_node(self.snapshot, self.plan, shard))
        await server.start([self.addresses[shard]])
        self.servers[shard] = server

    async def stop(self, shard: int) -> None:
        await self.servers.pop(shard).close()


async def ready(api) -> bool:
    await api.service.watch.refresh()
    return not api.service.watch.problems()


def test_a_shard_that_is_away_is_503_and_service_resumes_when_it_returns(api_model, tmp_path):
    async def main() -> None:
        fleet = Fleet(api_model, tmp_path)
        for shard in range(SHARDS):
            await fleet.start(shard)
        service = RankingService(RequestLimits(), expected_models=[MODEL])
        service.install(await asyncio.to_thread(load_served_model, fleet.source, service))
        request = api_request(1) | {"timeout_ms": 2000}
        async with running_api(service) as api:

            async def status() -> tuple[int, str]:
                answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=request)
                return answer.status_code, answer.json().get("error", {}).get("kind", "")

            scores = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()["scores"]
            np.testing.assert_allclose(scores, api_model.scores(request), rtol=1e-4)
            assert await ready(api)
            metrics = (await api.http.get("/metrics")).text
            for shard in range(SHARDS):
                labels = f'model="films",replica="{fleet.addresses[shard]}",shard="{shard}"'
                assert f'shardrank_memory_bytes{{card="0",{labels}' in metrics
                assert f'shardrank_rows_looked_up_total{{{labels},table="films"' in metrics

            await fleet.stop(1)
            assert await status() == (503, "shard_unavailable")
            with pytest.raises(Exception, match="shard 1 of 2: no replica answered") as refusal:
                await api.stub.Rank(rank_message(request))
            assert refusal.value.code().name == "UNAVAILABLE"
            assert not await ready(api)
            answer = await api.http.get("/readyz")
            assert answer.status_code == 503
            assert "shard 1" in answer.json()["problems"][MODEL]

            await fleet.start(1)
            while (await status())[0] != 200:  # noqa: ASYNC110  # the client connects again when it is asked to
                await asyncio.sleep(0.02)
            again = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()["scores"]
            assert again == scores
            assert await ready(api)
        await asyncio.to_thread(service.close)
        for shard in range(SHARDS):
            await fleet.stop(shard)

    run(main())


def test_loading_waits_for_shards_that_are_not_there_yet(api_model, tmp_path):
    # Loading asks the shards for its golden requests.
    model = write_api_model(tmp_path, golden=golden_of(api_model))
    pauses: list[float] = []

    async def main() -> None:
        fleet = Fleet(model, tmp_path)
        service = RankingService(expected_models=[MODEL])

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                for shard in range(SHARDS):
                    await fleet.start(shard)

        with pytest.raises(ShardUnavailableError):
            await asyncio.to_thread(load_served_model, fleet.source, service)
        served = await load_when_possible(fleet.source, service, sleep)
        assert (served.version, pauses) == (1, [0.1, 0.2])
        assert service.generations.models() == [MODEL]
        await asyncio.to_thread(service.close)
        for shard in range(SHARDS):
            await fleet.stop(shard)

    run(main())


def test_a_memory_budget_is_for_rows_in_this_process(api_model):
    with pytest.raises(ValidationError, match="memory_budget_bytes"):
        ModelSource(snapshot=api_model.path, shards=((Address.parse("127.0.0.1:1"),),), memory_budget_bytes=1)
    with pytest.raises(ValidationError, match="at least one replica"):
        ModelSource(snapshot=api_model.path, shards=((),))
