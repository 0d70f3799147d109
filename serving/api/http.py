"""The HTTP API as a plain ASGI application: it ranks by itself, and has the documents' application do all else."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loader.errors import OverloadedError, ShardrankError
from serving.api.bodies import CODINGS, HttpReply, defect_reply, error_reply, expand, read_body
from serving.api.documents import create_documents
from serving.api.http_gate import Gate
from serving.api.tokens import Tokens
from serving.errors import InvalidRequestError
from serving.formats.infer import InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec
from serving.observe.traces import TRACEPARENT, Parent, parent_of
from serving.rank.service import RankingService, answer

PROTOBUF = b"application/x-protobuf"
_REQUEST_ID = b"x-request-id"
# No colon in a model's name, so that what follows one can only be an action.
_ROUTE = re.compile(
    r"/v1/models/(?P<model>[^/:]+):(?P<method>rank|lookup)"
    r"|/v2/models/(?P<infer>[^/:]+)(?:/versions/(?P<version>[^/]+))?/infer"
)

# Of a head: whether it is its connection's last, or may be; and its id.
_MAY_BE_LAST = re.compile(rb"\r\nconnection:(?![ \t]*keep-alive[ \t]*\r\n)", re.IGNORECASE)
_ID_LINE = re.compile(rb"\r\nx-request-id:([^\r]*+)", re.IGNORECASE)

Headers = dict[bytes, bytes]


class HttpApp:
    """The HTTP API of a service, behind gates; `documents` has all other paths. Without `tokens` all is allowed."""

    def __init__(self, service: RankingService, tokens: Tokens | None = None) -> None:
        self._service = service
        self._tokens = tokens
        # Of the requests whose heads are read in this turn of the event loop.
        self._let_in = 0
        self._refusal: OverloadedError | None = None
        self._refused: Counter[tuple[str, str]] = Counter()
        self.documents = create_documents(service, tokens)

    def refuse(self, head: bytes) -> HttpReply | None:
        """Refuse a request that would wait in vain, by its head: for much less work than a call of this application.

        Its token is not checked: the refusal says nothing of what is served.
        """
        verb, target, rest = head.split(b" ", 2)
        if verb != b"POST" or not rest.startswith(b"HTTP/1.1") or _MAY_BE_LAST.search(rest) is not None:
            return None
        # A path that has to be decoded, or cut, is for the application.
        match = None if b"%" in target or b"?" in target else _ROUTE.fullmatch(target.decode("ascii"))
        if match is None:
            return None
        api, method = ("oip_http", "rank") if match["model"] is None else ("http", match["method"])
        if not (self._let_in or self._refused):
            asyncio.get_running_loop().call_soon(self._end_turn)
        # In so short a time next to nothing is done of what waits: whoever comes behind a refused one is refused too.
        error = self._refusal = self._refusal or self._service.overload(None, self._let_in)
        if error is None:
            self._let_in += 1
            return None
        self._refused[api, method] += 1
        found = _ID_LINE.search(rest)
        request_id = "" if found is None else found[1].strip(b" \t").decode("latin-1")
        reply = error_reply(match.string, request_id, error)
        return reply._replace(headers=((_REQUEST_ID.decode(), request_id), *reply.headers)) if found else reply

    def _end_turn(self) -> None:
        """Count the refused; forget whom was let in: whoever is complete is about to be queued."""
        for (api, method), count in self._refused.items():
            self._service.refused(api, method, OverloadedError.kind, count)
        self._refused.clear()
        self._let_in, self._refusal = 0, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        match = _ROUTE.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if match is None:
            await answer_whole(self.documents, scope, receive, send)
            return
        gate: Gate = scope["state"]["gate"]
        # Of several headers of a name the first counts.
        headers: Headers = dict(reversed(scope["headers"]))
        parent = None
        if self._service.tracer is not None and TRACEPARENT in headers:
            parent = parent_of(headers, scope["headers"])
        reply = await self._answered(match, headers, receive, gate, parent)
        lines = [(b"content-type", reply.content_type.encode()), (b"content-length", b"%d" % len(reply.body))]
        if (request_id := headers.get(_REQUEST_ID)) is not None:
            lines.append((_REQUEST_ID, request_id))
        for name, value in reply.headers:
            lines.append((name.encode("latin-1"), value.encode("latin-1")))
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        await send({"type": "http.response.body", "body": reply.body})
        gate.answered(scope["state"]["protocol"])

    async def _answered(
        self, match: re.Match[str], headers: Headers, receive: Receive, gate: Gate, parent: Parent | None
    ) -> HttpReply:
        max_bytes = self._service.limits.max_body_bytes
        try:
            if self._tokens is not None:
                authorization = headers.get(b"authorization")
                self._tokens.check(None if authorization is None else _text(authorization), "rank")
            codec, codings = _codec(match, headers)

            async def body() -> bytes:
                coding = _text(headers.get(b"content-encoding")).lower() or "identity"
                if coding != "identity" and coding not in codings:
                    others = f", or coded as {' or '.join(codings)}" if codings else ""
                    says = f"{coding[:40]!r} is not supported; send the body as it is{others}"
                    raise InvalidRequestError("content-encoding", says, kind="invalid_field")
                data = await read_body(receive, "max_body_bytes", max_bytes, headers.get(b"content-length"))
                if coding == "identity":
                    return data
                return await expand(data, max_bytes, gate.bytes, gate.spent, self._service.expanding)

            encoded = await answer(self._service, codec, body, gate, parent)
            return HttpReply(200, encoded.body, encoded.content_type, encoded.headers)
        except ShardrankError as error:
            return error_reply(match.string, _text(headers.get(_REQUEST_ID)), error)
        except Exception:
            return defect_reply(match.string, _text(headers.get(_REQUEST_ID)))


async def answer_whole(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run another application; give the request's id back, and tell the gate when the answer is complete."""
    is_complete = False

    async def sending(message: Message) -> None:
        nonlocal is_complete
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *request_id]
        await send(message)
        is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    request_id = [header for header in scope["headers"] if header[0] == _REQUEST_ID][:1]
    try:
        await app(scope, receive, sending)
    except Exception:
        # The application has answered it, and logged; what it has not, the server answers.
        if not is_complete:
            raise
    if is_complete:
        scope["state"]["gate"].answered(scope["state"]["protocol"])


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


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")
