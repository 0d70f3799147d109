"""A version is loaded, and checked against its golden requests before it may serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.errors import SnapshotCorruptError
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.embedded import ModelSource, Ranker, load_served_model
from serving.models import layers
from serving.models.layers import bfloat16_is_native
from serving.rank.service import RankingService
from serving.versions.fleet_member import FleetMember
from serving.versions.loaded_version import LoadedVersion, LoadOptions
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.errors import raises_kind
from shardrank_testing.golden import golden_of
from shardrank_testing.nodes import until
from shardrank_testing.ranking import needs_int8
from shardrank_testing.serving_api import (
    MODEL,
    ApiModel,
    api_request,
    api_spec,
    ask,
    rank_message,
    running_api,
    write_api_model,
)
from shardrank_testing.standalone import member_alone
from shardrank_testing.topologies import make_node

SHARDS = 2


@pytest.fixture(scope="module")
def golden(api_model) -> GoldenRequests:
    return golden_of(api_model)


class Fleet:
    """Shard nodes behind Unix sockets that can be stopped and started again, and a service over them."""

    def __init__(self, model: ApiModel, folder: Path) -> None:
        self.snapshot = Snapshot.open(model.path)
        self.plan = Plan.make(self.snapshot.spec, SHARDS, "hash", 1, 0)
        self.addresses = [Address.parse(f"unix:{folder}/{shard}.sock") for shard in range(SHARDS)]
        self.servers: dict[int, NodeServer] = {}
        self.service = RankingService(expected_models=[MODEL])
        self.members: list[FleetMember] = []

    def member(self, **options: Any) -> FleetMember:
        """A process over these shards that has not begun to load; it leaves at the end."""
        shards = [[address] for address in self.addresses]
        self.members.append(member_alone(self.service, self.snapshot.path, shards, **options))
        return self.members[-1]

    async def start(self, *shards: int) -> None:
        for shard in shards:
            self.servers[shard] = NodeServer(make_node(self.snapshot, self.plan, shard))
            await self.servers[shard].start([self.addresses[shard]])

    async def load(self, **options: Any) -> LoadedVersion:
        """Start all shards, and serve the model over them."""
        await self.start(*range(SHARDS))
        await self.member(**options).load()
        return self.service.generations.payload(MODEL, self.snapshot.version)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.leave()
        await asyncio.to_thread(self.service.close)
        for server in self.servers.values():
            await server.close()


async def test_a_shard_that_is_away_is_503_until_it_returns(api_model, tmp_path):
    request = api_request(1) | {"timeout_ms": 2000}
    async with Fleet(api_model, tmp_path) as fleet:
        await fleet.load()
        async with running_api(fleet.service) as api:

            async def ranked() -> dict[str, Any]:
                return (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()

            async def readiness() -> tuple[int, dict[str, str]]:
                await api.service.watch.refresh()
                response = await api.http.get("/readyz")
                return response.status_code, response.json()["problems"]

            scores = (await ranked())["scores"]
            np.testing.assert_allclose(scores, api_model.scores(request), rtol=1e-4)
            assert await readiness() == (200, {})
            metrics = (await api.http.get("/metrics")).text
            for shard in range(SHARDS):
                labels = f'model="films",replica="{fleet.addresses[shard]}",shard="{shard}"'
                assert f'shardrank_memory_bytes{{card="0",{labels}' in metrics
                assert f'shardrank_rows_looked_up_total{{{labels},table="films"' in metrics
            await fleet.servers.pop(1).close()
            refused = await api.http.post(f"/v1/models/{MODEL}:rank", json=request)
            assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "shard_unavailable")
            with pytest.raises(Exception, match="shard 1 of 2: no replica answered") as refusal:
                await api.stub.Rank(rank_message(request))
            assert refusal.value.code().name == "UNAVAILABLE"
            status, problems = await readiness()
            assert status == 503
            assert "shard 1" in problems[MODEL]
            await fleet.start(1)
            again: dict[str, Any] = {}
            while "scores" not in again:  # the client connects again when it is called
                again = await ranked()
            assert again["scores"] == scores
            assert await readiness() == (200, {})


async def test_loading_waits_for_shards_that_are_not_there_yet(tmp_path, golden):
    """Loading sends the shards its golden requests."""
    async with Fleet(write_api_model(tmp_path, golden=golden), tmp_path) as fleet:
        member = fleet.member()
        loading = asyncio.create_task(member.load())
        while "no replica answered" not in waiting_for(member):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert fleet.service.watch.problems() == {MODEL: "no live version"}
        await fleet.start(*range(SHARDS))
        await loading
        assert fleet.service.generations.live_versions() == {MODEL: 1}


def waiting_for(member: FleetMember) -> str:
    """Why a process has not loaded its one version yet."""
    record = member.agent.announced
    return "" if record is None else "".join(report.reason for report in record.versions)


async def test_a_process_alone_ends_with_the_error_of_its_version(tmp_path, golden):
    wrong = dataclasses.replace(golden, scores=(golden.scores + 0.5) % 1)
    async with Fleet(write_api_model(tmp_path, golden=wrong), tmp_path) as fleet:
        with raises_kind("golden_mismatch"):
            await fleet.load()
        assert fleet.service.generations.all() == []


async def test_a_process_alone_waits_for_a_file_before_it_gives_up(api_model, tmp_path):
    shutil.copytree(api_model.path, tmp_path / MODEL / "1")
    model = dataclasses.replace(api_model, path=tmp_path / MODEL / "1")
    dense = model.path / "dense.safetensors"
    async with Fleet(model, tmp_path) as fleet:
        await fleet.start(*range(SHARDS))
        member, hasty = fleet.member(), fleet.member(retry_s=0.1)
        dense.rename(tmp_path / "away")
        loading = asyncio.create_task(member.load())
        await until(lambda: "dense.safetensors: missing" in waiting_for(member))
        with pytest.raises(SnapshotCorruptError, match=r"dense\.safetensors: missing"):
            await hasty.load()
        assert not loading.done()
        (tmp_path / "away").rename(dense)
        await loading
        assert fleet.service.live(MODEL) == 1


def load(model, limits=None, **options):
    service = RankingService(limits)
    served = load_served_model(ModelSource(snapshot=model.path, **options), service)
    served.close()
    return served.description, service.metrics.render().decode()


def test_lookups_are_counted_on_after_rows_were_replaced(api_model):
    snapshot = Snapshot.open(api_model.path)
    plan = Plan.make(snapshot.spec)
    node = make_node(snapshot, plan, 0)
    options = LoadOptions(dtype="float32")
    served = LoadedVersion.load(snapshot, plan, lambda _: [LocalShard(node)], options, on_close=node.close)
    tables = load_tables(snapshot, plan.partition(0), plan.digest)
    node.generations.replace(MODEL, snapshot.version, tables)
    assert served.access() == [tables.engine.access]
    served.close()


def test_other_than_golden_scores_are_refused_with_the_numbers(tmp_path, golden):
    scores = golden.scores.copy()
    scores[-1] = (scores[-1] + 0.5) % 1
    model = write_api_model(tmp_path, golden=dataclasses.replace(golden, scores=scores))
    with raises_kind("golden_mismatch", match=r"films' version 1: golden scores differ by up to 0\.5, the manifest"):
        load(model, dtype="float32")


@pytest.mark.skipif(not bfloat16_is_native(), reason="this CPU has no bfloat16")
def test_bfloat16_serves_only_if_it_gives_the_golden_scores(tmp_path, golden, caplog):
    model = write_api_model(tmp_path, golden=golden)
    with caplog.at_level(logging.WARNING):
        description, metrics = load(model, dtype="auto")
    tolerance = Snapshot.open(model.path).manifest.golden.tolerance
    if description.dense_model.dtype == "bfloat16":
        assert description.dense_model.dtype_fallback == ""
        assert tolerance > 2**-9
    else:
        assert "with bfloat16 golden scores differ by up to" in description.dense_model.dtype_fallback
        assert "the dense model is computed in float32" in caplog.text
        assert f'shardrank_dtype_fallback{{model="{MODEL}",version="1"}} 1.0' in metrics


@needs_int8
def test_int8_layers_are_those_that_give_the_golden_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "MIN_INT8_WEIGHTS", 0)
    dense_model = api_spec().dense_model
    deep = dense_model.model_copy(update={"config": {**dense_model.config, "hidden": [24, 16]}})
    spec = api_spec().model_copy(update={"dense_model": deep})
    golden = golden_of(write_api_model(tmp_path / "first", spec=spec))
    found = list[str]()
    for tolerance in (0.2, *np.geomspace(0.05, 1e-6, 12).tolist()):
        model = write_api_model(tmp_path / f"{tolerance}", spec=spec, golden=golden, golden_tolerance=tolerance)
        source = ModelSource(snapshot=model.path, dtype="int8")
        with contextlib.closing(load_served_model(source, RankingService())) as served:
            checked, dtype = served.checked, served.description.dense_model.dtype
        assert (checked.difference or 0.0) <= tolerance
        assert bool(checked.int8) == (dtype == "int8") == (checked.fallback == "")
        found.append(checked.int8)
    assert re.fullmatch(r"mlp.layers.0, mlp.layers.1.* in int8, 0 of [1-9]\d* inputs beyond their codes", found[0])
    # The smallest is given up first, in the end all.
    kept = [re.sub(" in int8.*", "", text).split(", ") for text in dict.fromkeys(found) if text]
    assert found[-1] == ""
    assert all(fewer == more[: len(fewer)] for more, fewer in itertools.pairwise(kept))


@needs_int8
def test_no_layer_is_in_int8_without_golden_requests(tmp_path):
    description, _ = load(write_api_model(tmp_path), dtype="int8")
    reason = "there are no golden requests to check int8 with"
    assert (description.dense_model.dtype, description.dense_model.dtype_fallback) == ("float32", reason)


def bytes_by_form(service: RankingService) -> dict[str, float]:
    sample = rf'shardrank_shard_answer_bytes_total{{form="(.*)",model="{MODEL}"}} (.*)'
    found = re.findall(sample, service.metrics.render().decode())
    return {form: float(size) for form, size in found if float(size)}


@pytest.mark.parametrize("num_replicas", [0, pytest.param(1, marks=pytest.mark.nightly)])
async def test_the_narrowest_sums_are_sent_that_golden_scores_allow(tmp_path, num_replicas):
    spec = api_spec()
    wider = [table.model_copy(update={"embedding_dim": 4 * table.embedding_dim}) for table in spec.tables]
    spec = spec.model_copy(update={"tables": tuple(wider)})
    golden = golden_of(write_api_model(tmp_path / "first", spec=spec))
    chosen = list[str]()
    for tolerance in (0.2, *np.geomspace(0.01, 1e-6, 9).tolist()):
        folder = tmp_path / f"{tolerance}"
        model = write_api_model(folder, spec=spec, golden=golden, golden_tolerance=tolerance)
        async with Fleet(model, folder) as fleet:
            checked = (await fleet.load(num_replicas=num_replicas, dtype="float32")).checked
            before = bytes_by_form(fleet.service)
            found = await ask(fleet.service, api_request(1))
            np.testing.assert_allclose(found.scores, model.scores(api_request(1)), atol=tolerance + 1e-6)
            grown = {form: size - before.get(form, 0) for form, size in bytes_by_form(fleet.service).items()}
            chosen += [form for form, size in grown.items() if size and form != "stored"]
            refused = [form for form in ("int8", "float16") if f"with {form} sums of shards" in checked.wire_fallback]
            assert refused == (["int8", "float16"] if chosen[-1] == "float32" else [])
            metrics = fleet.service.metrics.render().decode()
            assert f'shardrank_wire_fallback{{model="{MODEL}",version="1"}} {float(bool(refused))}' in metrics
    assert chosen == sorted(chosen, key=["int8", "float16", "float32"].index)
    assert (len(chosen), set(chosen)) == (10, {"int8", "float16", "float32"})


def test_a_dense_model_that_gives_nan_fails_the_request_alone(tmp_path, api_model):
    # Weights so large that some units overflow to +inf and others to -inf.
    model = write_api_model(tmp_path, scale=1e4)
    with Ranker.open(model.path, dtype="float32") as ranker:
        request = api_request(1)
        request["candidates"]["dense"][0][0] = 3e38
        request["context"]["dense"] = [3e38, 3e38]
        assert not torch.isfinite(torch.from_numpy(model.scores(request))).all()
        with raises_kind("model_output", match="not finite"):
            ranker.rank(MODEL, **request)
        assert np.isfinite(ranker.rank(MODEL, **api_request(1)).scores).all()
