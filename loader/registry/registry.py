"""What a registry is: keys with revisions, announcements that expire, locks, and streams that lose nothing.

Two implementations, `DirectoryRegistry` and `RedisRegistry`, pass one contract test suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

MAX_VALUE_BYTES: Final = 8 << 20
"""Longest value of a key or entry of a stream."""
MAX_KEY_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value. Each write of a key gives it a higher revision; a key that was never written has revision 0."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of a stream."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The lowest sequence number that is kept and the highest that was ever appended; (0, 0) if there is no stream.

    After everything has been trimmed, `first` is `last + 1`.
    """

    first: int
    last: int


class Registry(Protocol):
    """Belongs to the event loop that it is first used on.

    Keys and stream names are '/'-separated parts of `[A-Za-z0-9_.:-]`; a prefix ends with '/'. Every method may raise
    RegistryUnavailableError: then it is not known whether a write took place, and it may be repeated.
    """

    @property
    def url(self) -> str:
        """What `open_registry` opens it by, with its password: not for logs."""
        ...

    @property
    def name(self) -> str:
        """For logs: its URL without a password."""
        ...

    async def get(self, key: str) -> Entry | None:
        """A key's value, or None."""
        ...

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """All keys below a prefix with their values, sorted by key."""
        ...

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        """Writes a key if it still has the revision that the writer knows; 0 if it must not exist.

        Returns:
            Its new revision.

        Raises:
            RegistryConflictError: it has another revision.
        """
        ...

    async def delete(self, key: str, expected_revision: int) -> None:
        """Deletes a key if it still has that revision. Raises RegistryConflictError if not."""
        ...

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """Writes a value that disappears by itself unless it is announced again within `ttl_s`."""
        ...

    async def withdraw(self, key: str) -> None:
        """Ends an announcement now. Does nothing if there is none."""
        ...

    async def announced(self, prefix: str) -> dict[str, bytes]:
        """All announcements below a prefix that have not expired, sorted by key."""
        ...

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        """Takes a lock, or renews it. True if `owner` has it for `ttl_s` from now on; False if another one has it."""
        ...

    async def release(self, key: str, owner: str) -> None:
        """Gives a lock back, if `owner` has it."""
        ...

    async def holder(self, key: str) -> str | None:
        """Who has a lock now."""
        ...

    async def append(self, stream: str, sequence: int, payload: bytes) -> None:
        """Appends to a stream, durably. A stream that does not exist yet may begin with any sequence number from 1 on.

        Raises:
            StreamSequenceError: `sequence` is not the last one plus 1; the message says what is. An append whose
                outcome was not known and that did take place fails like this when it is repeated: compare `read`.
        """
        ...

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        """Entries with a sequence number above `after`, ascending; at least one if there are any.

        What was trimmed is not there: compare the first one's number with `after + 1`.
        """
        ...

    async def bounds(self, stream: str) -> StreamBounds:
        """Where a stream begins and ends."""
        ...

    async def trim(self, stream: str, before: int) -> None:
        """Drops entries with a sequence number below `before`. The stream's end stays known."""
        ...

    async def close(self) -> None:
        """Ends connections. Announcements and locks are left to expire. Idempotent."""
        ...
