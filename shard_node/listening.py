"""Listening sockets: TCP with a free port if asked for, Unix sockets without taking one from a living process."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

from shard_node.address import Address
from shard_node.errors import AddressError

BACKLOG = 1024
UNIX_SOCKET_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening server.

    Attributes:
        server: accepts connections until closed.
        addresses: what is bound, one for each socket, with real ports.
        unix_inode: of the socket's file, to remove only a file that is still ours; None for TCP.
    """

    server: asyncio.Server
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


async def listen(
    address: Address, protocol: Callable[[], asyncio.BaseProtocol], unix_mode: int = UNIX_SOCKET_MODE
) -> Listener:
    """Binds an address and accepts connections.

    Args:
        address: port 0 takes any free port.
        protocol: makes the protocol of each connection.
        unix_mode: permissions of a Unix socket's file.

    Raises:
        AddressError: if it can't be bound, naming the address and the reason.
    """
    loop = asyncio.get_running_loop()
    try:
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
