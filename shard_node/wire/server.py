"""The node server: one shard node behind TCP and Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import cast

from loader.errors import OverloadedError
from shard_node.byte_budget import ByteAccount, ByteBudget
from shard_node.errors import CertificateRoleError, WireError
from shard_node.node import ShardNode
from shard_node.wire.address import Address, bind
from shard_node.wire.frame import HEADER, Frame, FrameConnection
from shard_node.wire.listening import Accepted, ConnectionListener
from shard_node.wire.messages import encode_goaway
from shard_node.wire.requests import Answer, Peer, RequestHandler, RequestWatch, ServerLimits
from shard_node.wire.tls import CLIENTS, HANDSHAKE_TIMEOUT_S, TlsContext

logger = logging.getLogger(__name__)

# What the kernel keeps of a Unix socket's unread bytes, 208 KB by default, is less than the answer to a batch: both
# ends would wake up for each piece of it. The kernel may allow less; TCP's buffers grow by themselves.
UNIX_SEND_BUFFER_BYTES = 1 << 20


class ServerConnection(FrameConnection, Accepted):
    """Serves one peer. A bad request is answered with an ERROR frame; only a broken stream ends the connection.

    While the peer leaves more than `max_unsent_bytes` of answers unread, no more of its requests are read.
    """

    def __init__(
        self,
        server: NodeServer,
        handler: RequestHandler,
        limits: ServerLimits,
        clock: Callable[[], float],
        address: str,
    ) -> None:
        super().__init__(limits.max_frame_bytes, limits.max_unsent_bytes)
        self.address = address
        self._server = server
        self._handler = handler
        self._limits = limits
        self._clock = clock
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._frame_begun_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_asked_to_go = self._is_idle = False
        # Bytes that came and are of no frame yet that was taken; and those that are written and not sent.
        self._untaken = self._unsent = 0
        self.peer_load = Peer(ByteAccount(server.buffers, self._give_way), lambda: not self.closed.done())

    end = FrameConnection.close

    def go_away(self) -> None:
        """Asks the peer to send no more requests; it closes the connection when it has its answers."""
        self.send(encode_goaway())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announces itself to the server, which may refuse it."""
        super().connection_made(transport)
        self.has_connected = True
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)
        # Asked to pause as soon as anything is not sent, and to resume when everything is: that is counted.
        cast(asyncio.Transport, transport).set_write_buffer_limits(0)
        self._watch_idleness()
        self._server.opened(self)

    def buffer_updated(self, nbytes: int) -> None:
        """Take frames, and start the time limit of one that is not whole yet."""
        if self._receive_timer is None:
            self._frame_begun_at = self._clock()
        if not self.is_discarding:
            # What comes with a header is in a buffer that every connection has.
            count = self.peer_load.account.charge if self._receiver.is_mid_body else self.peer_load.account.hold
            try:
                count(nbytes)
            except OverloadedError as error:
                self._give_way(error)
                return
            self._untaken += nbytes
        super().buffer_updated(nbytes)
        self._watch_receiving()

    def frame_received(self, frame: Frame) -> None:
        """Has it answered."""
        self._stop_receive_timer()
        budget_us = frame.header.budget_us
        # A frame that came in pieces spent its budget from its first byte on.
        deadline = self._frame_begun_at + budget_us * 1e-6 if budget_us else None
        size_bytes = HEADER.size + frame.body.size
        self._untaken -= size_bytes
        self._is_idle = False
        self._handler.handle(frame, deadline, partial(self._send_answer, size_bytes), self.peer_load)
        self._frame_begun_at = self._clock()

    def stream_broken(self, error: WireError, request_id: int) -> None:
        """Says what is wrong, and closes."""
        logger.warning("closing the connection from %s: %s", self.peer, error)
        self.refuse(self._handler.failure(request_id, error))

    def pause_writing(self) -> None:
        """Count what is not sent; take nothing more from a peer that does not read."""
        self._count_unsent()

    def resume_writing(self) -> None:
        """Take requests again."""
        self._count_unsent()
        if not self.is_reading_held:
            return
        self._stop_send_timer()
        self._frame_begun_at = self._clock()
        self.release_reading()
        self._watch_receiving()

    def connection_ended(self, error: Exception | None) -> None:
        """Forgets its timers. Requests that have not begun will not be."""
        self._stop_receive_timer()
        self._stop_send_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.peer_load.account.close()
        self._server.leave(self)

    def _send_answer(self, frame_bytes: int, buffers: Answer) -> None:
        # False means that the peer has gone: nobody is left to be told.
        if self.send(buffers):
            self.peer_load.account.refund(frame_bytes)
            self._count_unsent()

    def _count_unsent(self) -> None:
        if self._transport is None:
            return
        unsent = self._transport.get_write_buffer_size()
        self.peer_load.account.hold(unsent - self._unsent)
        self._unsent = unsent
        if unsent > self._limits.max_unsent_bytes and not self.is_reading_held:
            self._stop_receive_timer()
            self.hold_reading()
            self._send_timer = self._loop.call_later(self._limits.send_timeout_ms / 1e3, self._send_timed_out)

    def _give_way(self, error: OverloadedError) -> None:
        if self._receiver.is_mid_body:
            self.peer_load.account.refund(self._untaken)
            self._untaken = 0
            request_id = self._receiver.request_id
            self.refuse(self._handler.failure(request_id, OverloadedError(str(error), kind="node_overloaded")))

    def _watch_idleness(self) -> None:
        if self._is_idle and self.peer_load.in_flight == 0:
            if self._is_asked_to_go:
                self.abort()
                return
            self._is_asked_to_go = True
            self.go_away()
        self._is_idle = True
        self._idle_timer = self._loop.call_later(self._limits.idle_timeout_ms / 1e3, self._watch_idleness)

    def _watch_receiving(self) -> None:
        if self._receive_timer is None and self._receiver.is_mid_frame and self.is_open and not self.is_reading_held:
            timeout_s = self._limits.receive_timeout_ms / 1e3
            self._receive_timer = self._loop.call_later(timeout_s, self._receive_timed_out)

    def _receive_timed_out(self) -> None:
        self._receive_timer = None
        error = WireError(f"frame was not whole {self._limits.receive_timeout_ms} ms after its first byte")
        self.stream_broken(error, self._receiver.request_id)

    def _send_timed_out(self) -> None:
        logger.warning(
            "closing the connection from %s: it left answers unread for %d ms", self.peer, self._limits.send_timeout_ms
        )
        self.abort()

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()


