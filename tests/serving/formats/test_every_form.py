"""One request in every form that is taken: the same arrays from each, however its numbers are encoded."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.formats.protobuf import encode_varint
from shard_node.freshness import FreshnessBound
from shardrank_testing.inference_requests import binary_body, json_body, message_of, tensors_of
from shardrank_testing.parsing import (
    SCHEMA,
    SPEC,
    assert_same_request,
    field,
    parse_infer_body,
    parse_infer_message,
    parse_json,
    parse_message,
)
from shardrank_testing.serving_api import MODEL, api_request, packed_message, rank_message, sparse_message

NUMBERS = st.integers(0, 2**63 - 1)


@st.composite
def unknown(draw: st.DrawFn) -> bytes:
    """Fields of a newer version, or none."""
    fixed = encode_varint(99 << 3 | 5) + b"1234", encode_varint(99 << 3 | 1) + b"12345678"
    kinds = [b"", b"", b"", field(99, b"more"), *fixed, encode_varint(200 << 3) + encode_varint(2**64 - 1)]
    return draw(st.sampled_from(kinds))


def chunks(draw: st.DrawFn, values: list[Any]) -> list[list[Any]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(values)), max_size=3)))
    edges = [0, *cuts, len(values)]
    return [values[begin:end] for begin, end in itertools.pairwise(edges)]


def column(draw: st.DrawFn, number: int, wire_type: int, code: str, values: list[Any]) -> list[bytes]:
    """A repeated field in several chunks, each packed or one number after the other."""
    pieces = []
    for chunk in chunks(draw, values):
        if draw(st.booleans()):
            pieces.append(field(number, struct.pack(f"<{len(chunk)}{code}", *chunk)))
        else:
            pieces += [encode_varint(number << 3 | wire_type) + struct.pack(f"<{code}", one) for one in chunk]
    return pieces


def interleaved(draw: st.DrawFn, columns: list[list[bytes]]) -> bytes:
    """Pieces of all columns in some order that keeps each column's own, and unknown fields between."""
    order = draw(st.permutations([number for number, pieces in enumerate(columns) for _ in pieces]))
    rest = [iter(pieces) for pieces in columns]
    return b"".join(next(rest[number]) + draw(unknown()) for number in order) + draw(unknown())


@st.composite
def map_bytes(draw: st.DrawFn, request: dict[str, Any]) -> bytes:
    """A rank message by maps, in any encoding that protobuf allows."""
    parts = []
    for part, number in (("context", 3), ("candidates", 4)):
        entries = []
        for name, ids in request[part]["sparse"].items():
            message = sparse_message(ids, request[part]["weights"].get(name), is_context=part == "context")
            feature = interleaved(
                draw,
                [
                    column(draw, 1, 1, "q", list(message.ids)),
                    column(draw, 2, 5, "I", list(message.lengths)),
                    column(draw, 3, 5, "f", list(message.weights)),
                    [field(4, text.encode()) for text in message.string_ids],
                ],
            )
            key_and_value = draw(st.permutations([field(1, name.encode()), field(2, feature)]))
            entries.append(field(1, b"".join(key_and_value) + draw(unknown())))
        dense = request[part]["dense"]
        flat = [one for row in dense for one in row] if part == "candidates" else dense
        parts.append(
            [field(number, interleaved(draw, [draw(st.permutations(entries)), column(draw, 2, 5, "f", flat)]))]
        )
    timeout = [encode_varint(6 << 3) + encode_varint(request["timeout_ms"])]
    return interleaved(draw, [[field(1, MODEL.encode())], timeout, *parts])


@given(st.data(), st.integers(0, 10_000), st.integers(1, 6))
def test_map_messages_in_any_encoding_are_read_as_json(data, seed, count):
    request = api_request(seed, count)
    expected = parse_json(SCHEMA, request)
    assert_same_request(parse_message(SCHEMA, data.draw(map_bytes(request))), expected)


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 30),
    top_k=st.integers(1, 9),
    weighted=st.booleans(),
    order=st.randoms(use_true_random=False),
    bounds=st.fixed_dictionaries({}, optional={"max_age_ms": st.just(0) | NUMBERS, "min_sequence": NUMBERS}),
)
def test_every_form_is_the_same_request(seed, count, top_k, weighted, order, bounds):
    request = api_request(seed, count) | {"top_k": top_k, "request_id": "r"} | bounds
    if not weighted:
        request["context"]["weights"] = request["candidates"]["weights"] = {}
    expected = parse_json(SCHEMA, request)
    assert expected.bound == (FreshnessBound(**bounds) if bounds else None)
    parameters = {"timeout_ms": request["timeout_ms"], "top_k": top_k, **bounds}
    tensors = tensors_of(SPEC, request)
    order.shuffle(tensors)
    members = {"id": "r", "parameters": parameters}
    body, headers = binary_body(tensors, **members)
    assert_same_request(parse_json(SCHEMA, json.dumps(request, indent=1)), expected)
    assert_same_request(parse_message(SCHEMA, rank_message(request)), expected)
    assert_same_request(parse_message(SCHEMA, packed_message(SCHEMA, request)), expected)
    assert_same_request(parse_infer_body(SCHEMA, json_body(tensors, **members)), expected)
    assert_same_request(parse_infer_body(SCHEMA, body, headers["inference-header-content-length"]), expected)
    for raw in (True, False):
        message = message_of(tensors, MODEL, raw=raw, id="r")
        for name, value in parameters.items():
            message.parameters[name].int64_param = value
        assert_same_request(parse_infer_message(SCHEMA, message), expected)


@st.composite
def typed_bytes(draw: st.DrawFn, request: dict[str, Any]) -> bytes:
    """An inference message with typed contents, in any encoding that protobuf allows."""
    pieces = []
    for one in tensors_of(SPEC, request):
        flat = one.array.reshape(-1).tolist()
        if one.datatype == "FP32":
            contents = column(draw, 6, 5, "f", flat)
        elif one.datatype == "BYTES":
            contents = [field(8, text.encode()) for text in flat]
        else:
            contents = []
            for chunk in chunks(draw, [encode_varint(number) for number in flat]):
                is_packed = draw(st.booleans())
                contents += [field(3, b"".join(chunk))] if is_packed else [encode_varint(3 << 3) + own for own in chunk]
        dims = [encode_varint(number) for number in one.array.shape]
        shape = [field(3, b"".join(dims))] if draw(st.booleans()) else [encode_varint(3 << 3) + own for own in dims]
        inner = field(5, interleaved(draw, [contents]))
        named = [field(1, one.name.encode())], [field(2, one.datatype.encode())]
        pieces.append(field(5, interleaved(draw, [*named, shape, [inner]])))
    timeout = field(4, field(1, b"timeout_ms") + field(2, encode_varint(2 << 3) + encode_varint(request["timeout_ms"])))
    return interleaved(draw, [[field(1, MODEL.encode())], [timeout], pieces])


@given(st.data(), st.integers(0, 10_000), st.integers(1, 6))
def test_typed_contents_in_any_encoding_are_read_as_json(data, seed, count):
    request = api_request(seed, count)
    assert_same_request(parse_infer_message(SCHEMA, data.draw(typed_bytes(request))), parse_json(SCHEMA, request))
