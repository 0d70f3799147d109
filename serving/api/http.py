"""The HTTP API as a plain ASGI application: it ranks by itself, and has the documents' application do all else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loader.errors import ShardrankError
from serving.api.body_coding import CODINGS, expand
from serving.api.documents import create_documents
from serving.api.replies import REQUEST_ID, Reply, Tokens, defect_reply, error_reply, header_lines
from serving.errors import BodyTooLargeError, ClientGoneError, InvalidFieldError
from serving.formats.codecs import infer_http_codec, json_codec, message_codec
from serving.rank.answer import Client, Codec, answer
from serving.service import RankingService

PROTOBUF = b"application/x-protobuf"
_IDENTITY = "identity"
_LENGTH_DIGITS = 18
# No colon in a model's name, so that what follows one can only be an action.
_ROUTE = re.compile(
    r"/v1/models/(?P<model>[^/:]+):(?P<method>rank|lookup)"
    r"|/v2/models/(?P<infer>[^/:]+)(?:/versions/(?P<version>[^/]+))?/infer"
)

Headers = dict[bytes, bytes]


class _Hosted:
    """A client of whom the server tells nothing but what ASGI has words for."""

    def time_remaining(self) -> None:
        """None: HTTP clients set no deadline here."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Never call back."""

    def answered(self) -> None:
        """Nothing waits for that."""


_HOSTED = _Hosted()


class HttpApp:
    """The HTTP API of a service, for any ASGI server.

    A server may put a `Gate` into its state: it tells of clients that leave, and is told of answers that are complete.

    Args:
        service: answers.
        tokens: says who may do what; None lets everybody.

    Attributes:
        documents: the application for all other paths, which describes these ones too.
    """

    def __init__(self, service: RankingService, tokens: Tokens | None = None) -> None:
        self._service = service
        self._tokens = tokens
        self.documents = create_documents(service, self.reply, tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.documents(scope, receive, send)
            return
        if scope["method"] != "POST" or _ROUTE.fullmatch(scope["path"]) is None:
            await answer_whole(self.documents, scope, receive, send)
            return
        reply, request_id = await self._reply(scope, receive)
        headers = header_lines(reply, request_id)
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})
        gate_of(scope).answered()

    async def reply(self, scope: Scope, receive: Receive) -> Reply:
        """Answer a rank, lookup or infer request; errors are answers too."""
        return (await self._reply(scope, receive))[0]

    async def _reply(self, scope: Scope, receive: Receive) -> tuple[Reply, bytes | None]:
        # Of several headers of a name the first counts.
        headers: Headers = dict(reversed(scope["headers"]))
        request_id = headers.get(REQUEST_ID)
        try:
            reply = await self._answered(scope, headers, receive)
        except ShardrankError as error:
            reply = error_reply(scope["path"], _text(request_id), error)
        except Exception:
            reply = defect_reply(scope["path"], _text(request_id))
        return reply, request_id

    async def _answered(self, scope: Scope, headers: Headers, receive: Receive) -> Reply:
        if self._tokens is not None:
            authorization = headers.get(b"authorization")
            self._tokens.check(None if authorization is None else _text(authorization), "rank")
        match = cast(re.Match[str], _ROUTE.fullmatch(scope["path"]))
        codec, codings = _codec(match, headers)
        max_bytes = self._service.limits.max_body_bytes

        async def body() -> bytes:
            coding = _coding(headers, codings)
            data = await read_body(headers.get(b"content-length"), receive, max_bytes)
            return data if coding == _IDENTITY else await expand(data, max_bytes)

        client = cast(Client, gate_of(scope))
        encoded = await answer(self._service, codec, body, client)
        return Reply(200, encoded.body, encoded.content_type, encoded.headers)


async def answer_whole(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run another application, and tell the gate when its answer is complete."""
    is_complete = False

    async def sending(message: Message) -> None:
        nonlocal is_complete
        await send(message)
        is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    try:
        await app(scope, receive, sending)
    except Exception:
        # The application has answered it, and logged; what it has not, the server answers.
        if not is_complete:
            raise
    if is_complete:
        gate_of(scope).answered()


async def read_body(stated: bytes | None, receive: Receive, max_body_bytes: int) -> bytes:
    """Read a whole body.

    Args:
        stated: the header `Content-Length`.
        receive: of ASGI.
        max_body_bytes: the longest that it may be.

    Raises:
        BodyTooLargeError: before anything is read if its length says so, else as soon as too much has come.
        ClientGoneError: if the client leaves meanwhile.
    """
    unit = "bytes in the body"
    if stated is not None and stated.isdigit() and int(stated[:_LENGTH_DIGITS]) > max_body_bytes:
        raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, int(stated[:_LENGTH_DIGITS]), unit)
    message = await receive()
    if not message.get("more_body", False) and len(message.get("body", b"")) <= max_body_bytes:
        if message["type"] == "http.disconnect":
            raise _client_gone()
        whole: bytes = message.get("body", b"")
        return whole
    parts, received = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise _client_gone()
        part = message.get("body", b"")
        received += len(part)
        if received > max_body_bytes:
            raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {received}", unit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


def gate_of(scope: Scope) -> Any:
    """Find the connection's gate; something that does nothing, without one."""
    return scope.get("state", {}).get("gate", _HOSTED)


def _codec(match: re.Match[str], headers: Headers) -> tuple[Codec, tuple[str, ...]]:
    """Choose how a request is read, and the content codings that it may have."""
    model = match["model"]
    if model is None:
        length = headers.get(b"inference-header-content-length")
        return infer_http_codec(
            match["infer"], match["version"] or "", None if length is None else _text(length)
        ), CODINGS
    method: Literal["rank", "lookup"] = "rank" if match["method"] == "rank" else "lookup"
    content_type = headers.get(b"content-type", b"")
    if content_type == PROTOBUF or content_type.partition(b";")[0].strip().lower() == PROTOBUF:
        return message_codec(method, model), ()
    return json_codec(method, model), ()


def _coding(headers: Headers, allowed: tuple[str, ...]) -> str:
    coding = _text(headers.get(b"content-encoding")).lower() or _IDENTITY
    if coding != _IDENTITY and coding not in allowed:
        others = f", or coded as {' or '.join(allowed)}" if allowed else ""
        raise InvalidFieldError("content-encoding", f"{coding[:40]!r} is not supported; send the body as it is{others}")
    return coding


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")


def _client_gone() -> ClientGoneError:
    return ClientGoneError("the client closed the connection before its request was complete")
