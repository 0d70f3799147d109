"""TCP sockets to listen on, how connections are taken, and how workers that share a port deal them out.

The kernel chooses a worker for each connection by chance, now and then nearly always the same. A worker that accepts a
connection while another has fewer hands it on, by its descriptor, over a Unix socket (unix(7), SCM_RIGHTS). Counts are
in a file that all map; each number in it is written by one worker only, so that nothing has to be locked.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import socket
import ssl as tls
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from loader.errors import ConfigError, OverloadedError
from shard_node.byte_budget import ByteBudget
from shard_node.wire.tls import SHUTDOWN_TIMEOUT_S, Handshake, handshake

WORKER_VARIABLE = "SHARDRANK_WORKER"
LAST_HANDED_S = 0.02
"""How long a worker that stops still takes what others hand it, who did not know it yet."""
_TAKES_A_TURN = 16


class Place(NamedTuple):
    """Which of the workers a process is, counted from 0, and a folder that they all can write to."""

    worker: int
    num_workers: int
    folder: Path

    @classmethod
    def here(cls) -> Place | None:
        """Find the place of this process; None if it shares its ports with nobody."""
        told = os.environ.get(WORKER_VARIABLE)
        if told is None:
            return None
        worker, num_workers, folder = told.split("/", 2)
        return cls(int(worker), int(num_workers), Path("/", folder))

    def __str__(self) -> str:
        return f"{self.worker}/{self.num_workers}{self.folder.absolute()}"


class Dealer:
    """Hands connections to the worker with the fewest, and others' to `take`, on one event loop. Raises ConfigError."""

    def __init__(self, place: Place, port: int, take: Callable[[socket.socket], None]) -> None:
        self._place, self._take = place, take
        own, self._worker = place.worker, place.worker
        try:
            # By way of its descriptor the folder may have a longer name than a socket's address has room for.
            self._folder = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY)
            self._paths = [f"/proc/self/fd/{self._folder}/{port}-{one}.sock" for one in range(place.num_workers)]
            # [worker]: whether it takes connections, how many it has, how many it has given to each, and had of each.
            shape = (place.num_workers, 2 + 2 * place.num_workers)
            with (place.folder / f"{port}-connections").open("ab") as file:
                file.truncate(8 * shape[0] * shape[1])
            counts = np.memmap(file.name, np.int64, "r+", shape=shape)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._paths[own])
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self._paths[own])
        except OSError as error:
            raise ConfigError(f"workers can't share connections in {place.folder}: {error}") from error
        self._socket.setblocking(False)
        self._is_taking, self._open = counts[:, 0], counts[:, 1]
        self._given, self._had = counts[:, 2 : 2 + place.num_workers], counts[:, 2 + place.num_workers :]
        # What was given to the process that was here before is lost with it.
        self._had[own] = self._given[:, own]
        self._open[own] = 0
        self._is_taking[own] = 1
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def count(self, num_open: int) -> None:
        """Tell the others how many connections this worker has."""
        self._open[self._worker] = num_open

    def give(self, connection: socket.socket) -> bool:
        """Hand a connection to a worker that has fewer; False if none has, or it can't be reached."""
        own = self._worker
        # A connection that was given counts for the receiver before it knows of it.
        load = self._open + (self._given.T - self._had).sum(axis=1)
        load[self._is_taking == 0] = np.iinfo(np.int64).max
        fewer = np.flatnonzero(load < load[own])
        # `socket.send_fds` passes no address on.
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", connection.fileno()))]
        for other in fewer[load[fewer].argsort(kind="stable")].tolist():
            # Before it is sent: the receiver may run at once, and others look, while this process is stopped.
            self._given[own, other] += 1
            try:
                self._socket.sendmsg([bytes([own])], passed, 0, self._paths[other])
            except OSError:
                # It has ended, or its queue is full.
                self._given[own, other] -= 1
                continue
            connection.close()
            return True
        return False

    async def close(self) -> None:
        """Take what is on its way, then nothing more."""
        self._is_taking[self._worker] = 0
        await asyncio.sleep(LAST_HANDED_S)
        asyncio.get_running_loop().remove_reader(self._socket)
        while self._receive_one():
            pass
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._paths[self._worker])
        os.close(self._folder)

    def _receive(self) -> None:
        for _ in range(_TAKES_A_TURN):
            if not self._receive_one():
                return

    def _receive_one(self) -> bool:
        """Take one connection; False if there is none."""
        try:
            told, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError:
            return False
        if told:
            self._had[self._worker, told[0]] += 1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                self._take(socket.socket(fileno=descriptor))
        return True


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


class Accepted(asyncio.BaseProtocol):
    """One connection of a listener; it has connected once it has a transport: with TLS, after the handshake."""

    address = ""
    has_connected = False

    def end(self) -> None:
        """Close it, once all that was written is sent."""
        raise NotImplementedError


Made = TypeVar("Made", bound=Accepted)


class ConnectionListener(abc.ABC, Generic[Made]):
    """Accepts connections as far as limits allow, and shakes hands with each if it speaks TLS.

    At most `MAX_HANDSHAKES` are under way; one more ends the oldest: honest ones take milliseconds. One that fails is
    noted by the kind of its error. Connections are `open` from when they are accepted until they are lost. A subclass
    sets `new_connection`, which makes the protocol of a connection from its address.
    """

    new_connection: Callable[[str], Made]

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
