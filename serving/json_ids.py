"""Ids from JSON text to flat arrays by vector operations, with no Python object for an id.

It takes what requests are almost always made of, lists of digits in text that is known to be JSON, and gives up on
everything else: whoever calls it has a slower way that knows all of JSON and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from serving.limits import MAX_ID
from shard_node.bags import Int32Array, Int64Array, KeyedBags

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

_OPEN, _ZERO = ord("["), ord("0")
# How far a character leads into lists. Digits are never looked up; what may not stand between them is _OTHER.
_OTHER = 2
_STEPS = np.full(256, _OTHER, np.int8)
_STEPS[[ord(one) for one in ", \t\n\r"]] = 0
_STEPS[_OPEN], _STEPS[ord("]")] = 1, -1
# In front of the text, so that the eight bytes before any number's end are there, three times.
_MARGIN = b"," * 24
_MAX_DIGITS = len(str(MAX_ID))


def bags_of_json(
    keys: Int32Array, columns: Sequence[msgspec.Raw], is_one_bag: npt.NDArray[np.bool_]
) -> KeyedBags | None:
    """Flattens columns.

    Args:
        keys: int32 [S], the feature of each column.
        columns: S JSON values: lists of ids, or of lists of ids.
        is_one_bag: bool [S], where the column's ids are one bag, not one bag each.

    Returns:
        The bags, or None for anything but lists of integers from 0 to `MAX_ID`, each all bags or all ids.
    """
    joined = b"".join([_MARGIN, *columns])
    text = np.frombuffer(joined, np.uint8)
    sizes = np.array([memoryview(column).nbytes for column in columns], np.int64)
    begins = len(_MARGIN) + np.cumsum(sizes) - sizes
    if (text[begins] != _OPEN).any():
        return None
    # uint8 wraps around, so that nothing below "0" is below 10 either.
    between = np.flatnonzero(text - np.uint8(_ZERO) > 9)[len(_MARGIN) :]
    steps = _STEPS[text[between]]
    brackets = np.flatnonzero(steps != 0)
    depths = np.cumsum(steps[brackets], dtype=np.int64)
    digits = np.diff(between, prepend=between[0] - 1) - 1
    is_end = digits > 0
    if int(depths.max()) > 2 or int(steps.max()) == _OTHER:
        return None
    shape = _shape(steps[brackets], depths, np.cumsum(is_end, dtype=np.int64)[brackets], is_one_bag)
    values = _integers(joined, between[is_end], digits[is_end])
    if shape is None or values is None:
        return None
    bags_per_key, lengths = shape
    return KeyedBags.from_lengths(keys, bags_per_key, lengths, values)


def _shape(
    steps: npt.NDArray[np.int8], depths: Int64Array, ids_before: Int64Array, is_one_bag: npt.NDArray[np.bool_]
) -> tuple[Int64Array, Int64Array] | None:
    """Bags of each key, and their lengths.

    Args:
        steps: int8 [brackets], 1 or -1.
        depths: int64 [brackets], after each.
        ids_before: int64 [brackets].
        is_one_bag: bool [S].

    Returns:
        int64 [S] and int64 [B], or None for ids beside bags.
    """
    opens, inner_opens = (steps == 1) & (depths == 1), (steps == 1) & (depths == 2)
    closes, inner_closes = depths == 0, (steps == -1) & (depths == 1)
    ids_per_key = ids_before[closes] - ids_before[opens]
    inner_before = np.cumsum(inner_opens)
    inner_per_key = inner_before[closes] - inner_before[opens]
    inner_lengths = ids_before[inner_closes] - ids_before[inner_opens]
    nested = inner_per_key > 0
    # In lists of bags, each id is in a bag.
    if (nested & is_one_bag).any() or int(inner_lengths.sum()) != int(ids_per_key[nested].sum()):
        return None
    bags_per_key = np.where(is_one_bag, 1, np.where(nested, inner_per_key, ids_per_key))
    lengths = np.ones(int(bags_per_key.sum()), np.int64)
    lengths[np.repeat(nested, bags_per_key)] = inner_lengths
    lengths[np.repeat(is_one_bag, bags_per_key)] = ids_per_key[is_one_bag]
    return bags_per_key, lengths


def _integers(text: bytes, ends: Int64Array, digits: Int64Array) -> Int64Array | None:
    """int64 [n], the decimal numbers that end before `ends`; None if one is above `MAX_ID`."""
    most = int(digits.max()) if digits.size else 0
    if most > _MAX_DIGITS:
        return None
    windows = np.ndarray(len(text) - 7, np.dtype("<u8"), text, strides=1)
    values = _of_eight(windows, ends, np.minimum(digits, 8))
    for below in range(8, most, 8):
        longer = np.flatnonzero(digits > below)
        higher = _of_eight(windows, ends[longer] - below, np.minimum(digits[longer] - below, 8))
        values[longer] += higher * np.uint64(10**below)
    if most == _MAX_DIGITS and int(values.max()) > MAX_ID:
        return None
    return values.view(np.int64)


def _of_eight(windows: UInt64Array, ends: Int64Array, digits: Int64Array) -> UInt64Array:
    """uint64 [n], numbers of one to eight digits: neighbours are added, then pairs, then fours, all within a word.

    See https://lemire.me/blog/2022/01/21/swar-explained-parsing-eight-digits/. The first digit is the lowest byte.
    """
    words = windows[ends - 8].astype(np.uint64, copy=False)
    shifts = ((8 - digits) * 8).view(np.uint64)
    words >>= shifts
    words <<= shifts
    for mask, factor, shift in (
        (0x0F0F0F0F0F0F0F0F, 10 << 8 | 1, 8),
        (0x00FF00FF00FF00FF, 100 << 16 | 1, 16),
        (0x0000FFFF0000FFFF, 10_000 << 32 | 1, 32),
    ):
        words &= np.uint64(mask)
        words *= np.uint64(factor)
        words >>= np.uint64(shift)
    return words
