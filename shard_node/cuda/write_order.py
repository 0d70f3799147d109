"""Row writes and lookups in one order on all cards, kept by events: no host thread waits for a card.

A lock covers only the moments in which work is *put* on streams. A write goes behind all that any lane has put on its
stream; whatever a lane puts there later goes behind the write. So a batch sees all rows of a write as they were
before, or all as they are after it, on whichever card they lie.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from shard_node.cuda.cards import Event, Stream
from shard_node.generation import RowLock


class Reader:
    """A stream on which rows are looked up. Made by `WriteOrder.reader`; used by one thread at a time.

    Attributes:
        stream: as given.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.last_launch: Event | None = None
        self.last_write: Event | None = None


class WriteOrder:
    """The order of one engine's rows. Thread-safe.

    Args:
        streams: one of each card, on which rows are written.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)
        self._lock = RowLock()
        self._readers_lock = threading.Lock()
        self._readers: dict[int, Reader] = {}
        self._last_write: Event | None = None

    def reader(self, stream: Stream) -> Reader:
        """Makes a reader, which writes wait for from now on."""
        reader = Reader(stream)
        with self._readers_lock:
            self._readers[id(reader)] = reader
        return reader

    def forget(self, reader: Reader) -> None:
        """Ends a reader; all that it has launched must be done. Idempotent."""
        with self._readers_lock:
            self._readers.pop(id(reader), None)

    def readers(self) -> tuple[Reader, ...]:
        """All that there are."""
        with self._readers_lock:
            return tuple(self._readers.values())

    def read(self, reader: Reader, work: Callable[[], None]) -> None:
        """Runs `work`, which puts lookups on the reader's stream: all of them before, or all after, any write."""
        self._lock.begin_read()
        try:
            write = self._last_write
            if write is not None and write is not reader.last_write:
                reader.stream.wait(write)
                reader.last_write = write
            try:
                work()
            finally:
                # Also if it failed: what it put there before may still be reading rows.
                reader.last_launch = reader.stream.record()
        finally:
            self._lock.end_read()

    def write(self, work: Callable[[], None]) -> None:
        """Runs `work`, which puts writes of rows on `streams`."""
        self._lock.begin_write()
        try:
            head, *others = self.streams
            # The first card's stream joins all launches, so that the others have one event to wait for, and so later
            # has each lane: waits are as many as lanes and cards together, not their product.
            for reader in self.readers():
                if reader.last_launch is not None:
                    head.wait(reader.last_launch)
            if others:
                launched = head.record()
                for stream in others:
                    stream.wait(launched)
            try:
                work()
            finally:
                for stream in others:
                    head.wait(stream.record())
                self._last_write = head.record()
        finally:
            self._lock.end_write()
