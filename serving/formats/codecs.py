"""The codec of each form in which a request comes."""

from __future__ import annotations

from typing import Any, Literal

from serving.encode_json import encode, lookup_document, rank_document
from serving.formats.encode_message import encode_lookup, encode_rank
from serving.oip.answer_ids import AnswerIds
from serving.oip.encode import encode_grpc, encode_http
from serving.oip.infer_request import InferRequest, parse_version
from serving.oip.read_grpc import read_infer as read_infer_message
from serving.oip.read_http import parse_header_length, read_infer
from serving.rank.answer import Buffer, Codec, Encoded
from serving.read_proto import read_lookup, read_rank
from serving.service import RankingService

_ids = AnswerIds()
Method = Literal["rank", "lookup"]


class _Json:
    api = "http"

    def __init__(self, method: Method, model: str) -> None:
        self.method = method
        self._model = model

    def parse(self, service: RankingService, call: Any, body: Buffer) -> Any:
        text = bytes(body) if isinstance(body, memoryview) else body
        parse: Any = service.parse_rank if self.method == "rank" else service.parse_lookup
        return parse(call, self._model, text)

    def encode(self, answer: Any) -> Encoded:
        return Encoded(encode(rank_document(answer) if self.method == "rank" else lookup_document(answer)))


class _Message:
    def __init__(self, method: Method, model: str | None) -> None:
        self.method = method
        self._model = model
        self.api = "grpc" if model is None else "http"

    def parse(self, service: RankingService, call: Any, body: Buffer) -> Any:
        if self.method == "rank":
            return service.parse_rank_message(call, read_rank(bytes(body)))
        return service.parse_lookup_message(call, read_lookup(bytes(body)))

    def encode(self, answer: Any) -> Encoded:
        body = encode_rank(answer) if self.method == "rank" else encode_lookup(answer)
        return Encoded(body, "application/x-protobuf")


class _InferHttp:
    api, method = "oip_http", "rank"

    def __init__(self, model: str, version: str, header_length: str | None) -> None:
        self._target = model, version, header_length
        self._read: InferRequest

    def parse(self, service: RankingService, call: Any, body: Buffer) -> Any:
        model, version, length = self._target
        self._read = read_infer(
            model, parse_version(version), body, parse_header_length(length, len(body)), service.limits
        )
        return service.parse_infer(call, self._read)

    def encode(self, answer: Any) -> Encoded:
        body, header_length = encode_http(self._read, answer, answer.request_id or _ids())
        if header_length is None:
            return Encoded(body)
        return Encoded(body, "application/octet-stream", (("inference-header-content-length", str(header_length)),))


class _InferGrpc:
    api, method = "oip_grpc", "rank"
    _read: InferRequest

    def parse(self, service: RankingService, call: Any, body: Buffer) -> Any:
        self._read = read_infer_message(bytes(body))
        return service.parse_infer(call, self._read)

    def encode(self, answer: Any) -> Encoded:
        return Encoded(encode_grpc(self._read, answer, answer.request_id or _ids()))


def json_codec(method: Method, model: str) -> Codec:
    """Read the JSON form of a request to a model."""
    return _Json(method, model)


def message_codec(method: Method, model: str | None = None) -> Codec:
    """Read `RankRequest` or `LookupRequest`; over HTTP the path names the model too."""
    return _Message(method, model)


def infer_http_codec(model: str, version: str, header_length: str | None) -> Codec:
    """Read an inference request over HTTP; `header_length` is the header that binary tensors come with."""
    return _InferHttp(model, version, header_length)


def infer_grpc_codec() -> Codec:
    """Read a `ModelInferRequest`."""
    return _InferGrpc()
