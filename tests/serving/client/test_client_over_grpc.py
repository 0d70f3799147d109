"""The client against the real server, over gRPC."""

from __future__ import annotations

import asyncio
from contextlib import closing

import numpy as np
import pytest

from serving.client import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    Ragged,
    RetryPolicy,
)
from serving.limits import RequestLimits
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.client_calls import CLIENTS, calling, rank_arguments, reordered_spec
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    ApiModel,
    Gate,
    api_request,
    gated_service,
    running_api,
    served_service,
    write_api_model,
)

pytestmark = pytest.mark.anyio

both_clients = pytest.mark.parametrize("kind", CLIENTS)


def answers(service: RankingService, label: str) -> float:
    """Requests that the service has counted under a label."""
    lines = service.metrics.render().decode().splitlines()
    counts = [line for line in lines if line.startswith("shardrank_requests_total{") and label in line]
    return sum(float(line.split()[-1]) for line in counts)


def address_of(api: Api) -> str:
    return f"grpc://{api.listening.host}:{api.listening.grpc_port}"


@both_clients
async def test_scores_are_those_of_json_and_of_the_reference_in_any_form(api_model, api_service, kind):
    async with running_api(api_service) as api, calling(kind, address_of(api)) as call:
        for seed in range(4):
            request = {**api_request(seed, num_candidates=7), "request_id": f"r{seed}", "top_k": 3}
            over_json = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
            arguments = rank_arguments(request)
            tags, genres = (request["candidates"]["sparse"][name] for name in ("tag", "genre"))
            films = np.array(request["candidates"]["sparse"]["film"], np.int32)
            arrays = {
                "film": films,
                "genre": Ragged(np.array([one for bag in genres for one in bag], np.int16), list(map(len, genres))),
                "tag": [np.array(bag) for bag in tags],
                "device": np.array(request["candidates"]["sparse"]["device"]),
            }
            for candidates in (arguments["candidates"], arrays):
                dense = np.array(arguments["candidate_dense"])
                result = await call("rank", MODEL, **{**arguments, "candidates": candidates, "candidate_dense": dense})
                assert result.scores.dtype == np.float32
                np.testing.assert_array_equal(result.scores, np.float32(over_json["scores"]))
                np.testing.assert_allclose(result.scores, api_model.scores(request), rtol=1e-4)
                assert (result.model, result.version, result.request_id) == (MODEL, 1, f"r{seed}")
                assert result.order.tolist() == over_json["order"]
                assert result.order.size == 3


@both_clients
async def test_embeddings_are_looked_up_by_bag_and_by_id(api_model, api_service, kind):
    async with running_api(api_service) as api, calling(kind, address_of(api)) as call:
        features = {"film": [[3], [9, 11], []], "history": Ragged(np.array([1, 50, 2]), [2, 0, 1]), "user": [4, 5]}
        result = await call("lookup", MODEL, features, weights=None, request_id="x")
        assert (result.model, result.version, result.request_id) == (MODEL, 1, "x")
        assert list(result.embeddings) == list(features) or result.embeddings.keys() == features.keys()
        films = [api_model.pooled("film", bag, None) for bag in features["film"]]
        np.testing.assert_allclose(result.embeddings["film"], np.stack(films), rtol=1e-6)
        history = result.embeddings["history"]
        np.testing.assert_allclose(history.values, api_model.tables["films"][[1, 50, 2]], rtol=1e-6)
        assert history.lengths.tolist() == [2, 0, 1]
        assert result.embeddings["user"].shape == (2, 8)
        weighted = await call("lookup", MODEL, {"tag": [[1, 2]]}, weights={"tag": [[0.5, 2.0]]})
        np.testing.assert_allclose(weighted.embeddings["tag"][0], api_model.pooled("tag", [1, 2], [0.5, 2.0]))


@both_clients
async def test_errors_have_the_kind_of_the_server_and_the_field(api_model, kind):
    limits = RequestLimits(max_candidates=6)
    with closing(served_service(api_model, limits)) as service:
        async with running_api(service) as api, calling(kind, address_of(api)) as call:
            arguments = rank_arguments(api_request())

            async def refused(error: type[Exception], model: str = MODEL, **changed: object) -> Exception:
                with pytest.raises(error) as found:
                    await call("rank", model, **{**arguments, **changed})
                return found.value

            found = await refused(NotFoundError, "books")
            assert (found.kind, found.http_status, found.grpc_status) == ("model_not_found", 404, "NOT_FOUND")
            assert "books" in str(found)
            assert (await refused(NotFoundError, version=7)).kind == "model_not_found"
            found = await refused(InvalidRequestError, **rank_arguments(api_request(num_candidates=7)))
            assert (found.kind, found.field) == ("limit_exceeded", "candidates")
            assert "max_candidates = 6" in str(found)
            user = {**arguments["context"], "user": [1001]}
            found = await refused(InvalidRequestError, context=user)
            assert (found.kind, found.field) == ("unknown_id", "context.sparse.user[0]")
            found = await refused(InvalidRequestError, context={**arguments["context"], "user": [-1]})
            assert (found.kind, found.field) == ("invalid_id", "context.sparse.user[0]")
            found = await refused(InvalidRequestError, context_dense=[1e39, 0])
            assert (found.kind, found.field) == ("invalid_field", "context.dense[0]")
            assert (await refused(InvalidRequestError, top_k=-1)).field == "top_k"
            assert (await refused(InvalidRequestError, timeout_ms=0)).field == "timeout_ms"
            assert (await refused(InvalidRequestError, timeout_ms=10**7)).kind == "limit_exceeded"
            assert (await refused(InvalidRequestError, request_id="\ud800")).field == "request_id"
            without_user = {name: ids for name, ids in arguments["context"].items() if name != "user"}
            found = await refused(InvalidRequestError, context=without_user)
            assert (found.kind, found.field) == ("missing_feature", "context.sparse.user")


@both_clients
async def test_a_deadline_that_passes_at_the_server_and_what_is_shed_are_errors_of_their_own(api_model, kind):
    gate = Gate()
    with gated_service(api_model, gate, RequestLimits(max_in_flight=1)) as service:
        never = RetryPolicy(max_attempts=1)
        async with running_api(service) as api, calling(kind, address_of(api), retry=never) as call:
            arguments = rank_arguments(api_request())
            await call("describe", MODEL)
            first = asyncio.create_task(call("rank", MODEL, **{**arguments, "timeout_ms": 600}))
            await gate.wait_until_busy()
            with pytest.raises(OverloadedError) as found:
                await call("rank", MODEL, **arguments)
            assert (found.value.kind, found.value.grpc_status) == ("overloaded", "RESOURCE_EXHAUSTED")
            assert found.value.retry_after_s == 1.0
            with pytest.raises(DeadlineExceededError) as late:
                await first
            assert late.value.kind == "deadline_exceeded"
            gate.open.set()


@pytest.fixture(scope="module")
def two_orders(tmp_path_factory) -> list[ApiModel]:
    """Version 1, and version 2 whose features have another order."""
    store = tmp_path_factory.mktemp("store")
    return [write_api_model(store, 1), write_api_model(store, 2, seed=3, spec=reordered_spec())]


def load(service: RankingService, model: ApiModel) -> None:
    source = ModelSource(snapshot=model.path, dtype="float32", sharding="hash")
    service.install_staged(load_served_model(source, service))


@both_clients
async def test_a_live_client_goes_on_when_a_version_with_another_order_of_features_is_flipped_to(two_orders, kind):
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
