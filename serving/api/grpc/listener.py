"""HTTP/2 on sockets: a port, its connections, and how they share the event loop. Nothing here knows gRPC."""

from __future__ import annotations

import abc
import asyncio
import fcntl
import ssl as tls
import struct
import termios
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from heapq import nsmallest
from typing import cast

from loader.errors import OverloadedError
from serving.api.grpc.connection import Connection, Phase, Stream
from serving.api.grpc.wire import ConnectionLimits, ErrorCode, HeaderList, Http2Error
from shard_node.byte_budget import ByteAccount, ByteBudget
from shard_node.wire.listening import MAX_READ_S, Accepted, ConnectionListener, forget_unsent

MAX_BEGUN_CALLS = 16
"""That one connection may begin in an iteration: each parses its message in the next one."""
LINGER_S, MAX_TICK_S = 1.0, 1.0


class Http2Protocol(Connection, Accepted, asyncio.Protocol):
    """One connection and its socket."""

    def __init__(self, listener: Http2Listener, address: str) -> None:
        super().__init__(listener.limits, listener.clock)
        self.listener, self.loop, self.address = listener, listener.loop, address
        self.account = ByteAccount(listener.buffers, self._give_way)
        self._begun: list[int] = []
        # To be called once the responses of streams are sent.
        self._on_sent: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._idle_work_s = 0.0
        self._num_written = 0
        self._will_flush = self._is_waiting = self._is_lingering = self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings."""
        self._transport = cast(asyncio.Transport, transport)
        self.has_connected = True
        self._timer = self.loop.call_later(self.listener.tick_s, self._tick)
        if self.listener.is_stopping:
            self.ask_to_go()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop every stream."""
        del exc
        self._timer.cancel()
        self._begun, self._is_lingering, self._is_full = [], True, False
        self.fail(Http2Error(ErrorCode.NO_ERROR, ""))
        self.flush()
        self.account.close()
        self.listener.leave(self)

    def pause_writing(self) -> None:
        """Do not read from a peer that reads no responses."""
        self._is_full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again."""
        self._is_full = False
        self.flush()
        self._resume()

    def data_received(self, data: bytes) -> None:
        """Read frames, unless others come first."""
        self.feed(data)
        if not self._is_waiting and not self._is_lingering:
            self.work()

    def eof_received(self) -> None:
        """Send what is answered by now; then the transport closes itself."""
        self.flush()

    def work(self) -> None:
        """Read for `MAX_READ_S`. What is left is read in the next iteration, once others had their part of the loop."""
        started_at = self.clock()
        self._is_waiting = False
        self.read(started_at + MAX_READ_S)
        begun = [stream_id for stream_id in self._begun if stream_id in self.streams]
        self._begun = begun[MAX_BEGUN_CALLS:]
        for stream_id in begun[:MAX_BEGUN_CALLS]:
            self.streams[stream_id].begin()
        # By the wall clock, and so no more than is allowed: the processor may have been somewhere else for longer.
        self.spent(min(MAX_READ_S, self.clock() - started_at))
        if self.can_read or self._begun:
            self._is_waiting = True
            self._transport.pause_reading()
            self.loop.call_soon(self.work)
        else:
            self._resume()
        self.changed()

    def when_sent(self, stream_id: int, callback: Callable[[], None]) -> None:
        """Call `callback` when what a stream sends has left this process, or the stream is dropped."""
        if stream_id in self.streams:
            self._on_sent[stream_id].append(callback)
        else:
            callback()

    def spent(self, seconds: float) -> None:
        """Count work without a call that is completed; end a connection of much work and no such calls."""
        self._idle_work_s += seconds
        if self._idle_work_s > self.limits.max_idle_work_s:
            self.fail(Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too much work without a call that is completed"))

    def completed(self) -> None:
        """Note that a call was answered."""
        self._idle_work_s = 0.0

    def end(self) -> None:
        """Close it, which is idle, for another to be accepted."""
        self.listener.leave(self)
        self._is_lingering = True
        self.fail(Http2Error(ErrorCode.NO_ERROR, "idle for longest while there are max_connections"))
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """End it now."""
        connected = self._transport.get_extra_info("socket")
        if connected is not None and self._transport.get_write_buffer_size():
            forget_unsent(connected)
        self._transport.abort()

    def flush(self) -> None:
        """Hand over to the transport what is to be sent."""
        self._will_flush = False
        outgoing = self.outgoing()
        if outgoing and not self._transport.is_closing():
            self._num_written += len(outgoing)
            self._transport.write(outgoing)
        if self._on_sent and not self._is_full:
            for stream_id in self._on_sent.keys() - self.streams.keys():
                for callback in self._on_sent.pop(stream_id):
                    callback()

    def changed(self) -> None:
        """Send at the end of the loop's iteration what there is: a batch's responses are ready together."""
        if self.phase < Phase.OVER:
            if not self._will_flush:
                self._will_flush = True
                self.loop.call_soon(self.flush)
        # A socket that is closed while the peer still sends resets it, and then the peer may lose the last response.
        elif not self._is_lingering and not self._transport.is_closing():
            self._is_lingering = True
            self.flush()
            if self._transport.can_write_eof():
                self._transport.write_eof()
            if self.failure is not None:
                # It broke a rule: nothing else that it sends is read.
                self._transport.pause_reading()
            self.loop.call_later(LINGER_S, self._end_linger, self._num_unread())

    def open_stream(self, stream_id: int, request: HeaderList) -> Stream:
        """See `Connection`."""
        self._begun.append(stream_id)
        return self.listener.new_stream(self, stream_id, request)

    def _give_way(self, error: OverloadedError) -> None:
        for stream in list(self.streams.values()):
            stream.give_way(error)

    def _resume(self) -> None:
        if not (self._is_full or self._is_waiting or self._is_lingering or self._transport.is_closing()):
            self._transport.resume_reading()

    def _end_linger(self, before: int) -> None:
        if self._transport.is_closing():
            return
        unread = self._num_unread()
        if 0 < unread < before:
            # A slow peer has the time that it needs, as long as it reads something.
            self.loop.call_later(max(LINGER_S, self.limits.patience_s), self._end_linger, unread)
        else:
            self._transport.abort()

    def _num_unread(self) -> int:
        """Count the bytes that were written and that the peer's host does not have, here and in the kernel."""
        self.flush()
        connected = self._transport.get_extra_info("socket")
        # SIOCOUTQ of tcp(7), which is the same number.
        try:
            (in_kernel,) = struct.unpack("i", fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)))
        except (OSError, AttributeError):
            return 0
        return self._transport.get_write_buffer_size() + int(in_kernel)

    def _tick(self) -> None:
        self._timer = self.loop.call_later(self.listener.tick_s, self._tick)
        if self._is_lingering:
            return
        unread = self._num_unread()
        if self.tick(unread, self._num_written - unread):
            self.changed()
        else:
            self.abort()


