"""Large messages that are made to cost much: what is counted before it is made, and that nothing of them is kept."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.protobuf import encode_varint
from serving.formats.requests import Codec
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shardrank_testing.inference_requests import Tensor, message_of, tensors_of
from shardrank_testing.request_forms import packed_message
from shardrank_testing.serving_api import MODEL, api_request, api_spec, rank_message

LIMITS = RequestLimits()
SCHEMA = RequestSchema(FeatureSchema.of(api_spec()), LIMITS)
SIZE, TEXT = LIMITS.max_body_bytes, LIMITS.max_json_bytes
MIB = 2**20


def field(number: int, content: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


class Hostile(NamedTuple):
    """A message that is refused.

    Attributes:
        says: a part of the error.
        peak_bytes: what its refusal may take at most, beside the message itself.
    """

    name: str
    codec: Codec
    make: Callable[[], bytes]
    says: str
    peak_bytes: int = MIB // 4

    def __str__(self) -> str:
        return self.name


HEAD = field(1, b"films")
RANK, LOOKUP, INFER = MessageCodec("rank"), MessageCodec("lookup"), InferGrpcCodec()
FIELDS = "fields in the message, more than the limit max_message_fields"


def full(unit: bytes, head: bytes = HEAD) -> Callable[[], bytes]:
    return lambda: head + unit * ((SIZE - len(head)) // len(unit))


def infer_with(tensor: Tensor, **raw: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        others = [one for one in tensors_of(api_spec(), api_request(1)) if one.name != tensor.name]
        return message_of([*others, tensor], MODEL, **raw).SerializeToString()

    return make


def shape_of(dims: bytes) -> Callable[[], bytes]:
    return lambda: HEAD + field(5, field(1, b"film") + dims * ((SIZE - 99) // len(dims)))


def packed_with(**fields: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        message = packed_message(SCHEMA, api_request(1))
        for name, value in fields.items():
            getattr(message.packed, name).extend(value) if isinstance(value, list) else setattr(
                message.packed, name, value
            )
        return message.SerializeToString()

    return make


def map_with(count: int, last: int) -> Callable[[], bytes]:
    def make() -> bytes:
        message = rank_message(api_request(1))
        tag = message.candidates.sparse["tag"]
        tag.ClearField("weights"), tag.ClearField("ids"), tag.ClearField("lengths")
        values = np.full(count, 7)
        values[-1] = last
        tag.ids.extend(values.tolist())
        tag.lengths.extend([count // 5] * 5)
        return message.SerializeToString()

    return make


MESSAGES = [
    Hostile("8 M empty parts", RANK, full(field(4, b"")), "it is there twice"),
    Hostile("5 M unknown fields", RANK, full(field(99, b"")), FIELDS),
    Hostile("5 M unknown numbers", RANK, full(encode_varint(99 << 3) + b"\x01"), FIELDS),
    Hostile("unknown fields within fields", RANK, lambda: HEAD + field(3, full(field(99, b""), b"")()[:-99]), FIELDS),
    Hostile("8 M empty map entries", LOOKUP, full(field(3, b"")), FIELDS, 4 * MIB),
    Hostile(
        "a million features",
        RANK,
        lambda: HEAD + field(4, b"".join(field(1, field(1, b"%d" % number)) for number in range(1_000_000))),
        "model 'films' has no such feature here",
    ),
    Hostile(
        "2 M unpacked ids",
        LOOKUP,
        lambda: HEAD + field(3, field(1, b"film") + field(2, b"\x09" + bytes(8) + (b"\x09" + bytes(8)) * 1_700_000)),
        FIELDS,
        4 * MIB,
    ),
    Hostile(
        "8 M empty string ids",
        LOOKUP,
        lambda: HEAD + field(3, field(1, b"city") + field(2, field(4, b"") * 8_000_000)),
        FIELDS,
        4 * MIB,
    ),
    Hostile("a text of 16 MB", RANK, lambda: field(1, b"x" * (SIZE - 99)), "model: 16777117 bytes"),
    Hostile("a group", RANK, full(encode_varint(99 << 3 | 3)), "groups are not taken"),
    Hostile(
        "4 M bags",
        LOOKUP,
        lambda: HEAD + field(3, field(1, b"film") + field(2, field(2, bytes(SIZE - 96)))),
        "max_bags_per_feature",
        MIB,
    ),
    Hostile("2 M ids", RANK, map_with(1_900_000, 7), "max_ids_per_request = 1048576"),
    Hostile(
        "a packed digest of 16 MB", RANK, lambda: HEAD + field(10, field(1, b"x" * (SIZE - 99))), "schema_digest: "
    ),
    Hostile("packed empty strings", RANK, packed_with(string_ids=[""] * 8_000_000), FIELDS, 4 * MIB),
    Hostile("8 M empty outputs", INFER, full(field(6, b"")), FIELDS, 4 * MIB),
    Hostile("67 outputs", INFER, lambda: HEAD + field(6, field(1, b"scores")) * 67, "67 outputs, more than the limit"),
    Hostile("8 M empty inputs", INFER, full(field(5, b"")), "inputs.: it is given twice"),
    Hostile(
        "a million inputs",
        INFER,
        lambda: HEAD + b"".join(field(5, field(1, b"%d" % number)) for number in range(1_000_000)),
        FIELDS,
        4 * MIB,
    ),
    Hostile("8 M empty parameters", INFER, full(field(4, b"")), FIELDS),
    Hostile("8 M empty raw contents", INFER, full(field(7, b"")), "more than the limit", 4 * MIB),
    Hostile("outputs of parameters", INFER, full(field(6, field(2, b""))), FIELDS, 4 * MIB),
    Hostile(
        "16 M shape dims",
        INFER,
        lambda: HEAD + field(5, field(1, b"film") + field(3, bytes(SIZE - 99))),
        "more dimensions",
    ),
    Hostile("8 M unpacked shape dims", INFER, shape_of(b"\x18\x01"), "more dimensions"),
    Hostile(
        "16 M varints of 5",
        INFER,
        lambda: (
            infer_with(Tensor("x", "INT64", np.arange(1)))().replace(b"\x0a\x01x", b"\x0a\x01y")
            + field(
                5, field(1, b"film2") + field(3, b"\x05") + field(2, b"INT64") + field(5, field(3, bytes(SIZE - 999)))
            )
        ),
        "raw_input_contents",
    ),
    Hostile(
        "4 M empty strings",
        INFER,
        infer_with(Tensor("city", "BYTES", np.full(4_000_000, "", object))),
        "max_ids_per_request = 1048576",
    ),
    Hostile(
        "a million empty strings",
        INFER,
        infer_with(Tensor("city", "BYTES", np.full(1_000_000, "", object))),
        "max_string_ids = 16384",
        MIB,
    ),
    Hostile(
        "candidates without end",
        INFER,
        infer_with(Tensor("film", "INT64", np.zeros(2_000_000, np.int64))),
        "max_ids_per_request = 1048576",
    ),
]


def text_of(opening: bytes, unit: bytes, closing: bytes = b"1]}}") -> Callable[[], bytes]:
    return lambda: opening + unit * ((TEXT - len(opening) - len(closing)) // len(unit)) + closing


FILM, CITY, INPUTS = b'{"sparse":{"film":[', b'{"sparse":{"city":[', b'{"inputs":['
JSON_LOOKUP, BODY = JsonCodec("lookup", MODEL), InferHttpCodec(MODEL, "", None)
TEXTS = [
    Hostile("a million ints", JSON_LOOKUP, text_of(FILM, b"1,"), "max_bags_per_feature", 64 * MIB),
    Hostile("700 thousand empty lists", JSON_LOOKUP, text_of(FILM, b"[],"), "max_bags_per_feature", 64 * MIB),
    Hostile("strings for ints", JSON_LOOKUP, text_of(FILM, b'"",'), "max_bags_per_feature", 64 * MIB),
    Hostile("strings", JSON_LOOKUP, text_of(CITY, b'"",'), "max_bags_per_feature", 64 * MIB),
    Hostile("bags of strings", JSON_LOOKUP, text_of(CITY, b"[" + b'"",' * 63 + b'""],', b"[]]}}"), "max_string_ids"),
    Hostile("objects", JSON_LOOKUP, text_of(b'{"sparse":[', b"{},", b"{}]}"), "a list is not an object", 64 * MIB),
    Hostile(
        "keys",
        JSON_LOOKUP,
        text_of(b'{"sparse":{', b'"a":1,', b'"a":1}}'),
        "keys; a request has at most 16384",
        64 * MIB,
    ),
    Hostile("a list without end", JSON_LOOKUP, text_of(b"", b"["), "JSON", 64 * MIB),
    Hostile("broken off", JSON_LOOKUP, text_of(FILM, b"[1],", b"[1"), "not JSON", 128 * MIB),
    Hostile(
        "a wrong last bag",
        JSON_LOOKUP,
        text_of(FILM, b"[" + b"1," * 63 + b"1],", b"[true]]}}"),
        "true is not",
        128 * MIB,
    ),
    Hostile(
        "an id of 20 digits at the end",
        JSON_LOOKUP,
        text_of(FILM, b"[" + b"1," * 63 + b"1],", b"[" + b"9" * 20 + b"]]}}"),
        "numbers have at most 64 bits",
        128 * MIB,
    ),
    Hostile("a body of one byte too much", JSON_LOOKUP, lambda: b" " * (TEXT + 1), "max_json_bytes = 2097152"),
    Hostile("inputs", BODY, text_of(INPUTS, b"{},", b"{}]}"), "at most 16384 inputs", 5 * TEXT),
    Hostile(
        "outputs",
        BODY,
        lambda: b'{"inputs":[],"outputs":[' + b'{"name":""},' * 32_000 + b'{"name":""}]}',
        "outputs, more than the limit",
        8 * MIB,
    ),
]


def hostile_cases() -> Iterator[Any]:
    for case in (*MESSAGES, *TEXTS):
        yield pytest.param(case, id=f"{case.codec.api} {case.codec.method}: {case.name}")


def refuse(case: Hostile, body: bytes) -> str:
    try:
        case.codec.read(body, LIMITS).parse(SCHEMA)
    except BadRequestError as error:
        return str(error)
    return "taken"


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Memory is counted, and no garbage collection takes place that is not asked for."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("case", list(hostile_cases()))
def test_what_is_hostile_is_refused_by_its_count_and_nothing_of_it_is_kept(case):
    body = case.make()
    assert len(body) <= SIZE
    # What the first one of its kind makes for good: compiled expressions, the parser of the thread.
    assert case.says in refuse(case, body)
    with traced():
        refuse(case, body)
        after, peak = tracemalloc.get_traced_memory()
        assert peak <= case.peak_bytes
        # Freed by counting references: no cycle waits for a collection. The interpreter keeps some tuples for the next.
        assert after < MIB // 4
        assert gc.collect() == 0


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TEXTS])
def test_an_error_of_a_text_keeps_nothing_that_was_made_of_it(case):
    body = case.make()
    refuse(case, body)
    with traced():
        with pytest.raises(BadRequestError) as refusal:
            case.codec.read(body, LIMITS).parse(SCHEMA)
        assert tracemalloc.get_traced_memory()[0] < 2 * MIB
    assert case.says in str(refusal.value)


def test_the_collector_is_held_off_only_while_a_text_is_refused():
    assert gc.isenabled()
    refuse(TEXTS[8], TEXTS[8].make())
    assert gc.isenabled()
    gc.disable()
    try:
        refuse(TEXTS[8], TEXTS[8].make())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_limit_of_typed_contents_is_met_before_they_are_decoded():
    contents = field(5, field(3, bytes(SIZE - 9999)))
    others = [one for one in tensors_of(api_spec(), api_request(1)) if one.name != "film"]
    body = message_of(others, MODEL, raw=False).SerializeToString() + field(
        5, field(1, b"film") + field(2, b"INT64") + field(3, b"\x05") + contents
    )
    tracemalloc.start()
    try:
        case = Hostile("", INFER, bytes, "")
        assert "its shape holds 5 elements, its data 16767217" in refuse(case, body)
        assert tracemalloc.get_traced_memory()[1] < 3 * SIZE
    finally:
        tracemalloc.stop()
