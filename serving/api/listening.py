"""TCP sockets to listen on, and how connections are taken."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import select
import socket
import ssl as tls
import struct
from collections.abc import Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

from loader.errors import ConfigError, OverloadedError
from serving.api.dealing import Dealer, Place
from shard_node.byte_budget import ByteBudget
from shard_node.wire.tls import SHUTDOWN_TIMEOUT_S, Handshake, handshake

TURN_S = 0.005
"""Of the event loop, for one connection; then others come first."""
BACKLOG = 1024
ACCEPTS_A_TURN = 16
"""Connections that are taken before others have their turn of the event loop."""
MAX_HANDSHAKES = 256
LAST_HANDSHAKE_S = 1.0
"""How long handshakes may take that are under way when a front stops."""
UNFINISHED = "tls_unfinished"
# When no more files can be opened, those who wait are left in the queue for so long.
_EXHAUSTED_PAUSE_S = 0.1
_NO_LINGER = struct.pack("ii", 1, 0)
CountFailure: TypeAlias = Callable[[str, str, str], object]
"""Counts what a connection is refused or ended for: API, method, kind."""


def forget_unsent(connection: socket.socket) -> None:
    """Have a close reset the connection: the kernel throws away what the peer has not taken, and does not keep it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def poll_socket(connection: socket.socket | None, events: int) -> int:
    """Ask the kernel for `events` of a socket, and for its end, which nobody sees while nothing is read."""
    if connection is None:
        return select.POLLHUP
    poller = select.poll()
    poller.register(connection.fileno(), events)
    return sum(ready for _, ready in poller.poll(0))


class Accepted(asyncio.BaseProtocol):
    """One connection of a listener; it has connected once it has a transport: with TLS, after the handshake."""

    address = ""
    has_connected = False

    def end(self) -> None:
        """Close it, once all that was written is sent."""
        raise NotImplementedError


Made = TypeVar("Made", bound=Accepted)


class Front(abc.ABC, Generic[Made]):
    """Accepts connections as far as limits allow, and shakes hands with each if it speaks TLS.

    At most `MAX_HANDSHAKES` are under way; one more ends the oldest: honest ones take milliseconds. One that fails is
    noted by the kind of its error. Connections are `open` from when they are accepted until they are lost.
    """

    def __init__(
        self, buffers: ByteBudget, max_connections: int, handshake_timeout_s: float, ssl: tls.SSLContext | None
    ) -> None:
        self.buffers, self.ssl, self.handshake_timeout_s = buffers, ssl, handshake_timeout_s
        self.open: set[Made] = set()
        self._dealer: Dealer | None = None
        self._max_connections = max_connections
        self.port = 0
        self._socket: socket.socket | None = None
        # Connections that are not made yet; those that came first are first.
        self._connecting: dict[asyncio.Task[None], None] = {}
        self._all_closed = asyncio.Event()

    @abc.abstractmethod
    def new_connection(self, address: str) -> Made:
        """Make the protocol of a new connection."""

    @abc.abstractmethod
    def idle_connections(self) -> Iterable[Made]:
        """Return those that may be ended for another to have their place, the one that is idle for longest first."""

    @abc.abstractmethod
    def note(self, kind: str) -> None:
        """Count a connection that was refused, or ended."""

    def tell_refused(self, connection: socket.socket, error: OverloadedError) -> None:
        """Tell a client why it is refused, if that costs next to nothing."""

    def num_open(self) -> int:
        """How many connections count to the limit."""
        return len(self.open)

    def refusal(self) -> OverloadedError | None:
        """Return the reason why no connection is taken now, or None. Makes room, if an idle one can go."""
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
        self._count()
        return made

    def leave(self, connection: Made) -> None:
        """Count a connection out. It may still have its last bytes sent."""
        self.open.discard(connection)
        self._count()
        if not self.open:
            self._all_closed.set()

    async def all_closed(self, timeout_s: float) -> None:
        """Wait for every connection to be lost, but not longer."""
        self._all_closed.clear()
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), timeout_s)

    def listen(self, host: str, port: int, api: str, place: Place | None = None) -> int:
        """Listen, on a free port for 0, shared by processes with a `place`. Returns the port. Raises ConfigError."""
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server(
                address, family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=is_dual
            )
        except OSError as error:
            raise ConfigError(f"can't listen for {api} on {host}:{port}: {error}") from error
        listener.setblocking(False)
        self._socket, self.port = listener, listener.getsockname()[1]
        if place is not None:
            try:
                self._dealer = Dealer(place, self.port, self._take_in)
            except BaseException:
                listener.close()
                raise
        self._watch()
        return self.port

    async def stop_listening(self, timeout_s: float) -> None:
        """Take in what has connected, then nothing more; handshakes under way may take so long.

        With SO_REUSEPORT, what waits in the listener's queue is reset when it closes, not passed on to other processes.
        """
        if self._socket is not None:
            listener, self._socket = self._socket, None
            asyncio.get_running_loop().remove_reader(listener)
            # Anything else than an empty queue, such as too many open files, ends it as well: it is closed anyway.
            with listener, contextlib.suppress(OSError):
                while True:
                    self._take_in(listener.accept()[0])
        if self._dealer is not None:
            await self._dealer.close()
            self._dealer = None
        if self._connecting:
            _, late = await asyncio.wait(self._connecting, timeout=min(timeout_s, LAST_HANDSHAKE_S))
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _watch(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            listener = self._socket
            if listener is None:
                return
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                self.note("exhausted")
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_EXHAUSTED_PAUSE_S, self._watch)
                return
            if self._dealer is None or not self._dealer.give(connection):
                self._take_in(connection)

    def _count(self) -> None:
        if self._dealer is not None:
            self._dealer.count(len(self.open))

    def _take_in(self, connection: socket.socket) -> None:
        try:
            address: str = connection.getpeername()[0]
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            connection.close()
            return
        if (error := self.refusal()) is not None:
            if self.ssl is None:
                with contextlib.suppress(OSError):
                    self.tell_refused(connection, error)
            connection.close()
            return
        if self.ssl is not None and len(self._connecting) >= MAX_HANDSHAKES:
            oldest = next(iter(self._connecting))
            del self._connecting[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._connect(connection, self.make(address)))
        self._connecting[task] = None
        task.add_done_callback(lambda done: self._connecting.pop(done, None))

    async def _connect(self, connection: socket.socket, made: Made) -> None:
        begun, is_made, is_tls = Handshake(made.address), False, self.ssl is not None
        handshake.set(begun)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made,
                connection,
                ssl=self.ssl,
                ssl_handshake_timeout=self.handshake_timeout_s if is_tls else None,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S if is_tls else None,
            )
            is_made = True
        except OSError:
            # The peer has left, or its handshake has failed: that is counted below, and not worth more.
            connection.close()
        finally:
            if not is_made:
                if not made.has_connected:
                    self.leave(made)
                if is_tls:
                    self.note(UNFINISHED if begun.refused is None else begun.refused.kind)
