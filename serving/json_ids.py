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

_OPEN, _CLOSE, _COMMA, _ZERO = (ord(one) for one in "[],0")
_SPACES = np.frombuffer(b" \t\n\r", np.uint8)
# In front of the text, so that the eight bytes before any number's end are there, three times. Behind it, some of this
# fills the last word up, and one more.
_MARGIN = b"," * 24
_MAX_DIGITS = len(str(MAX_ID))
# Of eight characters, the values of the last ones; as many as a number has digits there.
_LAST_DIGITS = np.array([0x0F0F0F0F0F0F0F0F << 8 * (8 - count) & (2**64 - 1) for count in range(9)], np.uint64)
# Numbers that are worked on at a time, so that they stay in a cache.
_BLOCK = 16 * 2**10


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
    sizes = np.array([memoryview(column).nbytes for column in columns], np.int64)
    end = len(_MARGIN) + int(sizes.sum())
    joined = b"".join([_MARGIN, *columns, _MARGIN[end % 8 :]])
    text = np.frombuffer(joined, np.uint8, end)
    begins = len(_MARGIN) + np.cumsum(sizes) - sizes
    if (text[begins] != _OPEN).any():
        return None
    # uint8 wraps around, so that nothing below "0" is below 10 either.
    between = np.flatnonzero(text - np.uint8(_ZERO) > 9)[len(_MARGIN) :]
    characters = text.take(between)
    is_open = characters == _OPEN
    brackets = np.flatnonzero(is_open | (characters == _CLOSE))
    if not _is_lists(characters, brackets.size):
        return None
    steps = np.where(is_open.take(brackets), 1, -1)
    depths = np.cumsum(steps)
    if int(depths.max()) > 2:
        return None
    digits = np.diff(between, prepend=between[0] - 1)
    digits -= 1
    is_end = digits > 0
    numbers = np.flatnonzero(is_end)
    ids_before = np.cumsum(is_end, dtype=np.int32).take(brackets).astype(np.int64)
    shape = _shape(steps, depths, ids_before, is_one_bag)
    values = _integers(np.frombuffer(joined, "<u8"), between.take(numbers), digits.take(numbers))
    if shape is None or values is None:
        return None
    bags_per_key, lengths = shape
    return KeyedBags.from_lengths(keys, bags_per_key, lengths, values)


def _is_lists(characters: npt.NDArray[np.uint8], num_brackets: int) -> bool:
    """Whether all that stands between digits is brackets, commas and spaces."""
    others = characters.size - num_brackets - int(np.count_nonzero(characters == _COMMA))
    return others == 0 or others == int(np.count_nonzero(np.isin(characters, _SPACES)))


def _shape(
    steps: Int64Array, depths: Int64Array, ids_before: Int64Array, is_one_bag: npt.NDArray[np.bool_]
) -> tuple[Int64Array, Int64Array] | None:
    """Bags of each key, and their lengths.

    Args:
        steps: int64 [brackets], 1 or -1.
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


def _integers(words: UInt64Array, ends: Int64Array, digits: Int64Array) -> Int64Array | None:
    """int64 [n], the decimal numbers that end before `ends` in a text of words; None if one is above `MAX_ID`."""
    most = int(digits.max()) if digits.size else 0
    if most > _MAX_DIGITS:
        return None
    values = np.empty(ends.size, np.uint64)
    for start in range(0, ends.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        values[block] = _of_eight(words, ends[block] - 8, np.minimum(digits[block], 8))
    for below in range(8, most, 8):
        longer = np.flatnonzero(digits > below)
        higher = _of_eight(words, ends[longer] - (below + 8), np.minimum(digits[longer] - below, 8))
        values[longer] += higher * np.uint64(10**below)
    if most == _MAX_DIGITS and int(values.max()) > MAX_ID:
        return None
    return values.view(np.int64)


def _of_eight(words: UInt64Array, starts: Int64Array, digits: Int64Array) -> UInt64Array:
    """uint64 [n], numbers of one to eight digits that end eight characters behind `starts`.

    Neighbours are added, then pairs, then fours, all within a word.

    See https://lemire.me/blog/2022/01/21/swar-explained-parsing-eight-digits/. The first digit is the lowest byte.
    """
    found = _eight_at(words, starts)
    found &= _LAST_DIGITS.take(digits)
    found *= np.uint64(10 << 8 | 1)
    found >>= np.uint64(8)
    for mask, factor, shift in (
        (0x00FF00FF00FF00FF, 100 << 16 | 1, 16),
        (0x0000FFFF0000FFFF, 10_000 << 32 | 1, 32),
    ):
        found &= np.uint64(mask)
        found *= np.uint64(factor)
        found >>= np.uint64(shift)
    return found


def _eight_at(words: UInt64Array, starts: Int64Array) -> UInt64Array:
    """uint64 [n], the eight characters from each start on: of two words, what belongs to them."""
    first = starts >> 3
    bits = ((starts & 7) << 3).view(np.uint64)
    found = words.take(first)
    found >>= bits
    first += 1
    # A shift by all 64 bits gives 0.
    found |= words.take(first) << (np.uint64(64) - bits)
    return found
