"""Requests in every form to the arrays of a parsed one, as a call would read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from router.feature_schema import FeatureSchema
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.protobuf import encode_varint
from serving.formats.requests import Codec, Method, Request
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from shardrank_testing.serving_api import api_spec

MODEL = "model"
SPEC = api_spec()
SCHEMA = RequestSchema(FeatureSchema.of(SPEC), RequestLimits())


ARRAYS = ("keys", "bags_per_key", "offsets", "values")


def parse(schema: RequestSchema, codec: Codec, body: bytes) -> Request:
    return codec.read(body, schema.limits).parse(schema)


def parse_json(schema: RequestSchema, request: Mapping[str, Any] | bytes | str, method: Method = "rank") -> Any:
    text = json.dumps(request) if isinstance(request, Mapping) else request
    body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return parse(schema, JsonCodec(method, MODEL), body)


def parse_message(schema: RequestSchema, message: Any, method: Method = "rank") -> Any:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return parse(schema, MessageCodec(method), data)


def parse_infer_body(schema: RequestSchema, body: bytes, header_length: str | None = None) -> Any:
    return parse(schema, InferHttpCodec(model=MODEL, header_length=header_length), body)


def parse_infer_message(schema: RequestSchema, message: Any) -> Any:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return parse(schema, InferGrpcCodec(), data)


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message, also where it is empty."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def assert_same_arrays(actual: Any, expected: Any) -> None:
    """Two parsed rank requests have the same arrays; no weights are weights of 1."""
    assert actual.num_candidates == expected.num_candidates
    arrays = [(f"bags.{name}", getattr(actual.bags, name), getattr(expected.bags, name)) for name in ARRAYS]
    arrays += [(name, getattr(actual, name), getattr(expected, name)) for name in ("context_dense", "candidate_dense")]
    for name, ours, theirs in arrays:
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
        assert ours.dtype == theirs.dtype, name
        assert ours.flags.writeable, name
        assert ours.flags.aligned, name
    ones = np.ones(actual.bags.num_values, np.float32)
    ours, theirs = (ones if one.bags.weights is None else one.bags.weights for one in (actual, expected))
    np.testing.assert_array_equal(ours, theirs, err_msg="weights")
    assert list(actual.texts) == list(expected.texts)


def assert_same_request(actual: Any, expected: Any, *, may_spell_ones: bool = False) -> None:
    """Two parsed rank requests have the same arrays and options; one may spell weights of 1 where another has none."""
    assert_same_arrays(actual, expected)
    assert may_spell_ones or (actual.bags.weights is None) == (expected.bags.weights is None)
    for name in ("timeout_s", "top_k", "request_id", "bound"):
        assert getattr(actual, name) == getattr(expected, name), name


def dumps(request: Any) -> bytes:
    return json.dumps(request).encode()
