"""Who connects: TCP sockets to listen on, an account of what each address costs, and how connections are taken."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import ipaddress
import select
import socket
import ssl as tls
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from serving.api.dealing import Dealer, Place
from serving.errors import ListenError, OverloadedError
from serving.limits import RequestLimits
from shard_node.wire.tls import SHUTDOWN_TIMEOUT_S, Handshake, handshake

FORGIVEN_S = 0.02
"""Work that a completed request makes good: more than one of the largest allowed size takes at a front."""
UNTAKEN_S = 0.05
"""What an answer costs that its client does not take: more than making it, so that an address can't have many."""
HANDSHAKE_S = 0.001
"""What a TLS handshake costs the event loop; none is charged to a connection that completes a request."""
FREE_SHARE = 0.02
"""Of one core, that an address may use for nothing for ever: monitors that only connect do it."""
TURN_S = 0.005
"""Of the event loop, for one connection; then others come first."""
CONNECT_S = 50e-6
"""What a new connection costs the event loop before it brings a byte."""
MAX_REMEMBERED = 16_384
_IPV6_BITS = 64
BACKLOG = 1024
ACCEPTS_A_TURN = 16
"""Connections that are taken before others have their turn of the event loop."""
MAX_HANDSHAKES = 256
EVICTION_CHOICE = 64
"""Idle connections among which the address with most of them is looked for."""
LAST_HANDSHAKE_S = 1.0
"""How long handshakes may take that are under way when a front stops."""
UNFINISHED = "tls_unfinished"
"""Kind of a handshake whose peer has left, or was too slow."""
# When no more files can be opened, those who wait are left in the queue for so long.
_EXHAUSTED_PAUSE_S = 0.1
_NO_LINGER = struct.pack("ii", 1, 0)


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


@dataclass(slots=True)
class _Account:
    is_trusted: bool
    connections: int = 0
    debt_s: float = 0.0
    at: float = 0.0
    until: float = 0.0


class Addresses:
    """Accounts of the addresses that connect, for all fronts of a process together. Belongs to one thread.

    An IPv6 client is its /64 network, since it may choose any address in there. Memory is bounded: besides addresses
    that are connected, at most `MAX_REMEMBERED` are kept; those that left first are forgotten first.
    """

    def __init__(self, limits: RequestLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._trusted = [ipaddress.ip_network(proxy, strict=False) for proxy in limits.trusted_proxies]
        self._connected: dict[str, _Account] = {}
        self._left: dict[str, _Account] = {}

    def admit(self, address: str) -> str | None:
        """Say why an address may not open one more connection; None if it may. "" is a peer that has none, who may."""
        account = self._find(client_key(address))
        if account is None or account.is_trusted:
            return None
        wait_s = account.until - self._clock()
        if wait_s > 0:
            return f"this address caused work without completing a request; it may connect again in {wait_s:.0f} s"
        allowed = self._limits.max_connections_per_address
        if allowed and account.connections >= allowed:
            return f"this address has as many connections as max_connections_per_address = {allowed} allows"
        return None

    def is_waiting(self, address: str) -> bool:
        """Say whether an address was punished and its time is not over."""
        account = self._find(client_key(address))
        return account is not None and account.until > self._clock()

    def owner(self, address: str) -> str:
        """Name the account of an address; "" for a trusted one, which stands for many."""
        key = client_key(address)
        account = self._find(key)
        return "" if account is not None and account.is_trusted else key

    def connections(self, address: str) -> int:
        """Count the open connections of an address."""
        account = self._connected.get(client_key(address))
        return 0 if account is None else account.connections

    def opened(self, address: str) -> None:
        """Count a connection in; `closed` must follow."""
        key = client_key(address)
        account = self._connected.get(key)
        if account is None:
            account = self._left.pop(key, None) or _Account(self._is_trusted(key))
            self._connected[key] = account
        account.connections += 1

    def closed(self, address: str) -> None:
        """Count a connection out."""
        key = client_key(address)
        account = self._connected[key]
        account.connections -= 1
        if not account.connections:
            del self._connected[key]
            if account.debt_s or account.until:
                self._remember(key, account)

    def spent(self, address: str, seconds: float) -> bool:
        """Charge work, in seconds of processor time, that no completed request accounts for yet.

        Returns whether the address is over `max_idle_work_ms`. It is punished then, and a connection of it that has
        completed nothing is to be ended. Never for a trusted proxy.
        """
        account = self._account(client_key(address))
        if account.is_trusted:
            return False
        now = self._clock()
        account.debt_s = max(0.0, account.debt_s - FREE_SHARE * (now - account.at)) + seconds
        account.at = now
        allowed_s = self._limits.max_idle_work_ms / 1000
        if not allowed_s or account.debt_s <= allowed_s:
            return False
        account.until = now + self._limits.penalty_s
        # So that it is not more than a penalty's worth of good behaviour away from being welcome again.
        account.debt_s = min(account.debt_s, 2 * allowed_s)
        return True

    def completed(self, address: str, count: int = 1) -> None:
        """Make work good, by requests that were answered."""
        account = self._connected.get(client_key(address))
        if account is not None and account.debt_s:
            account.debt_s = max(0.0, account.debt_s - FORGIVEN_S * count)

    def punish(self, address: str) -> None:
        """Let an address open no connection for `penalty_s`. Never a trusted proxy."""
        account = self._account(client_key(address))
        if not account.is_trusted:
            account.until = self._clock() + self._limits.penalty_s

    def __len__(self) -> int:
        return len(self._connected) + len(self._left)

    def _find(self, key: str) -> _Account | None:
        return self._connected.get(key) or self._left.get(key)

    def _account(self, key: str) -> _Account:
        account = self._find(key)
        if account is None:
            account = _Account(self._is_trusted(key))
            self._remember(key, account)
        return account

    def _remember(self, key: str, account: _Account) -> None:
        if len(self._left) >= MAX_REMEMBERED:
            del self._left[next(iter(self._left))]
        self._left[key] = account

    def _is_trusted(self, key: str) -> bool:
        if not key:
            return True
        network = ipaddress.ip_network(key)
        return any(proxy.version == network.version and network.overlaps(proxy) for proxy in self._trusted)


def client_key(address: str) -> str:
    """Turn an address into what its account is called: itself, or the /64 network of an IPv6 one."""
    return _network(address) if ":" in address else address


@lru_cache(4096)
def _network(address: str) -> str:
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_BITS), strict=False))