class NodeServer(ConnectionListener[ServerConnection]):
    """Serves a shard node over the wire protocol on the running event loop, asyncio's or uvloop's.

    The node stays open when the server closes. `tls` is what TCP connections must speak, None for plain text; Unix
    sockets never speak it. `watch` is told of every request, if there is one. `addresses` is what is bound, with real
    ports; a host name that has several addresses gives one each.
    """

    def __init__(
        self,
        node: ShardNode,
        limits: ServerLimits | None = None,
        tls: TlsContext | None = None,
        watch: RequestWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or ServerLimits()
        self._tls = tls
        self._handler = RequestHandler(node, self._limits, clock, watch)
        count = (lambda cause: None) if watch is None else watch.buffer_refused
        buffers = ByteBudget(self._limits.max_buffered_bytes, count)
        super().__init__(buffers, self._limits.max_connections, HANDSHAKE_TIMEOUT_S, tls)
        self.new_connection = partial(ServerConnection, self, self._handler, self._limits, clock)
        self.addresses: tuple[Address, ...] = ()
        self._bound = ExitStack()
        self._is_draining, self._warned_at = False, -math.inf

    @property
    def in_flight(self) -> int:
        """Requests waiting for a thread or being pooled."""
        return self._handler.in_flight

    @property
    def num_connections(self) -> int:
        """Open connections, after their handshakes."""
        return sum(connection.has_connected for connection in self.open)

    def idle_connections(self) -> Iterable[ServerConnection]:
        """Return none: one too many is refused."""
        return ()

    def refusal(self) -> None:
        """Return None: a connection is refused in a frame, once it is there."""

    def note(self, kind: str) -> None:
        """See `ConnectionListener`; the TLS context counts refusals."""
        now = asyncio.get_running_loop().time()
        if kind == "exhausted" and now >= self._warned_at + 1.0:
            self._warned_at = now
            logger.warning("no more files can be opened for connections on %s", ", ".join(map(str, self.addresses)))

    async def start(self, addresses: Sequence[Address]) -> None:
        """Listen on every address, or on none. Raises ConfigError."""
        bound: list[tuple[socket.socket, Address]] = []
        with ExitStack() as undo:
            for address in addresses:
                for listener in map(undo.enter_context, await bind(address)):
                    if address.is_unix:
                        undo.callback(_remove_file, address.path, os.stat(address.path).st_ino)
                        bound.append((listener, address))
                    else:
                        bound.append((listener, Address(*listener.getsockname()[:2])))
            self._bound = undo.pop_all()
        self.addresses = tuple(address for _, address in bound)
        for listener, _ in bound:
            self.accept_on(listener)

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, ask every peer to go elsewhere, and wait until all have their answers and are gone.

        Requests that cross the wire with the GOAWAY frame are still answered. Returns whether all connections ended
        within the time; `close` ends the others.
        """
        self._is_draining = True
        until = asyncio.get_running_loop().time() + timeout_s
        # Those that connect from now on are told in `opened`.
        for connection in tuple(self.open):
            connection.go_away()
        await self._stop_listening(timeout_s)
        await self.all_closed(max(0.0, until - asyncio.get_running_loop().time()))
        if self.open:
            left = self.num_connections, self.in_flight, timeout_s
            logger.warning("%d connections and %d requests did not end within %.1f s", *left)
        return not self.open

    async def close(self) -> None:
        """Stop at once: connections are cut, what is being pooled is waited for and dropped. Idempotent."""
        self._is_draining = True
        await self._stop_listening(0)
        ended = [connection.closed for connection in self.open]
        for connection in tuple(self.open):
            connection.abort()
        await self._handler.close()
        if ended:
            await asyncio.wait(ended)

    def opened(self, connection: ServerConnection) -> None:
        """Take in a connection, or refuse it (called by it)."""
        if self.num_connections > self._limits.max_connections:
            error = OverloadedError(
                f"at most {self._limits.max_connections} connections are taken", kind="node_overloaded"
            )
            logger.warning("refusing the connection from %s: %s", connection.peer, error)
            connection.refuse(self._handler.failure(0, error))
            return
        if self._tls is not None and connection.certificate:
            try:
                connection.peer_load.roles = self._tls.peers.roles(connection.certificate, connection.address, CLIENTS)
            except CertificateRoleError as error:
                self._tls.peers.refuse(connection.address, error)
                connection.refuse(self._handler.failure(0, error))
                return
        if self._is_draining:
            connection.go_away()

    async def _stop_listening(self, timeout_s: float) -> None:
        await self.stop_listening(timeout_s)
        self._bound.close()


def _remove_file(path: str, inode: int) -> None:
    """Remove the file of a Unix socket, if it is still ours."""
    with suppress(FileNotFoundError):
        if os.lstat(path).st_ino == inode:
            os.unlink(path)
