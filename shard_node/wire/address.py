"""Where a shard node listens: a TCP host and port, or the path of a Unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shard_node.errors import AddressError
from shard_node.wire.tls import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, Handshake, ReloadingContext, handshake

logger = logging.getLogger(__name__)

MAX_PORT = 65_535
# Linux's sun_path holds 108 bytes, the last of them a zero.
MAX_UNIX_PATH_BYTES = 107

_TCP = re.compile(r"^(?:tcp://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]@?#]+)):(?P<port>[0-9]{1,5})$")


@dataclass(frozen=True, slots=True)
class Address:
    """One address; `path` is empty for TCP, `host` is empty for a Unix socket.

    Port 0 asks a server for any free port. `str()` gives a form that `parse` takes back.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `tcp://host:port`, `host:port`, `unix:/path` or `unix:///path`; an IPv6 host stands in brackets.

        Raises:
            AddressError: naming the text and what is allowed.
        """
        if text.startswith("unix:"):
            return cls(path=_unix_path(text))
        match = _TCP.match(text)
        if match is None:
            raise AddressError(
                f"address {text!r} is none of 'tcp://host:port', 'host:port', 'unix:/path', 'unix:///path'"
            )
        port = int(match["port"])
        if port > MAX_PORT:
            raise AddressError(f"address {text!r}: port {port} is not within 0..{MAX_PORT}")
        return cls(host=match["ipv6"] or match["host"], port=port)

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def _unix_path(text: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
        raise AddressError(f"address {text!r}: a Unix socket needs an absolute path of a file, as in 'unix:/run/node'")
    size = len(path.encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"address {text!r}: the path has {size} bytes, a Unix socket takes at most {MAX_UNIX_PATH_BYTES}"
        )
    return path


BACKLOG = 1024
UNIX_SOCKET_MODE = 0o600
MAX_HANDSHAKES = 256
NO_DESCRIPTORS_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening server.

    Attributes:
        server: accepts connections until closed.
        addresses: what is bound, one for each socket, with real ports.
        unix_inode: of the socket's file, to remove only a file that is still ours; None for TCP.
    """

    server: asyncio.Server | TlsAcceptor
    addresses: tuple[Address, ...]
    unix_inode: int | None

    def close(self) -> None:
        """Stops accepting, and removes the socket's file. Idempotent."""
        self.server.close()
        if self.unix_inode is None:
            return
        path = self.addresses[0].path
        try:
            if os.lstat(path).st_ino == self.unix_inode:
                os.unlink(path)
        except FileNotFoundError:
            return


class TlsAcceptor:
    """Accepts TLS connections on listening sockets, so that a handshake that fails can be told with its address.

    At most 256 handshakes are under way; one more ends the oldest: honest ones take milliseconds. The running event
    loop is asyncio's or uvloop's.

    Args:
        sockets: bound and listening; the acceptor's from now on.
        protocol: makes the protocol of each connection, which is told of it after its handshake.
        context: of the server; takes note of what fails.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        context: ReloadingContext,
    ) -> None:
        self._protocol = protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._accepting = [self._loop.create_task(self._accept(sock)) for sock in sockets]

    def close(self) -> None:
        """Stops accepting, and ends the handshakes under way. Connections stay. Idempotent."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            listener.setblocking(False)
            while True:
                try:
                    sock, peer = await self._loop.sock_accept(listener)
                except ConnectionError:
                    continue
                except OSError as error:
                    logger.warning("can't accept connections on %s: %s", listener.getsockname(), error)
                    await asyncio.sleep(NO_DESCRIPTORS_PAUSE_S)
                    continue
                if len(self._handshakes) >= MAX_HANDSHAKES:
                    oldest = next(iter(self._handshakes))
                    del self._handshakes[oldest]
                    oldest.cancel()
                task = self._loop.create_task(self._shake_hands(sock, peer[0]))
                self._handshakes[task] = None
                task.add_done_callback(lambda done: self._handshakes.pop(done, None))
                # Accepting what is in the queue already does not wait: as long as more came, the loop would stand.
                await asyncio.sleep(0)

    async def _shake_hands(self, sock: socket.socket, host: str) -> None:
        handshake.set(Handshake(host))
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError:
            # The context has taken note of a refusal; whoever just leaves is nobody's concern.
            return


async def listen(
    address: Address,
    protocol: Callable[[], asyncio.BaseProtocol],
    unix_mode: int = UNIX_SOCKET_MODE,
    tls: ReloadingContext | None = None,
) -> Listener:
    """Binds an address and accepts connections.

    Args:
        address: port 0 takes any free port.
        protocol: makes the protocol of each connection.
        unix_mode: permissions of a Unix socket's file.
        tls: what TCP connections must speak; a Unix socket never does.

    Raises:
        AddressError: if it can't be bound, naming the address and the reason.
    """
    loop = asyncio.get_running_loop()
    try:
        if tls is not None and not address.is_unix:
            places = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            sockets = _bind_tcp([(family, place) for family, _, _, _, place in places])
            names = [sock.getsockname() for sock in sockets]
            bound = tuple(Address(host=name[0], port=name[1]) for name in names)
            return Listener(TlsAcceptor(sockets, protocol, tls), bound, None)
        if not address.is_unix:
            server = await loop.create_server(protocol, address.host, address.port, backlog=BACKLOG)
            names = [sock.getsockname() for sock in server.sockets]
            return Listener(server, tuple(Address(host=name[0], port=name[1]) for name in names), None)
        sock = _bind_unix(address, unix_mode)
        try:
            inode = os.stat(address.path).st_ino
            server = await loop.create_unix_server(protocol, sock=sock, backlog=BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise AddressError(f"can't listen on {address}: {error}") from error
    return Listener(server, (address,), inode)


def _bind_tcp(
    places: Sequence[tuple[int, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]],
) -> list[socket.socket]:
    """A listening socket at each place, or none at all."""
    sockets: list[socket.socket] = []
    try:
        for family, place in dict.fromkeys(places):
            sockets.append(socket.create_server(place, family=family, backlog=BACKLOG))
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bind_unix(address: Address, mode: int) -> socket.socket:
    _remove_stale(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address.path)
        # Nobody can connect before listen(), so the permissions are right from the first moment.
        os.chmod(address.path, mode)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(address: Address) -> None:
    """Removes the socket's file that a process which died has left; refuses one that somebody listens on."""
    try:
        mode = os.lstat(address.path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"can't listen on {address}: there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            os.unlink(address.path)
            return
        except BlockingIOError:
            # Its queue of connections is full: somebody listens, and is busy.
            pass
    raise AddressError(f"can't listen on {address}: another process listens there")
