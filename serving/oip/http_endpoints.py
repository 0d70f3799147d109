"""The handlers of the protocol's HTTP API. Errors are `{"error": text}`; their kind is in a header."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from loader.errors import ShardrankError
from serving.errors import MalformedRequestError, RepositoryControlError, printable
from serving.formats.codecs import infer_http_codec
from serving.formats.infer import parse_version
from serving.formats.json_writer import MAX_MESSAGE_CHARS, RETRY_AFTER_S, encode
from serving.http.body import IDENTITY, as_text, content_coding, read_body
from serving.http.endpoints import HttpClient
from serving.http.exchange import Body, Exchange, Reply, reply_to
from serving.http.large_work import LargeWork
from serving.observe.times import Call
from serving.oip import documents
from serving.oip.body_coding import CODINGS, expand
from serving.rank.answer import answer
from serving.rank.service import RankingService

logger = logging.getLogger(__name__)

BINARY = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
ERROR_KIND = "shardrank-error-kind"
HEADER_LENGTH_NAME = HEADER_LENGTH.encode()
# What is compressed may become about that much longer in usual cases; it decides which bodies leave the event loop.
_USUAL_RATIO = 16
# Binary tensors are only copied and checked.
_BINARY_IS_CHEAPER = 16
_RETRY_LATER = 503


class _IndexBody(msgspec.Struct):
    ready: bool = False


class InferEndpoints:
    """Handlers over one service. Each takes a request and gives the whole answer.

    Args:
        service: answers.
        large: takes long JSON off the event loop.
    """

    def __init__(self, service: RankingService, large: LargeWork) -> None:
        self._service = service
        self._large = large

    def infer(self, exchange: Exchange) -> Awaitable[Reply]:
        """`POST /v2/models/{model}[/versions/{version}]/infer`."""
        return self._answer(exchange)

    async def _answer(self, exchange: Exchange) -> Reply:
        async def receive() -> Body:
            is_compressed = content_coding(exchange, CODINGS) != IDENTITY
            body = await read_body(exchange, self._service.limits.max_body_bytes)
            return expand(body, self._service.limits.max_body_bytes) if is_compressed else body

        codec = infer_http_codec(*_model(exchange), exchange.header(HEADER_LENGTH_NAME))
        try:
            encoded = await answer(self._service, codec, receive, HttpClient(exchange))
            return reply_to(exchange, 200, encoded.body, encoded.content_type, encoded.headers)
        except ShardrankError as error:
            return error_reply(exchange, error)
        except Exception:
            logger.exception("%s failed", exchange.target)
            return error_reply(exchange, ShardrankError("internal error; the server's log says more"))

    async def server_metadata(self, exchange: Exchange) -> Reply:
        """`GET /v2`."""
        return await self._tell(exchange, documents.server_metadata)

    async def live(self, exchange: Exchange) -> Reply:
        """`GET /v2/health/live`: the process runs."""
        return reply_to(exchange, 200, b"")

    async def ready(self, exchange: Exchange) -> Reply:
        """`GET /v2/health/ready`: as `/readyz`."""
        return reply_to(exchange, 503 if self._service.watch.problems() else 200, b"")

    async def model_ready(self, exchange: Exchange) -> Reply:
        """`GET /v2/models/{model}[/versions/{version}]/ready`."""

        async def answer(call: Call, exchange: Exchange) -> Reply:
            del call
            model, version = _model(exchange)
            is_ready = documents.model_is_ready(self._service, model, version)
            if not is_ready:
                # Says why, unless the version is here and something else keeps it from answering.
                self._service.lease(model, parse_version(version)).release()
            return reply_to(exchange, 200 if is_ready else 503, b"")

        return await self._handle(exchange, "model", answer)

    async def model_metadata(self, exchange: Exchange) -> Reply:
        """`GET /v2/models/{model}[/versions/{version}]`."""
        return await self._tell(exchange, lambda: documents.model_metadata(self._service, *_model(exchange)))

    async def model_config(self, exchange: Exchange) -> Reply:
        """`GET /v2/models/{model}[/versions/{version}]/config`."""
        return await self._tell(exchange, lambda: documents.model_config(self._service, *_model(exchange)))

    async def statistics(self, exchange: Exchange) -> Reply:
        """`GET /v2/models[/{model}[/versions/{version}]]/stats`."""
        return await self._tell(exchange, lambda: documents.model_statistics(self._service, *_model(exchange)))

    async def repository_index(self, exchange: Exchange) -> Reply:
        """`POST /v2/repository/index`."""

        async def answer(call: Call, exchange: Exchange) -> Reply:
            del call
            content_coding(exchange)
            body = as_text(await read_body(exchange, self._service.limits.max_body_bytes))
            try:
                ready_only = bool(body) and msgspec.json.decode(body, type=_IndexBody).ready
            except msgspec.MsgspecError as error:
                raise MalformedRequestError(
                    "", f'the body must be empty, or such as {{"ready": true}}: {error}'
                ) from error
            index = documents.repository_index(self._service, ready_only=ready_only)
            return reply_to(exchange, 200, encode(index))

        return await self._handle(exchange, "model", answer)

    async def repository_control(self, exchange: Exchange) -> Reply:
        """`POST /v2/repository/models/{model}/load` and `unload`, which are refused."""

        def refuse() -> Any:
            raise RepositoryControlError()

        return await self._tell(exchange, refuse)

    async def _tell(self, exchange: Exchange, document: Callable[[], Any]) -> Reply:
        async def answer(call: Call, exchange: Exchange) -> Reply:
            del call
            return reply_to(exchange, 200, encode(document()))

        return await self._handle(exchange, "model", answer)

    async def _handle(
        self, exchange: Exchange, method: str, answer: Callable[[Call, Exchange], Awaitable[Reply]]
    ) -> Reply:
        try:
            with self._service.call("oip_http", method) as call:
                return await answer(call, exchange)
        except ShardrankError as error:
            return error_reply(exchange, error)
        except Exception:
            logger.exception("%s failed", exchange.target)
            return error_reply(exchange, ShardrankError("internal error; the server's log says more"))


def error_reply(exchange: Exchange, error: ShardrankError) -> Reply:
    """An error in the protocol's form."""
    headers: tuple[tuple[str, str], ...] = ((ERROR_KIND, error.kind),)
    if error.http_status == _RETRY_LATER:
        headers = (*headers, ("retry-after", str(RETRY_AFTER_S)))
    message = printable(str(error), MAX_MESSAGE_CHARS)
    return reply_to(exchange, error.http_status, encode({"error": message}), headers=headers)


def _model(exchange: Exchange) -> tuple[str, str]:
    parameters = exchange.path_parameters
    return parameters.get("model", ""), parameters.get("version", "")
