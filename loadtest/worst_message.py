"""Time the reading and the refusal of the worst single messages of every form, at the default limits.

While a message is read, the event loop stands. None may take more than 50 ms, JSON of its full limit 100 ms.

    python -m loadtest.worst_message [--json FILE] [--only WORDS] [--runs N]

Bytes are those after decompression, where it makes no difference whether a message came compressed. Each time is the
least of several runs, and includes what it takes to free what was made.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec, VocabularyMapping
from loadtest.drill.hostile import messages
from loadtest.drill.hostile.messages import MESSAGES, Served, filled, sized
from loadtest.workloads.payloads import Encoding, Payload, Payloads
from loadtest.workloads.workload import WorkloadRequest
from router.feature_schema import FeatureSchema
from serving.api.bodies import expand
from serving.errors import BadRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import MAX_SEARCHED_BYTES, JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.protobuf import encode_field, encode_integer
from serving.formats.requests import Codec, Encoded, FeatureEmbeddings, LookupAnswer, RankAnswer
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.proto.inference import open_inference_pb2
from shard_node.bags import KeyedBags

LIMITS = RequestLimits()
MESSAGE, TEXT = LIMITS.max_body_bytes, LIMITS.max_json_bytes
IDS, CANDIDATES = LIMITS.max_ids_per_request, LIMITS.max_candidates
MODEL = "model"
Piece = TypeVar("Piece")


class Model:
    """A workload of one request, to a model whose features are half of the context, half of the candidates.

    One of each is a weighted one, one of the context a sequence, and three have string ids if there are `strings`.
    """

    name = MODEL

    def __init__(self, num_features: int, *, strings: bool = False) -> None:
        names = tuple(f"feature_{number:05}" for number in range(num_features))
        string_ids = {"id_mapping": VocabularyMapping(id_type="string")} if strings else {}
        tables = (
            TableSpec(name="t", num_embeddings=10**6, embedding_dim=16, feature_names=names[:-4]),
            TableSpec(name="h", num_embeddings=10**6, embedding_dim=16, pooling="none", feature_names=(names[-4],)),
            TableSpec(name="s", num_embeddings=10, embedding_dim=4, feature_names=names[-3:], **string_ids),
        )
        in_context = {name for number, name in enumerate(names) if name == names[-4] or number % 2}
        features = tuple(
            FeatureSpec(name=name, side="context" if name in in_context else "candidate", weighted=name in names[2:4])
            for name in names
        )
        self.spec = ModelSpec(
            model=MODEL,
            tables=tables,
            features=features,
            dense_inputs=DenseInputs(context=13, candidate=13),
            dense_model=DenseModelSpec(kind="mlp", config={"hidden": [4]}),
        )
        self.schema = FeatureSchema.of(self.spec)
        self.read_by = RequestSchema(self.schema, LIMITS)

    def request(self, rng: np.random.Generator) -> WorkloadRequest:
        """Return the request that was made last."""
        return self._request

    def encoded(
        self,
        api: Encoding,
        candidates: int,
        width: int,
        *,
        context: int | None = None,
        strings: int | None = None,
        text: str = "abc",
        one_id: int = 2**62,
        last_id: int | None = None,
        one_dense: float = 1.0,
        last_dense: float | None = None,
    ) -> Payload:
        """Encode a valid request whose bags are all of one length, in the context or of string ids maybe another."""
        is_context, is_string = self.schema.is_context, self.read_by.is_string
        each = np.where(is_context, width if context is None else context, width)
        each = np.where(is_string, each if strings is None else strings, each)
        bags = np.where(is_context, 1, candidates).astype(np.int64)
        values = np.full(int((bags * each).sum()), one_id, np.int64)
        values[-1] = one_id if last_id is None else last_id
        dense = np.full((candidates, 13), one_dense, np.float32)
        dense[-1, -1] = one_dense if last_dense is None else last_dense
        weights = np.ones(values.size, np.float32) if api == "grpc-packed" else None
        keys = np.arange(bags.size, dtype=np.int32)
        self._request = WorkloadRequest(
            KeyedBags.from_lengths(keys, bags, np.repeat(each, bags), values, weights),
            candidates,
            np.full(13, one_dense, np.float32),
            dense,
            {name: (text,) * int((bags * each)[at]) for at, name in enumerate(self.read_by.names) if is_string[at]},
        )
        return Payloads(self, api, count=1)[0]


PLAIN, STRINGS, WIDE = Model(26), Model(26, strings=True), Model(1000)
# Ids in a bag of each feature of candidates, of a request that is as large as allowed.
FULL_WIDTH = IDS // CANDIDATES // 13


class Case(NamedTuple):
    """One message: how it is read, what it is, and how long that may take."""

    name: str
    codec: Codec
    body: bytes
    model: Model = PLAIN
    allowed_ms: float = 50
    is_compressed: bool = False


# JSON may take longer.
json_case = partial(Case, allowed_ms=100)


def catalogue_cases() -> Iterator[Case]:
    """Messages that `drill hostile` sends, with JSON of the limit; those over gRPC as they are without compression."""
    served = Served(model=MODEL, features=PLAIN.read_by.candidate_names, dense=13, json_bytes=TEXT)
    codecs: dict[str, Codec] = {
        messages.GRPC_RANK: MessageCodec("rank"),
        messages.GRPC_LOOKUP: MessageCodec("lookup"),
        messages.GRPC_INFER: InferGrpcCodec(),
        messages.HTTP_RANK: JsonCodec("rank", MODEL),
        messages.HTTP_LOOKUP: JsonCodec("lookup", MODEL),
    }
    for one in MESSAGES.values():
        headers = dict(one.headers)
        codec = codecs.get(one.path) or InferHttpCodec(MODEL, "", headers.get(messages.HEADER_LENGTH))
        if one.form in ("both", "post"):
            yield Case(one.name, codec, one.build(served), PLAIN, one.limit_ms, "content-encoding" in headers)


# Rank and lookup messages


def unpacked_rank(candidates: int, width: int, context: int) -> bytes:
    """Return a valid rank message each of whose ids is a field of its own."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name, is_context, _ in PLAIN.read_by.kinds:
        ids = (b"\x09" + bytes(8)) * (context if is_context else candidates * width)
        lengths = b"" if is_context else sized(2, np.full(candidates, width, "<u4").tobytes())
        parts[is_context].append(sized(1, sized(1, name.encode()), sized(2, ids, lengths)))
    dense = np.ones(13 * candidates, "<f4").tobytes()
    context_part, candidates_part = (
        sized(3, *parts[True], sized(2, bytes(52))),
        sized(4, *parts[False], sized(2, dense)),
    )
    return sized(1, MODEL.encode()) + context_part + candidates_part


