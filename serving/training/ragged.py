"""Ragged lists in flat arrays: offsets int64 [B + 1] and values."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shard_node.bags import Int64Array

Scalar = TypeVar("Scalar", bound=np.generic)


def offsets_of(lengths: npt.NDArray[np.integer]) -> Int64Array:
    """int64 [B + 1] of lengths [B]."""
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions_in(offsets: Int64Array, chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Where the elements of some lists lie.

    Args:
        offsets: int64 [B + 1].
        chosen: int64 [C], lists, in any order and as often as wanted.

    Returns:
        Lengths int64 [C] of the chosen lists, and int64 [lengths.sum()], the positions of their elements, list by list.
    """
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    before = offsets_of(lengths)[:-1]
    return lengths, np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)


def rank_within(lengths: Int64Array) -> Int64Array:
    """int64 [lengths.sum()]: 0, 1, 2, ... in each list."""
    before = offsets_of(lengths)[:-1]
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(before, lengths)
