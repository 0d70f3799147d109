"""A request that its connection answers without the application."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from uvicorn.protocols.http.flow_control import FlowControl

from serving.http.body import client_gone, too_large
from serving.http.direct import DirectRoute
from serving.http.disconnect import Disconnect
from serving.http.exchange import Body
from serving.http.reading import LongBody

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# A shorter rest is not worth a parser of its own.
_LONG_REST_BYTES = 16 * 2**10
# Memory for what a client has only announced is bounded by what it has sent.
_MAX_ROOM_RATIO = 16
_LENGTH_DIGITS = 18


class DirectExchange(Disconnect):
    """An `Exchange` over a connection, and what uvicorn's connection asks of its request/response cycles.

    Its body comes in parts, which are joined; or the rest is read to where it stays, if it is known to be long.

    Args:
        route: what answers it.
        fields: header values by name in lower case.
        transport: where it may ask for the rest of the body.
        flow: pauses reading.
        message_event: the connection's, set when a handler that waits for the body shall look again.
        max_kept_bytes: more of a body than this is counted, not kept.
        keep_alive: whether the connection may outlive the answer.

    Attributes:
        more_body: whether its body has not come to its end.
        response_started, response_complete: both become true when the answer is written.
        disconnected: whether its client has gone.
        task: runs its handler; None before and after.
    """

    __slots__ = (
        "_fields",
        "_flow",
        "_long_body",
        "_max_kept_bytes",
        "_parts",
        "_received",
        "_transport",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "response_started",
        "route",
        "task",
    )

    def __init__(
        self,
        route: DirectRoute,
        fields: Mapping[bytes, bytes],
        transport: asyncio.Transport,
        flow: FlowControl,
        message_event: asyncio.Event,
        max_kept_bytes: int,
        *,
        keep_alive: bool,
    ) -> None:
        self._callback = None
        self.disconnected = False
        self.route = route
        self.task: asyncio.Task[None] | None = None
        self.keep_alive = keep_alive
        self.message_event = message_event
        self.more_body = True
        self.response_started = self.response_complete = False
        self._fields = fields
        self._transport = transport
        self._flow = flow
        self._max_kept_bytes = max_kept_bytes
        self._parts: list[bytes] = []
        self._long_body: LongBody | None = None
        self._received = 0

    @property
    def target(self) -> str:
        """Method and path, for the log."""
        return f"POST {self.route.path}"

    @property
    def path_parameters(self) -> Mapping[str, str]:
        """Parts of the path by name."""
        return self.route.parameters

    def header(self, name: bytes) -> str | None:
        """The first header of that name."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self, max_body_bytes: int) -> Body:
        """The whole body. Raises BodyTooLargeError, ClientGoneError."""
        if self.more_body and self._fields.get(b"expect", b"").lower() == b"100-continue":
            self._ask_for_body()
        self._flow.resume_reading()
        while self.more_body and not self.disconnected and self._received <= max_body_bytes:
            self.message_event.clear()
            await self.message_event.wait()
        if self.disconnected:
            raise client_gone()
        if self._received > max_body_bytes:
            raise too_large(max_body_bytes, self._received)
        if self._long_body is not None:
            long_body, self._long_body = self._long_body, None
            return long_body.data
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def take(self, data: bytes) -> None:
        """A part of the body has come."""
        if self.response_complete:
            return
        self._received += len(data)
        if self._received <= self._max_kept_bytes:
            self._parts.append(data)
        else:
            self._parts.clear()
            self.message_event.set()

    def expect_rest(self) -> LongBody | None:
        """Makes room for the whole body, if a long rest of it is still to come: that is to be read there."""
        length = self._number(b"content-length") or 0
        longest = min(_MAX_ROOM_RATIO * self._received, self._max_kept_bytes)
        if self.response_complete or not self._received + _LONG_REST_BYTES <= length <= longest:
            return None
        numbers_after = self.route.numbers_after
        numbers_at = None if numbers_after is None else self._number(numbers_after)
        self._long_body = LongBody(length, self._parts, numbers_at)
        self._parts.clear()
        return self._long_body

    def end_body(self) -> None:
        """The body has come to its end."""
        self.more_body = False
        self.message_event.set()

    def finish(self) -> None:
        """Its answer is written: nothing that it held is needed any more."""
        self.response_started = self.response_complete = True
        self._callback = None
        self._long_body = None
        self._parts.clear()

    def _number(self, name: bytes) -> int | None:
        """What a header says; None if that is no number, or none that a length can be."""
        stated = self._fields.get(name, b"")
        return int(stated) if stated.isdigit() and len(stated) <= _LENGTH_DIGITS else None

    def _ask_for_body(self) -> None:
        if not (self._transport.is_closing() or self._received):
            self._transport.write(_CONTINUE)
