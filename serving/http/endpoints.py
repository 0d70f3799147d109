"""The handlers of the HTTP API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from loader.errors import ShardrankError
from serving.formats.codecs import json_codec
from serving.formats.json_writer import RETRY_AFTER_S, encode, error_document
from serving.formats.requests import Method
from serving.http.body import content_coding, read_body
from serving.http.documents import ReadyDocument
from serving.http.exchange import REQUEST_ID, Body, Exchange, Reply, reply_to
from serving.http.large_work import LargeWork
from serving.observe.metrics import CONTENT_TYPE
from serving.observe.times import Call
from serving.rank.answer import answer
from serving.rank.service import RankingService

logger = logging.getLogger(__name__)

_REQUEST_ID_NAME = REQUEST_ID.encode()
_RETRY_AFTER = (("retry-after", str(RETRY_AFTER_S)),)
_RETRY_LATER = 503
METRICS_REFRESH_TIMEOUT_S = 1.0


class Endpoints:
    """Handlers over one service. Each takes a request and gives the whole answer."""

    def __init__(self, service: RankingService, large: LargeWork) -> None:
        self._service = service
        self._large = large

    def rank(self, exchange: Exchange) -> Awaitable[Reply]:
        """`POST /v1/models/{model}:rank`."""
        return self._answer(exchange, "rank")

    def lookup(self, exchange: Exchange) -> Awaitable[Reply]:
        """`POST /v1/models/{model}:lookup`."""
        return self._answer(exchange, "lookup")

    async def model(self, exchange: Exchange) -> Reply:
        """`GET /v1/models/{model}`."""
        return await self._handle(exchange, "model", self._model)

    async def models(self, exchange: Exchange) -> Reply:
        """`GET /v1/models`."""
        return await self._handle(exchange, "models", self._models)

    async def healthz(self, exchange: Exchange) -> Reply:
        """`GET /healthz`: the process runs."""
        return reply_to(exchange, 200, b'{"status":"ok"}')

    async def readyz(self, exchange: Exchange) -> Reply:
        """`GET /readyz`: every configured model is live and its shards answer. Rows that lag don't change that."""
        problems = self._service.watch.problems()
        degraded = self._service.watch.degraded()
        document = ReadyDocument(ready=not problems, problems=problems, degraded=degraded)
        return reply_to(exchange, 503 if problems else 200, document.model_dump_json().encode())

    async def metrics(self, exchange: Exchange) -> Reply:
        """`GET /metrics`, with what the shards tell now, or told last if they are slow."""
        del exchange
        try:
            async with asyncio.timeout(METRICS_REFRESH_TIMEOUT_S):
                await self._service.watch.refresh()
        except TimeoutError:
            logger.warning("the shards did not answer within %s s of /metrics", METRICS_REFRESH_TIMEOUT_S)
        return Reply(200, self._service.metrics.render(), CONTENT_TYPE)

    async def _handle(
        self, exchange: Exchange, method: str, answer: Callable[[Call, Exchange], Awaitable[bytes]]
    ) -> Reply:
        try:
            with self._service.call("http", method) as call:
                return reply_to(exchange, 200, await answer(call, exchange))
        except ShardrankError as error:
            return error_reply(exchange, error)
        except Exception:
            logger.exception("%s failed", exchange.target)
            return error_reply(exchange, ShardrankError("internal error; the server's log says more"))

    async def _answer(self, exchange: Exchange, method: Method) -> Reply:
        async def receive() -> Body:
            content_coding(exchange)
            return await read_body(exchange, self._service.limits.max_body_bytes)

        codec = json_codec(method, exchange.path_parameters["model"])
        try:
            return reply_to(exchange, 200, (await answer(self._service, codec, receive, HttpClient(exchange))).body)
        except ShardrankError as error:
            return error_reply(exchange, error)
        except Exception:
            logger.exception("%s failed", exchange.target)
            return error_reply(exchange, ShardrankError("internal error; the server's log says more"))

    async def _model(self, call: Call, exchange: Exchange) -> bytes:
        description = self._service.describe(exchange.path_parameters["model"])
        call.model = description.model
        return description.model_dump_json().encode()

    async def _models(self, call: Call, exchange: Exchange) -> bytes:
        del call, exchange
        return encode({"models": [description.model_dump() for description in self._service.models()]})


class HttpClient:
    """Whoever waits behind an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.watch = exchange.watch_client

    def time_remaining(self) -> None:
        """HTTP has no deadline."""


def error_reply(exchange: Exchange, error: ShardrankError) -> Reply:
    """An error in the API's own form."""
    request_id = exchange.header(_REQUEST_ID_NAME) or ""
    body = encode(error_document(error, request_id))
    headers = _RETRY_AFTER if error.http_status == _RETRY_LATER else ()
    return reply_to(exchange, error.http_status, body, headers=headers)
