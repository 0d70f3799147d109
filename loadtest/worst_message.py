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
from typing import NamedTuple

import numpy as np

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec, TableSpec, VocabularyMapping
from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import MAX_SEARCHED_BYTES, JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.protobuf import encode_field, encode_integer, encode_varint
from serving.formats.requests import Codec, Encoded, FeatureEmbeddings, LookupAnswer, RankAnswer
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits

LIMITS = RequestLimits()
MESSAGE, TEXT = LIMITS.max_body_bytes, LIMITS.max_json_bytes
IDS, CANDIDATES = LIMITS.max_ids_per_request, LIMITS.max_candidates
MODEL = "model"


def schema_of(num_features: int, *, strings: bool = False) -> RequestSchema:
    """Return a model whose features are half of the context, half of the candidates; one of each is a weighted one."""
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
    spec = ModelSpec(
        model=MODEL,
        tables=tables,
        features=features,
        dense_inputs=DenseInputs(context=13, candidate=13),
        dense_model=DenseModelSpec(kind="mlp", config={"hidden": [4]}),
    )
    return RequestSchema(FeatureSchema.of(spec), LIMITS)


PLAIN, STRINGS, WIDE = schema_of(26), schema_of(26, strings=True), schema_of(1000)


class Case(NamedTuple):
    """One message: how it is read, what it is, and how long that may take."""

    name: str
    codec: Codec
    body: bytes
    schema: RequestSchema = PLAIN
    allowed_ms: int = 50


# Of JSON, which may take longer.
json_case = partial(Case, allowed_ms=100)


