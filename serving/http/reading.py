"""Where the event loop puts what it reads: long bodies into the place where they stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

ALIGNED_BYTES = 8
"""Of the widest number that a body has."""
# As much is read at once of whatever is not the rest of a long body.
READ_BYTES = 64 * 2**10


class LongBody:
    """Room for a whole body, the rest of which is still to come.

    Args:
        length: its bytes.
        begun: its beginning, in parts; less than `length`.
        numbers_at: where numbers begin in it that shall be aligned in memory; None if it is only text.

    Attributes:
        data: the body, once it is complete; a `bytearray` if it is text.
    """

    __slots__ = ("_filled", "_view", "data")

    def __init__(self, length: int, begun: Iterable[bytes], numbers_at: int | None = None) -> None:
        # The system gives the memory of long ones only as it is written to.
        self.data: bytearray | memoryview
        if numbers_at is None:
            self.data = bytearray(length)
            self._view = memoryview(self.data)
        else:
            # Arrays begin where every number is aligned, and nobody fills them with zeros first.
            before = -numbers_at % ALIGNED_BYTES
            self.data = self._view = np.empty(before + length, np.uint8).data[before:]
        self._filled = 0
        for part in begun:
            self._view[self._filled : self._filled + len(part)] = part
            self._filled += len(part)

    def free(self) -> memoryview:
        """Where the rest belongs."""
        return self._view[self._filled :]

    def fill(self, num_bytes: int) -> bool:
        """So many bytes were put there. Returns whether the body is complete."""
        self._filled += num_bytes
        return self._filled == len(self._view)


class ReadingConnection(Protocol):
    """What is told of bytes that have come, and of all else.

    Attributes:
        long_body: the room for what comes next, if that is the rest of a long body.
    """

    long_body: LongBody | None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """As of asyncio's protocols, and so are those without a description."""

    def connection_lost(self, exc: Exception | None) -> None: ...  # noqa: D102

    def data_received(self, data: memoryview) -> None: ...  # noqa: D102

    def end_long_body(self) -> None:
        """The room that it gave is full."""

    def eof_received(self) -> bool: ...  # noqa: D102

    def pause_writing(self) -> None: ...  # noqa: D102

    def resume_writing(self) -> None: ...  # noqa: D102


class BufferedReading(asyncio.BufferedProtocol):
    """Stands between an event loop and a connection.

    Args:
        connection: its data are valid only until it returns.
        read_buffer: what comes is read into it, unless a long body is expected. All connections of one event loop may
            share it: a loop reads, and passes on what it has read, for one connection after the other.
    """

    def __init__(self, connection: ReadingConnection, read_buffer: memoryview) -> None:
        self._connection = connection
        self._read_buffer = read_buffer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Passed on."""
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Passed on."""
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        del sizehint
        long_body = self._connection.long_body
        return self._read_buffer if long_body is None else long_body.free()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        connection = self._connection
        if connection.long_body is None:
            connection.data_received(self._read_buffer[:nbytes])
        elif connection.long_body.fill(nbytes):
            connection.end_long_body()

    def eof_received(self) -> bool:
        """Passed on."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Passed on."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Passed on."""
        self._connection.resume_writing()


def reading_protocol(make: Callable[..., ReadingConnection]) -> type[BufferedReading]:
    """What one event loop makes for each connection: the connection itself, and what reads for it.

    Args:
        make: makes a connection. Gets what uvicorn gives, by name.
    """
    read_buffer = memoryview(bytearray(READ_BYTES))

    class Reading(BufferedReading):
        def __init__(self, **of_uvicorn: Any) -> None:
            super().__init__(make(**of_uvicorn), read_buffer)

    return Reading