class Http2Listener(ConnectionListener[Http2Protocol]):
    """Listens, and keeps the connections. Belongs to one event loop."""

    def __init__(
        self, limits: ConnectionLimits, buffers: ByteBudget, clock: Callable[[], float], ssl: tls.SSLContext | None
    ) -> None:
        super().__init__(buffers, limits.max_connections, limits.patience_s, ssl)
        self.new_connection = partial(Http2Protocol, self)
        self.limits, self.clock, self.loop = limits, clock, asyncio.get_running_loop()
        self.is_stopping = False
        self.tick_s = max(0.01, min(MAX_TICK_S, limits.patience_s / 2, limits.idle_s / 2, limits.age_s / 2))

    @abc.abstractmethod
    def new_stream(self, connection: Http2Protocol, stream_id: int, request: HeaderList) -> Stream:
        """Return what serves a new stream."""

    async def stop(self, grace_s: float) -> None:
        """Accept what has connected, then nothing more; end connections as streams do, or when the time is over."""
        self.is_stopping = True
        await self.stop_listening(grace_s)
        for connection in list(self.open):
            connection.ask_to_go()
        await self.all_closed(grace_s)
        for connection in list(self.open):
            connection.abort()
        await self.all_closed(LINGER_S)

    def idle_connections(self) -> Iterable[Http2Protocol]:
        """See `ConnectionListener`."""
        idle = (connection for connection in self.open if connection.has_connected and not connection.streams)
        return nsmallest(1, idle, key=lambda connection: connection.idle_since)
