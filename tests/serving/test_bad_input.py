"""The bad-input table: one list of broken requests, sent through all three APIs, beside requests that are right."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop

from loader.errors import ShardrankError
from serving.embedded import Ranker
from serving.limits import RequestLimits
from shardrank_testing.serving_api import MODEL, Api, api_request, api_service, rank_message, running_api

NAN = float("nan")
LIMITS = RequestLimits(
    max_candidates=50, max_ids_per_bag=40, max_ids_per_request=3000, max_body_bytes=60_000, max_timeout_ms=40_000
)
ALL = frozenset({"http", "grpc", "embedded"})
# What protobuf's types can't even express is JSON's alone.
JSON_ONLY = frozenset({"http", "embedded"})


@dataclass(frozen=True)
class Bad:
    """One way to be wrong.

    Attributes:
        break_it: changes a valid request.
        says: parts of the message: the field, and the value or the limit.
        kind: of the error.
        apis: where it can be said at all.
        model: the model that is asked.
    """

    name: str
    break_it: Callable[[dict[str, Any]], Any]
    says: tuple[str, ...]
    kind: str
    apis: frozenset[str] = ALL
    model: str = MODEL
    http_status: int = 400
    grpc_status: str = "INVALID_ARGUMENT"

    def __str__(self) -> str:
        return self.name


def at(*path: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """`at("a", "b")(value)` sets request["a"]["b"]."""

    def with_value(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(request: dict[str, Any]) -> None:
            place: Any = request
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value

        return change

    return with_value


FILM = ("candidates", "sparse", "film")
film = at(*FILM, 3)
USER = at("context", "sparse", "user")
RANGE = "0..9223372036854775807"
TABLE = [
    Bad("unknown model", lambda request: None, ("'nothing'", "films 1"), "model_not_found", ALL, "nothing", 404,
        "NOT_FOUND"),
    Bad("unknown version", at("version")(9), ("version 9", "films 1"), "model_not_found", ALL, MODEL, 404, "NOT_FOUND"),
    Bad("unknown candidate feature", at("candidates", "sparse", "flim")([1] * 5), ("candidates.sparse.flim", "'film'"),
        "unknown_feature"),
    Bad("unknown context feature", at("context", "sparse", "x")([1]), ("context.sparse.x", "'user'"),
        "unknown_feature"),
    Bad("feature on the wrong side", at("context", "sparse", "film")([1]), ("context.sparse.film", "candidate feature"),
        "unknown_feature"),
    Bad("missing candidate feature", lambda r: r["candidates"]["sparse"].pop("film"), ("candidates.sparse.film",),
        "missing_feature"),
    Bad("missing context feature", lambda r: r["context"]["sparse"].pop("user"), ("context.sparse.user",),
        "missing_feature"),
    Bad("candidate counts differ", lambda r: r["candidates"]["sparse"]["genre"].append([1]),
        ("candidates.sparse.", "candidates,"), "count_mismatch"),
    Bad("candidate dense rows differ", lambda r: r["candidates"]["dense"].pop(), ("candidates.dense", "5 candidates"),
        "count_mismatch"),
    Bad("context dense count", at("context", "dense")([1.0]), ("context.dense", "1 values", "takes 2"),
        "count_mismatch"),
    Bad("no candidates", lambda r: r.update(candidates={"sparse": {"film": [], "genre": [], "tag": [], "device": []}}),
        ("candidates", "at least 1"), "count_mismatch"),
    Bad("negative id", film(-5), ("candidates.sparse.film[3]", "-5", RANGE), "invalid_id"),
    Bad("negative context id", USER([-1]), ("context.sparse.user[0]", "-1", RANGE), "invalid_id"),
    Bad("float id", film(3.5), ("candidates.sparse.film[3]", "3.5", "integer"), "invalid_id", JSON_ONLY),
    Bad("integral float id", film(3.0), ("candidates.sparse.film[3]", "3.0", "integer"), "invalid_id", JSON_ONLY),
    Bad("boolean id", film(True), ("candidates.sparse.film[3]", "true", "integer"), "invalid_id", JSON_ONLY),
    Bad("null id", film(None), ("candidates.sparse.film[3]", "null", "integer"), "invalid_id", JSON_ONLY),
    Bad("string id", film("7"), ("candidates.sparse.film[3]", '"7"', "integer"), "invalid_id", JSON_ONLY),
    Bad("strings for integers", at(*FILM)(["7"] * 5), ("candidates.sparse.film", "integers"), "invalid_id"),
    Bad("integers for strings", at("context", "sparse", "city")([7]), ("context.sparse.city", "strings"), "invalid_id"),
    Bad("id of 2^63", film(2**63), ("candidates.sparse.film[3]", str(2**63), RANGE), "invalid_id", JSON_ONLY),
    Bad("id of 2^70", film(2**70), ("candidates.sparse.film[3]", str(2**70), RANGE), "invalid_id", JSON_ONLY),
    Bad("id beyond the table", film(777), ("candidates.sparse.film[3]", "777", "num_embeddings = 777"), "unknown_id"),
    Bad("context id beyond the table", at("context", "sparse", "history")([5, 6, 4000]),
        ("context.sparse.history[2]", "4000", "num_embeddings = 777"), "unknown_id"),
    Bad("string beyond the vocabulary", at("context", "sparse", "city")(["Oslo", "Atlantis"]),
        ("context.sparse.city[1]", "Atlantis", "num_embeddings"), "unknown_id"),
    Bad("NaN context dense", at("context", "dense", 1)(NAN), ("context.dense[1]", "finite"), "invalid_field"),
    Bad("inf candidate dense", at("candidates", "dense", 2, 1)(float("inf")), ("candidates.dense", "finite"),
        "invalid_field"),
    Bad("dense beyond float32", at("candidates", "dense", 2, 1)(1e39), ("candidates.dense", "finite"), "invalid_field",
        JSON_ONLY),
    Bad("NaN weight", at("context", "weights", "liked-tag", 1)(NAN), ("context.weights.liked-tag[1]", "finite"),
        "invalid_field"),
    Bad("weights for unweighted", at("context", "weights", "user")([1.0]), ("user", "takes no weights"),
        "invalid_field"),
    Bad("weight counts", at("context", "weights", "liked-tag")([1.0]), ("liked-tag", "weights"), "count_mismatch",
        frozenset({"grpc"})),
    Bad("too many candidates", lambda r: r.update(candidates=api_request(1, 51)["candidates"]),
        ("candidates", "51", "max_candidates = 50"), "limit_exceeded"),
    Bad("too many ids per bag", at("context", "sparse", "history")([1] * 41),
        ("context.sparse.history", "41", "max_ids_per_bag = 40"), "limit_exceeded"),
    Bad("too many ids", lambda r: r.update(candidates=copy.deepcopy(crowded())),
        ("max_ids_per_request = 3000",), "limit_exceeded"),
    Bad("timeout too long", at("timeout_ms")(40_001), ("timeout_ms", "max_timeout_ms = 40000"), "limit_exceeded"),
    Bad("timeout of nothing", at("timeout_ms")(-1), ("timeout_ms", "-1"), "invalid_field", JSON_ONLY),
    Bad("routing_key too long", at("routing_key")("x" * 129), ("routing_key", "129", "max_routing_key_chars = 128"),
        "limit_exceeded"),
    Bad("routing_key no text", at("routing_key")(7), ("routing_key", "7", "string"), "invalid_field", JSON_ONLY),
    Bad("top_k of nothing", at("top_k")(-1), ("top_k", "-1"), "invalid_field", JSON_ONLY),
    Bad("unknown key", at("candidate")({}), ("candidate", "unknown key"), "invalid_field", JSON_ONLY),
    Bad("no candidates object", lambda r: r.pop("candidates"), ("candidates", "missing"), "invalid_field", JSON_ONLY),
    Bad("list for object", at("context")([1]), ("context", "a list is not an object"), "invalid_field", JSON_ONLY),
    Bad("mixed bags and ids", film([1]), ("candidates.sparse.film[3]",), "invalid_field", JSON_ONLY),
]  # fmt: skip


def crowded() -> dict[str, Any]:
    """Candidates within every limit but that of ids over all features."""
    candidates = api_request(1, 50)["candidates"]
    candidates["sparse"]["genre"] = [[1] * 35] * 50
    candidates["sparse"]["tag"] = [[1] * 35] * 50
    del candidates["weights"]
    return candidates


def broken(bad: Bad) -> dict[str, Any]:
    request = api_request(1)
    bad.break_it(request)
    return request


def cases(api: str) -> Any:
    return pytest.mark.parametrize("bad", [bad for bad in TABLE if api in bad.apis], ids=str)


@pytest.fixture(scope="module")
def service(api_model):
    with api_service(api_model, LIMITS) as service:
        yield service


@pytest.fixture(scope="module")
def loop():
    """One event loop for the module, so that one server can serve all its cases."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield lambda main: runner.run(asyncio.wait_for(main, 60))