class CountsFailures(Protocol):
    """Counts what connections are refused or ended for."""

    def failed(self, api: str, method: str, kind: str) -> None:
        """Count one."""


class Accepted(asyncio.BaseProtocol):
    """One connection of a listener.

    Attributes:
        address: whose it is.
        has_connected: whether there is a transport: with TLS, once hands are shaken.
    """

    address = ""
    has_connected = False

    def end(self) -> None:
        """Close it, once all that was written is sent."""
        raise NotImplementedError


Made = TypeVar("Made", bound=Accepted)


class Front(abc.ABC, Generic[Made]):
    """Takes connections as far as limits allow, and shakes hands with each if it speaks TLS.

    At most `MAX_HANDSHAKES` are under way; one more ends the oldest: honest ones take milliseconds. One that fails
    costs its address `HANDSHAKE_S`, and is noted by the kind of its error.

    Attributes:
        open: connections, from when they are accepted until they are lost.
        handshake_cost_s: what a TLS handshake costs; 0 in plain text.
    """

    def __init__(
        self, addresses: Addresses, max_connections: int, handshake_timeout_s: float, ssl: tls.SSLContext | None
    ) -> None:
        self.addresses, self.ssl, self.handshake_timeout_s = addresses, ssl, handshake_timeout_s
        self.handshake_cost_s = 0.0 if ssl is None else HANDSHAKE_S
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
        """Return the first of those that may be ended for another to have their place."""

    @abc.abstractmethod
    def note(self, kind: str) -> None:
        """Count a connection that was refused, or ended."""

    def tell_refused(self, connection: socket.socket, error: OverloadedError) -> None:
        """Tell a client why it is refused, if that costs next to nothing."""

    def num_open(self) -> int:
        """How many connections count to the limit."""
        return len(self.open)

    def refusal(self, address: str) -> OverloadedError | None:
        """Say why no connection from an address is taken now; None if one is. Makes room, if an idle one can go."""
        if (reason := self.addresses.admit(address)) is not None:
            self.note("penalty" if self.addresses.is_waiting(address) else "overloaded")
            return OverloadedError(reason)
        if self.num_open() < self._max_connections:
            return None
        candidates = list(self.idle_connections())
        self.note("evicted" if candidates else "overloaded")
        if not candidates:
            limit = f"max_connections = {self._max_connections}"
            return OverloadedError(f"{limit} connections are open, none of them idle")
        # Who holds most of them gives one back first.
        max(candidates, key=lambda one: self.addresses.connections(one.address)).end()
        return None

    def make(self, address: str) -> Made:
        """Make the protocol of a new connection, and count it in; `lose` counts it out."""
        self.addresses.opened(address)
        made = self.new_connection(address)
        self.open.add(made)
        self._count()
        return made

    def lose(self, connection: Made) -> None:
        """Count a connection out."""
        self.leave(connection)
        self.addresses.closed(connection.address)

    def leave(self, connection: Made) -> None:
        """Have a connection not count any more, which may still have its last bytes sent."""
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
        """Listen, on a free port for 0; other processes may too. Returns the port. Raises ListenError.

        Processes that have a `place` share their connections evenly.
        """
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server(
                address, family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=is_dual
            )
        except OSError as error:
            raise ListenError(f"can't listen for {api} on {host}:{port}: {error}") from error
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
        """Refuse a connection before it costs anything, or have it made."""
        try:
            address: str = connection.getpeername()[0]
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            connection.close()
            return
        if (error := self.refusal(address)) is not None:
            if self.addresses.is_waiting(address):
                forget_unsent(connection)
            elif self.ssl is None:
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
                    self.lose(made)
                if is_tls:
                    self.note(UNFINISHED if begun.refused is None else begun.refused.kind)
                    self.addresses.spent(made.address, HANDSHAKE_S)
