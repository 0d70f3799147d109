"""Hashing of ids: splitmix64 and the row that a hashed id gets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of Steele, Lea and Flood's SplitMix64 (OOPSLA 2014), uint64 [n] to uint64 [n], a bijection."""
    mixed = values + _GAMMA
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hashed_rows(
    ids: npt.NDArray[np.int64], seed: npt.NDArray[np.uint64], num_embeddings: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """The row of each hashed id: floor(top 32 bits of splitmix64(id + seed) * num_embeddings / 2^32).

    A multiplication and a shift in place of a division (Lemire, "Fast Random Integer Generation in an Interval",
    2019); num_embeddings is below 2^32, so the product fits in 64 bits.

    Args:
        ids: int64 [n].
        seed: uint64 [n] or [1].
        num_embeddings: uint64 [n] or [1].

    Returns:
        int64 [n], each in 0..num_embeddings - 1.
    """
    mixed = splitmix64(ids.view(np.uint64) + seed)
    mixed >>= np.uint64(32)
    mixed *= num_embeddings
    mixed >>= np.uint64(32)
    return mixed.view(np.int64)
