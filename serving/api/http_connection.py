"""What stands between a socket and uvicorn's HTTP protocol: the bounds that uvicorn does not have.

A gate frames HTTP/1.1 (RFC 9112) just enough to know where a request ends, refuses what two readers could understand
differently, and gives the protocol behind it one request at a time. It bounds times, connections and work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import socket
import ssl as tls
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, takewhile
from typing import Literal, TypeAlias, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError
from serving.api.http_messages import (
    ChunkReader,
    Refuse,
    body_buffer,
    error_answer,
    header_too_large,
    read_head,
    whole_answer,
    without_upgrade,
)
from serving.api.listening import TURN_S, Accepted, ConnectionListener, CountFailure, forget_unsent
from serving.errors import malformed
from serving.formats.requests import Buffer
from serving.limits import RequestLimits
from shard_node.byte_budget import ByteAccount, ByteBudget, MessageBytes

logger = logging.getLogger(__name__)

# What a read costs the event loop outside of here. One that brings a usual packet's worth is nobody's fault.
_SHORT_READ_BYTES, _SHORT_READ_S = 512, 10e-6
READ_BYTES = 64 * 2**10
"""Read at once; as much may be held of requests that are sent ahead."""
LINGER_S = 1.0  # for the rest of a body that was refused to be dropped, so that the client gets to see the refusal
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_Phase = Literal["head", "body", "chunks", "complete"]


class HttpConnection(Accepted, asyncio.BufferedProtocol):
    """One connection.

    Attributes:
        is_feeding: whether the protocol behind reads, so that what it wants is no answer.
        owes: whether the protocol behind has a request that is not answered; `bytes` has its bytes and its answer's.
        has_begun: whether some of a request has come, but not all of it.
    """

    def __init__(self, gates: HttpListener, address: str) -> None:
        self._gates = gates
        self.address = address
        self.has_connected = self.has_begun = self.is_ended = self.is_feeding = self._is_lost = False
        self._phase: _Phase = "head"
        self._held, self._left = b"", 0
        self._body: memoryview | None = None
        self._chunks: ChunkReader
        self.owes = self._has_written = self._has_ended_sending = self._was_refused = self._is_dropped = False
        self._answer_head = b""
        self._paused_by: set[str] = set()
        self._watcher: Callable[[], None] | None = None
        self._unsent: list[Callable[[], None]] = []
        self._untaken: list[Callable[[], None]] = []
        self._idle_work_s = 0.0
        self._account = ByteAccount(gates.buffers, self._give_way)
        self.bytes = MessageBytes(self._account)
        self._transport: asyncio.Transport
        self._protocol: HttpToolsProtocol | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        self._transport = transport
        self.has_connected = True
        self._gates.receiving[self] = self._gates.clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever works for this client."""
        self.is_ended = self._is_lost = True
        self._held, self._body = b"", None
        self._gates.leave(self)
        self._unsent, self._untaken = self._unsent + self._untaken, []
        self._take()
        self._account.close()
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Give the room that is read into: of a long body, its own."""
        del sizehint
        if self._body is None:
            return self._gates.read_buffer
        return self._body[-self._left :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        if (body := self._body) is None:
            self.data_received(bytes(self._gates.read_buffer[:nbytes]))
            return
        began = self._gates.clock()
        self._left -= nbytes
        self._charge_body(nbytes)
        if not self._left or not self.owes:
            self._body = None
            if not self._left:
                self._complete()
            self._give(body[: len(body) - self._left])
        self._count_work(nbytes, began)

    def _count_work(self, nbytes: int, began: float) -> None:
        is_short = nbytes < _SHORT_READ_BYTES and self.has_begun
        # By the wall clock, and so no more than a turn: the processor may have been somewhere else for longer.
        self.spent(min(TURN_S, self._gates.clock() - began) + is_short * _SHORT_READ_S)

    def data_received(self, data: bytes) -> None:
        """Take bytes, of which the gate keeps what it needs."""
        if self.is_ended:
            return
        if self._phase == "complete":
            # Sent ahead. Nothing more is read before its turn has come.
            self._held += data
            self.pause("ahead")
            return
        began = self._gates.clock()
        try:
            if self._phase == "head":
                self._take_head(data, began)
            elif self._phase == "body":
                self._held, data = data[self._left :], data[: self._left]
                self._left -= len(data)
                self._charge_body(len(data))
                if not self._left:
                    self._complete()
                self._give(data)
            else:
                self._take_chunks(data)
        except ShardrankError as error:
            self._refuse(error)
        self._count_work(len(data), began)

    def eof_received(self) -> bool:
        """Answer what is complete, to a client that has ended sending."""
        if not self.owes or self._phase != "complete" or self.is_ended or self._gates.ssl is not None:
            return False
        self._has_ended_sending = True
        if not self._held:
            cast(HttpToolsProtocol, self._protocol).shutdown()
        return True

    def pause_writing(self) -> None:
        """Wait for a peer that does not take its answer, for so long."""
        self._gates.unread[self] = self._gates.clock()
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Go on: the peer takes it."""
        self._gates.unread.pop(self, None)
        self._take()
        if self._protocol is not None:
            self._protocol.resume_writing()

    def time_remaining(self) -> None:
        """Say that an HTTP client sets no deadline here."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client leaves before its answer: at once, if it has left already."""
        if self._is_lost:
            callback()
        else:
            self._watcher = callback

    def when_taken(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the answer that comes next is sent, or the client has left."""
        if self._is_lost:
            callback()
        else:
            self._untaken.append(callback)

    @property
    def connection(self) -> HttpConnection:
        """What stands for its connection."""
        return self

    def spent(self, seconds: float) -> None:
        """Count work for a request that is not answered yet; end a connection that costs much and completes nothing."""
        self._idle_work_s += seconds
        max_work_s = self._gates.limits.max_idle_work_ms / 1000 or math.inf
        if self._idle_work_s > max_work_s and not self.is_ended:
            self._gates.note("idle_work")
            self.drop()

    def answered(self, protocol: HttpToolsProtocol | None) -> None:
        """Go on to the next request: that of a protocol is answered, unless it was refused meanwhile."""
        if protocol is not self._protocol:
            return
        self._watcher = None
        self.owes = False
        self._flush()
        if self.bytes.held:
            self._untaken.append(self.bytes.refund_all)
            self.bytes = MessageBytes(self._account)
        if self._untaken:
            self._unsent, self._untaken = self._unsent + self._untaken, []
            if self not in self._gates.unread:
                self._take()
        self._idle_work_s = 0.0
        if self.is_ended:
            return
        if self._phase != "complete":
            self._gates.receiving.pop(self, None)
            self._gates.lingering[self] = self._gates.clock()
        else:
            self._await_next()

    def begin_drain(self) -> None:
        """Make the answer that is owed the connection's last."""
        if self.owes and self._protocol is not None:
            self._protocol.shutdown()

    def is_between_requests(self) -> bool:
        """Say whether no request is here, not even in part."""
        return self._phase == "head" and not self.has_begun and not self._held and not self.is_ended

    def may_bring_request(self) -> bool:
        """Say whether a request may be on its way: the first one, or one that has come and was not read yet."""
        return self._protocol is None or bool(self.poll(select.POLLIN) & select.POLLIN)

    def poll(self, events: int) -> int:
        """Return which of `events`, or the end, the kernel has of the socket; nobody sees it while nothing is read."""
        if (connected := self._transport.get_extra_info("socket")) is None:
            return select.POLLHUP
        poller = select.poll()
        poller.register(connected.fileno(), events)
        return sum(ready for _, ready in poller.poll(0))

    def end(self) -> None:
        """Close the connection, once all that was written is sent."""
        if not self.is_ended:
            self._flush()
            self.is_ended = True
            self._held, self._body = b"", None
            self.bytes.refund_all()
            self._gates.forget(self)
            self._gates.closing[self] = self._gates.clock()
            self._transport.close()

    def drop(self) -> None:
        """Close the connection now."""
        self.is_ended = True
        if (connected := self._transport.get_extra_info("socket")) is not None:
            forget_unsent(connected)
        self._transport.abort()

    def drop_unread(self) -> None:
        """Close the connection of a peer that does not take its answer."""
        self._gates.note("unread")
        self.drop()

    def end_late(self) -> None:
        """End a connection whose request was not complete in time."""
        if self.has_begun:
            limit = f"receive_timeout_s = {self._gates.limits.receive_timeout_s} s"
            self._refuse(DeadlineExceededError(f"the request was not complete after {limit}", kind="request_timeout"))
        else:
            self.end()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send what belongs to an answer: its head together with what follows, by one system call."""
        if self.is_feeding:
            # Nobody answers that early but the parser, to what it can't read.
            self._was_refused = True
        elif self.is_ended:
            return
        elif self._has_written:
            head, self._answer_head = self._answer_head, b""
            self.bytes.hold(len(data))
            self._transport.writelines((head, data) if head else (data,))
        elif data == _CONTINUE:
            self._transport.write(data)
        else:
            self._has_written, self._answer_head = True, bytes(data)

    def pause(self, by: str) -> None:
        """Read nothing more, until everybody who asked for that wants to go on."""
        if not self._paused_by and not self.is_ended:
            self._transport.pause_reading()
        self._paused_by.add(by)
        if by == "ahead":
            self._gates.ahead.add(self)

    def resume(self, by: str) -> None:
        """Read on."""
        if by in self._paused_by:
            self._paused_by.discard(by)
            if by == "ahead":
                self._gates.ahead.discard(self)
            if not self._paused_by and not self.is_ended:
                self._transport.resume_reading()

    def _take_head(self, data: bytes, now: float) -> None:
        gates, searched = self._gates, 0
        if self._held:
            searched = max(0, len(self._held) - 3)
            data = self._held + data
        elif data.startswith(b"\r\n"):
            # RFC 9112, 2.2: some send one behind a body.
            data = data[2:]
        end = data.find(b"\r\n\r\n", searched)
        max_header_bytes = gates.limits.max_header_bytes
        if (end + 4 if end >= 0 else len(data)) > max_header_bytes:
            raise header_too_large(max_header_bytes)
        if end < 0:
            self._held = data
            if data and not self.has_begun:
                self._begin_receiving(now)
            return
        self._held = b""
        length, is_chunked, has_upgrade = read_head(data, end)
        body_at = end + 4
        if has_upgrade:
            plain = without_upgrade(data[:body_at])
            data, body_at = plain + data[body_at:], len(plain)
        gates.idle.pop(self, None)
        self.owes, self._has_written = True, False
        body_end = body_at + length
        if (is_chunked or len(data) < body_end) and not self.has_begun:
            self._begin_receiving(now)
        self._is_dropped = False
        # A peer that takes no answers gets no more of them. The body of what is refused by its head is dropped.
        if not gates.is_draining and self not in gates.unread and (reply := gates.refuse(data[:body_at])) is not None:
            self._is_dropped = True
            self._transport.write(whole_answer(reply, gates.state.default_headers, is_last=False))
            self.answered(self._protocol)
        if not is_chunked:
            self._charge_body(min(len(data), body_end) - body_at)
        if is_chunked:
            self._phase, self._chunks = "chunks", ChunkReader(max_header_bytes)
            self._give(data[:body_at])
            if not self.is_ended:
                self._take_chunks(data[body_at:])
        elif len(data) < body_end:
            self._phase, self._left = "body", body_end - len(data)
            if READ_BYTES < self._left <= gates.limits.max_body_bytes and not self._is_dropped:
                # One copy and one turn of whoever waits for it.
                self._body = body_buffer(length)
                self._body[: -self._left] = data[body_at:]
                data = data[:body_at]
            self._give(data)
        else:
            if len(data) > body_end:
                data, self._held = data[:body_end], data[body_end:]
            self._complete()
            self._give(data)

    def _take_chunks(self, data: bytes) -> None:
        """Take chunks apart, and give on what they hold as one."""
        chunks, clock = self._chunks, self._gates.clock
        until = clock() + TURN_S
        body = chunks.feed(data, lambda: clock() < until)
        self._charge_body(len(body))
        given = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        if chunks.is_complete:
            self._held, chunks.rest = chunks.rest, b""
            self._complete()
            given += b"0\r\n\r\n"
        elif chunks.is_interrupted:
            self._go_on_later()
        if given:
            self._give(given)

    def _charge_body(self, num_bytes: int) -> None:
        """Count bytes that the application is to be given; refuse the request if there is no room for them."""
        if num_bytes and self.owes:
            try:
                self.bytes.charge(num_bytes)
            except OverloadedError as error:
                self._refuse_rest(error)

    def _refuse_rest(self, error: ShardrankError) -> None:
        """Answer a request that is not read to its end; what still comes of it is dropped, for a while."""
        self._gates.note(error.kind)
        if self._has_written:
            self.end()
            return
        protocol, self._protocol, self._body, self.owes = self._protocol, None, None, False
        if protocol is not None:
            protocol.connection_lost(None)  # it has half a request; the next one gets another
        self.bytes.refund_all()
        self._is_dropped = True
        self._transport.write(error_answer(error, self._gates.state.default_headers, is_last=False))
        self.resume("protocol")
        self.answered(None)

    def _give_way(self, error: ShardrankError) -> None:
        if self.bytes.held and self._phase in ("body", "chunks"):
            self._refuse_rest(error)

    def _give(self, data: Buffer) -> None:
        if self._is_dropped:
            if self._phase == "complete":
                self._await_next()
            return
        protocol = self._protocol
        if protocol is None:
            protocol = self._protocol = self._gates.new_protocol(self, self._transport, self._gates.state)
            if self in self._gates.unread:
                protocol.pause_writing()
        self.is_feeding = True
        try:
            protocol.data_received(cast(bytes, data))  # or whatever else is a buffer
        finally:
            self.is_feeding = False
        if self._was_refused:
            self._refuse(malformed("", "not HTTP/1.1: the request line is not understood"))
            return
        if self._gates.is_draining and self.owes:
            protocol.shutdown()
        if self._phase == "complete":
            if self._held:
                self.pause("ahead")
            if not self.owes:
                # The body was refused early, and dropped to its end.
                self._await_next()

    def _take(self) -> None:
        taken, self._unsent = self._unsent, []
        for callback in taken:
            callback()

    def _flush(self) -> None:
        if self._answer_head and not self.is_ended:
            self._transport.write(self._answer_head)
        self._answer_head = b""

    def _complete(self) -> None:
        self._phase = "complete"
        self.has_begun = False
        self._gates.receiving.pop(self, None)
        self._gates.lingering.pop(self, None)

    def _begin_receiving(self, now: float) -> None:
        self.has_begun = True
        # Again, so that it is the last one.
        self._gates.receiving.pop(self, None)
        self._gates.receiving[self] = now
        self._gates.idle.pop(self, None)

    def _await_next(self) -> None:
        self._phase = "head"
        if self._held:
            self._go_on_later()
        elif self._has_ended_sending or self._gates.is_draining:
            self.end()
        else:
            self._gates.idle[self] = self._gates.clock()
            self.resume("ahead")

    def _go_on_later(self) -> None:
        """Take what is held in another turn of the event loop; nothing is read until then."""
        self.pause("turn")
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self.is_ended:
            return
        self.resume("turn")
        data, self._held = self._held, b""
        self.data_received(data)
        if self._phase != "complete" or not self._held:
            self.resume("ahead")

    def _refuse(self, error: ShardrankError) -> None:
        """Answer without the application, and close. A handler that waits for the body learns that the client left."""
        self._gates.note(error.kind)
        is_answered = self._has_written if self.owes else self._phase != "head"
        if not (is_answered or self.is_ended):
            self._transport.write(error_answer(error, self._gates.state.default_headers))
        self.end()


NewProtocol: TypeAlias = Callable[[HttpConnection, asyncio.Transport, ServerState], HttpToolsProtocol]


class HttpListener(ConnectionListener[HttpConnection]):
    """What the connections of one listener share, and what they wait for: since when, the longest first.

    Attributes:
        is_draining: whether each answer is its connection's last.
        lingering: connections that have their answer and send the rest of a body all the same.
        unread: connections whose peer does not take its answer.
        ahead: connections that are not read from, because a request was sent ahead of an answer.
    """

    def __init__(
        self,
        new_protocol: NewProtocol,
        limits: RequestLimits,
        failed: CountFailure,
        buffers: ByteBudget,
        clock: Callable[[], float],
        ssl: tls.SSLContext | None = None,
        refuse: Refuse = lambda head: None,
    ) -> None:
        super().__init__(buffers, limits.max_connections, limits.receive_timeout_s, ssl)
        self.new_connection = partial(HttpConnection, self)
        self.limits, self.clock, self.refuse = limits, clock, refuse
        self.new_protocol, self._failed = new_protocol, failed
        self.is_draining = False
        self.state = ServerState()
        self._waiting: tuple[dict[HttpConnection, float], ...] = ({}, {}, {}, {}, {})
        self.idle, self.receiving, self.lingering, self.unread, self.closing = self._waiting
        self.ahead: set[HttpConnection] = set()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._ended: Counter[str] = Counter()

    def idle_connections(self) -> Iterable[HttpConnection]:
        """See `ConnectionListener`: then those of which nothing has come."""
        return chain(self.idle, (gate for gate in self.receiving if not gate.has_begun))

    def num_open(self) -> int:
        """See `ConnectionListener`."""
        return len(self.open) - len(self.closing)

    def tell_refused(self, connection: socket.socket, error: OverloadedError) -> None:
        """See `ConnectionListener`."""
        connection.send(error_answer(error, self.state.default_headers))

    def leave(self, connection: HttpConnection) -> None:
        """See `ConnectionListener`."""
        self.forget(connection)
        super().leave(connection)

    def note(self, kind: str) -> None:
        """Count what was refused, or ended. It is logged with others of its second, but TLS logs its own."""
        if not kind.startswith("tls_"):
            self._ended[kind] += 1
        self._failed("http", "connection", kind)

    def tell(self) -> None:
        """Log what was noted since the last time, in one line."""
        if self._ended:
            counts = ", ".join(f"{kind}: {count}" for kind, count in self._ended.most_common())
            logger.warning("HTTP connections refused or ended: %s", counts)
            self._ended.clear()

    def sweep(self) -> None:
        """End what has waited for too long."""
        timeout_s = self.limits.receive_timeout_s
        for waiting, allowed_s, end in (
            (self.receiving, timeout_s, HttpConnection.end_late),
            (self.idle, self.limits.keep_alive_s, HttpConnection.end),
            (self.lingering, LINGER_S, HttpConnection.end),
            (self.unread, timeout_s, HttpConnection.drop_unread),
            (self.closing, timeout_s, HttpConnection.drop),
        ):
            before = self.clock() - allowed_s
            for gate in list(takewhile(lambda gate: waiting[gate] <= before, waiting)):  # noqa: B023  # used at once
                waiting.pop(gate, None)
                end(gate)
        for gate in [gate for gate in self.ahead if gate.poll(0)]:
            gate.drop()

    def forget(self, gate: HttpConnection) -> None:
        """Take a connection out of all that wait."""
        for waiting in self._waiting:
            waiting.pop(gate, None)
        self.ahead.discard(gate)