@pytest.fixture(scope="module")
def api(service, loop):
    server = running_api(service)
    yield loop(server.__aenter__())
    loop(server.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def ranker(service):
    return Ranker(service, MODEL)


def assert_message(bad: Bad, kind: str, message: str) -> None:
    assert kind == bad.kind, message
    for part in bad.says:
        assert part in message


async def assert_neighbours_are_right(api: Api, expected: dict[int, np.ndarray], bad_call: Any) -> Any:
    """Sends requests around the broken one, all at once, and returns what the broken one got."""
    good = [api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(seed)) for seed in expected]
    *answers, outcome = await asyncio.gather(*good, bad_call, return_exceptions=True)
    for answer, scores in zip(answers, expected.values(), strict=True):
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(np.array(answer.json()["scores"], "f4"), scores, rtol=1e-5)
    return outcome


@pytest.fixture(scope="module")
def expected(api_model):
    return {seed: api_model.scores(api_request(seed)) for seed in (2, 3)}


@cases("http")
def test_http_refuses_it_by_name_and_its_neighbours_are_right(api, loop, expected, bad):
    async def main() -> None:
        content = json.dumps(broken(bad)).encode()
        call = api.http.post(f"/v1/models/{bad.model}:rank", content=content, headers={"x-request-id": "r-1"})
        answer = await assert_neighbours_are_right(api, expected, call)
        assert answer.status_code == bad.http_status
        assert answer.headers["x-request-id"] == "r-1"
        error = answer.json()["error"]
        assert error["request_id"] == "r-1"
        assert error["field"]
        assert_message(bad, error["kind"], error["message"])

    loop(main())


