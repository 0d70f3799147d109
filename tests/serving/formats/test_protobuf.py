"""The protobuf wire format: the walk over a message and its numbers, against the protobuf library."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.internal import decoder, encoder
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InvalidRequestError
from serving.formats.protobuf import (
    ProtobufMessage,
    encode_field,
    encode_varint,
    signed,
    tags_of,
)
from serving.proto.inference import open_inference_pb2
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.errors import raises_kind
from shardrank_testing.inference_requests import message_of, tensors_of
from shardrank_testing.parsing import SCHEMA, SPEC
from shardrank_testing.serving_api import MODEL, api_request, packed_message, rank_message

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)


def message(data: bytes, max_fields: int = 1000) -> ProtobufMessage:
    return ProtobufMessage(data, "a.Message", max_fields)


@given(st.lists(INT64, max_size=50))
def test_varints_are_those_of_the_library(numbers):
    tensor = open_inference_pb2.InferTensorContents(int64_contents=numbers).SerializeToString()
    read = message(tensor)
    spans = [(start, end) for _, start, end in read.fields()]
    assert [number for span in spans for number in map(signed, read.varints(*span))] == numbers
    joined = b"".join(tensor[start:end] for start, end in spans)
    assert b"".join(encode_varint(one % 2**64) for one in numbers) == joined


def parameters_message(seed: int) -> open_inference_pb2.ModelInferRequest:
    made = open_inference_pb2.ModelInferRequest(model_name="films", raw_input_contents=[bytes(seed % 200), b""])
    made.parameters["int"].int64_param = -seed
    made.parameters["text"].string_param = "x" * (seed % 5)
    made.parameters["double"].double_param = seed / 7
    made.parameters["bool"].bool_param = seed % 2 == 0
    return made


REQUESTS = st.builds(api_request, st.integers(0, 10_000), st.integers(1, 5))
MESSAGES = st.one_of(
    st.builds(rank_message, REQUESTS),
    st.builds(lambda request: packed_message(SCHEMA, request), REQUESTS),
    st.builds(lambda request, raw: message_of(tensors_of(SPEC, request), MODEL, raw=raw), REQUESTS, st.booleans()),
    st.builds(parameters_message, st.integers(0, 10_000)),
)


def by_library(data: bytes) -> list[tuple[int, Any]]:
    """Tags and contents, by the decoder of the protobuf library."""
    found, at = [], 0
    while at < len(data):
        tag, at = decoder._DecodeVarint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = decoder._DecodeVarint(data, at)
            found.append((tag, value))
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, at = decoder._DecodeVarint(data, at)
        found.append((tag, data[at : at + size]))
        at += size
    return found


@given(MESSAGES)
def test_the_fields_of_a_message_are_those_of_the_library(made):
    data = made.SerializeToString()
    found = [(tag, start if tag & 7 == 0 else data[start:end]) for tag, start, end in message(data).fields()]
    assert found == by_library(data)


@given(MESSAGES, st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_message_is_read_within_its_bytes(made, position, flipped):
    damaged = bytearray(made.SerializeToString())
    if damaged:
        damaged[position % len(damaged)] ^= flipped
    try:
        fields = list(message(bytes(damaged)).fields())
    except InvalidRequestError:
        return
    for tag, start, end in fields:
        assert 8 <= tag < 2**32
        assert tag & 7 == 0 or 0 < start <= end <= len(damaged)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x00", "a number that there is not"),
        (b"\x07", "a number that there is not"),
        (b"\xf8\xff\xff\xff\xff\x01\x01", "a number that there is not"),
        (b"\x0a", "a varint that does not end"),
        (b"\x0a\x05abc", "field 1 is longer than what is left"),
        (b"\x0d\x01\x02", "it ends within field 1"),
        (b"\x09\x01\x02", "it ends within field 1"),
        (b"\x0b\x0c", "field 1 has wire type 3; groups are not taken"),
        (b"\x0e", "wire type 6"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "longer than what is left"),
    ],
)
def test_what_is_no_message_is_malformed(data, problem):
    with raises_kind("malformed", match=f"the message is not a a.Message: .*{problem}"):
        list(message(data).fields())


def test_fields_of_all_walks_over_a_message_count_together():
    data = b"\x08\x01" * 6
    one = message(data, 10)
    assert len(list(one.fields())) == 6
    assert len(list(one.fields(0, 8))) == 4
    with raises_kind("limit_exceeded", match=r"more than 10 fields in the message, .* max_message_fields = 10"):
        next(one.fields())


def test_a_walk_stops_at_the_first_field_beyond_the_limit():
    walked = 0
    with raises_kind("limit_exceeded"):
        for _ in message(b"\x9a\x06\x00" * 1_000_000, 50).fields():
            walked += 1
    assert walked == 50


@given(st.integers(1, 2**29 - 1), st.binary(max_size=300))
def test_what_is_written_is_what_the_library_writes(number, content):
    written: list[bytes] = []
    encoder.BytesEncoder(number, False, False)(written.append, content, True)
    assert encode_field(number, content) == (b"".join(written) if content else b"")


def test_tags_are_those_that_the_library_writes_packed_or_one_by_one():
    contents = open_inference_pb2.InferTensorContents
    written = contents(
        bool_contents=[True],
        int_contents=[1],
        int64_contents=[1],
        fp32_contents=[1.0],
        fp64_contents=[1.0],
        bytes_contents=[b"x"],
    )
    names = [tags_of(contents)[tag] for tag, _, _ in message(written.SerializeToString()).fields()]
    assert names == [field.name for field, _ in written.ListFields()]
    one_by_one = b"".join([b"\x10\x01", b"\x35" + bytes(4), b"\x39" + bytes(8)])
    names = [tags_of(contents)[tag] for tag, _, _ in message(one_by_one).fields()]
    assert names == ["int_contents", "fp32_contents", "fp64_contents"]
    # A number that is not repeated has no packed form.
    assert sorted(tags_of(ranking_pb2.LookupRequest)) == [
        1 << 3 | 2,
        2 << 3,
        3 << 3 | 2,
        4 << 3,
        5 << 3 | 2,
        6 << 3 | 2,
        7 << 3,
        8 << 3,
        9 << 3,
    ]