def map_lookup(bags: int, ids: int, last_id: int = 7) -> bytes:
    """Return a lookup of two features."""
    body = sized(1, b"model")
    for name in ("feature_00000", "feature_00002"):
        values = np.full(ids // 2, 2**62, "<i8")
        values[-1] = last_id
        lengths = np.zeros(bags // 2, "<u4")
        lengths[: ids // 2] = 1
        feature = encode_field(1, values.tobytes()) + encode_field(2, lengths.tobytes())
        body += sized(3, sized(1, name.encode()) + sized(2, feature))
    return body


def message_cases() -> Iterator[Case]:
    """Messages of `shardrank.v1`."""
    rank, lookup, head = MessageCodec("rank"), MessageCodec("lookup"), sized(1, b"model")
    few = LIMITS.max_message_fields
    for name, unit in {
        "unknown fields": sized(99, b""),
        "unknown varints": b"\x98\x06\x01",
        "long varints": b"\x38" + b"\xff" * 9 + b"\x01",
        "unknown groups": b"\x9b\x06\x9c\x06",
        "fields with padded lengths": b"\x9a\x06\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00",
    }.items():
        yield Case(f"rank: {name}, 16 MB", rank, filled(unit, MESSAGE, head))
        yield Case(f"rank: {name}, as many as allowed", rank, head + unit * (few - 2))
    some = b"".join(sized(1, sized(1, b"f%d" % number) + sized(2, b"")) for number in range(few // 3 - 2))
    known = b"".join(sized(1, sized(1, n.encode()) + sized(2, b"")) for n in WIDE.read_by.candidate_names[:-1])
    digest = sized(1, STRINGS.schema.digest.encode())
    long_text = digest + sized(3, bytes(4)) + sized(7, b"x" * (MESSAGE // few - 8)) * (few - 9)
    for name, model, body in (
        ("rank: one field of 16 MB", PLAIN, sized(99, bytes(MESSAGE - 100))),
        ("rank: empty map entries, 16 MB", PLAIN, sized(4, filled(sized(1, b""), MESSAGE))),
        ("rank: as many features as allowed", PLAIN, sized(4, some)),
        ("rank: as many features as allowed, wide model", WIDE, sized(4, some)),
        ("rank: one feature missing, wide model", WIDE, sized(4, known)),
        ("rank: an unknown feature, wide model", WIDE, sized(4, sized(1, sized(1, b"feature_x" * 15)))),
        ("rank: a name of 16 MB", PLAIN, sized(4, sized(1, sized(1, b"x" * (MESSAGE - 99))))),
        ("packed: long string ids, 16 MB", STRINGS, encode_integer(5, 9) + sized(10, long_text)),
        ("packed: a digest of 16 MB", PLAIN, sized(10, sized(1, b"x" * (MESSAGE - 99)))),
    ):
        yield Case(name, rank, head + body, model)
    yield Case("rank: a model of 16 MB", rank, sized(1, b"x" * (MESSAGE - 99)))
    wide = partial(PLAIN.encoded, "grpc", CANDIDATES, context=4096)
    packed_of = partial(PLAIN.encoded, "grpc-packed", CANDIDATES, 21)
    yield Case("rank: full size", rank, wide(9).body)
    yield Case("rank: full size, a negative id at the end", rank, wide(9, last_id=-1).body)
    yield Case("rank: more ids than allowed, 16 MB", rank, wide(40).body)
    yield Case("rank: unpacked ids, 16 MB", rank, unpacked_rank(CANDIDATES, 30, 4096))
    yield Case("rank: unpacked ids, as many as allowed", rank, unpacked_rank(12, 50, 610))
    beyond, up_to = STRINGS.encoded("grpc", CANDIDATES, 5), STRINGS.encoded("grpc", 2000, 2, context=4096)
    yield Case("rank: string ids beyond the limit", rank, beyond.body, STRINGS)
    yield Case("rank: string ids up to the limit", rank, up_to.body, STRINGS)
    yield Case("packed: full size", rank, packed_of().body)
    yield Case("packed: full size, a negative id at the end", rank, packed_of(last_id=-1).body)
    yield Case("packed: full size, NaN at the end", rank, packed_of(last_dense=np.nan).body)
    yield Case("packed: string ids up to the limit", rank, STRINGS.encoded("grpc-packed", 2000, 5).body, STRINGS)
    yield Case("lookup: as many ids as allowed", lookup, map_lookup(2**17, IDS))
    yield Case("lookup: as many bags as allowed", lookup, map_lookup(2**17, 2**17))
    yield Case("lookup: a negative id at the end", lookup, map_lookup(2**16, 2**16, -1))
    yield Case("lookup: empty bags, 16 MB", lookup, map_lookup(2**22 - 99, 4))


# The Open Inference Protocol


def inputs_of(payload: Payload) -> Iterator[tuple[open_inference_pb2.ModelInferRequest.InferInputTensor, int]]:
    """Return the inputs of a message, each with how many elements it has."""
    for one in open_inference_pb2.ModelInferRequest.FromString(payload.body).inputs:
        yield one, int(np.prod(one.shape))


def typed(payload: Payload, ids: Callable[[int], bytes]) -> bytes:
    """Return a message with typed contents in place of raw ones; `ids` writes so many of them."""
    body = sized(1, MODEL.encode())
    for one, size in inputs_of(payload):
        contents = {
            "FP32": sized(6, np.ones(size, "<f4").tobytes()) if one.datatype == "FP32" else b"",
            "BYTES": sized(8, b"abc") * size,
            "INT64": ids(size) if one.datatype == "INT64" else b"",
        }[one.datatype]
        body += sized(5, one.SerializeToString(), sized(5, contents))
    return body


def infer_cases() -> Iterator[Case]:
    """Inference requests over gRPC."""
    codec, head, few = InferGrpcCodec(), sized(1, b"model"), LIMITS.max_message_fields
    for name, unit in {
        "outputs with empty parameters, 16 MB": sized(6, sized(2, b"")),
        "inputs with empty contents, 16 MB": sized(5, sized(5, b"")),
        "parameters of text, 16 MB": sized(4, sized(1, b"a") + sized(2, sized(3, b"x"))),
        "parameters of long text": sized(4, sized(1, b"a") + sized(2, sized(3, b"x" * 1400))),
    }.items():
        yield Case(f"infer: {name}", codec, filled(unit, MESSAGE, head))
    many = b"".join(sized(5, sized(1, b"%d" % number)) for number in range(few // 2 - 2))
    yield Case("infer: as many inputs as allowed", codec, head + many)
    dims = sized(5, sized(1, b"feature_00000") + filled(b"\x18\x01", MESSAGE - 99))
    yield Case("infer: 8 M shape dims, unpacked", codec, head + dims)
    empty = partial(STRINGS.encoded, "oip-grpc", text="")
    up_to = empty(1000, 1, strings=LIMITS.max_string_ids // 3000)
    yield Case("infer: raw, full size", codec, PLAIN.encoded("oip-grpc", CANDIDATES, FULL_WIDTH).body)
    yield Case("infer: raw, empty strings, as many as allowed", codec, up_to.body, STRINGS)
    yield Case("infer: raw, 3 M empty strings", codec, empty(1, 1, strings=2**20).body, STRINGS)
    short, long = b"\x07", b"\xff" * 8 + b"\x7f"
    for label, count, width, context, ids in (
        ("varints of 1 byte, full size", CANDIDATES, FULL_WIDTH, FULL_WIDTH, lambda size: sized(3, short * size)),
        ("varints of 9 bytes, full size", CANDIDATES, FULL_WIDTH, FULL_WIDTH, lambda size: sized(3, long * size)),
        ("varints of 9 bytes, 2^18", CANDIDATES, 4, 4, lambda size: sized(3, long * size)),
        ("varints of 9 bytes, 2^17", CANDIDATES // 2, 4, 4, lambda size: sized(3, long * size)),
        ("unpacked varints", 100, 20, 20, lambda size: (b"\x18" + short) * size),
        ("chunks of one varint", 1, 1, 1000, lambda size: sized(3, short) * size),
    ):
        body = typed(PLAIN.encoded("oip-grpc", count, width, context=context), ids)
        yield Case(f"infer: typed, {label}", codec, body)
    yield Case(
        "infer: typed, strings up to the limit", codec, typed(up_to, lambda size: sized(3, short * size)), STRINGS
    )


def data_body(payload: Payload, one_id: object, one_float: float = 1) -> bytes:
    """Return an inference request over HTTP with its data in JSON."""
    element = {"INT64": one_id, "FP32": one_float, "BYTES": ""}
    inputs = [
        {"name": one.name, "datatype": one.datatype, "shape": [*one.shape], "data": [element[one.datatype]] * size}
        for one, size in inputs_of(payload)
    ]
    return json.dumps({"inputs": inputs}, separators=(",", ":")).encode()


def infer_http_cases() -> Iterator[Case]:
    """Inference requests over HTTP."""
    empty = STRINGS.encoded("oip-http", 1000, 1, strings=LIMITS.max_string_ids // 3000, text="")
    full = PLAIN.encoded("oip-http", CANDIDATES, FULL_WIDTH)
    for name, given, model, allowed_ms in (
        ("binary, full size", full, PLAIN, 50),
        ("empty strings", empty, STRINGS, 100),
    ):
        own = InferHttpCodec(MODEL, "", dict(given.headers)[messages.HEADER_LENGTH])
        yield Case(f"infer body: {name}", own, given.body, model, allowed_ms)
    codec = InferHttpCodec(MODEL, "", None)
    for name, one_id, one_float, each in (
        ("ints of one digit", 1, 1, 2),
        ("ints of one digit, lists of one", [1], 1, 4),
        ("ints of 19 digits", 2**62, 1.0, 20),
        ("long floats", 1, 0.12345678901234567, 20),
    ):
        width = max(1, (TEXT - 9000) // (13 * CANDIDATES * each) - (1 if each == 2 else 0))
        count = min(CANDIDATES, (TEXT - 9000) // ((13 * width + 13) * each))
        body = data_body(PLAIN.encoded("oip-grpc", count, width), one_id, one_float)
        yield json_case(f"infer body: {name}", codec, body)
    body = data_body(PLAIN.encoded("oip-grpc", 1, 1), 1)
    first = body.index(b'"data":[') + len(b'"data":[')
    room = TEXT - len(body)
    for name, more in {
        "a million empty lists": b"[]," * (room // 3),
        "deep nesting": b"[" * room,
        "a string of quotes": b'"' + b'\\"' * (room // 2 - 2) + b'",',
        "commas in a string": b'"' + b"," * (room - 4) + b'",',
        "huge digits": b"9" * (room - 4) + b",",
        "zeros": b"0," * (room // 2),
    }.items():
        yield json_case(f"infer body: {name}", codec, body[:first] + more + body[first:])
    long_shape = b'{"name":"a","shape":[' + b"1," * 500 + b'1],"datatype":""},'
    for name, unit in {"keys": b'"a":1,', "dims": long_shape}.items():
        opening, closing = (b'{"inputs":[', b"{}]}") if unit[:1] == b"{" else (b"{", b'"inputs":[]}')
        yield json_case(f"infer body: {name}", codec, filled(unit, TEXT - 99, opening) + closing)
    given_dims = b'{"inputs":[{"name":"a","datatype":"","shape":[' + b"1," * (TEXT // 2 - 99) + b'1],"data":[]}]}'
    yield json_case("infer body: a shape of a million dims", codec, given_dims)
    outputs = b'{"inputs":[],"outputs":[' + b'{"name":""},' * 32_700 + b'{"name":""}]}'
    yield json_case("infer body: outputs", codec, outputs)


# JSON


def json_lookup(text: bytes, name: str, *, model: Model = PLAIN, allowed_ms: int = 100) -> Case:
    """Return a lookup of one feature, whose list is given without brackets, and repeated to the full limit."""
    feature = b"feature_00025" if model is STRINGS else b"feature_00000"
    head, tail = b'{"sparse":{"' + feature + b'":[', b"]}}"
    unit, _, end = text.partition(b"|")
    count = (TEXT - len(head) - len(tail) - len(end)) // len(unit)
    body = head + (unit * count + end).rstrip(b",") + tail
    return Case(f"json lookup: {name}", JsonCodec("lookup", MODEL), body, model, allowed_ms)


# What the lists of a lookup are filled with; behind the bar, what stands at their end.
JSON_LISTS = {
    b"1,": "ints",
    b"1,|-1": "ints, the last one negative",
    b"1,|true": "ints, the last one no int",
    b"1,|99999999999999999999": "ints, the last one of 20 digits",
    b"1,|" + b"9" * 5000: "ints, the last one of 5,000 digits",
    b"4611686018427387904,|-1": "long ints, the last one negative",
    b"1.5,": "floats",
    b"[1],|[-1]": "lists of one, the last one negative",
    b"[1],|[[1]]": "lists of one, the last one nested",
    b"[1],|1": "lists of one, the last one none",
    b"[],": "empty lists",
    b"[],|[-1]": "empty lists, the last one not",
    b"[[]],": "nested empty lists",
    b"{},": "empty objects",
    b'"",': "empty strings",
    b'"\\"",': "strings of a quote",
    b'"\\u00e9",': "escaped strings",
    b"null,": "null",
    b"[": "deep nesting, broken off",
    b'{"a":': "deep objects, broken off",
    b"9": "one number",
    b"-9,": "negative ints",
    b"123456789012345678901,": "ints of 21 digits",
    b"0.1234567890123456789012345678,": "long floats",
    b"1e5,": "exponents",
    b" |1": "spaces",
    b"1,|1]": "ints, broken off",
    b"[1],|[1": "lists, broken off",
    b"9" * 4000 + b",": "ints of 4,000 digits",
    b"0." + b"1" * 4000 + b",": "floats of 4,000 digits",
}


def json_cases() -> Iterator[Case]:
    """Make lookups in JSON of the full limit."""
    for text, name in JSON_LISTS.items():
        yield json_lookup(text, name)
    # Within the limits of bags, so that only the numbers are wrong.
    bag, floats = b"[" + b"1," * 63 + b"1],", b"[" + b"1e5," * 63 + b"1e5],"
    for end, name in {
        b"": "none wrong", b"[1,-1]": "a negative one", b"[1,true]": "no int", b"[1,1.0]": "a float",
        b"[1,99999999999999999999]": "one of 20 digits", b"[1,9223372036854775808]": "2^63", b"[1,[1]]": "nested",
        b"1": "no list", b"[1": "broken off", b'["x"]': "a string",
    }.items():  # fmt: skip
        yield json_lookup(bag + b"|" + end, f"bags of 64 ints, at the end {name}")
    yield json_lookup(floats, "bags of 64 floats")
    yield json_lookup(b"[[" + b"]],[[" * 63 + b"]],", "bags of 64 nested lists")
    yield json_lookup(b"[" + b"[]," * 63 + b"[]],", "bags of 64 empty lists")
    yield json_lookup(floats + b"|[1", "bags of 64 floats, broken off")
    count = TEXT // (len(bag) + len(floats)) - 5
    for end, name in {b"[1e5]": "none wrong", b"[1e39]": "1e39", b'["x"]': "a string", b"[1,1]": "one too many",
                      b"[99999999999999999999]": "of 20 digits"}.items():  # fmt: skip
        body = (b'{"sparse":{"feature_00002":[' + bag * count + b'[1]]},"weights":{"feature_00002":[' + floats * count
                + end + b"]}}")  # fmt: skip
        yield json_case(f"json lookup: weights, at the end {name}", JsonCodec("lookup", MODEL), body)
    for name, unit in {"empty lists": b"[],", "empty strings": b'"",', "ints": b"1,", "exponents": b"1e5,"}.items():
        for key in (b"context", b"candidates"):
            head = b'{"' + key + b'":{"dense":['
            body = filled(unit, TEXT - 99, head)[:-1] + b"]}}"
            yield json_case(f"json rank: {key.decode()}.dense of {name}", JsonCodec("rank", MODEL), body)
    # The longest text in which Python's decoder looks for what is not quite JSON.
    for unit in (b"1,", b"[1],", b"[[]],", b"1.5,"):
        body = filled(unit, MAX_SEARCHED_BYTES - 99, b'{"sparse":{"feature_00000":[') + b"NaN]}}"
        yield json_case(f"json lookup: NaN behind {unit.decode()}", JsonCodec("lookup", MODEL), body)
    for text, name in {
        b'"ab",': "strings",
        b'"ab",|7': "strings, the last one none",
        b'"\\u00e9",': "escaped strings",
        b'"\\ud800",': "lone surrogates",
        b"[],": "empty lists of strings",
        b'["ab"],|["ab",7]': "lists of strings, the last one wrong",
        b'"' + b"x" * 100 + b'",': "longer strings",
    }.items():
        yield json_lookup(text, f"string feature, {name}", model=STRINGS)


def json_rank_cases() -> Iterator[Case]:
    """Make rank requests in JSON, and requests whose keys are what is wrong."""
    rank = JsonCodec("rank", MODEL)
    encoded = partial(PLAIN.encoded, "json", one_dense=0.00012345679)
    body = encoded(min(CANDIDATES, TEXT * 99 // (len(encoded(100, 1).body))), 1).body
    yield json_case("json rank: full size", rank, body)
    for name, end in {"a value more": b",1", "a text": b',"x"', "1e39": b"e39"}.items():
        yield json_case(f"json rank: full size, {name} at the end", rank, body[:-4] + end + body[-4:])
    yield json_case("json rank: full size, broken off", rank, body[:-1])
    weights = body[:-1] + b',"weights":{}}'
    yield json_case("json rank: full size, an unknown key at the end", rank, weights)
    yield json_case("json rank: full size, a key twice at the end", rank, body[:-1] + b',"context":{}}')
    some = b'{"sparse":{' + b",".join(b'"f%d":[]' % number for number in range(16_000)) + b"}}"
    yield json_case("json lookup: 16,000 keys", JsonCodec("lookup", MODEL), some, WIDE)
    misspelt = b'{"sparse":{"' + b"feature_x" * 15 + b'":[]}}'
    alike = b'{"sparse":{"erutaef_00100":[]}}'
    yield json_case("json lookup: a feature of the same letters, wide model", JsonCodec("lookup", MODEL), alike, WIDE)
    for count, width in ((4096, 2), (1000, 8), (100, 75)):
        body = PLAIN.encoded("json", count, width, one_id=7, one_dense=0.5).body
        yield json_case(f"json rank: {count} x {width}", rank, body)
        at = body.rindex(b"7]]}")
        negative, fraction = body[:at] + b"-" + body[at:], body[: at + 1] + b".0" + body[at + 1 :]
        yield json_case(f"json rank: {count} x {width}, a negative id at the end", rank, negative)
        yield json_case(f"json rank: {count} x {width}, a float at the end", rank, fraction)
    yield json_case("json lookup: an unknown feature, wide model", JsonCodec("lookup", MODEL), misspelt, WIDE)


def longest_piece(pieces: Callable[[], Iterator[Piece]], runs: int) -> tuple[float, list[Piece]]:
    """Return the longest time, in seconds, for which others wait between pieces of work, and what the last run made.

    The time is the least of several runs.
    """
    least, found = float("inf"), list[Piece]()
    for _ in range(runs):
        given, longest, found = pieces(), 0.0, []
        piece: Piece | None
        while True:
            began = time.thread_time()
            piece = next(given, None)
            longest = max(longest, time.thread_time() - began)
            if piece is None:
                break
            found.append(piece)
        least = min(least, longest)
    return least, found


def outcome_of(case: Case, body: bytes) -> str:
    """Read one message: "ok", or the kind of its error and what it says."""
    try:
        case.codec.read(body, LIMITS).parse(case.model.read_by)
    except BadRequestError as error:
        return f"{error.kind}: {error}"[:110]
    return "ok"


def reading(case: Case) -> Iterator[str]:
    """Read one message, decompressed first if it must be; others have their turn whenever this yields."""
    if not case.is_compressed:
        yield outcome_of(case, case.body)
        return
    expanding = expand(case.body, MESSAGE, lambda seconds: None)
    try:
        while True:
            expanding.send(None)
            yield ""
    except StopIteration as done:
        yield outcome_of(case, done.value)
    except BadRequestError as error:
        yield f"{error.kind}: {error}"[:110]


def writing(encode: Callable[[], Encoded]) -> Iterator[int]:
    """Write an answer, and return the bytes of its pieces."""
    encoded = encode()
    yield len(encoded.body)
    yield from map(len, encoded.more)


def answers() -> Iterator[tuple[str, Callable[[], Encoded]]]:
    """Return the largest answers, written in each form."""
    count = LIMITS.max_lookup_floats
    values = np.random.default_rng(1).standard_normal((count // 16, 16), dtype=np.float32)
    lookup = LookupAnswer(MODEL, 1, {"a": FeatureEmbeddings(values, None)})
    # A row and a bag count as a float each.
    rows = values.reshape(-1, 1)[: count // 3]
    narrow = LookupAnswer(MODEL, 1, {"a": FeatureEmbeddings(rows, np.ones(len(rows), np.int64))})
    scores = np.random.default_rng(1).standard_normal(CANDIDATES, dtype=np.float32)
    rank = RankAnswer(MODEL, 1, scores, np.arange(CANDIDATES))
    empty = b'{"sparse":{"a":[]}}'
    yield "json answer: lookup, full size", lambda: JsonCodec("lookup", MODEL).read(empty, LIMITS).encode(lookup)
    yield "json answer: lookup, lists of one", lambda: JsonCodec("lookup", MODEL).read(empty, LIMITS).encode(narrow)
    yield "json answer: rank", lambda: JsonCodec("lookup", MODEL).read(empty, LIMITS).encode(rank)
    message = sized(1, b"model")
    yield "message answer: lookup", lambda: MessageCodec("lookup").read(message, LIMITS).encode(lookup)


def main() -> int:
    """Time everything; 1 if something takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the table")
    parser.add_argument("--only", default="", help="words that the name of a message must have")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    table: list[dict[str, object]] = []
    is_slow = False

    def add(name: str, size: int, allowed_ms: float, spent_s: float, outcome: str) -> None:
        nonlocal is_slow
        gc.collect()
        ms = round(1e3 * spent_s, 2)
        table.append({"message": name, "bytes": size, "ms": ms, "allowed_ms": allowed_ms, "outcome": outcome})
        is_slow |= ms > allowed_ms
        mark = "!" if ms > allowed_ms else " "
        print(f"{mark} {ms:8.2f} ms {size / 2**20:6.2f} MiB  {name:56} {outcome}", flush=True)  # noqa: T201

    for make in (catalogue_cases, message_cases, infer_cases, infer_http_cases, json_cases, json_rank_cases):
        for case in make():
            if options.only in case.name:
                spent_s, found = longest_piece(partial(reading, case), options.runs)
                add(case.name, len(case.body), case.allowed_ms, spent_s, found[-1])
    for name, encode in answers():
        if options.only in name:
            spent_s, sizes = longest_piece(partial(writing, encode), options.runs)
            add(name, sum(sizes), 50, spent_s, "its longest piece")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
