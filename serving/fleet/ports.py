"""Ports that several serving processes share, and socket paths that fit the kernel's limit."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from types import TracebackType

from serving.fleet.errors import FleetError
from shard_node.address import MAX_UNIX_PATH_BYTES


class SharedPort:
    """A TCP port held for processes that will listen on it with SO_REUSEPORT.

    The socket is bound but never listens, so the kernel gives it no connection; while it is open, no other user can
    take the port, not even between the death of the last worker and its restart.

    Args:
        host: the address that the workers will bind.
        port: the wanted port; 0 for any free one.

    Raises:
        FleetError: if the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                _check_free(family, host, port)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            free = "; use --http-port 0 / --grpc-port 0 for free ones" if error.errno == errno.EADDRINUSE else ""
            raise FleetError(f"can't bind {host} port {port}: {error.strerror or error}{free}") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Lets the port go. Idempotent."""
        self._socket.close()

    def __enter__(self) -> SharedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_free(family: socket.AddressFamily, host: str, port: int) -> None:
    """Raises OSError if anyone else has the port: with SO_REUSEPORT alone, two fleets would share it unnoticed."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a server that has just ended must not keep the port from its successor.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def socket_path(directory: Path, name: str) -> Path:
    """The path of a Unix socket.

    Raises:
        FleetError: if it is longer than the kernel takes.
    """
    path = directory / name
    size = len(str(path).encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise FleetError(
            f"socket path {str(path)!r} has {size} bytes, at most {MAX_UNIX_PATH_BYTES} are possible; "
            "set TMPDIR to a shorter folder"
        )
    return path


def connectable_host(host: str) -> str:
    """The address at which a server that is bound to `host` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
