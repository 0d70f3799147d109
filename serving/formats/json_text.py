"""JSON text: what can be counted in it before anything is made of it, and how much is made at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import numpy as np

from serving.formats.requests import Buffer

_QUOTE = ord('"')


@contextlib.contextmanager
def many_lists() -> Iterator[None]:
    """Hold the garbage collector off while lists are made by the hundred thousand.

    It would go over all of them again and again, for most of the time that they take, and none is part of a cycle.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_above(body: Buffer, character: int, most: int) -> int:
    """Count a character outside of strings, if it stands there more than `most` times; else return 0.

    Exact for JSON; any other text is refused in any case.
    """
    # The whole text is counted first, several times faster than `bytes.count`; what stands in strings only adds to it.
    if len(body) <= most or int(np.count_nonzero(np.frombuffer(body, np.uint8) == character)) <= most:
        return 0
    plain = bytes(body)
    if b"\\" in plain:
        # First pairs of backslashes, then escaped quotes: what is left has a quote only where a string begins or ends.
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(plain, np.uint8)
    is_outside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1 == 0
    count = int(np.count_nonzero((text == character) & is_outside))
    return count if count > most else 0
