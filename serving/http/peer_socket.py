"""What a connection asks of its socket, which transports have no words for."""

from __future__ import annotations

import asyncio
import select
import socket
import struct

_NO_LINGER = struct.pack("ii", 1, 0)


def is_readable(transport: asyncio.Transport) -> bool:
    """Whether bytes of the peer wait that the event loop has not seen yet."""
    poller = select.poll()
    poller.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poller.poll(0))


def drop_peer(transport: asyncio.Transport) -> None:
    """Closes a connection now."""
    # Without lingering, what the peer has not taken is thrown away, and not kept by the kernel for it.
    if (connected := transport.get_extra_info("socket")) is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
