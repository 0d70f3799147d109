from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from router.feature_schema import FeatureSchema
from serving.errors import BadRequestError, MalformedRequestError
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.parse_json import JsonParser
from serving.parse_proto import ProtoParser
from serving.proto.shardrank.v1 import ranking_pb2, ranking_wire_pb2
from serving.read_proto import MAX_SEARCHED_BYTES, read_lookup, read_rank
from shardrank_testing.serving_api import api_request, api_spec, rank_message

SCHEMA = RequestSchema(FeatureSchema.of(api_spec()), RequestLimits())
PARSER = ProtoParser(SCHEMA)


def assert_same_request(actual: Any, expected: Any) -> None:
    for name in ("keys", "bags_per_key", "offsets", "values", "weights"):
        np.testing.assert_array_equal(getattr(actual.bags, name), getattr(expected.bags, name), err_msg=name)
    np.testing.assert_array_equal(actual.context_dense, expected.context_dense)
    np.testing.assert_array_equal(actual.candidate_dense, expected.candidate_dense)
    assert (actual.num_candidates, actual.deadline, actual.top_k, list(actual.texts)) == (
        expected.num_candidates,
        expected.deadline,
        expected.top_k,
        list(expected.texts),
    )


@given(st.integers(0, 1000), st.integers(1, 6))
@settings(max_examples=40)
def test_protobuf_and_json_give_the_same_arrays(seed, count):
    request = api_request(seed, count) | {"top_k": 3}
    parsed = PARSER.rank(read_rank(rank_message(request).SerializeToString()), None, 7.0)
    assert_same_request(parsed, JsonParser(SCHEMA).rank(request, None, 7.0))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def packed(field: int, payload: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(payload)) + payload


@st.composite
def encoded_feature(draw: st.DrawFn) -> bytes:
    """A SparseFeature with every encoding that protobuf allows: several chunks, empty ones, unpacked numbers, mixed."""
    pieces: list[bytes] = []
    for field, code, fixed, numbers in (
        (1, "<q", 1, st.integers(-(2**63), 2**63 - 1)),
        (2, "<I", 5, st.integers(0, 2**32 - 1)),
        (3, "<f", 5, st.floats(width=32, allow_nan=False)),
    ):
        for _ in range(draw(st.integers(0, 3))):
            chunk = [struct.pack(code, one) for one in draw(st.lists(numbers, max_size=3))]
            if draw(st.booleans()):
                pieces.append(packed(field, b"".join(chunk)))
            else:
                pieces.extend(varint(field << 3 | fixed) + one for one in chunk)
    pieces.extend(packed(4, text.encode()) for text in draw(st.lists(st.sampled_from(["a", "Zürich", ""]), max_size=2)))
    # Fields of different numbers may come in any order; those of one number keep theirs.
    return b"".join(pieces)


@given(st.lists(encoded_feature(), min_size=1, max_size=3), st.lists(encoded_feature(), max_size=2))
def test_the_wire_types_read_whatever_the_public_types_read(context, candidates):
    def feature_set(features: list[bytes]) -> bytes:
        entries = [packed(1, f"f{number}".encode()) + packed(2, one) for number, one in enumerate(features)]
        return b"".join(packed(1, entry) for entry in entries)

    data = packed(1, b"films") + packed(3, feature_set(context)) + packed(4, feature_set(candidates))
    public, wire = ranking_pb2.RankRequest.FromString(data), read_rank(data).parts()
    for part in ("context", "candidates"):
        theirs, ours = getattr(public, part).sparse, getattr(wire, part)
        assert sorted(theirs) == sorted(ours.names)
        for name, feature in theirs.items():
            place = ours.names.index(name)
            joined = {field: b"".join(getattr(ours, field)[place]) for field in ("ids", "lengths", "weights")}
            assert joined["ids"] == np.array(list(feature.ids), "<i8").tobytes()
            assert joined["lengths"] == np.array(list(feature.lengths), "<u4").tobytes()
            assert joined["weights"] == np.array(list(feature.weights), "<f4").tobytes()
            assert list(ours.texts[place]) == list(feature.string_ids)


@pytest.mark.parametrize("count", [1, MAX_SEARCHED_BYTES])
@pytest.mark.parametrize("part", ["sparse", "dense"])
def test_numbers_are_found_in_the_unpacked_encoding_however_many_there_are(part, count):
    many = range(count)
    if part == "sparse":
        unpacked = packed(2, b"".join(varint(1 << 3 | 1) + struct.pack("<q", one) for one in many))
        features = packed(1, packed(1, b"tag") + unpacked)
    else:
        features = b"".join(varint(2 << 3 | 5) + struct.pack("<f", one) for one in many)
    # Another feature is packed, and so long that the rest is little beside it.
    other = packed(1, packed(1, b"film") + packed(2, packed(1, bytes(8 * 50_000))))
    message = read_rank(packed(1, b"films") + packed(4, features + other)).parts()
    if part == "sparse":
        ids = message.candidates.ids[message.candidates.names.index("tag")]
        np.testing.assert_array_equal(np.frombuffer(b"".join(ids), "<i8"), many)
    else:
        np.testing.assert_array_equal(np.frombuffer(b"".join(message.candidate_dense), "<f4"), many)


