"""Define a registry: keys with revisions, announcements that expire, locks, and durable streams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from loader.errors import RegistryRecordError, StreamSequenceError, cut

MAX_VALUE_BYTES: Final = 8 << 20
"""Longest value of a key or entry of a stream."""
MAX_KEY_BYTES: Final = 512

REDIS_SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
MAX_PART_CHARACTERS: Final = 200
"""Longest part of a key: a part becomes the name of a file."""
MAX_TTL_S: Final = 3600.0
MAX_SEQUENCE: Final = 2**53 - 1
"""Highest sequence number. Redis computes with doubles in its scripts."""
_PART = rf"(?!\.{{1,2}}(?:/|\Z))[A-Za-z0-9_.:\-]{{1,{MAX_PART_CHARACTERS}}}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*\Z")
_PREFIX = re.compile(rf"(?:{_PART}/)*\Z")


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


class Publisher(NamedTuple):
    """Who commits: the name of which there is one, if any, its token, and how many replicas are waited for."""

    name: str = ""
    token: int = 0
    min_replicas: int = 0


ANYBODY: Final = Publisher()


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The lowest sequence number that is kept and the highest that was ever appended; (0, 0) without a stream.

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

    @property
    def name(self) -> str:
        """For logs: its URL without a password."""

    async def get(self, key: str) -> Entry | None:
        """Return a key's value, or None."""

    async def entries(self, prefix: str) -> dict[str, Entry]:
        """Return all keys below a prefix with their values, sorted by key."""

    async def put(self, key: str, value: bytes, expected_revision: int) -> int:
        """Write a key of that revision (0: it must not exist); return the new one. Raises RegistryConflictError."""

    async def delete(self, key: str, expected_revision: int) -> None:
        """Delete a key, if it is there. Raises RegistryConflictError if it has another revision."""

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """Write a value that disappears by itself unless it is announced again within `ttl_s`."""

    async def withdraw(self, key: str) -> None:
        """End an announcement now. Does nothing if there is none."""

    async def announced(self, prefix: str) -> dict[str, bytes]:
        """Return all announcements below a prefix that have not expired, sorted by key."""

    async def acquire(self, key: str, owner: str, ttl_s: float) -> bool:
        """Acquire a lock, or renew it. Return whether `owner` has it, for `ttl_s` from now on."""

    async def release(self, key: str, owner: str) -> None:
        """Give a lock back, if `owner` has it."""

    async def holder(self, key: str) -> str | None:
        """Return who has a lock now."""

    async def append(self, stream: str, sequence: int, payload: bytes, by: Publisher = ANYBODY) -> None:
        """Append to a stream, durably. A new stream may begin with any sequence number from 1 on.

        The last entry may be appended again, which changes nothing. Raises StreamSequenceError if `sequence` is not the
        last one plus 1, or after the first `commit` to this stream, and otherwise as `commit`.
        """

    async def commit(
        self, stream: str, entry: StreamEntry, rows: bytes, after: StreamEntry | None, by: Publisher = ANYBODY
    ) -> None:
        """Append an entry with bytes beside it, durably: both are there, or neither. `append` is refused from now on.

        `after` is the stream's last entry as the publisher saw it, None for none, without a payload if that is not
        known any more; the entry's number is higher. The last entry may be appended again, which changes nothing.
        `rows` are for `read_rows`. Raises StreamSequenceError if the stream does not end with `after`,
        PublisherSupersededError if the publisher was given a higher token, RegistryUnavailableError unless as many
        replicas of the registry as it asks for have the entry.
        """

    async def next_token(self, stream: str, publisher: str) -> int:
        """Return a number higher than any before, of which `commit` takes no lower one from the publisher."""

    async def read_rows(self, stream: str, ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Return bytes [begin, end) of what lies beside entries: (sequence, begin, end). b"" for what is trimmed."""

    async def read(
        self, stream: str, after: int, max_entries: int = 256, max_bytes: int = 16 << 20
    ) -> list[StreamEntry]:
        """Return entries with a sequence number above `after`, ascending; at least one if there are any.

        Trimmed entries are missing: compare the first one's number with `after + 1`.
        """

    async def bounds(self, stream: str) -> StreamBounds:
        """Return where a stream begins and ends."""

    async def stream_size(self, stream: str) -> tuple[int, int]:
        """Return how many entries a stream has, and about how many bytes they take, in memory or on disk."""

    async def max_stream_bytes(self) -> float:
        """Return the bytes that a stream may take unless its publisher says otherwise; inf for no limit."""

    async def trim(self, stream: str, before: int) -> None:
        """Drop entries with a sequence number below `before`. The stream's end stays known."""

    async def close(self) -> None:
        """End connections. Announcements and locks are left to expire. Idempotent."""


def without_password(url: str) -> str:
    """Return a URL for messages, with `***` in place of user and password."""
    scheme, separator, address = url.partition("://")
    if not separator:
        return url
    # Up to the last @ before the first / would let a password with a raw / through: up to the last @ of all.
    _, at, host = address.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}"


