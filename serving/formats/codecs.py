"""The codec of each form in which a request comes."""

from __future__ import annotations

from serving.formats.infer_grpc import InferGrpcCodec
from serving.formats.infer_http import InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec

json_codec = JsonCodec
message_codec = MessageCodec
infer_http_codec = InferHttpCodec
infer_grpc_codec = InferGrpcCodec
