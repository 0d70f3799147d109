"""The handlers of the HTTP API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from loader.errors import ShardrankError
from serving.call import Call
from serving.encode_json import RETRY_AFTER_S, encode, error_document, lookup_document, rank_document
from serving.http.body import read_body
from serving.http.documents import ReadyDocument
from serving.http.large_work import LargeWork
from serving.http.protocol import watch_client
from serving.metrics import CONTENT_TYPE
from serving.service import RankingService

logger = logging.getLogger(__name__)

JSON = "application/json"
REQUEST_ID_HEADER = "x-request-id"
_RETRY_LATER = 503
METRICS_REFRESH_TIMEOUT_S = 1.0


class Endpoints:
    """Handlers over one service. Each takes the raw request and makes the whole response."""

    def __init__(self, service: RankingService, large: LargeWork) -> None:
        self._service = service
        self._large = large

    async def rank(self, request: Request) -> Response:
        """`POST /v1/models/{model}:rank`."""
        return await self._handle(request, "rank", self._rank)

    async def lookup(self, request: Request) -> Response:
        """`POST /v1/models/{model}:lookup`."""
        return await self._handle(request, "lookup", self._lookup)

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        return await self._handle(request, "model", self._model)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return await self._handle(request, "models", self._models)

    async def healthz(self, request: Request) -> Response:
        """`GET /healthz`: the process runs."""
        return _json_response(request, 200, b'{"status":"ok"}')

    async def readyz(self, request: Request) -> Response:
        """`GET /readyz`: every configured model is live and its shards answer. Rows that lag don't change that."""
        problems = self._service.watch.problems()
        degraded = self._service.watch.degraded()
        document = ReadyDocument(ready=not problems, problems=problems, degraded=degraded)
        return _json_response(request, 503 if problems else 200, document.model_dump_json().encode())

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, with what the shards tell now, or told last if they are slow."""
        del request
        try:
            async with asyncio.timeout(METRICS_REFRESH_TIMEOUT_S):
                await self._service.watch.refresh()
        except TimeoutError:
            logger.warning("the shards did not answer within %s s of /metrics", METRICS_REFRESH_TIMEOUT_S)
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _handle(
        self, request: Request, method: str, answer: Callable[[Call, Request], Awaitable[bytes]]
    ) -> Response:
        try:
            with self._service.call("http", method) as call:
                return _json_response(request, 200, await answer(call, request))
        except ShardrankError as error:
            return error_response(request, error)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(request, ShardrankError("internal error; the server's log says more"))

    async def _rank(self, call: Call, request: Request) -> bytes:
        body = await read_body(request, self._service.limits.max_body_bytes)
        call.received = self._service.clock()
        self._service.admit(call)
        parse = partial(self._service.parse_rank, call, request.path_params["model"], body)
        parsed = await self._large.parse(len(body), parse)
        call.parsed = self._service.clock()
        answer = await self._service.rank(parsed, watch_client(request))
        answered = self._service.clock()
        encoded = await self._large.encode(answer.scores.size, lambda: encode(rank_document(answer)))
        self._service.metrics.answer_encoded(call, parsed, answered, self._service.clock())
        return encoded

    async def _lookup(self, call: Call, request: Request) -> bytes:
        body = await read_body(request, self._service.limits.max_body_bytes)
        call.received = self._service.clock()
        self._service.admit(call)
        parse = partial(self._service.parse_lookup, call, request.path_params["model"], body)
        parsed = await self._large.parse(len(body), parse)
        call.parsed = self._service.clock()
        answer = await self._service.lookup(parsed, watch_client(request))
        answered = self._service.clock()
        floats = sum(feature.values.size for feature in answer.embeddings.values())
        encoded = await self._large.encode(floats, lambda: encode(lookup_document(answer)))
        self._service.metrics.answer_encoded(call, parsed, answered, self._service.clock())
        return encoded

    async def _model(self, call: Call, request: Request) -> bytes:
        description = self._service.describe(request.path_params["model"])
        call.model = description.model
        return description.model_dump_json().encode()

    async def _models(self, call: Call, request: Request) -> bytes:
        del call, request
        return encode({"models": [description.model_dump() for description in self._service.models()]})


def error_response(request: Request, error: ShardrankError) -> Response:
    """An error in the API's own form."""
    request_id = request.headers.get(REQUEST_ID_HEADER, "")
    response = _json_response(request, error.http_status, encode(error_document(error, request_id)))
    if error.http_status == _RETRY_LATER:
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


def _json_response(request: Request, status: int, body: bytes) -> Response:
    response = Response(body, status, media_type=JSON)
    if (request_id := request.headers.get(REQUEST_ID_HEADER)) is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response