@cases("grpc")
def test_grpc_refuses_it_by_name_and_its_neighbours_are_right(api, loop, expected, bad):
    async def main() -> None:
        outcome = await assert_neighbours_are_right(api, expected, api.stub.Rank(rank_message(broken(bad), bad.model)))
        assert isinstance(outcome, grpc.aio.AioRpcError)
        assert outcome.code().name == bad.grpc_status
        kind = dict(outcome.trailing_metadata())["shardrank-error-kind"]
        assert_message(bad, kind, outcome.details())

    loop(main())


@cases("embedded")
def test_the_in_process_call_refuses_it_by_name(ranker, service, bad):
    ranker = ranker if bad.model == MODEL else Ranker(service, bad.model)
    with pytest.raises(ShardrankError) as refusal:
        ranker.rank(broken(bad))
    assert_message(bad, refusal.value.kind, str(refusal.value))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (json.dumps(api_request(1) | {"context": NAN}).encode(), "context: NaN is not in 0.."),
        (b"\xff\xfe", "utf-8"),
        (json.dumps(api_request(1)).encode()[:-10], "not JSON"),
    ],
)
def test_malformed_json_is_refused(api, loop, body, says):
    async def main() -> None:
        answer = await api.http.post(f"/v1/models/{MODEL}:rank", content=body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]

    loop(main())


def test_a_malformed_message_is_invalid_argument(api, loop):
    async def main() -> None:
        for method in ("Rank", "Lookup", "GetModel"):
            call = api.channel.unary_unary(f"/shardrank.v1.RankingService/{method}")
            with pytest.raises(grpc.aio.AioRpcError, match="the message is not a ") as refusal:
                await call(b"\xff\xff\xff")
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    loop(main())


def test_too_many_bytes_are_refused_in_every_api(api, loop):
    async def main() -> None:
        request = api_request(1)
        request["request_id"] = "x" * 80_000
        answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=request)
        assert answer.status_code == 413
        assert "max_body_bytes = 60000" in answer.json()["error"]["message"]
        message = rank_message(request)
        with pytest.raises(grpc.aio.AioRpcError, match="max_body_bytes = 60000") as refusal:
            await api.stub.Rank(message)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        message.request_id *= 100
        with pytest.raises(grpc.aio.AioRpcError, match="max_body_bytes = 60000") as refusal:
            await api.stub.Rank(message)
        assert dict(refusal.value.trailing_metadata())["shardrank-error-kind"] == "body_too_large"

    loop(main())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sparse": {"nope": [[1]]}}, "sparse.nope"),
        ({"sparse": {"film": [[-1]]}}, "sparse.film[0][0]: -1"),
        ({"sparse": {"film": [[1], [3, 900]]}}, "sparse.film[1][1]: 900"),
        ({"sparse": {"film": [[1] * 41]}}, "sparse.film[0]: 41 ids in one bag, more than the limit max_ids_per_bag"),
        ({"sparse": {"tag": [[1]]}, "weights": {"tag": [[1, 2]]}}, "weights.tag[0]"),
        ({"sparse": {"film": [[1]]}, "weights": {"tag": [[1]]}}, "tag"),
        ({"sparse": 3}, "sparse: 3 is not an object"),
        ({}, "sparse: missing"),
    ],
)
def test_a_broken_lookup_is_refused_by_name(api, loop, ranker, body, says):
    async def main() -> None:
        answer = await api.http.post(f"/v1/models/{MODEL}:lookup", json=body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]

    loop(main())
    with pytest.raises(ShardrankError) as refusal:
        ranker.lookup(body)
    assert says in str(refusal.value)


def test_no_refusal_keeps_a_lease(service, ranker):
    for bad in TABLE:
        if "embedded" in bad.apis:
            with pytest.raises(ShardrankError):
                Ranker(service, bad.model).rank(broken(bad))
    ranker.rank(api_request(1))
    assert [generation.leases for generation in service.generations.all()] == [0]
