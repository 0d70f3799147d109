"""One HTTP/1.1 connection that costs little: whole requests written as prepared bytes, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias, cast

import httptools

MAX_BODY_BYTES = 16 << 20

OnAnswer: TypeAlias = Callable[["HttpConnection", int, bytes], None]
OnEnd: TypeAlias = Callable[["HttpConnection", str], None]


class PostRequest(NamedTuple):
    """A prepared request: its request line and headers, to which more can be added when it is sent, and its body."""

    head: bytes
    body: bytes


def post_request(host: str, port: int, path: str, headers: Mapping[str, str], body: bytes) -> PostRequest:
    """Return a POST request; `headers` must not have `host` or `content-length`."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"POST {path} HTTP/1.1", f"host: {at}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return PostRequest(("\r\n".join(lines) + "\r\n").encode("latin-1"), body)


class HttpConnection(asyncio.Protocol):
    """One connection.

    Args:
        on_answer: called with (self, status, body) for each whole answer. If `closed` is true by then, the answer was
            the last one.
        on_end: called once with (self, reason), when no answer will come any more. The request that was out, if any,
            has failed.

    Attributes:
        closed: whether no request may be sent.
        idle_since: for its owner, who may keep it for the next request.
    """

    def __init__(self, on_answer: OnAnswer, on_end: OnEnd) -> None:
        self.closed = False
        self.idle_since = 0.0
        self._on_answer = on_answer
        self._on_end = on_end
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        # uvloop's transports are not instances of asyncio's class.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: PostRequest, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send a request, with further headers; the one before it must have been answered."""
        assert self._transport is not None
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        self._transport.writelines([request.head, f"{lines}\r\n".encode("latin-1"), request.body])

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            # What its owner's callback raised is a defect, and no fault of the server's.
            self._end("a defect of the client")
            raise
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; called by the parser."""
        self._parts.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._end(f"an answer of more than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        """End the answer; called by the parser."""
        if self._ended:
            return
        # Before the next request is sent, since an answer may say that it is the last one of its connection.
        last = self.closed = not self._parser.should_keep_alive()
        parts, self._parts, self._body_bytes = self._parts, [], 0
        self._on_answer(self, self._parser.get_status_code(), parts[0] if len(parts) == 1 else b"".join(parts))
        if last:
            self._end("the answer before was the connection's last")

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self._end(f"the connection ended: {exc or 'closed by the server'}")

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._end("closed by the client")

    def _end(self, reason: str) -> None:
        self.closed = True
        if self._ended:
            return
        self._ended = True
        if self._transport is not None:
            self._transport.close()
        self._on_end(self, reason)
