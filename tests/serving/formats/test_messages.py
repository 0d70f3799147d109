"""Rank and lookup messages, by maps of features and packed: what they say, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InvalidRequestError
from serving.formats.messages import MessageCodec
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.errors import raises_kind
from shardrank_testing.parsing import SCHEMA, assert_same_request, field, parse_json, parse_message
from shardrank_testing.serving_api import api_request, packed_message, rank_message

LIMITS = RequestLimits()


def read(data: bytes, method: Any = "rank", model: str | None = None) -> Any:
    return MessageCodec(method, model).read(data, LIMITS)


def test_outer_fields_are_known_before_the_features_are_looked_at():
    message = ranking_pb2.RankRequest(model="films", version=7, request_id="r", top_k=2, timeout_ms=40)
    message.candidates.sparse["unheard of"].ids.append(1)
    unparsed = read(message.SerializeToString())
    assert (unparsed.model, unparsed.version, unparsed.key) == ("films", 7, "r")
    message.routing_key = "u"
    assert read(message.SerializeToString()).key == "u"
    assert read(ranking_pb2.RankRequest(model="films").SerializeToString()).version is None
    looked_up = ranking_pb2.LookupRequest(model="films", version=-1, routing_key="u").SerializeToString()
    assert (read(looked_up, "lookup").version, read(looked_up, "lookup").key) == (-1, "u")


def test_options_are_those_that_the_message_says():
    message = rank_message(api_request(1) | {"top_k": 3, "request_id": "r", "timeout_ms": 40})
    parsed = parse_message(SCHEMA, message)
    assert (parsed.top_k, parsed.request_id, parsed.timeout_s) == (3, "r", 0.04)
    message.top_k = message.timeout_ms = 0
    parsed = parse_message(SCHEMA, message)
    assert (parsed.top_k, parsed.timeout_s) == (None, LIMITS.default_timeout_ms / 1000)
    with raises_kind("limit_exceeded", match="timeout_ms: 60001 ms, more than the limit max_timeout_ms = 60000"):
        parse_message(SCHEMA, rank_message(api_request(1) | {"timeout_ms": 60_001}))
    with raises_kind("limit_exceeded", match="request_id: 129 characters"):
        parse_message(SCHEMA, rank_message(api_request(1) | {"request_id": "x" * 129}))


_MESSAGE = rank_message(api_request(1)).SerializeToString()
_PACKED = packed_message(SCHEMA, api_request(1)).SerializeToString()


@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans(), st.booleans())
def test_a_damaged_message_is_refused_or_read_as_the_library_reads_it(position, flipped, is_cut, is_packed):
    good = _PACKED if is_packed else _MESSAGE
    position %= len(good)
    damaged = bytearray(good)
    damaged[position] ^= flipped
    data = bytes(damaged[:position] if is_cut else damaged)
    try:
        parsed = parse_message(SCHEMA, data)
    except InvalidRequestError:
        return
    # What the library makes of it, and writes in its own way, is the same request.
    assert_same_request(parsed, parse_message(SCHEMA, ranking_pb2.RankRequest.FromString(data)))


@pytest.mark.parametrize("name", ["ids", "lengths", "weights"])
def test_a_packed_field_of_broken_length_is_malformed(name):
    number = {"ids": 1, "lengths": 2, "weights": 3}[name]
    feature = rank_message(api_request(1)).candidates.sparse["tag"].SerializeToString() + field(number, b"123")
    message = rank_message(api_request(1))
    del message.candidates.sparse["tag"]
    entry = field(1, field(1, b"tag") + field(2, feature))
    # A second part of the same number would be merged by the library; here it is a feature more in the same part.
    data = message.SerializeToString()
    candidates = message.candidates.SerializeToString()
    data = data.replace(field(4, candidates), field(4, candidates + entry))
    with raises_kind("malformed", match=rf"candidates\.sparse\.tag\.{name}: .* not a multiple"):
        parse_message(SCHEMA, data)


MISFITS = [
    (lambda m: m.candidates.sparse["genre"].lengths.append(0), r"candidates\.sparse\.\w+: \d candidates, expected \d"),
    (lambda m: m.candidates.sparse["genre"].ids.append(0), r"candidates\.sparse\.genre\.lengths: they add up to"),
    (lambda m: m.context.sparse["user"].lengths.extend([0, 1]), r"context\.sparse\.user: 2 bags, expected 1"),
    (lambda m: m.candidates.dense.append(1.0), r"candidates\.dense: 16 values"),
    (lambda m: m.candidates.sparse["tag"].weights.append(1.0), r"candidates\.sparse\.tag\.weights: \d+ weights for"),
    (lambda m: setattr(m, "num_candidates", 7), r": 5 candidates, expected 7"),
    (lambda m: setattr(m, "num_candidates", 2**32 - 1), r"max_candidates = 4096"),
    (lambda m: m.ClearField("candidates"), r"candidates\.sparse\.\w+: model 'films' needs it, one of 4"),
    (lambda m: m.packed.SetInParent(), r"packed: it is given beside context or candidates"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISFITS)
def test_what_does_not_fit_together_is_named(change, message):
    request = rank_message(api_request(1))
    change(request)
    with pytest.raises(InvalidRequestError, match=message):
        parse_message(SCHEMA, request)


def test_what_is_there_twice_is_refused():
    message = rank_message(api_request(1))
    context, candidates = message.context.SerializeToString(), message.candidates.SerializeToString()
    start = field(1, b"films")
    for data in (
        start + field(3, context) + field(3, context) + field(4, candidates),
        start + field(3, context) + field(4, candidates[:0]) + field(4, candidates),
    ):
        with raises_kind("malformed", match="it is there twice"):
            parse_message(SCHEMA, data)
    user = field(1, field(1, b"user") + field(2, b""))
    with raises_kind("invalid_field", match=r"context\.sparse\.user: it is given twice"):
        parse_message(SCHEMA, start + field(3, context + user) + field(4, candidates))
    twice = field(1, field(1, b"user") + field(2, b"") + field(2, b""))
    with raises_kind("malformed", match=r"context\.sparse: the value of .user. is there twice"):
        parse_message(SCHEMA, start + field(3, twice) + field(4, candidates))


def test_a_lookup_of_too_much_is_refused_by_its_count():
    for limits, said in (
        (RequestLimits(max_bags_per_feature=2), r"sparse\.film: 3 bags, more than the limit max_bags_per_feature = 2"),
        (RequestLimits(max_lookup_floats=20), r"floats in the answer, more than the limit max_lookup_floats = 20"),
    ):
        message = ranking_pb2.LookupRequest(model="films")
        message.sparse["film"].ids.extend([1, 2, 3])
        schema = RequestSchema(SCHEMA.features, limits)
        with raises_kind("limit_exceeded", match=said):
            parse_message(schema, message, "lookup")
        with raises_kind("limit_exceeded", match=said):
            parse_json(schema, {"sparse": {"film": [1, 2, 3]}}, "lookup")


# The packed form


def packed(seed: int = 1, **fields: Any) -> ranking_pb2.RankRequest:
    """A packed request with some of its fields as given; None clears one."""
    message = packed_message(SCHEMA, api_request(seed))
    for name, value in fields.items():
        of = message if name == "num_candidates" else message.packed
        if isinstance(value, list):
            of.ClearField(name)
            getattr(of, name).extend(value)
        else:
            setattr(of, name, value)
    return message


def changed(array: bytes, dtype: str, position: int, value: Any) -> bytes:
    values = np.frombuffer(array, dtype).copy()
    values[position] = value
    return values.tobytes()


GOOD = packed().packed
# Features whose ids add up to what is there, though one of them has less than none.
_BELOW_ZERO = changed(changed(GOOD.lengths, "<i4", 17, -1), "<i4", 18, 6)


PACKED_MISFITS = [
    ({"ids": GOOD.ids[:-8]}, "count_mismatch", r"packed\.ids: \d+ integers and 2 strings; the lengths say"),
    ({"ids": GOOD.ids[:-1]}, "malformed", r"packed\.ids: \d+ bytes, which is not a multiple of 8"),
    ({"lengths": GOOD.lengths[:-4]}, "count_mismatch", r"packed\.lengths: 23 of them for 24 bags"),
    ({"lengths": GOOD.lengths[:-3]}, "malformed", r"packed\.lengths: \d+ bytes"),
    ({"lengths": b""}, "count_mismatch", r"packed\.ids: .* the lengths say 23 and 1"),
    ({"lengths": changed(GOOD.lengths, "<i4", 3, -1)}, "invalid_field", r"packed\.lengths\[3\]: -1 is not in 0\.\."),
    ({"lengths": changed(GOOD.lengths, "<i4", 3, 2**31 - 1)}, "invalid_field", r"packed\.lengths\[3\]"),
    ({"lengths": _BELOW_ZERO}, "invalid_field", r"lengths\[.*\]: -1 is not in 0\.\."),
    ({"lengths": _BELOW_ZERO, "weights": b""}, "invalid_field", r"lengths\[.*\]: -1 is not in 0\.\."),
    ({"weights": GOOD.weights[:-4]}, "count_mismatch", r"packed\.weights: \d+ of them for \d+ ids"),
    ({"weights": changed(GOOD.weights, "<f4", 0, 0.5)}, "invalid_field", "takes no weights has one that is not 1"),
    ({"string_ids": ["Oslo"]}, "count_mismatch", r"and 1 strings; the lengths say \d+ and 2"),
    ({"string_ids": ["Oslo"] * 3}, "count_mismatch", r"and 3 strings"),
    ({"context_dense": b"\0" * 12}, "count_mismatch", r"context\.dense: 3 values, the model takes 2"),
    ({"candidate_dense": GOOD.candidate_dense[:-4]}, "count_mismatch", r"candidates\.dense: 14 values; 5"),
    ({"candidate_dense": changed(GOOD.candidate_dense, "<f4", 14, np.nan)}, "invalid_field",
        r"candidates\.dense\[4\]\[2\]: nan is not a finite float32"),
    ({"ids": changed(GOOD.ids, "<i8", 0, -1)}, "invalid_id", r"\[0\]: -1 is not in 0\.\."),
    ({"num_candidates": 0}, "count_mismatch", "0 candidates; a rank request needs at least 1"),
    ({"num_candidates": 4}, "count_mismatch", r"packed\.lengths: 24 of them for 20 bags"),
    ({"num_candidates": 2**31}, "limit_exceeded", "max_candidates = 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "kind", "message"), PACKED_MISFITS)
def test_packed_arrays_that_do_not_fit_are_named(fields, kind, message):
    with raises_kind(kind, match=message):
        parse_message(SCHEMA, packed(**fields))


def test_a_request_packed_for_another_schema_is_told_both_digests():
    for digest in ("", "0" * 64):
        with raises_kind("schema_digest") as refusal:
            parse_message(SCHEMA, packed(schema_digest=digest))
        assert (refusal.value.kind, refusal.value.grpc_status) == ("schema_digest", "FAILED_PRECONDITION")
        assert repr(digest) in str(refusal.value)
        assert SCHEMA.features.digest in str(refusal.value)
