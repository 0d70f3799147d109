"""Versions are installed, flipped and withdrawn, and a canary gets its share of requests."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ConfigError, DeadlineExceededError, RolloutError, UnavailableError
from loader.registry.fleet import LATENCY_BOUNDS_MS
from loader.snapshot.manifest import DenseInputs, ModelSpec
from router.feature_schema import FeatureSchema
from serving.embedded import ModelSource, Ranker, load_served_model
from serving.errors import InvalidRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.observe.calls import Call
from serving.proto.shardrank.v1 import ranking_pb2
from serving.rank.service import RankingService, answer
from serving.results import RankResult
from serving.versions.loaded_version import LoadedVersion
from serving.versions.version_choice import CanaryChoice, key_hash
from shard_node.errors import GenerationNotFoundError, NodeUnavailableError
from shardrank_testing.errors import raises_kind
from shardrank_testing.inference_requests import binary_body, json_body, message_of, tensors_of
from shardrank_testing.serving_api import (
    MODEL,
    ApiModel,
    Waiting,
    api_request,
    api_spec,
    packed_message,
    rank_message,
    running_api,
    stats_of,
    write_api_model,
)
from shardrank_testing.waiting import Clock

SHARE = 0.5
KEYS = [f"user-{number}" for number in range(40)]
CHOICE = CanaryChoice(2, SHARE)
IN_CANARY = next(key for key in KEYS if CHOICE.has_key(MODEL, key))


@pytest.fixture(scope="module")
def newer(tmp_path_factory) -> ApiModel:
    return write_api_model(tmp_path_factory.mktemp("newer"), version=2, seed=9)


def loaded(model: ApiModel, service: RankingService) -> LoadedVersion:
    return load_served_model(ModelSource(snapshot=model.path, dtype="float32"), service)


@pytest.fixture
def clock() -> Clock:
    """What the service's clock is ahead of time, in seconds."""
    return Clock()


@pytest.fixture
def service(api_model, newer, clock) -> Iterator[RankingService]:
    """Version 1 live, and version 2 staged."""
    with closing(RankingService(expected_models=[MODEL], clock=lambda: time.monotonic() + clock.now)) as service:
        service.install(loaded(api_model, service))
        service.install_staged(loaded(newer, service))
        yield service


def expected_version(key: str) -> int:
    return 2 if CHOICE.has_key(MODEL, key) else 1


def rank(service: RankingService, **fields: Any) -> RankResult:
    return Ranker(service).rank(MODEL, **api_request(1) | fields)


def test_a_staged_version_answers_by_number_until_it_is_live(service, newer):
    assert service.live(MODEL) == 1
    assert service.live("books") is None
    assert rank(service).version == 1
    np.testing.assert_allclose(rank(service, version=2).scores, newer.scores(api_request(1)), rtol=1e-5)
    for _ in range(2):
        service.flip(MODEL, 2)
        assert (service.live(MODEL), rank(service).version) == (2, 2)
    service.flip(MODEL, 1)
    assert rank(service).version == 1
    with pytest.raises(GenerationNotFoundError):
        service.flip(MODEL, 3)
    served = service.generations.all()[1].payload
    with pytest.raises(RolloutError, match="already here"):
        service.install_staged(served)
    assert service.retire(MODEL, 2).retired.wait(10)
    with pytest.raises(GenerationNotFoundError):
        service.retire(MODEL, 2)
    assert service.live(MODEL) == 1


async def test_a_key_goes_to_one_version_over_every_api(service, api_model, newer):
    lookup = {"sparse": {"film": [[1]]}}
    service.set_canary(MODEL, 2, SHARE)
    async with running_api(service) as api:
        for key in KEYS:
            body = api_request(1) | {"routing_key": key}
            message = rank_message(body)
            lookup_message = ranking_pb2.LookupRequest(model=MODEL, routing_key=key)
            lookup_message.sparse["film"].ids.append(1)
            http = (await api.http.post(f"/v1/models/{MODEL}:rank", json=body)).json()
            found = await api.http.post(f"/v1/models/{MODEL}:lookup", json=lookup | {"routing_key": key})
            ranked, looked_up = await api.stub.Rank(message), await api.stub.Lookup(lookup_message)
            versions = {http["version"], found.json()["version"], ranked.version, looked_up.version}
            assert versions == {expected_version(key)}
            model = newer if expected_version(key) == 2 else api_model
            np.testing.assert_allclose(http["scores"], model.scores(body), rtol=1e-5)
        # Told of themselves is what is live.
        assert (await api.http.get(f"/v1/models/{MODEL}")).json()["version"] == 1


