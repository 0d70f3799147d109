"""The client against the real server, over HTTP: messages of `application/x-protobuf`."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from serving.client import InvalidRequestError, NotFoundError
from serving.limits import RequestLimits
from shardrank_testing.client_calls import CLIENTS, calling, rank_arguments
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    api_request,
    running_api,
    served_service,
)

pytestmark = pytest.mark.anyio

both_clients = pytest.mark.parametrize("kind", CLIENTS)


def address_of(api: Api) -> str:
    return f"http://{api.listening.host}:{api.listening.http_port}"


@both_clients
async def test_scores_are_those_of_json_and_of_grpc(api_model, api_service, kind):
    async with (
        running_api(api_service) as api,
        calling(kind, address_of(api)) as call,
        calling(kind, f"grpc://{api.listening.host}:{api.listening.grpc_port}") as over_grpc,
    ):
        for seed in range(4):
            request = {**api_request(seed, num_candidates=7), "request_id": f"r{seed}", "top_k": 3}
            over_json = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
            result = await call("rank", MODEL, **rank_arguments(request))
            np.testing.assert_array_equal(result.scores, np.float32(over_json["scores"]))
            np.testing.assert_allclose(result.scores, api_model.scores(request), rtol=1e-4)
            other = await over_grpc("rank", MODEL, **rank_arguments(request))
            np.testing.assert_array_equal(result.scores, other.scores)
            np.testing.assert_array_equal(result.order, other.order)
            assert (result.version, result.request_id, result.order.size) == (1, f"r{seed}", 3)


@both_clients
async def test_errors_have_the_kind_and_the_field_of_the_server(api_model, kind):
    with closing(served_service(api_model, RequestLimits(max_candidates=6))) as service:
        async with running_api(service) as api, calling(kind, address_of(api)) as call:
            arguments = rank_arguments(api_request())
            with pytest.raises(NotFoundError) as missing:
                await call("rank", MODEL, **{**arguments, "version": 7})
            assert (missing.value.kind, missing.value.http_status) == ("model_not_found", 404)
            with pytest.raises(InvalidRequestError, match="max_candidates = 6") as found:
                await call("rank", MODEL, **rank_arguments(api_request(num_candidates=7)))
            assert (found.value.kind, found.value.field) == ("limit_exceeded", "candidates")
            context = {**arguments["context"], "user": [1001]}
            with pytest.raises(InvalidRequestError) as found:
                await call("rank", MODEL, **{**arguments, "context": context})
            assert (found.value.kind, found.value.http_status) == ("unknown_id", 400)
            assert found.value.field == "context.sparse.user[0]"
