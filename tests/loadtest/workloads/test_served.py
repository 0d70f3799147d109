"""Workloads of a served model: what its description tells makes requests that it answers, and a file's are drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from loader.errors import ConfigError
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import open_payloads
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import APIS, GRPC_APIS
from loadtest.workloads.served import describe, described_spec, requests_like
from loadtest.workloads.workload import features_of
from router.feature_schema import FeatureSchema
from serving.description import ModelInfo
from serving.observe.recording import RequestRecorder, recorded_files
from serving.rank.service import RankingService
from shardrank_testing.serving_api import MODEL, api_request, api_service, api_spec, run, running_api, write_api_model


def lenient_spec():
    """The model, whose vocabulary takes any string."""
    spec = api_spec()
    tables = [
        table.model_copy(update={"unknown_id": "skip"}) if table.name == "cities" else table for table in spec.tables
    ]
    return spec.model_copy(update={"tables": tuple(tables)})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankingService]:
    with api_service(write_api_model(tmp_path_factory.mktemp("store"), spec=lenient_spec())) as running:
        yield running


def load_of(target: str, described: ModelInfo, **options: object) -> OfferedLoad:
    load = OfferedLoad(target=target, model=MODEL, requests=20, **options)
    return load.model_copy(update={"workload": described})


@pytest.mark.parametrize("api_name", APIS)
def test_a_description_makes_requests_that_are_answered_over_every_api(service: RankingService, api_name) -> None:
    async def work() -> None:
        async with running_api(service) as api:
            is_grpc = api_name in GRPC_APIS
            port = api.listening.grpc_port if is_grpc else api.listening.http_port
            target = f"{'grpc' if is_grpc else 'http'}://127.0.0.1:{port}"
            described = await asyncio.to_thread(describe, target, MODEL)
            assert described == service.describe(MODEL)
            options = {"candidates": "3-9:5", "hotness": ("2", "history=9"), "ids": "zipf:1.1"}
            name, pool = open_payloads(load_of(target, described, api=api_name, **options))
            assert name == (
                f"{MODEL} version 1, hotness 2 history=9, unknown ids of cities, ids zipf:1.1, candidates 3-9:5, "
                "ragged bags"
            )
            async with grpc.aio.insecure_channel(f"127.0.0.1:{api.listening.grpc_port}") as channel:
                for payload in pool:
                    if is_grpc:
                        answer = await channel.unary_unary(payload.path, None, None)(payload.body)
                    else:
                        response = await api.http.post(
                            payload.path, content=payload.body, headers=dict(payload.headers)
                        )
                        assert response.status_code == 200, response.text
                        answer = response.content
                    assert len(pool.scores(answer)) == payload.num_candidates

    run(work())


def test_a_described_model_has_the_schema_of_the_served_one(service: RankingService) -> None:
    described = service.describe(MODEL)
    assert FeatureSchema.of(described_spec(described)).digest == described.schema_digest
    workload = open_workload(described, candidates="50", hotness=["3", "tag=1"], varied=False)
    features = {
        feature.name: feature for feature in features_of(workload.schema, workload.request(np.random.default_rng(0)))
    }
    assert features["film"].lengths.tolist() == [3] * 50
    assert features["history"].lengths.tolist() == [3]
    assert features["tag"].lengths.tolist() == [1] * 50
    assert features["film"].values.max() < 10**6
    assert 0 <= features["tag"].weights.min() < 0.5 < features["tag"].weights.max() < 1
    assert features["film"].weights is None
    assert all(text.isdecimal() for text in features["city"].texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hotness": ["histroy=3"]}, r"no feature 'histroy'; there are \['history'\]"),
        ({"hotness": ["history=0"]}, "'0' is not a whole number of ids from 1 to 4096"),
        (
            {"candidates": "5000"},
            "candidates 5000, hotness: a request may have 5000, the server's limit max_candidates is 4096",
        ),
        (
            {"hotness": ("3000",), "candidates": "5"},
            "a request may have 5999, the server's limit max_ids_per_bag is 4096",
        ),
    ],
)
def test_options_that_do_not_fit_a_served_model_are_refused(service: RankingService, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        open_workload(service.describe(MODEL), **options)


def test_a_vocabulary_that_refuses_unknown_ids_needs_requests(service: RankingService) -> None:
    described = service.describe(MODEL)
    tables = [table.model_copy(update={"unknown_id": "reject"}) for table in described.tables]
    with pytest.raises(ConfigError, match=r"ids of cities can't be made up: .* with --like FILE"):
        open_workload(described.model_copy(update={"tables": tuple(tables)}))


def test_requests_are_drawn_from_recorded_and_from_json_ones(service: RankingService, tmp_path: Path) -> None:
    described, sent = service.describe(MODEL), [api_request(seed, 3 + seed) for seed in range(6)]
    recorder = RequestRecorder(tmp_path / "recorded", 1.0)
    service.on_ranked += (recorder.offer,)

    async def ask() -> None:
        async with running_api(service) as api:
            for request in sent:
                assert (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).status_code == 200

    run(ask())
    service.on_ranked = ()
    recorder.close()
    (file,) = recorded_files(tmp_path / "recorded")
    lines = tmp_path / "requests.jsonl"
    lines.write_text("".join(json.dumps(request | {"top_k": 2}) + "\n" for request in sent))
    for path in (tmp_path / "recorded", file, lines):
        _, requests = requests_like(path, described)
        assert [request.num_candidates for request in requests] == [3, 4, 5, 6, 7, 8]
        _, pool = open_payloads(load_of("http://h", described, like=path))
        assert sorted(payload.num_candidates for payload in pool) == [3, 4, 5, 6, 7, 8]
        first = next(payload for payload in pool if payload.num_candidates == 3)
        assert json.loads(first.body)["candidates"]["sparse"].keys() == sent[0]["candidates"]["sparse"].keys()
    bodies = [
        [payload.body for payload in open_payloads(load_of("http://h", described, like=lines), at)[1]] for at in (0, 1)
    ]
    assert bodies[0] != bodies[1]
    assert sorted(bodies[0]) == sorted(bodies[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context": {}}\n', "line 1 is no JSON request on one line: candidates: missing"),
        ("", "no requests to .* with the features of version 1"),
    ],
)
def test_a_file_without_requests_to_the_model_is_refused(
    service: RankingService, tmp_path: Path, content, message
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        requests_like(path, service.describe(MODEL))