def test_a_canary_ends_when_withdrawn_or_live(service):
    with pytest.raises(GenerationNotFoundError):
        service.set_canary(MODEL, 3, SHARE)
    with pytest.raises(ConfigError):
        service.set_canary(MODEL, 2, 1.0)
    assert service.canary(MODEL) is None
    service.set_canary(MODEL, 2, SHARE)
    service.flip(MODEL, 2)
    assert service.canary(MODEL) is None
    service.set_canary(MODEL, 1, SHARE)
    service.retire(MODEL, 1)
    assert service.canary(MODEL) is None
    assert rank(service, routing_key=IN_CANARY).version == 2


def test_a_version_is_counted_for_what_it_answered_and_scored(service, api_model, newer):
    service.set_canary(MODEL, 2, SHARE)
    requests = [api_request(seed, 1 + seed) | {"routing_key": key} for seed, key in enumerate(KEYS[:12])]
    for request in requests:
        Ranker(service).rank(MODEL, **request)
    for version, model in ((1, api_model), (2, newer)):
        own = [one for one in requests if expected_version(one["routing_key"]) == version]
        scores = np.concatenate([model.scores(one) for one in own]).astype(np.float64)
        stats = stats_of(service, version)
        assert (stats.requests, stats.errors, sum(stats.latency_counts)) == (len(own), 0, len(own))
        assert stats.score_count == scores.size
        np.testing.assert_allclose(stats.score_sum, scores.sum(), rtol=1e-5)
        np.testing.assert_allclose(stats.score_square_sum, (scores**2).sum(), rtol=1e-5)
    retired = service.retire(MODEL, 2)
    assert retired.retired.wait(10)
    assert [one.version for one in service.generations.all()] == [1]
    text = service.metrics.render().decode()
    assert 'shardrank_version_requests_total{model="films",outcome="ok",version="1"}' in text
    assert 'version="2"' not in text
    # The same number, loaded again, begins anew.
    service.install_staged(loaded(newer, service))
    assert stats_of(service, 2).requests == 0


def test_a_failure_in_the_canary_counts_for_it_with_its_latency(service, clock):
    async def away(*_: object) -> None:
        clock.now += 2.0
        raise NodeUnavailableError("it is away")

    for replica in service.generations.payload(MODEL, 2).replicas:
        replica.ranking.score = away
    service.set_canary(MODEL, 2, SHARE)
    with pytest.raises(NodeUnavailableError):
        rank(service, routing_key=IN_CANARY)
    with raises_kind("model_not_found"):
        rank(service, version=7)
    stats = stats_of(service, 2)
    assert (stats.requests, stats.errors, stats.score_count) == (1, 1, 0)
    # Time goes on meanwhile: the bound may be the next one.
    assert 2000.0 <= LATENCY_BOUNDS_MS[stats.latency_counts.index(1)] < 2000.0 * 1.16**2
    assert stats_of(service, 1).requests == 0


@pytest.mark.parametrize(
    ("fields", "error", "errors"),
    [
        ({"version": 2}, None, 0),
        ({"version": 2}, NodeUnavailableError("away"), 0),
        ({"routing_key": IN_CANARY}, InvalidRequestError("film", "no row", kind="unknown_id"), 0),
        ({"routing_key": IN_CANARY, "timeout_ms": 50}, DeadlineExceededError("late"), 0),
        ({"routing_key": IN_CANARY, "timeout_ms": 5000}, DeadlineExceededError("late"), 1),
    ],
)
def test_guards_count_no_request_of_a_clients_making(service, fields, error, errors):
    """A named version, a 4xx, or a deadline below the live version's median says nothing of the canary."""
    for seconds in (0.001, 0.1, 0.1):
        service.generations.payload(MODEL, 1).counter.ended(Call("http", "rank", 0.0), "ok", seconds)
    service.set_canary(MODEL, 2, SHARE)

    async def fails(*_: object) -> None:
        raise error

    for replica in service.generations.payload(MODEL, 2).replicas if error else ():
        replica.ranking.score = fails
    with pytest.raises(type(error)) if error else nullcontext():
        rank(service, **fields)
    stats = stats_of(service, 2)
    assert (stats.requests, stats.errors, stats.score_count) == (errors, errors, 0)


def make_live_without_replicas(service: RankingService, version: int) -> None:
    """Make a version live that has no replica of some shard, with version 1 as the fallback."""
    service.flip(MODEL, version)
    service.fallbacks[MODEL] = 1
    lose_replicas(service, version)


def lose_replicas(service: RankingService, version: int) -> None:
    async def fails(*_: object) -> None:
        raise UnavailableError("no replica answered", kind="shard_unavailable")

    for replica in service.generations.payload(MODEL, version).replicas:
        replica.ranking.score = fails