def local_path(url: str) -> Path | None:
    """Return the path that a text is, or that a `file:` URL is of; None for another URL, or one that is not plain."""
    parts = urlsplit(url) if "://" in url else None
    if parts is None:
        return Path(url)
    is_plain = parts.netloc in ("", "localhost") and not (parts.query or parts.fragment)
    return Path(unquote(parts.path)) if parts.scheme == "file" and is_plain and parts.path else None


def check_key(key: str, what: str = "key", *, value: bytes = b"", ttl_s: float = 1.0, owner: str = "-") -> str:
    """Return a key, stream name or prefix. Raises RegistryRecordError if it, or what goes with it, is not allowed."""
    if len(key) > MAX_KEY_BYTES or (_PREFIX if what == "prefix" else _KEY).match(key) is None:
        raise RegistryRecordError(
            f"{what} {cut(repr(key))}: allowed are at most {MAX_KEY_BYTES} characters, '/'-separated parts of "
            f"1 to {MAX_PART_CHARACTERS} out of A-Z a-z 0-9 _ . : -, and no part '.' or '..'"
        )
    if len(value) > MAX_VALUE_BYTES:
        raise RegistryRecordError(f"{key}: a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed")
    if not 0.001 <= ttl_s <= MAX_TTL_S:
        raise RegistryRecordError(f"{key}: ttl_s {ttl_s}; allowed is 0.001 to {MAX_TTL_S:g}")
    if not 0 < len(owner) <= 400 or not owner.isprintable():
        raise RegistryRecordError(f"{key}: owner {cut(repr(owner))}; allowed are 1 to 400 printable characters")
    return key


def check_stream(stream: str, *, max_entries: int = 1, max_bytes: int = 1) -> str:
    """Return a stream's name. Raises RegistryRecordError."""
    check_key(stream, "stream")
    if max_entries < 1 or max_bytes < 1:
        raise RegistryRecordError(
            f"stream {stream}: max_entries {max_entries}, max_bytes {max_bytes}; both must be at least 1"
        )
    return stream


def check_entry(stream: str, entry: StreamEntry, rows: bytes = b"", after: StreamEntry | None = None) -> None:
    """Raise RegistryRecordError for an entry that can't be, StreamSequenceError for its number."""
    check_key(stream, "stream", value=max(entry.payload, rows, key=len))
    least = 1 if after is None else after.sequence + 1
    if not least <= entry.sequence <= MAX_SEQUENCE:
        raise StreamSequenceError(f"stream {stream}: sequence {entry.sequence}; allowed is {least} to {MAX_SEQUENCE}")


def check_publisher(name: str) -> str:
    """Return a publisher's name. Raises RegistryRecordError unless it may be a part of a key, or is empty."""
    if name and re.fullmatch(_PART, name) is None:
        raise RegistryRecordError(f"publisher {cut(repr(name))}: allowed is what a part of a key may be")
    return name
