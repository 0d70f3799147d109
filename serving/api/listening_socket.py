"""TCP sockets to listen on, at ports that other processes of the server share."""

from __future__ import annotations

import contextlib
import socket

from serving.errors import ListenError


def listening_socket(host: str, port: int, api: str) -> socket.socket:
    """A bound TCP socket that further processes may bind as well, to share the port.

    Args:
        host: name or address.
        port: 0 takes a free one.
        api: what is served there, for the error.

    Raises:
        ListenError: if it can't be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ListenError(f"can't listen for {api} on {host}:{port}: {error}") from error
    return listener


def accept_waiting(listener: socket.socket) -> list[socket.socket]:
    """Takes what has connected to a listener that is about to be closed.

    With SO_REUSEPORT, what waits in its queue then is reset, not passed on to other processes.
    """
    accepted = []
    # Anything else than an empty queue, such as too many open files, ends it as well: the listener is closed anyway.
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            accepted.append(connection)
    return accepted