async def test_the_live_version_answers_for_a_canary_without_replicas(service):
    """A by-replica rollout may have one node of the new version; that it is lost counts against the canary."""
    service.set_canary(MODEL, 2, SHARE)
    lose_replicas(service, 2)
    body = json.dumps(api_request(1) | {"routing_key": IN_CANARY}).encode()
    encoded = await answer(service, service.admit("http", "rank", None), JsonCodec("rank", MODEL), body, Waiting())
    assert json.loads(bytes(encoded.body))["version"] == 1
    counted = [(stats.requests, stats.errors) for stats in (stats_of(service, 1), stats_of(service, 2))]
    assert counted == [(1, 0), (1, 1)]


TENSORS, SCHEMA = tensors_of(api_spec(), api_request(1)), RequestSchema(FeatureSchema.of(api_spec()), RequestLimits())
BINARY, HEADERS = binary_body(TENSORS)


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (JsonCodec("rank", MODEL), json.dumps(api_request(1)).encode()),
        (MessageCodec("rank"), rank_message(api_request(1)).SerializeToString()),
        (MessageCodec("rank", MODEL), packed_message(SCHEMA, api_request(1)).SerializeToString()),
        (InferHttpCodec(model=MODEL), json_body(TENSORS)),
        (InferHttpCodec(model=MODEL, header_length=HEADERS["inference-header-content-length"]), BINARY),
        (InferGrpcCodec(), message_of(TENSORS, MODEL).SerializeToString()),
    ],
    ids=["json", "message", "packed", "infer json", "infer binary", "infer grpc"],
)
async def test_a_request_of_each_form_is_parsed_anew_for_the_fallback(service, codec, body):
    make_live_without_replicas(service, 2)
    encoded = await answer(service, service.admit(codec.api, "rank", None), codec, body, Waiting())
    assert encoded.body
    assert [stats_of(service, version).requests for version in (1, 2)] == [1, 1]
    assert [generation.leases for generation in service.generations.all()] == [0, 0]


def with_wider_context(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"dense_inputs": DenseInputs(context=3, candidate=3)})


def with_more_users(spec: ModelSpec) -> ModelSpec:
    users, *others = spec.tables
    return spec.model_copy(update={"tables": (users.model_copy(update={"num_embeddings": 1001}), *others)})


@pytest.mark.parametrize(
    ("change", "context", "reason"),
    [
        (with_wider_context, {"dense": [0.0] * 3}, "context.dense: 3 values"),
        (with_more_users, {"sparse": api_request(1)["context"]["sparse"] | {"user": [1000]}}, "context.sparse.user"),
    ],
    ids=["its schema", "its rows"],
)
async def test_what_the_fallback_refuses_stays_unavailable(service, tmp_path, change, context, reason):
    """The request is right, for a version that has no replica: its client may try again."""
    spec = change(api_spec())
    service.install_staged(loaded(write_api_model(tmp_path, version=3, spec=spec), service))
    make_live_without_replicas(service, 3)
    request = api_request(1)
    request["context"] |= context
    async with running_api(service) as api:
        response = await api.http.post(f"/v1/models/{MODEL}:rank", json=request)
    assert (response.status_code, response.json()["error"]["kind"]) == (503, "shard_unavailable")
    assert f"only version 1 answers: {reason}" in response.text
    assert [stats_of(service, version).errors for version in (3, 2)] == [1, 0]
    assert [generation.leases for generation in service.generations.all()] == [0, 0, 0]


MODELS = st.text(max_size=20)
REQUEST_KEYS = st.text(max_size=40)
SHARES = st.floats(min_value=0.0, max_value=1.0, exclude_min=True, exclude_max=True)


def taken(choice: CanaryChoice, model: str, keys: list[str]) -> set[str]:
    return {key for key in keys if choice.has_key(model, key)}


@given(MODELS, st.text(max_size=8), st.floats(min_value=0.01, max_value=0.99))
def test_the_canary_gets_its_share_of_the_keys_within_chance(model, prefix, share):
    num_keys = 4000
    count = len(taken(CanaryChoice(2, share), model, [f"{prefix}{number}" for number in range(num_keys)]))
    deviation = math.sqrt(num_keys * share * (1 - share))
    assert abs(count - num_keys * share) < 6 * deviation


@given(MODELS, st.lists(REQUEST_KEYS, max_size=50), SHARES, SHARES)
def test_a_share_that_grows_keeps_the_keys_that_are_in(model, keys, one, other):
    smaller, larger = (CanaryChoice(2, share) for share in sorted((one, other)))
    assert taken(smaller, model, keys) <= taken(larger, model, keys)


def test_the_hash_is_the_same_in_every_process_and_release():
    assert key_hash("films", "user-42") == 12941052709652097497
    assert key_hash("films", "Zürich") == 12032135330414632854


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="not above 0 and below 1"):
        RankingService().set_canary("films", 2, share)
