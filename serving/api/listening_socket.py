"""TCP sockets to listen on, at ports that other processes of the server share, and how their connections are taken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from typing import Generic, Protocol, TypeVar

from serving.api.addresses import HANDSHAKE_S, Addresses
from serving.errors import ListenError
from shard_node.wire.tls import SHUTDOWN_TIMEOUT_S, Handshake, handshake

BACKLOG = 1024
ACCEPTS_A_TURN = 16
"""Connections that are taken before others have their turn of the event loop."""
MAX_HANDSHAKES = 256
LAST_HANDSHAKE_S = 1.0
"""How long handshakes may take that are under way when a front stops."""
UNFINISHED = "tls_unfinished"
"""Kind of a handshake whose peer has left, or was too slow."""
# When no more files can be opened, those who wait are left in the queue for so long.
_EXHAUSTED_PAUSE_S = 0.1
_NO_LINGER = struct.pack("ii", 1, 0)


def listening_socket(host: str, port: int, api: str) -> socket.socket:
    """Listen at a TCP port that further processes may share; 0 takes a free one. Raises ListenError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address, family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise ListenError(f"can't listen for {api} on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener


def forget_unsent(connection: socket.socket) -> None:
    """Have a close reset the connection: the kernel throws away what the peer has not taken, and does not keep it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


Accepted = TypeVar("Accepted", bound=asyncio.BaseProtocol)


class Front(Protocol[Accepted]):
    """What an acceptor takes connections for; `addresses` are accounts of those who connect."""

    addresses: Addresses
    handshake_timeout_s: float

    def admit(self, connection: socket.socket, address: str) -> Accepted | None:
        """Give the protocol of a new connection; None to have it closed, before it costs anything."""

    def give_up(self, protocol: Accepted) -> None:
        """Note that the connection of a protocol could not be made, or is lost again."""

    def note(self, kind: str) -> None:
        """Count a connection that was refused, or ended."""


class Acceptor(Generic[Accepted]):
    """Accepts the connections of a front, and shakes hands with each if it speaks TLS.

    At most `MAX_HANDSHAKES` are under way; one more ends the oldest: honest ones take milliseconds. One that fails
    costs its address `HANDSHAKE_S`, and is noted by the kind of its error. The running event loop is asyncio's or
    uvloop's.
    """

    def __init__(self, listener: socket.socket, front: Front[Accepted], context: ssl.SSLContext | None) -> None:
        self._front, self._context = front, context
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = listener
        # Connections that are not made yet; those that came first are first.
        self._connecting: dict[asyncio.Task[None], None] = {}
        self._watch()

    async def stop(self, timeout_s: float) -> None:
        """Take in what has connected, then nothing more; handshakes under way may take so long.

        With SO_REUSEPORT, what waits in the listener's queue is reset when it closes, not passed on to other processes.
        """
        if self._listener is not None:
            listener, self._listener = self._listener, None
            self._loop.remove_reader(listener)
            # Anything else than an empty queue, such as too many open files, ends it as well: it is closed anyway.
            with listener, contextlib.suppress(OSError):
                while True:
                    self._take(listener.accept()[0])
        if self._connecting:
            _, late = await asyncio.wait(self._connecting, timeout=min(timeout_s, LAST_HANDSHAKE_S))
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            listener = self._listener
            if listener is None:
                return
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                self._front.note("exhausted")
                self._loop.remove_reader(listener)
                self._loop.call_later(_EXHAUSTED_PAUSE_S, self._watch)
                return
            self._take(connection)

    def _watch(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _take(self, connection: socket.socket) -> None:
        try:
            address: str = connection.getpeername()[0]
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            connection.close()
            return
        protocol = self._front.admit(connection, address)
        if protocol is None:
            connection.close()
            return
        if self._context is not None and len(self._connecting) >= MAX_HANDSHAKES:
            oldest = next(iter(self._connecting))
            del self._connecting[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._connect(connection, protocol, address))
        self._connecting[task] = None
        task.add_done_callback(lambda done: self._connecting.pop(done, None))

    async def _connect(self, connection: socket.socket, protocol: Accepted, address: str) -> None:
        begun, is_made, is_tls = Handshake(address), False, self._context is not None
        handshake.set(begun)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._front.handshake_timeout_s if is_tls else None,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S if is_tls else None,
            )
            is_made = True
        except OSError:
            # The peer has left, or its handshake has failed: that is counted below, and not worth more.
            connection.close()
        finally:
            if not is_made:
                self._front.give_up(protocol)
                if is_tls:
                    self._front.note(UNFINISHED if begun.refused is None else begun.refused.kind)
                    self._front.addresses.spent(address, HANDSHAKE_S)
