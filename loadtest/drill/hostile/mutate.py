"""Mutations of valid requests, the same ones for the same seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

# What lengths and numbers become: the edges of one, two, four and eight bytes, and a little beyond.
EDGES = tuple(
    sorted({value for bits in (7, 8, 15, 16, 24, 31, 32, 63, 64) for value in (2**bits - 1, 2**bits)} | {0, 1})
)
_DIGITS = re.compile(rb"\d+")
_MAX_INSERTED = 16
_MAX_REPEATED = 64

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def flip_bits(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """Up to four bits become the other ones."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) * 8)
        data[at >> 3] ^= 1 << (at & 7)


def insert(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """Random bytes come in."""
    at = rng.randint(0, len(data))
    data[at:at] = rng.randbytes(rng.randint(1, _MAX_INSERTED))


def delete(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A range goes."""
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, max(1, len(data) // 8))]


def repeat(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A range comes a few times."""
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randint(1, _MAX_REPEATED)] * rng.randint(1, 4)


def splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """Goes on as another request."""
    other = rng.choice(corpus)
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]


def truncate(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """Ends early."""
    del data[rng.randrange(len(data)) :]


def lie(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A number of one, two, four or eight bytes, which may be a length, becomes an edge."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(data))
    value = rng.choice(EDGES) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))


def lie_varint(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A byte becomes a varint of up to ten bytes."""
    at = rng.randrange(len(data))
    data[at : at + 1] = b"\xff" * rng.randint(1, 10) + rng.choice((b"\x01", b"\x7f", b"\x00"))


def lie_in_text(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A number in digits becomes an edge, negative at times."""
    at = rng.randrange(len(data))
    if (found := _DIGITS.search(data, at)) is not None:
        data[found.start() : found.end()] = rng.choice((b"%d", b"-%d", b"%d.5", b"%de9")) % rng.choice(EDGES)


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    insert,
    delete,
    repeat,
    splice,
    truncate,
    lie,
    lie_varint,
    lie_in_text,
)


class Mutator:
    """Draws mutated requests without end.

    Args:
        seed: of what is drawn.
        corpus: valid requests, none of them empty.
        keep: bytes at the begin of each that stay as they are.
    """

    def __init__(self, seed: str, corpus: Sequence[bytes], keep: int = 0) -> None:
        self._random = random.Random(seed)
        self._corpus = corpus
        self._keep = keep

    def next(self) -> bytes:
        """One more: one to three mutations of one of them."""
        rng = self._random
        whole = rng.choice(self._corpus)
        data = bytearray(whole[self._keep :])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if data:
                rng.choice(MUTATIONS)(rng, data, self._corpus)
        return whole[: self._keep] + bytes(data)
