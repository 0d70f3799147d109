"""What any registry refuses, whichever it is: keys and values that can't be stored by every implementation."""

from __future__ import annotations

import re
from typing import Final

from loader.errors import RegistryRecordError, StreamSequenceError, cut
from loader.registry.registry import MAX_KEY_BYTES, MAX_VALUE_BYTES

MAX_PART_CHARACTERS: Final = 200
"""Longest part of a key: a part becomes the name of a file."""
MAX_TTL_S: Final = 3600.0
MAX_SEQUENCE: Final = 2**53 - 1
"""Highest sequence number. Redis computes with doubles in its scripts."""

_PART = rf"(?!\.{{1,2}}(?:/|\Z))[A-Za-z0-9_.:\-]{{1,{MAX_PART_CHARACTERS}}}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*\Z")


def check_key(key: str, what: str = "key") -> str:
    """Gives a key or stream name back, or raises RegistryRecordError if it can't be one."""
    if len(key) > MAX_KEY_BYTES or _KEY.match(key) is None:
        raise RegistryRecordError(
            f"{what} {cut(repr(key))}: allowed are at most {MAX_KEY_BYTES} characters, '/'-separated parts of "
            f"1 to {MAX_PART_CHARACTERS} out of A-Z a-z 0-9 _ . : -, and no part '.' or '..'"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Gives a prefix back, or raises RegistryRecordError; "" stands for everything."""
    if prefix and not prefix.endswith("/"):
        raise RegistryRecordError(f"prefix {cut(repr(prefix))}: it must end with '/'")
    if prefix:
        check_key(prefix[:-1], "prefix")
    return prefix


def check_value(key: str, value: bytes) -> None:
    """Raises RegistryRecordError if a value is too long."""
    if len(value) > MAX_VALUE_BYTES:
        raise RegistryRecordError(f"{key}: a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed")


def check_ttl(key: str, ttl_s: float) -> None:
    """Raises RegistryRecordError if a time to live is not one."""
    if not 0.001 <= ttl_s <= MAX_TTL_S:
        raise RegistryRecordError(f"{key}: ttl_s {ttl_s}; allowed is 0.001 to {MAX_TTL_S:g}")


def check_owner(key: str, owner: str) -> None:
    """Raises RegistryRecordError if a lock's owner is not a short, printable text."""
    if not 0 < len(owner) <= 400 or not owner.isprintable():
        raise RegistryRecordError(f"{key}: owner {cut(repr(owner))}; allowed are 1 to 400 printable characters")


def check_sequence(stream: str, sequence: int) -> None:
    """Raises StreamSequenceError if a number can't be one of an entry."""
    if not 1 <= sequence <= MAX_SEQUENCE:
        raise StreamSequenceError(f"stream {stream}: sequence {sequence}; allowed is 1 to {MAX_SEQUENCE}")


def check_read(stream: str, max_entries: int, max_bytes: int) -> None:
    """Raises RegistryRecordError if nothing could be read with these limits."""
    if max_entries < 1 or max_bytes < 1:
        raise RegistryRecordError(
            f"stream {stream}: max_entries {max_entries}, max_bytes {max_bytes}; both must be at least 1"
        )