def test_fields_that_are_not_known_yet_change_nothing():
    newer = varint(99 << 3 | 5) + b"1234"
    feature = packed(1, struct.pack("<q", 7)) + newer
    data = packed(1, b"films") + packed(4, packed(1, packed(1, b"film") + packed(2, feature)) + newer) + newer
    message = read_rank(data)
    candidates = message.parts().candidates
    assert (message.fields.model, candidates.names) == ("films", ["film"])
    assert candidates.ids == [[struct.pack("<q", 7)]]


def test_the_wire_types_differ_from_the_public_ones_only_in_fixed_width_numbers():
    fixed = {FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_FLOAT}

    def flat(field: FieldDescriptor) -> Any:
        as_bytes = field.is_repeated and field.type in fixed
        kind = FieldDescriptor.TYPE_BYTES if as_bytes else field.type
        return field.name, field.number, kind, field.is_repeated, field.has_presence and field.message_type is None

    public = ranking_pb2.DESCRIPTOR.message_types_by_name
    for name, message in ranking_wire_pb2.DESCRIPTOR.message_types_by_name.items():
        assert [flat(one) for one in message.fields] == [flat(one) for one in public[name].fields], name


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x00"])
def test_what_is_no_message_is_malformed(data):
    for read in (read_rank, read_lookup):
        with pytest.raises(MalformedRequestError):
            read(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_malformed_and_never_a_crash(data):
    try:
        message = read_rank(data)
        PARSER.rank(message, None, 0.0)
    except BadRequestError:
        return
    raise AssertionError("no arbitrary bytes hold all features")


@pytest.mark.parametrize("field", ["ids", "lengths", "weights"])
def test_a_packed_field_of_broken_length_is_malformed(field):
    message = ranking_wire_pb2.RankRequest.FromString(rank_message(api_request(1)).SerializeToString())
    getattr(message.candidates.sparse["tag"], field).append(b"123")
    with pytest.raises(MalformedRequestError, match=rf"candidates\.sparse\.tag\.{field}"):
        PARSER.rank(read_rank(message.SerializeToString()), None, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.candidates.sparse["genre"].lengths.append(0),
            r"candidates\.sparse\.\w+: \d candidates, expected \d",
        ),
        (lambda m: m.candidates.sparse["tag"].ids.append(0), r"candidates\.sparse\.tag\.lengths: they add up to"),
        (lambda m: m.context.sparse["user"].lengths.extend([0, 1]), r"context\.sparse\.user: 2 bags, expected 1"),
        (lambda m: m.candidates.dense.append(1.0), r"candidates\.dense: 16 values"),
        (lambda m: m.candidates.sparse["film"].weights.extend([1.0] * 5), r"film\.weights: feature 'film' takes no"),
        (
            lambda m: m.candidates.sparse["tag"].weights.append(1.0),
            r"candidates\.sparse\.tag\.weights: \d+ weights for",
        ),
        (lambda m: m.candidates.sparse["film"].string_ids.append("x"), r"film\.string_ids: ids of 'film' are integers"),
        (lambda m: m.context.sparse["city"].ids.append(1), r"context\.sparse\.city\.ids: ids of 'city' are strings"),
        (lambda m: setattr(m, "num_candidates", 7), r": 5 candidates, expected 7"),
        (lambda m: setattr(m, "num_candidates", 2**32 - 1), r"max_candidates = 4096"),
    ],
)
def test_what_does_not_fit_together_is_named(change, message):
    request = rank_message(api_request(1))
    change(request)
    with pytest.raises(BadRequestError, match=message):
        PARSER.rank(read_rank(request.SerializeToString()), None, 0.0)


def test_a_lookup_without_lengths_has_one_id_for_each_bag():
    message = ranking_pb2.LookupRequest(model="films")
    message.sparse["history"].ids.extend([4, 5, 6])
    message.sparse["film"].ids.extend([1, 2, 3])
    message.sparse["film"].lengths.extend([0, 2, 1])
    parsed = PARSER.lookup(read_lookup(message.SerializeToString()), None, 0.0)
    assert [SCHEMA.names[key] for key in parsed.bags.keys] == ["history", "film"]
    assert parsed.bags.bags_per_key.tolist() == [3, 3]
    assert parsed.bags.lengths.tolist() == [1, 1, 1, 0, 2, 1]
