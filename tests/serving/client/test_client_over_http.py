"""The client against the real server, over HTTP: messages of `application/x-protobuf`."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from serving.client import InvalidRequestError, NotFoundError, Ragged
from serving.limits import RequestLimits
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.client_calls import CLIENTS, calling, rank_arguments, reordered_spec
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    api_request,
    run,
    running_api,
    served_service,
    write_api_model,
)

both_clients = pytest.mark.parametrize("kind", CLIENTS)


def address_of(api: Api) -> str:
    return f"http://{api.listening.host}:{api.listening.http_port}"


@both_clients
def test_scores_are_those_of_json_and_of_grpc(api_model, api_service, kind):
    async def main() -> None:
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

    run(main())


@both_clients
def test_embeddings_are_looked_up(api_model, api_service, kind):
    async def main() -> None:
        async with running_api(api_service) as api, calling(kind, address_of(api)) as call:
            features = {"film": [[3], [9, 11], []], "history": Ragged(np.array([1, 50, 2]), [2, 0, 1])}
            result = await call("lookup", MODEL, features, request_id="x")
            films = [api_model.pooled("film", bag, None) for bag in features["film"]]
            np.testing.assert_allclose(result.embeddings["film"], np.stack(films), rtol=1e-6)
            np.testing.assert_allclose(
                result.embeddings["history"].values, api_model.tables["films"][[1, 50, 2]], rtol=1e-6
            )
            assert result.embeddings["history"].lengths.tolist() == [2, 0, 1]
            assert (result.version, result.request_id) == (1, "x")

    run(main())


@both_clients
def test_a_model_is_described_as_over_grpc(api_service, kind):
    async def main() -> None:
        async with (
            running_api(api_service) as api,
            calling(kind, address_of(api)) as call,
            calling(kind, f"grpc://{api.listening.host}:{api.listening.grpc_port}") as over_grpc,
        ):
            assert await call("describe", MODEL) == await over_grpc("describe", MODEL)
            assert (await call("describe", MODEL, 1)).version == 1
            with pytest.raises(NotFoundError, match="only the live version") as found:
                await call("describe", MODEL, 2)
            assert found.value.kind == "model_not_found"
            with pytest.raises(NotFoundError, match="books"):
                await call("describe", "books")

    run(main())


@both_clients
def test_errors_have_the_kind_and_the_field_of_the_server(api_model, kind):
    async def main() -> None:
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

    run(main())


@both_clients
def test_a_live_client_goes_on_when_the_order_of_features_changes_and_asks_older_versions_by_name(tmp_path, kind):
    models = [write_api_model(tmp_path, 1), write_api_model(tmp_path, 2, seed=3, spec=reordered_spec())]

    async def main() -> None:
        with closing(served_service(models[0])) as service:
            source = ModelSource(snapshot=models[1].path, dtype="float32", sharding="hash")
            service.install_staged(load_served_model(source, service))
            async with running_api(service) as api, calling(kind, address_of(api)) as call:
                request = api_request(5)

                async def check(expected: int, **more: object) -> None:
                    result = await call("rank", MODEL, **rank_arguments(request), **more)
                    assert result.version == expected
                    np.testing.assert_allclose(result.scores, models[expected - 1].scores(request), rtol=1e-4)

                await check(1)
                await check(2, version=2)
                for live in (2, 1, 2):
                    service.flip(MODEL, live)
                    await check(live)
                    await check(live)
                    await check(1, version=1)
                    await check(2, version=2)

    run(main())
