"""The handlers of the protocol's HTTP API. Errors are `{"error": text}`; their kind is in a header."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loader.errors import ShardrankError
from serving.call import Call
from serving.encode_json import MAX_MESSAGE_CHARS, RETRY_AFTER_S, encode
from serving.errors import MalformedRequestError, printable
from serving.http.body import content_coding, read_body
from serving.http.large_work import LargeWork
from serving.http.protocol import watch_client
from serving.oip import documents
from serving.oip.body_coding import CODINGS, expand
from serving.oip.encode import encode_http
from serving.oip.errors import RepositoryControlError
from serving.oip.infer_request import InferRequest, parse_version
from serving.oip.read_http import parse_header_length, read_infer
from serving.request import RankRequest
from serving.service import RankingService

logger = logging.getLogger(__name__)

JSON = "application/json"
BINARY = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
ERROR_KIND = "shardrank-error-kind"
REQUEST_ID = "x-request-id"
# What is compressed may become about that much longer in usual cases; it decides which bodies leave the event loop.
_USUAL_RATIO = 16
# Binary tensors are only copied and checked.
_BINARY_IS_CHEAPER = 16
_RETRY_LATER = 503


class _IndexBody(msgspec.Struct):
    ready: bool = False


class InferEndpoints:
    """Handlers over one service. Each takes the raw request and makes the whole response.

    Args:
        service: answers.
        large: takes long JSON off the event loop.
        new_id: makes the id of an answer whose request has none.
    """

    def __init__(
        self, service: RankingService, large: LargeWork, new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        self._service = service
        self._large = large
        self._new_id = new_id

    async def infer(self, request: Request) -> Response:
        """`POST /v2/models/{model}[/versions/{version}]/infer`."""
        return await self._handle(request, "rank", lambda call: self._infer(call, request))

    async def server_metadata(self, request: Request) -> Response:
        """`GET /v2`."""
        return await self._tell(request, documents.server_metadata)

    async def live(self, request: Request) -> Response:
        """`GET /v2/health/live`: the process runs."""
        return _respond(request, 200, b"")

    async def ready(self, request: Request) -> Response:
        """`GET /v2/health/ready`: as `/readyz`."""
        return _respond(request, 503 if self._service.watch.problems() else 200, b"")

    async def model_ready(self, request: Request) -> Response:
        """`GET /v2/models/{model}[/versions/{version}]/ready`."""

        async def answer(call: Call) -> Response:
            del call
            model, version = _model(request)
            is_ready = documents.model_is_ready(self._service, model, version)
            if not is_ready:
                # Says why, unless the version is here and something else keeps it from answering.
                self._service.lease(model, parse_version(version)).release()
            return _respond(request, 200 if is_ready else 503, b"")

        return await self._handle(request, "model", answer)

    async def model_metadata(self, request: Request) -> Response:
        """`GET /v2/models/{model}[/versions/{version}]`."""
        return await self._tell(request, lambda: documents.model_metadata(self._service, *_model(request)))

    async def model_config(self, request: Request) -> Response:
        """`GET /v2/models/{model}[/versions/{version}]/config`."""
        return await self._tell(request, lambda: documents.model_config(self._service, *_model(request)))

    async def statistics(self, request: Request) -> Response:
        """`GET /v2/models[/{model}[/versions/{version}]]/stats`."""
        return await self._tell(request, lambda: documents.model_statistics(self._service, *_model(request)))

    async def repository_index(self, request: Request) -> Response:
        """`POST /v2/repository/index`."""

        async def answer(call: Call) -> Response:
            del call
            body = await read_body(request, self._service.limits.max_body_bytes)
            try:
                ready_only = bool(body) and msgspec.json.decode(body, type=_IndexBody).ready
            except msgspec.MsgspecError as error:
                raise MalformedRequestError(
                    "", f'the body must be empty, or such as {{"ready": true}}: {error}'
                ) from error
            index = documents.repository_index(self._service, ready_only=ready_only)
            return _respond(request, 200, encode(index))

        return await self._handle(request, "model", answer)

    async def repository_control(self, request: Request) -> Response:
        """`POST /v2/repository/models/{model}/load` and `unload`, which are refused."""

        def refuse() -> Any:
            raise RepositoryControlError()

        return await self._tell(request, refuse)

    async def _tell(self, request: Request, document: Callable[[], Any]) -> Response:
        async def answer(call: Call) -> Response:
            del call
            return _respond(request, 200, encode(document()))

        return await self._handle(request, "model", answer)

    async def _handle(self, request: Request, method: str, answer: Callable[[Call], Awaitable[Response]]) -> Response:
        try:
            with self._service.call("oip_http", method) as call:
                return await answer(call)
        except ShardrankError as error:
            return error_response(request, error)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(request, ShardrankError("internal error; the server's log says more"))

    async def _infer(self, call: Call, request: Request) -> Response:
        service = self._service
        coding = content_coding(request, CODINGS)
        body = await read_body(request, service.limits.max_body_bytes, CODINGS)
        call.received = service.clock()
        service.admit(call)
        reading = _Reading(service, call, request, body, is_compressed=coding != "identity")
        parsed = await self._large.parse(reading.json_bytes, reading.parse)
        call.parsed = service.clock()
        answer = await service.rank(parsed, watch_client(request))
        answered = service.clock()
        encoding = partial(encode_http, reading.read, answer, answer.request_id or self._new_id())
        encoded, header_length = await self._large.encode(answer.scores.size, encoding)
        response = _respond(request, 200, encoded, JSON if header_length is None else BINARY)
        if header_length is not None:
            response.headers[HEADER_LENGTH] = str(header_length)
        service.metrics.answer_encoded(call, parsed, answered, service.clock())
        return response


class _Reading:
    """One request while it is read, maybe on another thread."""

    def __init__(
        self, service: RankingService, call: Call, request: Request, body: bytes | bytearray, *, is_compressed: bool
    ) -> None:
        self._service = service
        self._call = call
        self._model, self._version = _model(request)
        self._header_length = request.headers.get(HEADER_LENGTH)
        self._body = body
        self._is_compressed = is_compressed
        self.read: InferRequest

    @property
    def json_bytes(self) -> int:
        """As much work as decoding about so much JSON is; binary tensors cost next to nothing."""
        size = len(self._body)
        if self._is_compressed:
            return _USUAL_RATIO * size
        length = parse_header_length(self._header_length, size)
        return size if length is None else length + (size - length) // _BINARY_IS_CHEAPER

    def parse(self) -> RankRequest:
        """Reads and parses it, and keeps what was read."""
        limits, body = self._service.limits, self._body
        if self._is_compressed:
            body = expand(body, limits.max_body_bytes)
        header_length = parse_header_length(self._header_length, len(body))
        self.read = read_infer(self._model, parse_version(self._version), body, header_length, limits)
        return self._service.parse_infer(self._call, self.read)


def error_response(request: Request, error: ShardrankError) -> Response:
    """An error in the protocol's form."""
    message = printable(str(error), MAX_MESSAGE_CHARS)
    response = _respond(request, error.http_status, encode({"error": message}))
    response.headers[ERROR_KIND] = error.kind
    if error.http_status == _RETRY_LATER:
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


def _model(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _respond(request: Request, status: int, body: bytes, media_type: str = JSON) -> Response:
    response = Response(body, status, media_type=media_type)
    if (request_id := request.headers.get(REQUEST_ID)) is not None:
        response.headers[REQUEST_ID] = request_id
    return response
