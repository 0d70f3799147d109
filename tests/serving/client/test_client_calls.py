"""Both clients against the real server, over gRPC and HTTP (messages of `application/x-protobuf`)."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing

import numpy as np
import pytest

from loader.errors import (
    ConfigError,
    DeadlineExceededError,
    OverloadedError,
    SnapshotNotFoundError,
    UnavailableError,
)
from serving.client import Client, Ragged, RetryPolicy
from serving.embedded import ModelSource, Ranker, load_served_model
from serving.errors import InvalidRequestError, NotFoundError
from serving.limits import RequestLimits
from serving.observe.traces import Tracer
from serving.rank.service import RankingService
from shardrank_testing.client_calls import CLIENTS, calling, rank_arguments, reordered_spec
from shardrank_testing.errors import raises_kind
from shardrank_testing.otlp_receiver import KeptSpans
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    ApiModel,
    api_request,
    gated_api,
    running_api,
    served_service,
    write_api_model,
)

both_clients = pytest.mark.parametrize("kind", CLIENTS)
both_apis = pytest.mark.parametrize("scheme", ["grpc", "http"])


def answers(service: RankingService, label: str) -> float:
    """Requests that the service has counted under a label."""
    lines = service.metrics.render().decode().splitlines()
    counts = [line for line in lines if line.startswith("shardrank_requests_total{") and label in line]
    return sum(float(line.split()[-1]) for line in counts)


def address_of(api: Api, scheme: str = "grpc") -> str:
    return f"{scheme}://{api.grpc_address if scheme == 'grpc' else api.http_address}"


@both_apis
@both_clients
async def test_scores_are_those_of_json_and_of_the_reference(api_model, api, kind, scheme):
    """From lists, arrays and ragged arrays."""
    async with calling(kind, address_of(api, scheme)) as call:
        for seed in range(4):
            request = {**api_request(seed, num_candidates=7), "request_id": f"r{seed}", "top_k": 3}
            over_json = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
            arguments, sparse = rank_arguments(request), request["candidates"]["sparse"]
            arguments["candidate_dense"] = np.array(arguments["candidate_dense"])
            arrays = {
                "film": np.array(sparse["film"], np.int32),
                "genre": Ragged(
                    np.array([id for bag in sparse["genre"] for id in bag], np.int16), [*map(len, sparse["genre"])]
                ),
                "tag": [np.array(bag) for bag in sparse["tag"]],
                "device": np.array(sparse["device"]),
            }
            forms = [{**arguments, "candidates": candidates} for candidates in (sparse, arrays)]
            mixed = {**request["candidates"], "sparse": arrays, "weights": None}
            weights = request["candidates"]["weights"]
            for form in (*forms, request, {**request, "candidates": mixed, "weights": weights}):
                result = await call("rank", MODEL, **form)
                assert result.scores.dtype == np.float32
                np.testing.assert_array_equal(result.scores, np.float32(over_json["scores"]))
                np.testing.assert_allclose(result.scores, api_model.scores(request), rtol=1e-4)
                assert (result.model, result.version, result.request_id) == (MODEL, 1, f"r{seed}")
                assert result.order.tolist() == over_json["order"]
                assert result.order.size == 3


async def test_a_ranker_is_a_client_of_its_own_process(api_model, api):
    """The same results of the same arguments, for rank, lookup and describe."""
    request, features = api_request(3), {"film": [[3], [9, 11]], "history": Ragged(np.array([1, 50, 2]), [2, 1])}
    ranker: Client = Ranker(api.service)
    async with calling(Client, address_of(api)) as call:
        for form in (request, rank_arguments(request)):
            remote, local = (
                await call("rank", MODEL, **form, request_id="x"),
                ranker.rank(MODEL, **form, request_id="x"),
            )
            np.testing.assert_array_equal(local.scores, remote.scores)
            np.testing.assert_array_equal(local.order, remote.order)
            assert (local.scores.dtype, local.order.dtype) == (np.float32, np.int64)
            others = [(result.model, result.version, result.request_id, result.outputs) for result in (local, remote)]
            assert others[0] == others[1]
        body = {"sparse": {"tag": [[1, 2]]}, "weights": {"tag": [[0.5, 2.0]]}, "version": 1}
        looked_up = ranker.lookup(MODEL, **body).embeddings["tag"]
        np.testing.assert_array_equal(looked_up, (await call("lookup", MODEL, **body)).embeddings["tag"])
        remote, local = await call("lookup", MODEL, features), ranker.lookup(MODEL, features)
        np.testing.assert_array_equal(local.embeddings["film"], remote.embeddings["film"])
        np.testing.assert_array_equal(local.embeddings["history"].values, remote.embeddings["history"].values)
        np.testing.assert_array_equal(local.embeddings["history"].lengths, remote.embeddings["history"].lengths)
        assert ranker.describe(MODEL) == await call("describe", MODEL)


WRONG_SIDES = [
    ({"context": [1]}, "context", "is not a mapping of names of features to their values"),
    ({"context": {"sparse": {"user": [1]}, "weights": [1]}}, "context.weights", "is not a mapping"),
    ({"weights": [1]}, "weights", "is not a mapping"),
    ({"candidates": {1: [1]}}, "candidates", "is not a mapping"),
    (
        {"candidates": {"film": Ragged(5, [1])}, "weights": {}},
        "candidates.sparse.film",
        "Ragged: object of type 'int' has no len()",
    ),
    ({"version": [1]}, "version", "[1]: "),
    ({"top_k": 0}, "top_k", "0 is not a number of 1 or more"),
    ({"timeout_ms": "50"}, "timeout_ms", "'50' is not a number"),
    ({"timeout_ms": float("inf")}, "timeout_ms", "inf is not a number"),
    ({"context": {"sparse": {}, "ids": {}}}, "context.ids", "allowed are ['dense', 'sparse', 'weights']"),
    ({"context": {"dense": [1.0]}, "context_dense": [1.0]}, "context.dense", "it is given twice"),
    ({"top_k": 1.5}, "top_k", "1.5: "),
    ({"timeout_ms": float("nan")}, "timeout_ms", "nan is not a number"),
]


@pytest.mark.parametrize(("arguments", "field", "says"), WRONG_SIDES)
def test_a_side_or_option_of_no_known_form_is_refused(api_service, arguments, field, says):
    with pytest.raises(InvalidRequestError, match=re.escape(says)) as found:
        Ranker(api_service).rank(MODEL, **{**rank_arguments(api_request()), **arguments})
    assert (found.value.kind, found.value.field) == ("invalid_field", field)


@both_apis
@both_clients
async def test_after_close_each_call_says_so(api, kind, scheme):
    async with calling(kind, address_of(api, scheme)) as call:
        await call("rank", MODEL, **api_request())
        await call("close")
        for method, *arguments in (
            ("rank", MODEL, {}, {"film": [1]}),
            ("lookup", MODEL, {"film": [1]}),
            ("describe", MODEL),
        ):
            with pytest.raises(UnavailableError, match=f"this {kind.__name__} is closed") as found:
                await call(method, *arguments)
            assert found.value.kind == "closed"


@both_apis
@both_clients
async def test_a_call_that_is_under_way_when_its_client_closes_says_so(api_model, kind, scheme):
    async with gated_api(api_model) as api, calling(kind, address_of(api, scheme), timeout_ms=20_000) as call:
        assert api.gate is not None
        pending = asyncio.create_task(call("rank", MODEL, **api_request()))
        await api.gate.wait_until_busy()
        await call("close")
        api.gate.open.set()
        with raises_kind("closed"):
            await pending


def test_a_ranker_that_is_closed_says_so_and_options_are_checked(api_model):
    with Ranker.open(api_model.path, dtype="float32") as ranker:
        assert ranker.rank(MODEL, **api_request()).scores.size == 5
    with pytest.raises(UnavailableError, match="this Ranker is closed"):
        ranker.rank(MODEL, **api_request())
    ranker.close()
    with pytest.raises(ConfigError, match="num_replicas: Input should be greater than or equal to 0"):
        Ranker.open(api_model.path, num_replicas=-1)
    with pytest.raises(SnapshotNotFoundError, match=f"is a model's folder; its newest version is .*/{MODEL}/1$"):
        Ranker.open(api_model.path.parent)


@both_clients
async def test_embeddings_are_looked_up_by_bag_and_by_id(api_model, api, kind):
    async with calling(kind, address_of(api)) as call:
        features = {"film": [[3], [9, 11], []], "history": Ragged(np.array([1, 50, 2]), [2, 0, 1]), "user": [4, 5]}
        result = await call("lookup", MODEL, features, weights=None, request_id="x")
        assert (result.model, result.version, result.request_id) == (MODEL, 1, "x")
        assert result.embeddings.keys() == features.keys()
        films = [api_model.pooled("film", bag, None) for bag in features["film"]]
        np.testing.assert_allclose(result.embeddings["film"], np.stack(films), rtol=1e-6)
        history = result.embeddings["history"]
        np.testing.assert_allclose(history.values, api_model.tables["films"][[1, 50, 2]], rtol=1e-6)
        assert history.lengths.tolist() == [2, 0, 1]
        assert result.embeddings["user"].shape == (2, 8)
        weighted = await call("lookup", MODEL, {"tag": [[1, 2]]}, weights={"tag": [[0.5, 2.0]]})
        np.testing.assert_allclose(weighted.embeddings["tag"][0], api_model.pooled("tag", [1, 2], [0.5, 2.0]))


CONTEXT = rank_arguments(api_request())["context"]
WITHOUT_USER = {name: ids for name, ids in CONTEXT.items() if name != "user"}
REFUSED = [
    ({"model": "books"}, NotFoundError, "model_not_found", None, "books"),
    ({"version": 7}, NotFoundError, "model_not_found", None, ""),
    (rank_arguments(api_request(num_candidates=4097)), InvalidRequestError, "limit_exceeded", "candidates", "= 4096"),
    ({"context": {**CONTEXT, "user": [1001]}}, InvalidRequestError, "unknown_id", "context.sparse.user[0]", "1001"),
    ({"context": {**CONTEXT, "user": [-1]}}, InvalidRequestError, "invalid_id", "context.sparse.user[0]", "-1"),
    ({"context_dense": [1e39, 0]}, InvalidRequestError, "invalid_field", "context.dense[0]", ""),
    ({"top_k": -1}, InvalidRequestError, "invalid_field", "top_k", ""),
    ({"timeout_ms": 0}, InvalidRequestError, "invalid_field", "timeout_ms", ""),
    ({"timeout_ms": 10**7}, InvalidRequestError, "limit_exceeded", "timeout_ms", ""),
    ({"request_id": "\ud800"}, InvalidRequestError, "invalid_field", "request_id", ""),
    ({"context": WITHOUT_USER}, InvalidRequestError, "missing_feature", "context.sparse.user", ""),
]


@both_apis
@both_clients
async def test_errors_have_the_kind_of_the_server_and_the_field(api, kind, scheme):
    async with calling(kind, address_of(api, scheme)) as call:
        for changed, error, error_kind, field, says in REFUSED:
            arguments = {**rank_arguments(api_request()), **changed}
            with pytest.raises(error, match=says or None) as found:
                await call("rank", arguments.pop("model", MODEL), **arguments)
            assert found.value.kind == error_kind
            assert field is None or found.value.field == field
            if error is NotFoundError:
                assert (found.value.http_status, found.value.grpc_status) == (404, "NOT_FOUND")


@both_clients
async def test_a_late_answer_and_a_shed_request_have_their_errors(api_model, kind):
    never = RetryPolicy(max_attempts=1)
    async with (
        gated_api(api_model, RequestLimits(max_in_flight=1)) as api,
        calling(kind, address_of(api), retry=never) as call,
    ):
        arguments = rank_arguments(api_request())
        await call("describe", MODEL)
        first = asyncio.create_task(call("rank", MODEL, **{**arguments, "timeout_ms": 600}))
        await api.gate.wait_until_busy()
        with pytest.raises(OverloadedError) as shed:
            await call("rank", MODEL, **arguments)
        assert (shed.value.kind, shed.value.grpc_status) == ("overloaded", "RESOURCE_EXHAUSTED")
        assert shed.value.retry_after_s == 1.0
        with pytest.raises(DeadlineExceededError) as late:
            await first
        assert late.value.kind == "deadline_exceeded"


@pytest.fixture(scope="module")
def two_orders(tmp_path_factory) -> list[ApiModel]:
    """Version 1, and version 2 whose features have another order."""
    store = tmp_path_factory.mktemp("store")
    return [write_api_model(store, 1), write_api_model(store, 2, seed=3, spec=reordered_spec())]


def load(service: RankingService, model: ApiModel) -> None:
    source = ModelSource(snapshot=model.path, dtype="float32", sharding="hash")
    service.install_staged(load_served_model(source, service))


@both_clients
async def test_a_client_goes_on_when_the_order_of_features_changes(two_orders, kind):
    first, second = two_orders
    with closing(served_service(first)) as service:
        load(service, second)
        digests = [service.describe(MODEL, version).schema_digest for version in (1, 2)]
        assert digests[0] != digests[1]
        async with running_api(service) as api, calling(kind, address_of(api)) as call:
            request = api_request(5)
            arguments = rank_arguments(request)

            async def check(expected: int, **more: object) -> None:
                result = await call("rank", MODEL, **arguments, **more)
                assert result.version == expected
                np.testing.assert_allclose(result.scores, two_orders[expected - 1].scores(request), rtol=1e-4)

            await check(1)
            await check(2, version=2)
            for live in (2, 1, 2):
                service.flip(MODEL, live)
                await check(live)
                await check(live)
                await check(1, version=1)
            # One for each flip; the pinned ones are packed for the version that was asked for.
            assert answers(service, 'status="schema_digest"') == 3
            service.set_canary(MODEL, 1, 0.5)
            answered = set()
            for number in range(20):
                result = await call("rank", MODEL, **arguments, routing_key=str(number))
                answered.add(result.version)
                expected = two_orders[result.version - 1].scores(request)
                np.testing.assert_allclose(result.scores, expected, rtol=1e-4)
            assert answered == {1, 2}


TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


@both_clients
async def test_a_traceparent_reaches_the_server_over_both_apis(api, kind, monkeypatch):
    """What the caller passes as headers goes along with its call, so that the server's spans are in its trace."""
    sink = KeptSpans()
    headers = {"Traceparent": f"00-{TRACE:032x}-{SPAN:016x}-01", "tracestate": "a=b"}
    monkeypatch.setattr(api.service, "tracer", Tracer(sink, 0.0))
    for scheme in ("http", "grpc"):
        async with calling(kind, address_of(api, scheme)) as call:
            await call("rank", MODEL, **rank_arguments(api_request(1)), headers=headers)
            await call("lookup", MODEL, {"film": [[1]]}, headers=headers)
            await call("lookup", MODEL, {"film": [[1]]})
    calls = [span for span in sink.spans if span.kind == "server"]
    assert [span.name for span in calls] == ["http rank", "http lookup", "grpc rank", "grpc lookup"]
    assert {span.parent for span in calls} == {(TRACE, SPAN, "a=b")}
