from __future__ import annotations

import httpx
import numpy as np
import pytest

from serving.http.app import Handlers, create_app
from serving.http.direct import DirectRoutes
from serving.http.exchange import Exchange, Reply
from serving.http.large_work import LargeWork
from shardrank_testing.inference_requests import binary_body, tensors_of
from shardrank_testing.serving_api import MODEL, api_request, api_service, run, running_api

RANK = f"/v1/models/{MODEL}:rank"


async def _handler(exchange: Exchange) -> Reply:
    return Reply(200, exchange.target.encode())


ROUTES = DirectRoutes({"/v1/models/{model}:rank": _handler, "/v2/models/{model}/versions/{version}/infer": _handler})


@pytest.mark.parametrize(
    ("url", "parameters"),
    [
        (b"/v1/models/films:rank", {"model": "films"}),
        (b"/v1/models/a.b-c_d~e+f&g:rank", {"model": "a.b-c_d~e+f&g"}),
        (b"/v2/models/films/versions/12/infer", {"model": "films", "version": "12"}),
    ],
)
def test_a_path_is_found_with_its_parameters(url, parameters):
    for _ in range(2):
        found = ROUTES.find(url)
        assert (found.handler, found.path, found.parameters) == (_handler, url.decode(), parameters)


@pytest.mark.parametrize(
    "url",
    [
        b"/v1/models/films:rank?x=1",
        b"/v1/models/films:rank#here",
        b"/v1/models/fil%6Ds:rank",
        b"/v1/models/:rank",
        b"/v1/models/a/b:rank",
        b"/v1/models/a:b:rank",
        b"/v1/models/films:ranked",
        b"/v1/models/films:rank/",
        b"/v1/models/films\xff:rank",
        b"/v1/models/films\n:rank",
        b"http://host/v1/models/films:rank",
        b"/v2/models/films/infer",
        b"*",
        b"",
        b"/v1/models/" + b"x" * 2000 + b":rank",
    ],
)
def test_any_other_path_is_left_to_the_application(url):
    assert ROUTES.find(url) is None


def test_every_model_path_that_takes_requests_is_direct(api_model):
    with api_service(api_model) as service:
        routes = Handlers.of(service, LargeWork()).direct_routes()
    for action in (":rank", ":lookup"):
        assert routes.find(f"/v1/models/{MODEL}{action}".encode()) is not None
    for path in (f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/versions/1/infer"):
        assert routes.find(path.encode()) is not None


def _requests(model) -> list[tuple[str, bytes, dict[str, str]]]:
    """Path, body and headers of requests that are answered in every way there is."""
    body, headers = binary_body(tensors_of(model.spec, api_request(1)), id="abc")
    rank = httpx.Request("POST", "http://x", json=api_request(1)).content
    lookup = httpx.Request("POST", "http://x", json={"sparse": {"film": [[1, 2], [3]]}}).content
    infer = f"/v2/models/{MODEL}/infer"
    return [
        (RANK, rank, {}),
        (RANK, rank, {"x-request-id": "one"}),
        (f"/v1/models/{MODEL}:lookup", lookup, {}),
        (infer, body, headers),
        (f"/v2/models/{MODEL}/versions/1/infer", body, headers | {"x-request-id": "zwei ü"}),
        (RANK, b"{", {"x-request-id": "two"}),
        (RANK, b"", {}),
        (RANK, rank, {"content-encoding": "br"}),
        ("/v1/models/none:rank", rank, {}),
        (f"/v2/models/{MODEL}/versions/0/infer", body, headers),
        (infer, body[:-1], headers),
        (infer, body, {"inference-header-content-length": "x"}),
    ]


def _same(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    # The date is the server's, not the handler's.
    headers = sorted((name, value) for name, value in answer.headers.items() if name not in ("date", "server"))
    return answer.status_code, answer.content, headers


def test_a_direct_request_an_escaped_one_and_one_without_a_server_are_answered_alike(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            transport = httpx.ASGITransport(app=create_app(service))
            async with running_api(service) as api, httpx.AsyncClient(transport=transport, base_url="http://x") as app:
                statuses = set()
                for path, body, headers in _requests(api_model):
                    sent = {name: value.encode() for name, value in headers.items()}
                    direct = await api.http.post(path, content=body, headers=sent)
                    # The last letter of the path's action, escaped: a path that connections don't know.
                    escaped = f"{path[:-1]}%{ord(path[-1]):02X}"
                    through_app = await api.http.post(escaped, content=body, headers=sent)
                    hosted = await app.post(path, content=body, headers=sent)
                    assert _same(direct) == _same(through_app) == _same(hosted)
                    assert direct.headers.get("x-request-id") == headers.get("x-request-id")
                    statuses.add(direct.status_code)
                assert statuses == {200, 400, 404}

    run(main())


def test_an_answer_without_an_id_gets_one_that_no_other_has(api_model):
    async def main() -> None:
        with api_service(api_model) as service:
            async with running_api(service) as api:
                body, headers = binary_body(tensors_of(api_model.spec, api_request(1)))
                answers = [
                    await api.http.post(f"/v2/models/{MODEL}/infer", content=body, headers=headers) for _ in "ab"
                ]
                ids = [answer.json()["id"] for answer in answers]
                assert len(set(ids)) == 2
                assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
                scores = [np.array(answer.json()["outputs"][0]["data"]) for answer in answers]
                assert (scores[0] == scores[1]).all()

    run(main())