def filled(unit: bytes, size: int, head: bytes = b"") -> bytes:
    """As many units as fit into a message of some size."""
    return head + unit * ((size - len(head)) // len(unit))


def wrapped(number: int, inner: bytes) -> bytes:
    """Return a field of any content, empty ones too."""
    return encode_varint(number << 3 | 2) + encode_varint(len(inner)) + inner


# Rank and lookup messages


def map_rank(schema: RequestSchema, count: int, ids: int, *, unpacked: bool = False, last_id: int = 7) -> bytes:
    """Return a valid rank message with about so many ids in all, in bags of the same length."""
    parts = {"context": b"", "candidates": b""}
    per_feature = ids // len(schema.names)
    for name, is_context, is_string in schema.kinds:
        bags = 1 if is_context else count
        each = max(1, min(per_feature // bags, LIMITS.max_ids_per_bag))
        total = bags * each
        if is_string:
            feature = wrapped(4, b"abc") * total
        else:
            values = np.full(total, 2**62, "<i8")
            values[-1] = last_id
            feature = (
                b"".join(b"\x09" + one.tobytes() for one in values) if unpacked else encode_field(1, values.tobytes())
            )
        if not is_context:
            feature += encode_field(2, np.full(bags, each, "<u4").tobytes())
        parts["context" if is_context else "candidates"] += wrapped(1, wrapped(1, name.encode()) + wrapped(2, feature))
    context = parts["context"] + encode_field(2, bytes(4 * 13))
    candidates = parts["candidates"] + encode_field(2, np.ones(13 * count, "<f4").tobytes())
    return wrapped(1, b"model") + wrapped(3, context) + wrapped(4, candidates)


def packed_rank(schema: RequestSchema, count: int, ids: int, last_id: int = 7, last_dense: float = 1.0) -> bytes:
    """Return a valid packed rank message, likewise."""
    bags = np.where(schema.features.is_context, 1, count)
    each = max(1, min(ids // int(bags.sum()), LIMITS.max_ids_per_bag))
    lengths = np.full(int(bags.sum()), each, "<i4")
    per_feature = bags * each
    strings = int(per_feature[schema.is_string].sum())
    values = np.full(int(per_feature.sum()) - strings, 2**62, "<i8")
    values[-1] = last_id
    dense = np.ones(13 * count, "<f4")
    dense[-1] = last_dense
    packed = b"".join((
        wrapped(1, schema.features.digest.encode()), wrapped(2, values.tobytes()), wrapped(3, lengths.tobytes()),
        wrapped(4, np.ones(int(per_feature.sum()), "<f4").tobytes()), wrapped(5, bytes(52)),
        wrapped(6, dense.tobytes()), wrapped(7, b"abc") * strings,
    ))  # fmt: skip
    return wrapped(1, b"model") + encode_integer(5, count) + wrapped(10, packed)


def map_lookup(bags: int, ids: int, last_id: int = 7) -> bytes:
    """Return a lookup of two features."""
    body = wrapped(1, b"model")
    for name in ("feature_00000", "feature_00002"):
        values = np.full(ids // 2, 2**62, "<i8")
        values[-1] = last_id
        lengths = np.zeros(bags // 2, "<u4")
        lengths[: ids // 2] = 1
        feature = encode_field(1, values.tobytes()) + encode_field(2, lengths.tobytes())
        body += wrapped(3, wrapped(1, name.encode()) + wrapped(2, feature))
    return body


def message_cases() -> Iterator[Case]:
    """Messages of `shardrank.v1`."""
    rank, lookup, head = MessageCodec("rank"), MessageCodec("lookup"), wrapped(1, b"model")
    few = LIMITS.max_message_fields
    for name, unit in {
        "empty candidates": wrapped(4, b""),
        "unknown fields": wrapped(99, b""),
        "unknown varints": b"\x98\x06\x01",
        "long varints": b"\x38" + b"\xff" * 9 + b"\x01",
        "unknown groups": b"\x9b\x06\x9c\x06",
        "fields with padded lengths": b"\x9a\x06\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00",
    }.items():
        yield Case(f"rank: {name}, 16 MB", rank, filled(unit, MESSAGE, head))
        yield Case(f"rank: {name}, as many as allowed", rank, head + unit * (few - 2))
    yield Case("rank: one field of 16 MB", rank, head + wrapped(99, bytes(MESSAGE - 100)))
    entries = filled(wrapped(1, b""), MESSAGE)
    yield Case("rank: empty map entries, 16 MB", rank, head + wrapped(4, entries))
    names = b"".join(wrapped(1, wrapped(1, b"%d" % number)) for number in range(1_000_000))
    yield Case("rank: a million features", rank, head + wrapped(4, names))
    some = b"".join(wrapped(1, wrapped(1, b"f%d" % number) + wrapped(2, b"")) for number in range(few // 3 - 2))
    yield Case("rank: as many features as allowed", rank, head + wrapped(4, some))
    yield Case("rank: as many features as allowed, wide model", rank, head + wrapped(4, some), WIDE)
    known = b"".join(wrapped(1, wrapped(1, n.encode()) + wrapped(2, b"")) for n in WIDE.candidate_names[:-1])
    yield Case("rank: one feature missing, wide model", rank, head + wrapped(4, known), WIDE)
    misspelt = wrapped(1, wrapped(1, b"feature_x" * 15))
    yield Case("rank: an unknown feature, wide model", rank, head + wrapped(4, misspelt), WIDE)
    yield Case("rank: a name of 16 MB", rank, head + wrapped(4, wrapped(1, wrapped(1, b"x" * (MESSAGE - 99)))))
    yield Case("rank: a model of 16 MB", rank, wrapped(1, b"x" * (MESSAGE - 99)))
    yield Case("rank: full size", rank, map_rank(PLAIN, CANDIDATES, IDS))
    yield Case("rank: full size, a negative id at the end", rank, map_rank(PLAIN, CANDIDATES, IDS, last_id=-1))
    yield Case("rank: more ids than allowed, 16 MB", rank, map_rank(PLAIN, CANDIDATES, 15 * 2**17))
    yield Case("rank: unpacked ids, 16 MB", rank, map_rank(PLAIN, CANDIDATES, IDS, unpacked=True))
    yield Case("rank: unpacked ids, as many as allowed", rank, map_rank(PLAIN, 12, few - 500, unpacked=True))
    strings = map_rank(STRINGS, 5000, 26 * 5000)
    yield Case("rank: string ids beyond the limit", rank, strings, STRINGS)
    yield Case("rank: string ids up to the limit", rank, map_rank(STRINGS, 2000, 26 * (few // 3)), STRINGS)
    yield Case("packed: full size", rank, packed_rank(PLAIN, CANDIDATES, IDS))
    yield Case("packed: full size, a negative id at the end", rank, packed_rank(PLAIN, CANDIDATES, IDS, -1))
    yield Case("packed: full size, NaN at the end", rank, packed_rank(PLAIN, CANDIDATES, IDS, 7, np.nan))
    yield Case("packed: string ids up to the limit", rank, packed_rank(STRINGS, 2000, 26 * (few // 3)), STRINGS)
    long_text = wrapped(7, b"x" * (MESSAGE // few - 8)) * (few - 9)
    digest = wrapped(1, STRINGS.features.digest.encode())
    long_strings = head + encode_integer(5, 9) + wrapped(10, digest + wrapped(3, bytes(4)) + long_text)
    yield Case("packed: long string ids, 16 MB", rank, long_strings, STRINGS)
    yield Case("packed: a digest of 16 MB", rank, head + wrapped(10, wrapped(1, b"x" * (MESSAGE - 99))))
    yield Case("lookup: as many ids as allowed", lookup, map_lookup(2**17, IDS))
    yield Case("lookup: as many bags as allowed", lookup, map_lookup(2**17, 2**17))
    yield Case("lookup: a negative id at the end", lookup, map_lookup(2**16, 2**16, -1))
    yield Case("lookup: empty bags, 16 MB", lookup, map_lookup(2**22 - 99, 4))


# The Open Inference Protocol


def tensor(name: str, datatype: str, shape: tuple[int, ...], contents: bytes = b"") -> bytes:
    """Return an input."""
    dims = b"".join(encode_varint(one) for one in shape)
    fields = wrapped(1, name.encode()) + wrapped(2, datatype.encode()) + wrapped(3, dims)
    return wrapped(5, fields + (wrapped(5, contents) if contents else b""))


def shapes_of(
    schema: RequestSchema, count: int, width: int, string_width: int
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the inputs of a full request."""
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for name, is_context, is_string in schema.kinds:
        datatype, own = ("BYTES", string_width) if is_string else ("INT64", width)
        found.append((name, datatype, (own,) if is_context else (count, own)))
    return [*found, ("context.dense", "FP32", (13,)), ("candidates.dense", "FP32", (count, 13))]


def elements(datatype: str, size: int) -> bytes:
    """Raw contents."""
    if datatype == "BYTES":
        return bytes(4 * size)
    return (np.full(size, 2**62, "<i8") if datatype == "INT64" else np.ones(size, "<f4")).tobytes()


def typed(datatype: str, size: int, one_id: bytes, *, unpacked: bool = False) -> bytes:
    """Typed contents."""
    if datatype == "FP32":
        return wrapped(6, np.ones(size, "<f4").tobytes())
    if datatype == "BYTES":
        return wrapped(8, b"abc") * size
    return (b"\x18" + one_id) * size if unpacked else wrapped(3, one_id * size)


def infer_cases() -> Iterator[Case]:
    """Inference requests over gRPC."""
    codec, head, few = InferGrpcCodec(), wrapped(1, b"model"), LIMITS.max_message_fields
    for name, unit in {
        "empty outputs": wrapped(6, b""),
        "empty inputs": wrapped(5, b""),
        "empty parameters": wrapped(4, b""),
        "empty raw contents": wrapped(7, b""),
        "outputs with empty parameters": wrapped(6, wrapped(2, b"")),
        "inputs with empty contents": wrapped(5, wrapped(5, b"")),
        "unknown fields": wrapped(99, b""),
        "parameters of text": wrapped(4, wrapped(1, b"a") + wrapped(2, wrapped(3, b"x"))),
    }.items():
        yield Case(f"infer: {name}, 16 MB", codec, filled(unit, MESSAGE, head))
    texts = wrapped(4, wrapped(1, b"a") + wrapped(2, wrapped(3, b"x" * 1400)))
    yield Case("infer: parameters of long text", codec, filled(texts, MESSAGE, head))
    many = b"".join(wrapped(5, wrapped(1, b"%d" % number)) for number in range(few // 2 - 2))
    yield Case("infer: as many inputs as allowed", codec, head + many)
    dims = wrapped(5, wrapped(1, b"feature_00000") + wrapped(3, b"\x01" * (MESSAGE - 99)))
    yield Case("infer: 16 M shape dims", codec, head + dims)
    dims = wrapped(5, wrapped(1, b"feature_00000") + filled(b"\x18\x01", MESSAGE - 99))
    yield Case("infer: 8 M shape dims, unpacked", codec, head + dims)
    for label, schema, count, width, string_width in (
        ("full size", PLAIN, CANDIDATES, IDS // CANDIDATES // 13, 1),
        ("empty strings, as many as allowed", STRINGS, 1000, 1, LIMITS.max_string_ids // 3000),
    ):
        given = shapes_of(schema, count, width, string_width)
        raw = b"".join(wrapped(7, elements(datatype, int(np.prod(shape)))) for _, datatype, shape in given)
        yield Case(f"infer: raw, {label}", codec, head + b"".join(tensor(*one) for one in given) + raw, schema)
    given = [(name, kind, (2**20,) if kind == "BYTES" else shape) for name, kind, shape in shapes_of(STRINGS, 1, 1, 1)]
    raw = b"".join(wrapped(7, elements(datatype, int(np.prod(shape)))) for _, datatype, shape in given)
    yield Case("infer: raw, 3 M empty strings", codec, head + b"".join(tensor(*one) for one in given) + raw, STRINGS)
    for label, count, width, one_id, unpacked in (
        ("varints of 1 byte, full size", CANDIDATES, IDS // CANDIDATES // 13, b"\x07", False),
        ("varints of 9 bytes, full size", CANDIDATES, IDS // CANDIDATES // 13, b"\xff" * 8 + b"\x7f", False),
        ("varints of 9 bytes, 2^18", CANDIDATES, 4, b"\xff" * 8 + b"\x7f", False),
        ("varints of 9 bytes, 2^17", CANDIDATES // 2, 4, b"\xff" * 8 + b"\x7f", False),
        ("unpacked varints", 100, 20, b"\x07", True),
    ):
        given = shapes_of(PLAIN, count, width, 1)
        body = head + b"".join(
            tensor(*one, typed(one[1], int(np.prod(one[2])), one_id, unpacked=unpacked)) for one in given
        )
        yield Case(f"infer: typed, {label}", codec, body)
    one = tensor("feature_00001", "INT64", (5,), wrapped(3, b"\x01" * (MESSAGE - 99)))
    rest = b"".join(
        tensor(*other, typed(other[1], int(np.prod(other[2])), b"\x07"))
        for other in shapes_of(PLAIN, 1, 1, 1)
        if other[0] != "feature_00001"
    )
    yield Case("infer: typed, 16 M varints of 5", codec, (head + rest + one)[:MESSAGE])
    chunks = tensor("feature_00001", "INT64", (4096,), wrapped(3, b"\x01") * 4096)
    yield Case("infer: typed, chunks of one varint", codec, head + rest + chunks)
    given = shapes_of(STRINGS, 1000, 1, LIMITS.max_string_ids // 3000)
    body = head + b"".join(tensor(*one, typed(one[1], int(np.prod(one[2])), b"\x07")) for one in given)
    yield Case("infer: typed, strings up to the limit", codec, body, STRINGS)


def infer_body(given: list[tuple[str, str, tuple[int, ...]]], data: Callable[[str, int], str | None]) -> Case:
    """Return an inference request over HTTP; what has no JSON data is binary."""
    inputs, tail = [], b""
    for name, datatype, shape in given:
        text = data(datatype, int(np.prod(shape)))
        rest = f'"data":{text}'
        if text is None:
            raw = elements(datatype, int(np.prod(shape)))
            rest, tail = f'"parameters":{{"binary_data_size":{len(raw)}}}', tail + raw
        inputs.append(f'{{"name":"{name}","datatype":"{datatype}","shape":{list(shape)},{rest}}}')
    header = ('{"inputs":[' + ",".join(inputs) + "]}").encode()
    return Case("", InferHttpCodec(MODEL, "", str(len(header))), header + tail, PLAIN, 100)


def json_data(one_id: str, one_float: str, *, nested: int = 0) -> Callable[[str, int], str]:
    """Elements of JSON data."""

    def of(datatype: str, size: int) -> str:
        one = {"INT64": one_id, "FP32": one_float}.get(datatype, '""')
        if nested and size % nested == 0 and datatype == "INT64" and size > nested:
            return "[" + ",".join(["[" + ",".join([one] * nested) + "]"] * (size // nested)) + "]"
        return "[" + ",".join([one] * size) + "]"

    return of


def infer_http_cases() -> Iterator[Case]:
    """Inference requests over HTTP."""
    full = shapes_of(PLAIN, CANDIDATES, IDS // CANDIDATES // 13, 1)
    yield infer_body(full, lambda datatype, size: None)._replace(name="infer body: binary, full size", allowed_ms=50)
    strings = shapes_of(STRINGS, 1000, 1, LIMITS.max_string_ids // 3000)
    yield infer_body(strings, lambda datatype, size: None)._replace(name="infer body: empty strings", schema=STRINGS)
    count = TEXT // 2 // 13 // 50
    for name, one_id, one_float, nested, each in (
        ("ints of one digit", "1", "1", 0, 2),
        ("ints of one digit, lists of one", "1", "1", 1, 4),
        ("ints of 19 digits", str(2**62), "1.0", 0, 20),
        ("long floats", "1", "0.12345678901234567", 0, 20),
    ):
        width = max(1, (TEXT - 9000) // (13 * CANDIDATES * each) - (1 if each == 2 else 0))
        count = min(CANDIDATES, (TEXT - 9000) // ((13 * width + 13) * each))
        given = shapes_of(PLAIN, count, width, 1)
        yield infer_body(given, json_data(one_id, one_float, nested=nested))._replace(name=f"infer body: {name}")
    small, codec = shapes_of(PLAIN, 1, 1, 1), InferHttpCodec(MODEL, "", None)
    body = infer_body(small, json_data("1", "1")).body
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
    one_input = b'{"name":"a","shape":[],"datatype":""},'
    long_shape = b'{"name":"a","shape":[' + b"1," * 500 + b'1],"datatype":""},'
    for name, unit in {
        "empty inputs": b"{},",
        "keys": b'"a":1,',
        "inputs without data": one_input,
        "dims": long_shape,
    }.items():
        opening, closing = (b'{"inputs":[', b"{}]}") if unit[:1] == b"{" else (b"{", b'"inputs":[]}')
        yield json_case(f"infer body: {name}", codec, filled(unit, TEXT - 99, opening) + closing)
    given_dims = b'{"inputs":[{"name":"a","datatype":"","shape":[' + b"1," * (TEXT // 2 - 99) + b'1],"data":[]}]}'
    yield json_case("infer body: a shape of a million dims", codec, given_dims)
    outputs = b'{"inputs":[],"outputs":[' + b'{"name":""},' * 32_700 + b'{"name":""}]}'
    yield json_case("infer body: outputs", codec, outputs)


# JSON


def json_lookup(text: bytes, name: str, *, schema: RequestSchema = PLAIN, allowed_ms: int = 100) -> Case:
    """Return a lookup of one feature, whose list is given without brackets, and repeated to the full limit."""
    feature = b"feature_00025" if schema is STRINGS else b"feature_00000"
    head, tail = b'{"sparse":{"' + feature + b'":[', b"]}}"
    unit, _, end = text.partition(b"|")
    count = (TEXT - len(head) - len(tail) - len(end)) // len(unit)
    body = head + (unit * count + end).rstrip(b",") + tail
    return Case(f"json lookup: {name}", JsonCodec("lookup", MODEL), body, schema, allowed_ms)


def json_rank(schema: RequestSchema, count: int, width: int, one_float: bytes, *, end: bytes = b"") -> bytes:
    """Return a rank request; `end` is put before the last number of the candidates' dense values."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name, is_context, is_string in schema.kinds:
        own = b'"abc"' if is_string else b"4611686018427387904"
        bag = b"[" + b",".join([own] * width) + b"]"
        text = bag if is_context else b"[" + b",".join([bag] * count) + b"]"
        parts[is_context].append(b'"' + name.encode() + b'":' + text)
    row = b"[" + b",".join([one_float] * 13) + b"]"
    dense = b"[" + b",".join([row] * count) + b"]"
    dense = dense[:-2] + end + dense[-2:]
    context = b'{"sparse":{' + b",".join(parts[True]) + b'},"dense":' + row + b"}"
    candidates = b'{"sparse":{' + b",".join(parts[False]) + b'},"dense":' + dense + b"}"
    return b'{"context":' + context + b',"candidates":' + candidates + b"}"


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
        yield json_lookup(text, f"string feature, {name}", schema=STRINGS)


def json_rank_cases() -> Iterator[Case]:
    """Make rank requests in JSON, and requests whose keys are what is wrong."""
    rank = JsonCodec("rank", MODEL)
    size = len(json_rank(PLAIN, 100, 1, b"0.12345678901")) // 100
    count = min(CANDIDATES, TEXT * 99 // 100 // size)
    body = json_rank(PLAIN, count, 1, b"0.12345678901")
    yield json_case("json rank: full size", rank, body)
    for name, end in {"a value more": b",1", "a text": b',"x"', "1e39": b"e39"}.items():
        wrong = json_rank(PLAIN, count, 1, b"0.12345678901", end=end)
        yield json_case(f"json rank: full size, {name} at the end", rank, wrong)
    yield json_case("json rank: full size, broken off", rank, body[:-1])
    weights = body[:-1] + b',"weights":{}}'
    yield json_case("json rank: full size, an unknown key at the end", rank, weights)
    yield json_case("json rank: full size, a key twice at the end", rank, body[:-1] + b',"context":{}}')
    keys = b'{"sparse":{' + b",".join(b'"%d":1' % number for number in range(TEXT // 12)) + b"}}"
    yield json_case("json lookup: keys by the hundred thousand", JsonCodec("lookup", MODEL), keys)
    some = b'{"sparse":{' + b",".join(b'"f%d":[]' % number for number in range(16_000)) + b"}}"
    yield json_case("json lookup: 16,000 keys", JsonCodec("lookup", MODEL), some, WIDE)
    same = b'{"sparse":{' + b'"a":1,' * (TEXT // 6 - 99) + b'"a":1}}'
    yield json_case("json lookup: one key again and again", JsonCodec("lookup", MODEL), same)
    misspelt = b'{"sparse":{"' + b"feature_x" * 15 + b'":[]}}'
    alike = b'{"sparse":{"erutaef_00100":[]}}'
    yield json_case("json lookup: a feature of the same letters, wide model", JsonCodec("lookup", MODEL), alike, WIDE)
    for count, width in ((4096, 2), (1000, 8), (100, 75)):
        body = json_rank(PLAIN, count, width, b"0.5").replace(b"4611686018427387904", b"7")
        yield json_case(f"json rank: {count} x {width}", rank, body)
        at = body.rindex(b"7]]}")
        negative, fraction = body[:at] + b"-" + body[at:], body[: at + 1] + b".0" + body[at + 1 :]
        yield json_case(f"json rank: {count} x {width}, a negative id at the end", rank, negative)
        yield json_case(f"json rank: {count} x {width}, a float at the end", rank, fraction)
    yield json_case("json lookup: an unknown feature, wide model", JsonCodec("lookup", MODEL), misspelt, WIDE)
    long_id = b'{"sparse":{},"request_id":"' + b"\\u00e9" * (TEXT // 6 - 99) + b'"}'
    yield json_case("json lookup: a long request_id", JsonCodec("lookup", MODEL), long_id)


def seconds(run: Callable[[], str], runs: int) -> tuple[float, str]:
    """Return the least time of several runs, and what became of the last one."""
    least, outcome = float("inf"), ""
    for _ in range(runs):
        began = time.thread_time()
        outcome = run()
        least = min(least, time.thread_time() - began)
    return least, outcome


def longest_piece(encode: Callable[[], Encoded], runs: int) -> tuple[float, int]:
    """Return the longest time, in seconds, for which others wait while an answer is written, and its bytes."""
    longest: list[float] = []
    for _ in range(runs):
        marks = [time.thread_time()]
        encoded = encode()
        marks.append(time.thread_time())
        size = len(encoded.body)
        for piece in encoded.more:
            marks.append(time.thread_time())
            size += len(piece)
        longest.append(max(np.diff(marks)))
    return min(longest), size


def outcome_of(case: Case) -> str:
    """Read one message: "ok", or the kind of its error and what it says."""
    try:
        case.codec.read(case.body, LIMITS).parse(case.schema)
    except BadRequestError as error:
        return f"{error.kind}: {error}"[:110]
    return "ok"


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
    message = wrapped(1, b"model")
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

    def add(name: str, size: int, allowed_ms: int, spent_s: float, outcome: str) -> None:
        nonlocal is_slow
        gc.collect()
        ms = round(1e3 * spent_s, 2)
        table.append({"message": name, "bytes": size, "ms": ms, "allowed_ms": allowed_ms, "outcome": outcome})
        is_slow |= ms > allowed_ms
        mark = "!" if ms > allowed_ms else " "
        print(f"{mark} {ms:8.2f} ms {size / 2**20:6.2f} MiB  {name:56} {outcome}", flush=True)  # noqa: T201

    for make in (message_cases, infer_cases, infer_http_cases, json_cases, json_rank_cases):
        for case in make():
            if options.only in case.name:
                timed = seconds(lambda case=case: outcome_of(case), options.runs)  # type: ignore[misc]
                add(case.name, len(case.body), case.allowed_ms, *timed)
    for name, encode in answers():
        if options.only in name:
            longest_s, size = longest_piece(encode, options.runs)
            add(name, size, 50, longest_s, "its longest piece")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
