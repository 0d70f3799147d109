"""What stands between a socket and uvicorn's HTTP protocol: the bounds that uvicorn does not have.

A gate frames HTTP/1.1 (RFC 9112) just enough to know where a request ends. It refuses whatever two readers could
understand differently, gives the protocol behind it one request at a time, and reads nothing ahead of an answer but
what one read had brought along. It bounds times, connections and work.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any, Literal, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loader.errors import ShardrankError
from serving.api.addresses import HANDSHAKE_S
from serving.api.http_framing import ChunkReader, header_too_large, read_head, without_upgrade
from serving.api.http_gates import READ_BYTES, Gates, refusal
from serving.api.listening_socket import forget_unsent
from serving.errors import MalformedRequestError, RequestTimeoutError, ServingError
from serving.formats.requests import Buffer

TURN_S = 0.005
"""Of the event loop, for one connection; then others come first."""
CONNECT_S = 50e-6
"""What a new connection costs the event loop before it brings a byte."""
# What a read costs the event loop outside of here. One that brings a usual packet's worth is nobody's fault.
_SHORT_READ_BYTES, _SHORT_READ_S = 512, 10e-6
# Work of a connection is told to its address in portions of so much.
_TELL_S = 0.001
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_Phase = Literal["head", "body", "chunks", "complete"]
CloseClient = Callable[[], None]


class _Wire(asyncio.Transport):
    """The transport that a gate shows to the protocol behind it."""

    def __init__(self, gate: Gate, transport: asyncio.Transport) -> None:
        super().__init__()
        self._gate = gate
        self._transport = transport
        # Each answer passes here several times.
        self.write = gate.write  # type: ignore[method-assign]

    def close(self) -> None:
        self._gate.close_by_protocol()

    def is_closing(self) -> bool:
        return self._gate.is_ended

    def pause_reading(self) -> None:
        self._gate.pause("protocol")

    def resume_reading(self) -> None:
        self._gate.resume("protocol")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class Gate(asyncio.BufferedProtocol):
    """One connection.

    Args:
        gates: of its listener.
        address: whose it is.

    Attributes:
        has_connected: whether there is a transport: with TLS, once hands are shaken.
        has_begun: whether some of a request has come, but not all of it.
        is_ended: whether nothing is read or written any more.
    """

    def __init__(self, gates: Gates, address: str) -> None:
        self._gates = gates
        self.address = address
        self.has_connected = self.has_begun = self.is_ended = False
        self._phase: _Phase = "head"
        self._held = b""
        self._left = 0
        self._body: memoryview | None = None
        self._chunks: ChunkReader
        self._owes = self._has_written = self._has_ended_sending = self._is_feeding = self._was_refused = False
        self._answer_head = b""
        self._paused_by: set[str] = set()
        self._watcher: CloseClient | None = None
        self._untaken: list[CloseClient] = []
        self._work_s = CONNECT_S
        # Of its handshake, until a request is answered.
        self._unpaid_s = HANDSHAKE_S if gates.is_tls else 0.0
        self._idle_work_s = 0.0
        self._answers = 0
        self._transport: asyncio.Transport
        self._protocol: HttpToolsProtocol | None = None
        self._is_lost = False

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        self._transport = transport
        self.has_connected = True
        self._gates.receiving[self] = self._gates.clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever works for this client."""
        self.is_ended = self._is_lost = True
        self._work_s += self._unpaid_s
        self._tell_work()
        self._gates.lose(self)
        self._taken()
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            watcher()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Give the room that is read into: of a long body, its own."""
        del sizehint
        if self._body is None:
            return self._gates.read_buffer
        return self._body[-self._left :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        body = self._body
        if body is None:
            self.data_received(bytes(self._gates.read_buffer[:nbytes]))
            return
        began = self._gates.clock()
        self._left -= nbytes
        if not self._left or not self._owes:
            # It is complete; or it was refused, and what follows is dropped as it comes.
            self._body = None
            if not self._left:
                self._complete()
            self._give(body[: len(body) - self._left])
        self._count_work(nbytes, began)

    def _count_work(self, nbytes: int, began: float) -> None:
        self._work_s += self._gates.clock() - began
        if nbytes < _SHORT_READ_BYTES and self.has_begun:
            self._work_s += _SHORT_READ_S
        if self._work_s > _TELL_S:
            self._tell_work()

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
                self._take_body(data)
            else:
                self._take_chunks(data)
        except ServingError as error:
            self._refuse(error)
        self._count_work(len(data), began)

    def eof_received(self) -> bool:
        """Answer what is complete, to a client that has ended sending."""
        if not self._owes or self._phase != "complete" or self.is_ended or self._gates.is_tls:
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
        if not self._owes:
            self._taken()
        if self._protocol is not None:
            self._protocol.resume_writing()

    # What the application calls, by `scope["state"]["gate"]`.

    def time_remaining(self) -> None:
        """Say that an HTTP client sets no deadline here."""

    def watch(self, callback: CloseClient) -> None:
        """Have `callback` called when the client leaves before its answer: at once, if it has left already."""
        if self._is_lost:
            callback()
        else:
            self._watcher = callback

    @property
    def owner(self) -> str:
        """The account of its address; "" for one that stands for many."""
        return self._gates.addresses.owner(self.address)

    def when_taken(self, callback: CloseClient) -> None:
        """Have `callback` called when the answer that comes next is sent, or the client has left."""
        if self._is_lost:
            callback()
        else:
            self._untaken.append(callback)

    def answered(self) -> None:
        """Go on to the next request: the answer to this one is written as a whole."""
        self._watcher = None
        self._owes = False
        if self._answer_head:
            self._flush()
        if self._untaken and self not in self._gates.unread:
            self._taken()
        self._answers += 1
        self._idle_work_s = self._unpaid_s = 0.0
        gates = self._gates
        if self.is_ended:
            return
        if self._phase != "complete":
            gates.receiving.pop(self, None)
            gates.lingering[self] = gates.clock()
        elif self._has_ended_sending and not self._held:
            self.end()
        else:
            self._await_next()

    # What the listener calls.

    def begin_drain(self) -> None:
        """Make the answer that is owed the connection's last."""
        if self._owes and self._protocol is not None:
            self._protocol.shutdown()

    def is_between_requests(self) -> bool:
        """Say whether no request is here, not even in part."""
        return self._phase == "head" and not self.has_begun and not self._held and not self.is_ended

    def may_bring_request(self) -> bool:
        """Say whether a request may be on its way: the first one, or one that has come and was not read yet."""
        if self._protocol is None:
            return True
        return bool(self._poll(select.POLLIN) & select.POLLIN)

    def was_reset(self) -> bool:
        """Say whether the peer has ended the connection for good, which nobody sees while nothing is read."""
        return bool(self._poll(0))

    def _poll(self, events: int) -> int:
        """Ask the kernel which of `events` the socket has; POLLHUP if it is closed, which nobody was told of yet."""
        connection = self._transport.get_extra_info("socket")
        if connection is None:
            return select.POLLHUP
        poller = select.poll()
        poller.register(connection.fileno(), events)
        ready = poller.poll(0)
        return ready[0][1] if ready else 0

    def end(self) -> None:
        """Close the connection, once all that was written is sent."""
        if not self.is_ended:
            if self._answer_head:
                self._flush()
            self.is_ended = True
            self._held, self._body = b"", None
            self._gates.forget(self)
            self._gates.closing[self] = self._gates.clock()
            self._transport.close()

    def drop(self) -> None:
        """Close the connection now."""
        self.is_ended = True
        if (connected := self._transport.get_extra_info("socket")) is not None:
            forget_unsent(connected)
        self._transport.abort()

    def end_late(self) -> None:
        """End a connection whose request was not complete in time."""
        if not self.has_begun:
            self.end()
            return
        limit = f"receive_timeout_s = {self._gates.limits.receive_timeout_s} s"
        self._refuse(RequestTimeoutError(f"the request was not complete after {limit}"))

    # What the protocol behind does to its transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send what belongs to an answer: its head together with what follows, by one system call."""
        if self._is_feeding:
            # Nobody answers that early but the parser, to what it can't read.
            self._was_refused = True
        elif self.is_ended:
            return
        elif self._has_written:
            head, self._answer_head = self._answer_head, b""
            self._transport.writelines((head, data) if head else (data,))
        elif data == _CONTINUE:
            self._transport.write(data)
        else:
            self._has_written, self._answer_head = True, bytes(data)

    def close_by_protocol(self) -> None:
        """End after an answer."""
        if not self._is_feeding:
            self.end()

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

    # How a request is framed.

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
        self._owes, self._has_written = True, False
        body_end = body_at + length
        if is_chunked:
            self._begin_chunks(data, body_at, now)
        elif len(data) < body_end:
            self._phase, self._left = "body", body_end - len(data)
            if not self.has_begun:
                self._begin_receiving(now)
            self._give(data)
            if READ_BYTES < self._left <= gates.limits.max_body_bytes and self._owes and not self.is_ended:
                # One copy, and one turn of whoever waits for it, in place of one for each read.
                self._body = memoryview(bytearray(self._left))
        else:
            if len(data) > body_end:
                data, self._held = data[:body_end], data[body_end:]
            self._complete()
            self._give(data)

    def _take_body(self, data: bytes) -> None:
        if len(data) > self._left:
            data, self._held = data[: self._left], data[self._left :]
        self._left -= len(data)
        if not self._left:
            self._complete()
        self._give(data)

    def _begin_chunks(self, data: bytes, body_at: int, now: float) -> None:
        self._phase, self._chunks = "chunks", ChunkReader(self._gates.limits.max_header_bytes)
        if not self.has_begun:
            self._begin_receiving(now)
        self._give(data[:body_at])
        if not self.is_ended:
            self._take_chunks(data[body_at:])

    def _take_chunks(self, data: bytes) -> None:
        """Take chunks apart, and give on what they hold as one."""
        clock = self._gates.clock
        until, chunks = clock() + TURN_S, self._chunks
        body = chunks.feed(data, lambda: clock() < until)
        given = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        if chunks.is_complete:
            self._held, chunks.rest = chunks.rest, b""
            self._complete()
            given += b"0\r\n\r\n"
        elif chunks.is_interrupted:
            self._go_on_later()
        if given:
            self._give(given)

    def _give(self, data: Buffer) -> None:
        """Feed the protocol behind."""
        protocol = self._protocol
        if protocol is None:
            protocol = self._protocol = self._gates.new_protocol({"gate": self})
            protocol.connection_made(_Wire(self, self._transport))
        self._is_feeding = True
        try:
            # It takes whatever is a buffer.
            protocol.data_received(cast(bytes, data))
        finally:
            self._is_feeding = False
        if self._was_refused:
            self._refuse(MalformedRequestError("", "not HTTP/1.1: the request line is not understood"))
            return
        if self._gates.is_draining and self._owes:
            protocol.shutdown()
        if self._phase == "complete":
            if self._held:
                self.pause("ahead")
            if not self._owes:
                # The body was refused early, and dropped to its end.
                self._await_next()

    def _taken(self) -> None:
        untaken, self._untaken = self._untaken, []
        for callback in untaken:
            callback()

    def _flush(self) -> None:
        """Send the head of an answer that has nothing else."""
        head, self._answer_head = self._answer_head, b""
        if not self.is_ended:
            self._transport.write(head)

    def _complete(self) -> None:
        self._phase = "complete"
        self.has_begun = False
        self._gates.receiving.pop(self, None)
        self._gates.lingering.pop(self, None)

    def _begin_receiving(self, now: float) -> None:
        self.has_begun = True
        receiving = self._gates.receiving
        receiving.pop(self, None)
        receiving[self] = now
        self._gates.idle.pop(self, None)

    def _await_next(self) -> None:
        self._phase = "head"
        if self._held:
            self._go_on_later()
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

    # How it ends.

    def _refuse(self, error: ShardrankError) -> None:
        """Answer without the application, and close. A handler that waits for the body learns that the client left."""
        self._gates.note(error.kind)
        is_answered = self._has_written if self._owes else self._phase != "head"
        if not (is_answered or self.is_ended):
            self._transport.write(refusal(error, self._gates.state.default_headers))
        self.end()

    def _tell_work(self) -> None:
        """Charge the address; end a connection that costs much and completes nothing."""
        gates, work_s, answers = self._gates, self._work_s, self._answers
        self._work_s, self._answers = 0.0, 0
        is_over = gates.addresses.spent(self.address, work_s)
        if answers:
            gates.addresses.completed(self.address, answers)
            return
        self._idle_work_s += work_s
        if (is_over or self._idle_work_s > gates.max_work_s) and not self._is_lost:
            gates.note("penalty")
            gates.addresses.punish(self.address)
            self.drop()
