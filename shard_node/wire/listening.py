"""Sockets to listen on, and how connections are accepted: as far as limits allow, a few each loop iteration.

Workers of one server listen on the same port by SO_REUSEPORT: the kernel chooses one of them for each connection.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import socket
import ssl as tls
import struct
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

from loader.errors import ConfigError, OverloadedError
from loader.progress import end_tasks
from shard_node.byte_budget import ByteBudget
from shard_node.wire.tls import SHUTDOWN_TIMEOUT_S, Handshake, handshake

MAX_READ_S = 0.005
"""Of a loop iteration, for one connection; then others come first."""
BACKLOG = 1024
MAX_ACCEPTS = 16
"""Connections accepted in one loop iteration."""
MAX_HANDSHAKES = 256
LAST_HANDSHAKE_S = 1.0
"""How long handshakes under way may last when a listener stops."""
UNFINISHED = "tls_unfinished"
# When no more files can be opened, clients wait in the kernel's queue for so long.
_EXHAUSTED_PAUSE_S = 0.1
_NO_LINGER = struct.pack("ii", 1, 0)
CountFailure: TypeAlias = Callable[[str, str, str], object]
"""Counts what a connection is refused or closed for: API, method, kind."""


def forget_unsent(connection: socket.socket) -> None:
    """Have a close reset the connection: the kernel drops what the peer has not read, and does not keep it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


class Accepted(asyncio.BaseProtocol):
    """One connection of a listener; it has connected once it has a transport: with TLS, after the handshake."""

    address = ""
    has_connected = False

    def end(self) -> None:
        """Close it, once all that was written is sent."""
        raise NotImplementedError


Made = TypeVar("Made", bound=Accepted)


class ConnectionListener(abc.ABC, Generic[Made]):
    """Accepts connections as far as limits allow, with a handshake for each if it speaks TLS; Unix sockets never do.

    At most `MAX_HANDSHAKES` are under way; another cancels the oldest: honest ones last milliseconds. A failed one is
    noted by the kind of its error. Connections are `open` from when they are accepted until they are lost. A subclass
    sets `new_connection`, which makes the protocol of a connection from its address.
    """

    new_connection: Callable[[str], Made]

    def __init__(
        self, buffers: ByteBudget, max_connections: int, handshake_timeout_s: float, ssl: tls.SSLContext | None
    ) -> None:
        self.buffers, self.ssl, self.handshake_timeout_s = buffers, ssl, handshake_timeout_s
        self.open: set[Made] = set()
        self._max_connections = max_connections
        self._sockets: set[socket.socket] = set()
        self.port = 0
        # Tasks of connections that are not made yet, the oldest first.
        self._connecting: dict[asyncio.Task[None], None] = {}
        self._all_closed = asyncio.Event()

    @abc.abstractmethod
    def idle_connections(self) -> Iterable[Made]:
        """Return those that may be closed to make room for another, idle for longest first."""

    @abc.abstractmethod
    def note(self, kind: str) -> None:
        """Count a connection that was refused, or closed."""

    def send_refusal(self, connection: socket.socket, error: OverloadedError) -> None:
        """Tell a client why it is refused, if that costs next to nothing."""

    def num_open(self) -> int:
        """Return how many connections count to the limit."""
        return len(self.open)

    def refusal(self) -> OverloadedError | None:
        """Return why no connection can be accepted now, or None; closes an idle connection to make room."""
        if self.num_open() < self._max_connections:
            return None
        idle = next(iter(self.idle_connections()), None)
        self.note("overloaded" if idle is None else "evicted")
        if idle is None:
            limit = f"max_connections = {self._max_connections}"
            return OverloadedError(f"{limit} connections are open, none of them idle")
        idle.end()
        return None

    def make(self, address: str) -> Made:
        """Make the protocol of a new connection, and count it in; `leave` counts it out."""
        made = self.new_connection(address)
        self.open.add(made)
        return made

    def leave(self, connection: Made) -> None:
        """Count a connection out. Its last bytes may still be sent."""
        self.open.discard(connection)
        if not self.open:
            self._all_closed.set()

    async def all_closed(self, timeout_s: float) -> None:
        """Wait until every connection is lost, but not longer."""
        self._all_closed.clear()
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), timeout_s)

    def listen(self, host: str, port: int, api: str) -> int:
        """Listen, on a free port for 0. Returns the port. Raises ConfigError."""
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server(
                address, family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=is_dual
            )
        except OSError as error:
            raise ConfigError(f"can't listen for {api} on {host}:{port}: {error}") from error
        self.port = listener.getsockname()[1]
        self.accept_on(listener)
        return self.port

    def accept_on(self, listener: socket.socket) -> None:
        """Accept the connections of a listening socket, which is closed by `stop_listening`."""
        listener.setblocking(False)
        self._sockets.add(listener)
        self._watch(listener)

    async def stop_listening(self, timeout_s: float) -> None:
        """Accept what has connected, then nothing more; handshakes under way may last `timeout_s`.

        With SO_REUSEPORT, what waits in the listener's queue is reset when it closes, not passed on to other processes.
        """
        while self._sockets:
            listener = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listener)
            # Any error, such as too many open files, stops it as an empty queue does: it is closed anyway.
            with listener, contextlib.suppress(OSError):
                while True:
                    self.accept_socket(*listener.accept())
        if self._connecting:
            _, unfinished = await asyncio.wait(self._connecting, timeout=min(timeout_s, LAST_HANDSHAKE_S))
            await end_tasks(unfinished)

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS):
            if listener not in self._sockets:
                return
            try:
                connection, peer = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                self.note("exhausted")
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_EXHAUSTED_PAUSE_S, self._watch, listener)
                return
            self.accept_socket(connection, peer)

    def accept_socket(self, connection: socket.socket, peer: Any) -> None:
        """Make the protocol of an accepted connection; `peer` is its address, "" of a Unix socket."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            # asyncio's own loop leaves it as it is for sockets that were accepted elsewhere.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (error := self.refusal()) is not None:
            if self.ssl is None:
                with contextlib.suppress(OSError):
                    self.send_refusal(connection, error)
            connection.close()
            return
        if self.ssl is not None and len(self._connecting) >= MAX_HANDSHAKES:
            oldest = next(iter(self._connecting))
            del self._connecting[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._connect(connection, self.make(peer[0] if isinstance(peer, tuple) else "")))
        self._connecting[task] = None
        task.add_done_callback(lambda done: self._connecting.pop(done, None))

    async def _connect(self, connection: socket.socket, made: Made) -> None:
        started, is_made = Handshake(made.address), False
        is_tls = self.ssl is not None and connection.family != socket.AF_UNIX
        handshake.set(started)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made,
                connection,
                ssl=self.ssl if is_tls else None,
                ssl_handshake_timeout=self.handshake_timeout_s if is_tls else None,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S if is_tls else None,
            )
            is_made = True
        except OSError:
            # The peer has left, or its handshake has failed: counted below.
            connection.close()
        finally:
            if not is_made:
                if not made.has_connected:
                    self.leave(made)
                if is_tls:
                    self.note(UNFINISHED if started.refused is None else started.refused.kind)
