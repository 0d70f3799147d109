"""Requests in every form to the arrays of a parsed one, as a call would read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.formats.infer_grpc import InferGrpcCodec
from serving.formats.infer_http import InferHttpCodec
from serving.formats.json_reader import JsonCodec, encode_request
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec, Method, Request
from serving.formats.schema import RequestSchema

MODEL = "model"


def parse(schema: RequestSchema, codec: Codec, body: bytes) -> Request:
    return codec.read(body, schema.limits).parse(schema)


def parse_json(schema: RequestSchema, request: Mapping[str, Any] | bytes | str, method: Method = "rank") -> Any:
    """A dict goes the way of an in-process call."""
    if isinstance(request, Mapping):
        body = encode_request(request)
    else:
        body = request.encode("utf-8", "surrogatepass") if isinstance(request, str) else request
    return parse(schema, JsonCodec(method, MODEL), body)


def parse_message(schema: RequestSchema, message: Any, method: Method = "rank") -> Any:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return parse(schema, MessageCodec(method), data)


def parse_infer_body(schema: RequestSchema, body: bytes, header_length: str | None = None) -> Any:
    return parse(schema, InferHttpCodec(MODEL, "", header_length), body)


def parse_infer_message(schema: RequestSchema, message: Any) -> Any:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return parse(schema, InferGrpcCodec(), data)


def dumps(request: Any) -> bytes:
    return json.dumps(request).encode()
