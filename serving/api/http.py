"""The HTTP API as a plain ASGI application: it ranks by itself, and has the documents' application do all else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, Protocol, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loader.errors import ShardrankError
from serving.api.body_coding import CODINGS, expand
from serving.api.documents import create_documents
from serving.api.replies import REQUEST_ID, Reply, defect_reply, error_reply, header_lines
from serving.api.tokens import Tokens
from serving.errors import BodyTooLargeError, ClientGoneError, InvalidFieldError
from serving.formats.infer import InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec
from serving.rank.answer import Client as WaitingClient
from serving.rank.answer import answer
from serving.rank.service import RankingService

PROTOBUF = b"application/x-protobuf"
_IDENTITY = "identity"
_LENGTH_DIGITS = 18
# No colon in a model's name, so that what follows one can only be an action.
_ROUTE = re.compile(
    r"/v1/models/(?P<model>[^/:]+):(?P<method>rank|lookup)"
    r"|/v2/models/(?P<infer>[^/:]+)(?:/versions/(?P<version>[^/]+))?/infer"
)

Headers = dict[bytes, bytes]


class Client(WaitingClient, Protocol):
    """The connection that a request came by."""

    def answered(self) -> None:
        """Take note that its answer is complete."""


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
        match = _ROUTE.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if match is None:
            await answer_whole(self.documents, scope, receive, send)
            return
        gate: Client = gate_of(scope)
        # Of several headers of a name the first counts.
        headers: Headers = dict(reversed(scope["headers"]))
        reply = await self._answered(match, headers, receive, gate)
        lines = header_lines(reply, headers.get(REQUEST_ID))
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        await send({"type": "http.response.body", "body": reply.body})
        gate.answered()

    async def reply(self, scope: Scope, receive: Receive) -> Reply:
        """Answer a rank, lookup or infer request; errors are answers too."""
        match = cast(re.Match[str], _ROUTE.fullmatch(scope["path"]))
        return await self._answered(match, dict(reversed(scope["headers"])), receive, gate_of(scope))

    async def _answered(self, match: re.Match[str], headers: Headers, receive: Receive, client: Client) -> Reply:
        max_bytes = self._service.limits.max_body_bytes
        try:
            if self._tokens is not None:
                authorization = headers.get(b"authorization")
                self._tokens.check(None if authorization is None else _text(authorization), "rank")
            codec, codings = _codec(match, headers)

            async def body() -> bytes:
                coding = headers.get(b"content-encoding")
                is_plain = coding is None or _is_identity(coding, codings)
                data = await read_body(headers.get(b"content-length"), receive, max_bytes)
                return data if is_plain else await expand(data, max_bytes)

            encoded = await answer(self._service, codec, body, client)
            return Reply(200, encoded.body, encoded.content_type, encoded.headers)
        except ShardrankError as error:
            return error_reply(match.string, _text(headers.get(REQUEST_ID)), error)
        except Exception:
            return defect_reply(match.string, _text(headers.get(REQUEST_ID)))


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
    parts: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection before its request was complete")
        part = message.get("body", b"")
        received += len(part)
        if received > max_body_bytes:
            raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {received}", unit)
        parts.append(part)
        if not message.get("more_body", False):
            return part if len(parts) == 1 else b"".join(parts)


def gate_of(scope: Scope) -> Client:
    """Find the connection's gate; something that does nothing, without one."""
    client: Client = scope.get("state", {}).get("gate", _HOSTED)
    return client


def _codec(match: re.Match[str], headers: Headers) -> tuple[Codec, tuple[str, ...]]:
    """Choose how a request is read, and the content codings that it may have."""
    model = match["model"]
    if model is None:
        length = headers.get(b"inference-header-content-length")
        return InferHttpCodec(
            match["infer"], match["version"] or "", None if length is None else _text(length)
        ), CODINGS
    method: Literal["rank", "lookup"] = "rank" if match["method"] == "rank" else "lookup"
    content_type = headers.get(b"content-type", b"")
    if content_type == PROTOBUF or content_type.partition(b";")[0].strip().lower() == PROTOBUF:
        return MessageCodec(method, model), ()
    return JsonCodec(method, model), ()


def _is_identity(stated: bytes, allowed: tuple[str, ...]) -> bool:
    """Say whether a body is as it is, or else compressed in one of the ways that are allowed."""
    coding = _text(stated).lower()
    if coding in (_IDENTITY, ""):
        return True
    if coding not in allowed:
        others = f", or coded as {' or '.join(allowed)}" if allowed else ""
        raise InvalidFieldError("content-encoding", f"{coding[:40]!r} is not supported; send the body as it is{others}")
    return False


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")
