"""Messages that are made to harm, and wrong requests: each is sent to a real server over each API, beside valid calls.

It is refused by name, what it took is given back, and no call beside it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from loader.errors import ShardrankError
from serving.api.grpc import wire as frames
from serving.embedded import Ranker
from serving.errors import InvalidRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.protobuf import encode_varint
from serving.formats.requests import Codec
from serving.limits import RequestLimits
from shardrank_testing.http2_peer import PING, Http2Peer, data, prefixed
from shardrank_testing.inference_requests import Tensor, message_of, tensors_of
from shardrank_testing.parsing import SCHEMA, field
from shardrank_testing.serving_api import (
    MODEL,
    Api,
    ApiModel,
    api_request,
    api_spec,
    packed_message,
    rank_message,
    served_api,
    until,
)

NAN = float("nan")
MIB = 2**20
# All calls come over one connection, which is not to end for the work that it causes.
LIMITS = RequestLimits(max_idle_work_ms=0)
SMALL_LIMITS = RequestLimits(
    max_candidates=50, max_ids_per_bag=40, max_ids_per_request=3000, max_timeout_ms=40_000, max_idle_work_ms=0
)
SIZE, TEXT = LIMITS.max_body_bytes, LIMITS.max_json_bytes


class Route(NamedTuple):
    """Where a body is sent, and what reads it there (None where the codec is not the API's own)."""

    api: str
    path: str
    codec: Codec | None
    content_type: str = "application/json"

    def __str__(self) -> str:
        return f"{self.api} {self.path.rpartition('/')[2]} {self.content_type.rpartition('/')[2]}"


RPC, INFERENCE, PROTOBUF = "/shardrank.v1.RankingService", "/inference.GRPCInferenceService", "application/x-protobuf"
JSON_RANK = Route("http", "/v1/models/{model}:rank", JsonCodec("rank", MODEL))
JSON_LOOKUP = Route("http", "/v1/models/{model}:lookup", JsonCodec("lookup", MODEL))
INFER_BODY = Route("http", "/v2/models/{model}/infer", InferHttpCodec(model=MODEL, header_length=None))
GRPC_RANK = Route("grpc", f"{RPC}/Rank", MessageCodec("rank"), "")
GRPC_LOOKUP = Route("grpc", f"{RPC}/Lookup", MessageCodec("lookup"), "")
GET_MODEL = Route("grpc", f"{RPC}/GetModel", None, "")
RANK = (GRPC_RANK, Route("http", JSON_RANK.path, MessageCodec("rank", MODEL), PROTOBUF))
LOOKUP = (GRPC_LOOKUP, Route("http", JSON_LOOKUP.path, MessageCodec("lookup", MODEL), PROTOBUF))
INFER = (Route("grpc", f"{INFERENCE}/ModelInfer", InferGrpcCodec(), ""),)


@dataclass(frozen=True)
class Hostile:
    """A body that is refused.

    Attributes:
        says: a part of the error.
        kind: of the error; any if it is empty.
        peak_bytes: what its refusal may take at most, beside the body itself.
        coding: how the body is compressed on its way.
    """

    name: str
    routes: tuple[Route, ...]
    make: Callable[[], bytes]
    says: str
    peak_bytes: int = MIB // 4
    kind: str = ""
    status: tuple[int, str] = (400, "INVALID_ARGUMENT")
    coding: str = ""


# Requests that are wrong in one place.


@dataclass(frozen=True)
class Wrong:
    """A valid rank request with one change, in the JSON form and as a message.

    Attributes:
        apis: where it can be expressed at all; protobuf's types exclude some.
    """

    name: str
    change: Callable[[dict[str, Any]], Any]
    says: tuple[str, ...]
    kind: str
    apis: tuple[str, ...] = ("http", "grpc", "embedded")
    model: str = MODEL
    status: tuple[int, str] = (400, "INVALID_ARGUMENT")

    def request(self) -> dict[str, Any]:
        request = api_request(1)
        self.change(request)
        return request


NOT_GRPC, JSON_ONLY = ("http", "embedded"), ("http",)
NOT_FOUND, TOO_LARGE, OTHER_SCHEMA = (404, "NOT_FOUND"), (413, "INVALID_ARGUMENT"), (409, "FAILED_PRECONDITION")


def at(*path: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """`at("a", "b")(value)` sets request["a"]["b"]."""

    def with_value(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(request: dict[str, Any]) -> None:
            owner: Any = request
            for step in path[:-1]:
                owner = owner[step]
            owner[path[-1]] = value

        return change

    return with_value


def crowded() -> dict[str, Any]:
    """Candidates within every limit but that of ids over all features."""
    candidates = api_request(1, 50)["candidates"]
    candidates["sparse"] |= {"genre": [[1] * 35] * 50, "tag": [[1] * 35] * 50}
    del candidates["weights"]
    return candidates


FILM = ("candidates", "sparse", "film")
film = at(*FILM, 3)
USER = at("context", "sparse", "user")
RANGE = "0..9223372036854775807"
WRONG = [
    Wrong("unknown model", lambda request: None, ("'nothing'", "films 1"), "model_not_found", model="nothing",
        status=NOT_FOUND),
    Wrong("unknown version", at("version")(9), ("version 9", "films 1"), "model_not_found", status=NOT_FOUND),
    Wrong("unknown candidate feature", at("candidates", "sparse", "flim")([1] * 5),
        ("candidates.sparse.flim", "'film'"), "unknown_feature"),
    Wrong("unknown context feature", at("context", "sparse", "x")([1]), ("context.sparse.x", "'user'"),
        "unknown_feature"),
    Wrong("feature on the wrong side", at("context", "sparse", "film")([1]),
        ("context.sparse.film", "candidate feature"), "unknown_feature"),
    Wrong("missing candidate feature", lambda r: r["candidates"]["sparse"].pop("film"), ("candidates.sparse.film",),
        "missing_feature"),
    Wrong("missing context feature", lambda r: r["context"]["sparse"].pop("user"), ("context.sparse.user",),
        "missing_feature"),
    Wrong("candidate counts differ", lambda r: r["candidates"]["sparse"]["genre"].append([1]),
        ("candidates.sparse.", "candidates,"), "count_mismatch"),
    Wrong("candidate dense rows differ", lambda r: r["candidates"]["dense"].pop(), ("candidates.dense", "5 candidates"),
        "count_mismatch"),
    Wrong("context dense count", at("context", "dense")([1.0]), ("context.dense", "1 values", "takes 2"),
        "count_mismatch"),
    Wrong("no candidates",
        lambda r: r.update(candidates={"sparse": {"film": [], "genre": [], "tag": [], "device": []}}),
        ("candidates", "at least 1"), "count_mismatch"),
    Wrong("negative id", film(-5), ("candidates.sparse.film[3]", "-5", RANGE), "invalid_id"),
    Wrong("negative context id", USER([-1]), ("context.sparse.user[0]", "-1", RANGE), "invalid_id"),
    Wrong("float id", film(3.5), ("candidates.sparse.film[3]", "3.5", "integer"), "invalid_id", NOT_GRPC),
    Wrong("integral float id", film(3.0), ("candidates.sparse.film[3]", "3.0", "integer"), "invalid_id", NOT_GRPC),
    Wrong("boolean id", film(True), ("candidates.sparse.film[3]", "true", "integer"), "invalid_id", JSON_ONLY),
    Wrong("null id", film(None), ("candidates.sparse.film[3]", "null", "integer"), "invalid_id", JSON_ONLY),
    Wrong("string id", film("7"), ("candidates.sparse.film[3]", '"7"', "integer"), "invalid_id", JSON_ONLY),
    Wrong("strings for integers", at(*FILM)(["7"] * 5), ("candidates.sparse.film", "integers"), "invalid_id"),
    Wrong("integers for strings", at("context", "sparse", "city")([7]), ("context.sparse.city", "strings"),
        "invalid_id"),
    Wrong("id of 2^63", film(2**63), ("candidates.sparse.film[3]", str(2**63), RANGE), "invalid_id", NOT_GRPC),
    Wrong("id of 2^70", film(2**70), ("candidates.sparse.film[3]", str(2**70), RANGE), "invalid_id", NOT_GRPC),
    Wrong("id beyond the table", film(777), ("candidates.sparse.film[3]", "777", "num_embeddings = 777"), "unknown_id"),
    Wrong("context id beyond the table", at("context", "sparse", "history")([5, 6, 4000]),
        ("context.sparse.history[2]", "4000", "num_embeddings = 777"), "unknown_id"),
    Wrong("string beyond the vocabulary", at("context", "sparse", "city")(["Oslo", "Atlantis"]),
        ("context.sparse.city[1]", "Atlantis", "num_embeddings"), "unknown_id"),
    Wrong("NaN context dense", at("context", "dense", 1)(NAN), ("context.dense[1]", "not a finite"), "invalid_field"),
    Wrong("inf candidate dense", at("candidates", "dense", 2, 1)(float("inf")), ("candidates.dense", "finite"),
        "invalid_field"),
    Wrong("dense beyond float32", at("candidates", "dense", 2, 1)(1e39), ("candidates.dense", "finite"),
        "invalid_field", NOT_GRPC),
    Wrong("NaN weight", at("context", "weights", "liked-tag", 1)(NAN), ("context.weights.liked-tag[1]", "finite"),
        "invalid_field"),
    Wrong("weights for unweighted", at("context", "weights", "user")([1.0]), ("user", "takes no weights"),
        "invalid_field"),
    Wrong("weight counts", at("context", "weights", "liked-tag")([1.0]), ("liked-tag", "weights"), "count_mismatch",
        ("grpc",)),
    Wrong("too many candidates", lambda r: r.update(candidates=api_request(1, 51)["candidates"]),
        ("candidates", "51", "max_candidates = 50"), "limit_exceeded"),
    Wrong("too many numbers that are no ids",
        lambda r: (r["candidates"]["sparse"].update(dict.fromkeys(("film", "genre", "tag", "device"), [1.5] * 51)),
                   r["candidates"].pop("weights")), ("max_candidates = 50",), "limit_exceeded", JSON_ONLY),
    Wrong("too many negative ids", USER([-1] * 41), ("max_ids_per_bag = 40",), "limit_exceeded"),
    Wrong("too many ids per bag", at("context", "sparse", "history")([1] * 41),
        ("context.sparse.history", "41", "max_ids_per_bag = 40"), "limit_exceeded"),
    Wrong("too many ids", lambda r: r.update(candidates=crowded()), ("max_ids_per_request = 3000",), "limit_exceeded"),
    Wrong("timeout too long", at("timeout_ms")(41_000), ("timeout_ms", "max_timeout_ms = 40000"), "limit_exceeded"),
    Wrong("timeout of nothing", at("timeout_ms")(-1), ("timeout_ms", "-1"), "invalid_field", NOT_GRPC),
    Wrong("routing_key too long", at("routing_key")("x" * 129), ("routing_key", "129", "max_routing_key_chars = 128"),
        "limit_exceeded"),
    Wrong("routing_key no text", at("routing_key")(7), ("routing_key", "7", "string"), "invalid_field", JSON_ONLY),
    Wrong("top_k of nothing", at("top_k")(-1), ("top_k", "-1"), "invalid_field", NOT_GRPC),
    Wrong("unknown key", at("candidate")({}), ("candidate", "unknown key"), "invalid_field", JSON_ONLY),
    Wrong("no candidates object", lambda r: r.pop("candidates"), ("candidates", "missing"), "invalid_field", JSON_ONLY),
    Wrong("list for object", at("context")([1]), ("context", "a list is not an object"), "invalid_field", JSON_ONLY),
    Wrong("mixed bags and ids", film([1]), ("candidates.sparse.film[3]",), "invalid_field", JSON_ONLY),
]  # fmt: skip


# Bodies that are made to cost much.


HEAD, NAME = field(1, b"films"), b"0" * 7
FIELDS = "fields in the message, more than the limit max_message_fields"


def full(unit: bytes, head: bytes = HEAD) -> Callable[[], bytes]:
    return lambda: head + unit * ((SIZE - len(head)) // len(unit))


def tensors_but(name: str) -> list[Tensor]:
    return [tensor for tensor in tensors_of(api_spec(), api_request(1)) if tensor.name != name]


def infer_with(tensor: Tensor) -> Callable[[], bytes]:
    return lambda: message_of([*tensors_but(tensor.name), tensor], MODEL).SerializeToString()


def empty_strings(count: int) -> Callable[[], bytes]:
    """As ids of a context feature: of each there is only its length."""

    def make() -> bytes:
        message = message_of(tensors_but("city"), MODEL)
        message.inputs.add(name="city", datatype="BYTES", shape=[count])
        message.raw_input_contents.append(bytes(4 * count))
        return message.SerializeToString()

    return make


def a_million(unit: bytes) -> bytes:
    """A unit that ends with `NAME`, each time with another."""
    return b"".join(unit[:-7] + b"%07d" % number for number in range(1_000_000))


def shape_of(dims: bytes) -> Callable[[], bytes]:
    return lambda: HEAD + field(5, field(1, b"film") + dims * ((SIZE - 99) // len(dims)))


def mixed_contents() -> bytes:
    raw = infer_with(Tensor("y", "INT64", np.arange(1)))()
    return raw + field(
        5, field(1, b"film2") + field(2, b"INT64") + field(3, b"\x05") + field(5, field(3, bytes(SIZE - 999)))
    )


def typed_contents() -> bytes:
    films = field(1, b"film") + field(2, b"INT64") + field(3, b"\x05") + field(5, field(3, bytes(SIZE - 9999)))
    return message_of(tensors_but("film"), MODEL, raw=False).SerializeToString() + field(5, films)


def packed_empty_strings() -> bytes:
    message = packed_message(SCHEMA, api_request(1))
    message.packed.string_ids.extend([""] * 8_000_000)
    return message.SerializeToString()


def many_ids() -> bytes:
    message = rank_message(api_request(1))
    tag = message.candidates.sparse["tag"]
    tag.Clear()
    tag.ids.extend([7] * 1_900_000)
    tag.lengths.extend([380_000] * 5)
    return message.SerializeToString()


MESSAGES = [
    Hostile("8 M empty parts", RANK, full(field(4, b"")), "it is there twice"),
    Hostile("5 M unknown fields", RANK, full(field(99, b"")), FIELDS),
    Hostile("5 M unknown numbers", RANK, full(encode_varint(99 << 3) + b"\x01"), FIELDS),
    Hostile("unknown fields within fields", RANK, lambda: HEAD + field(3, full(field(99, b""), b"")()[:-99]), FIELDS),
    Hostile("8 M empty map entries", LOOKUP, full(field(3, b"")), FIELDS, 4 * MIB),
    Hostile("a million features", RANK, lambda: HEAD + field(4, a_million(field(1, field(1, NAME)))),
        "model 'films' has no such feature here"),
    Hostile("2 M unpacked ids", LOOKUP,
        lambda: HEAD + field(3, field(1, b"film") + field(2, b"\x09" + bytes(8) + (b"\x09" + bytes(8)) * 1_700_000)),
        FIELDS, 4 * MIB),
    Hostile("8 M empty string ids", LOOKUP,
        lambda: HEAD + field(3, field(1, b"city") + field(2, field(4, b"") * 8_000_000)), FIELDS, 4 * MIB),
    Hostile("a text of 16 MB", RANK, lambda: field(1, b"x" * (SIZE - 99)), "model: 16777117 bytes"),
    Hostile("a group", RANK, full(encode_varint(99 << 3 | 3)), "groups are not taken"),
    Hostile("4 M bags", LOOKUP, lambda: HEAD + field(3, field(1, b"film") + field(2, field(2, bytes(SIZE - 96)))),
        "max_bags_per_feature", MIB),
    Hostile("2 M ids", RANK, many_ids, "max_ids_per_request = 1048576"),
    Hostile("a packed digest of 16 MB", RANK, lambda: HEAD + field(10, field(1, b"x" * (SIZE - 99))), "schema_digest: ",
        status=OTHER_SCHEMA),
    Hostile("packed empty strings", RANK, packed_empty_strings, FIELDS, 4 * MIB),
    Hostile("8 M empty outputs", INFER, full(field(6, b"")), FIELDS, 4 * MIB),
    Hostile("67 outputs", INFER, lambda: HEAD + field(6, field(1, b"scores")) * 67, "67 outputs, more than the limit"),
    Hostile("8 M empty inputs", INFER, full(field(5, b"")), "inputs.: it is given twice"),
    Hostile("a million inputs", INFER, lambda: HEAD + a_million(field(5, field(1, NAME))), FIELDS, 4 * MIB),
    Hostile("8 M empty parameters", INFER, full(field(4, b"")), FIELDS),
    Hostile("8 M empty raw contents", INFER, full(field(7, b"")), "more than the limit", 4 * MIB),
    Hostile("outputs of parameters", INFER, full(field(6, field(2, b""))), FIELDS, 4 * MIB),
    Hostile("16 M shape dims", INFER, lambda: HEAD + field(5, field(1, b"film") + field(3, bytes(SIZE - 99))),
        "more dimensions"),
    Hostile("8 M unpacked shape dims", INFER, shape_of(b"\x18\x01"), "more dimensions"),
    Hostile("16 M varints of 5", INFER, mixed_contents, "raw_input_contents"),
    Hostile("4 M empty strings", INFER, empty_strings(4_000_000), "max_ids_per_request = 1048576"),
    Hostile("a million empty strings", INFER, empty_strings(1_000_000), "max_string_ids = 16384", MIB),
    Hostile("candidates without end", INFER, infer_with(Tensor("film", "INT64", np.zeros(2_000_000, np.int64))),
        "max_ids_per_request = 1048576"),
]  # fmt: skip


def text_of(opening: bytes, unit: bytes, closing: bytes = b"1]}}") -> Callable[[], bytes]:
    return lambda: opening + unit * ((TEXT - len(opening) - len(closing)) // len(unit)) + closing


FILMS, CITY, INPUTS = b'{"sparse":{"film":[', b'{"sparse":{"city":[', b'{"inputs":['
TEXTS = [
    Hostile("a million ints", (JSON_LOOKUP,), text_of(FILMS, b"1,"), "max_bags_per_feature", 64 * MIB),
    Hostile("700 thousand empty lists", (JSON_LOOKUP,), text_of(FILMS, b"[],"), "max_bags_per_feature", 64 * MIB),
    Hostile("strings for ints", (JSON_LOOKUP,), text_of(FILMS, b'"",'), "max_bags_per_feature", 64 * MIB),
    Hostile("strings", (JSON_LOOKUP,), text_of(CITY, b'"",'), "max_bags_per_feature", 64 * MIB),
    Hostile("no ids", (JSON_LOOKUP,), text_of(FILMS, b"true,"), "max_bags_per_feature", 64 * MIB),
    Hostile("bags among bags", (JSON_LOOKUP,), text_of(CITY, b"[],[[]],"), "max_bags_per_feature", 64 * MIB),
    Hostile("bags of strings", (JSON_LOOKUP,), text_of(CITY, b"[" + b'"",' * 63 + b'""],', b"[]]}}"), "max_string_ids"),
    Hostile("objects", (JSON_LOOKUP,), text_of(b'{"sparse":[', b"{},", b"{}]}"), "a list is not an object", 64 * MIB),
    Hostile("keys", (JSON_LOOKUP,), text_of(b'{"sparse":{', b'"a":1,', b'"a":1}}'), "keys; a request has at most 16384",
        64 * MIB),
    Hostile("a list without end", (JSON_LOOKUP,), text_of(b"", b"["), "JSON", 64 * MIB),
    Hostile("broken off", (JSON_LOOKUP,), text_of(FILMS, b"[1],", b"[1"), "not JSON", 128 * MIB),
    Hostile("a wrong last bag", (JSON_LOOKUP,), text_of(FILMS, b"[" + b"1," * 63 + b"1],", b"[true]]}}"), "true is not",
        128 * MIB),
    Hostile("an id of 20 digits at the end", (JSON_LOOKUP,),
        text_of(FILMS, b"[" + b"1," * 63 + b"1],", b"[" + b"9" * 20 + b"]]}}"), "numbers have at most 64 bits",
        128 * MIB),
    Hostile("a body of one byte too much", (JSON_LOOKUP,), lambda: b" " * (TEXT + 1), "max_json_bytes = 2097152",
        status=TOO_LARGE),
    Hostile("inputs", (INFER_BODY,), text_of(INPUTS, b"{},", b"{}]}"), "at most 16384 inputs", 5 * TEXT),
    Hostile("outputs", (INFER_BODY,), lambda: b'{"inputs":[],"outputs":[' + b'{"name":""},' * 32_000 + b'{"name":""}]}',
        "outputs, more than the limit", 8 * MIB),
]  # fmt: skip


VALID = json.dumps(api_request(1)).encode()
MALFORMED = [
    *[
        Hostile(f"broken JSON, {number}", (JSON_RANK,), lambda body=body: body, says)
        for number, (body, says) in enumerate([
            (b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "not an object"), (b"\xff\xfe", "utf-8"),
            (VALID[:-10], "not JSON"), (b'{"context": NaN}', "context: NaN is not a finite number of 64 bits"),
        ])
    ],
    *[
        Hostile(f"a broken lookup, {number}", (JSON_LOOKUP,), lambda body=body: json.dumps(body).encode(), says)
        for number, (body, says) in enumerate([
            ({"sparse": {"nope": [[1]]}}, "sparse.nope"),
            ({"sparse": {"film": [[-1]]}}, "sparse.film[0][0]: -1"),
            ({"sparse": {"film": [[1], [3, 900]]}}, "sparse.film[1][1]: 900"),
            ({"sparse": {"film": [[1] * 4097]}}, "sparse.film[0]: 4097 ids in one bag, more than the limit max_ids_"),
            ({"sparse": {"tag": [[1]]}, "weights": {"tag": [[1, 2]]}}, "weights.tag[0]"),
            ({"sparse": {"film": [[1]]}, "weights": {"tag": [[1]]}}, "tag"),
            ({"sparse": 3}, "sparse: 3 is not an object"),
            ({}, "sparse: missing"),
        ])
    ],
    Hostile("no message", (*RANK, *LOOKUP, GET_MODEL), lambda: b"\xff\xff\xff", "the message is not a "),
    Hostile("no model", (GRPC_RANK, GRPC_LOOKUP, GET_MODEL), bytes, "model: it is empty"),
    Hostile("no message of 3 MB", RANK, lambda: b"\xff" * 3_000_000, "the message is not a "),
    Hostile("no message, compressed", (GRPC_RANK,), lambda: b"\xff" * 3_000_000, "is not a", coding="deflate"),
    Hostile("too much once it is expanded", (GRPC_RANK, INFER_BODY), lambda: bytes(SIZE + 1),
        "max_body_bytes = 16777216", kind="body_too_large", status=TOO_LARGE, coding="deflate"),
    Hostile("a byte too much", (*RANK, *LOOKUP, *INFER), lambda: bytes(SIZE + 1), "max_body_bytes = 16777216",
        kind="body_too_large", status=TOO_LARGE),
    Hostile("far too much", (*RANK, JSON_RANK), lambda: bytes(4 * SIZE), "max_body_bytes = 16777216",
        kind="body_too_large", status=TOO_LARGE),
    Hostile("typed contents beyond their shape", INFER, typed_contents, "its shape holds 5 elements, its data has 1",
        3 * SIZE),
]  # fmt: skip


# The runner.


class Refusal(NamedTuple):
    """What a client is told."""

    status: int | str
    kind: str
    text: str
    field: str = ""


async def send(api: Api, route: Route, body: bytes, coding: str = "", model: str = MODEL) -> Refusal:
    if route.api == "grpc":
        compression = grpc.Compression.Deflate if coding else None
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await api.channel.unary_unary(route.path)(body, compression=compression)
        kind = dict(refusal.value.trailing_metadata())["shardrank-error-kind"]
        return Refusal(refusal.value.code().name, str(kind), refusal.value.details())
    headers = {
        "content-type": route.content_type,
        "x-request-id": "r-1",
        **({"content-encoding": coding} if coding else {}),
    }
    content = zlib.compress(body) if coding else body
    answer = await api.http.post(route.path.format(model=model), content=content, headers=headers)
    assert answer.headers["x-request-id"] == "r-1"
    error = answer.json()["error"]
    if route is INFER_BODY:
        return Refusal(answer.status_code, answer.headers["shardrank-error-kind"], error)
    assert error["request_id"] == "r-1"
    return Refusal(answer.status_code, error["kind"], error["message"], error.get("field", ""))


async def send_beside_good_calls(api: Api, expected: dict[int, np.ndarray], bad: Any) -> Refusal:
    """Send good requests over both APIs at once with a bad one."""
    over_http = [api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(seed)) for seed in expected]
    over_grpc = [api.stub.Rank(rank_message(api_request(seed))) for seed in expected]
    refusal, *answers = await asyncio.gather(bad, *over_http, *over_grpc)
    found = [answer.json()["scores"] for answer in answers[: len(over_http)]]
    found += [list(answer.scores) for answer in answers[len(over_http) :]]
    for scores, right in zip(found, [*expected.values()] * 2, strict=True):
        np.testing.assert_allclose(np.array(scores, "f4"), right, rtol=1e-5)
    return refusal


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Memory is counted, and no garbage collection takes place that is not asked for."""
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.fixture(scope="module")
def limits() -> RequestLimits:
    return LIMITS


@pytest.fixture(scope="module")
def expected(api_model: ApiModel) -> dict[int, np.ndarray]:
    return {seed: api_model.scores(api_request(seed)) for seed in (2, 3)}


@pytest.fixture(scope="module")
async def warm_api(api: Api, expected: dict[int, np.ndarray]) -> Api:
    """A server that has what the first request of a kind makes for good: compiled expressions, a thread's parser."""
    for route in (*RANK, *LOOKUP, *INFER, JSON_RANK, JSON_LOOKUP, INFER_BODY):
        await send_beside_good_calls(api, expected, send(api, route, b"\xff\xff\xff"))
    return api


@pytest.fixture(scope="module")
async def small_api(api_model: ApiModel) -> AsyncIterator[Api]:
    """A server with limits that a small request can exceed."""
    async with served_api(api_model, SMALL_LIMITS) as api:
        yield api


def leases(api: Api) -> list[int]:
    return [generation.leases for generation in api.service.generations.all()]


BODIES = [*MALFORMED, *MESSAGES, *TEXTS]
LARGE = [*MESSAGES, *TEXTS, MALFORMED[-1]]


@pytest.mark.parametrize(
    ("row", "route"), [pytest.param(row, route, id=f"{route}: {row.name}") for row in BODIES for route in row.routes]
)
async def test_a_hostile_body_is_refused_and_nothing_of_it_is_kept(warm_api, expected, row, route):
    api, body = warm_api, row.make()
    with traced():
        refusal = await send_beside_good_calls(api, expected, send(api, route, body, row.coding))
        await until(lambda: (api.service.in_flight, leases(api)) == (0, [0]))
        held, _ = tracemalloc.get_traced_memory()
    assert held < 1.5 * MIB
    assert row.says in refusal.text
    assert row.kind in ("", refusal.kind)
    assert refusal.status in row.status


@pytest.mark.parametrize(
    ("row", "api_name"), [pytest.param(row, api, id=f"{api}: {row.name}") for row in WRONG for api in row.apis]
)
async def test_a_wrong_request_is_refused_by_name(small_api, expected, row, api_name):
    request = row.request()
    if api_name == "embedded":
        with pytest.raises(ShardrankError) as raised:
            await asyncio.to_thread(Ranker(small_api.service).rank, row.model, **request)
        kind, text = raised.value.kind, str(raised.value)
    else:
        route, body = JSON_RANK, json.dumps(request).encode()
        if api_name == "grpc":
            route, body = GRPC_RANK, rank_message(request, row.model).SerializeToString()
        refusal = await send_beside_good_calls(small_api, expected, send(small_api, route, body, model=row.model))
        assert refusal.status in row.status
        assert refusal.field or api_name == "grpc"
        kind, text = refusal.kind, refusal.text
    assert kind == row.kind, text
    assert [part for part in row.says if part not in text] == []
    await until(lambda: (small_api.service.in_flight, leases(small_api)) == (0, [0]))


def refuse(codec: Codec, body: bytes) -> InvalidRequestError:
    try:
        codec.read(body, LIMITS).parse(SCHEMA)
    except InvalidRequestError as error:
        return error
    raise AssertionError("it was taken")


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.routes[0]}: {row.name}") for row in LARGE])
def test_a_large_body_is_refused_by_its_count_undecoded(row):
    """By the codec alone, so that its peak can be measured."""
    body, codec = row.make(), row.routes[0].codec
    assert len(body) <= SIZE
    assert row.says in str(refuse(codec, body))
    # What there is already needs no look.
    gc.freeze()
    with traced():
        error = refuse(codec, body)
        held, peak = tracemalloc.get_traced_memory()
        del error
        after, _ = tracemalloc.get_traced_memory()
        # Freed by counting references: no cycle waits for a collection. The interpreter keeps some tuples for the next.
        assert gc.collect() == 0
    gc.unfreeze()
    assert (peak <= row.peak_bytes, after < MIB // 4) == (True, True)
    # The error of a text keeps nothing that was made of it.
    assert held < 2 * MIB or row not in TEXTS


def test_the_collector_is_held_off_only_while_a_text_is_refused():
    codec, body = JSON_LOOKUP.codec, next(row for row in TEXTS if row.name == "broken off").make()
    assert gc.isenabled()
    refuse(codec, body)
    assert gc.isenabled()
    with traced():
        refuse(codec, body)
        assert not gc.isenabled()


async def test_floods_of_parallel_messages_fail_no_valid_call(api_model, expected):
    """Half-sent bodies, and messages that expand 200 times, from the address of the valid calls."""
    limits, packed = RequestLimits(max_body_bytes=MIB, max_buffered_bytes=4 * MIB), zlib.compress(bytes(MIB))
    head = f"POST {RANK[1].path.format(model=MODEL)} HTTP/1.1\r\nhost: a\r\ncontent-length: {MIB}\r\n\r\n".encode()
    async with served_api(api_model, limits) as api:
        peers = [await asyncio.open_connection(api.listening.host, api.listening.http_port) for _ in range(40)]
        for _, writer in peers:
            writer.write(head + bytes(MIB // 2))
        bad = asyncio.gather(*(send(api, GRPC_RANK, packed, "deflate") for _ in range(64)))
        refusals = await send_beside_good_calls(api, expected, bad)
        assert {refusal.kind for refusal in refusals} <= {"malformed", "buffer_full"}
        await until(lambda: sum(b" 429 " in reader._buffer for reader, _ in peers) > 20)
        assert api.service.buffers.buffered <= 4 * MIB
        for _, writer in peers:
            writer.close()
        await until(lambda: api.service.buffers.buffered == 0)


async def test_nothing_of_a_message_that_is_cut_off_is_kept(api):
    peer = Http2Peer(*await asyncio.open_connection(api.listening.host, api.listening.grpc_port))
    peer.begin()
    with traced():
        for stream_id in range(1, 11, 2):
            peer.send(peer.call(stream_id, GRPC_RANK.path), data(stream_id, prefixed(bytes(4_000_000))[:16_000]))
            peer.send(data(stream_id, bytes(16_000)) * 55, frames.rst_stream(stream_id, frames.ErrorCode.CANCEL), PING)
            await peer.find(frames.PING)
        held, _ = tracemalloc.get_traced_memory()
    peer.close()
    assert held < 1.5 * MIB
