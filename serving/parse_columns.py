"""From one Python list per feature, as JSON gives them, to flat bags.

A column is a list of bags (`[[1, 5], [2]]`) or, with one id for each bag, the flat list of those ids (`[1, 2]`). What
happens once per feature here is what a format that names every feature can't avoid; ids are never touched one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any, TypeAlias

import numpy as np

from loader.fingerprint import fingerprint_strings
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

Column: TypeAlias = Sequence[Any]


def bags_of_columns(
    keys: Int32Array, columns: Sequence[Column], is_string: Sequence[bool]
) -> tuple[KeyedBags, Sequence[str]]:
    """Flattens columns.

    Args:
        keys: int32 [S], the feature of each column.
        columns: S lists, each all bags or all ids.
        is_string: whether a column's ids are strings.

    Returns:
        The bags, with fingerprints for string ids, and those strings in the order of their values.

    Raises:
        TypeError: for a column that is bags in one place and ids in another.
    """
    nested = [bool(column) and type(column[0]) is list for column in columns]
    if any(is_string):
        _check_string_bags(columns, nested, is_string)
    sizes = list(map(len, columns))
    bags_per_key = np.array(sizes, dtype=np.int64)
    lengths = np.ones(sum(sizes), dtype=np.int64)
    if any(nested):
        in_nested = np.repeat(np.array(nested), bags_per_key)
        lengths[in_nested] = np.fromiter(map(len, chain.from_iterable(compress(columns, nested))), np.int64)
    bags = KeyedBags.from_lengths(keys, bags_per_key, lengths, np.empty(0, np.int64))
    flat = [chain.from_iterable(column) if deep else column for column, deep in zip(columns, nested, strict=True)]
    texts: Sequence[Any] = ()
    if any(is_string):
        texts = list(chain.from_iterable(compress(flat, is_string)))
        values = _with_strings(flat, is_string, bags, texts)
    else:
        values = np.fromiter(chain.from_iterable(flat), np.int64, count=int(bags.offsets[-1]))
    return KeyedBags(keys, bags_per_key, bags.offsets, values), texts


def _check_string_bags(columns: Sequence[Column], nested: Sequence[bool], is_string: Sequence[bool]) -> None:
    for column, deep, strings in zip(columns, nested, is_string, strict=True):
        # A string has a length and can be iterated: it would pass for a bag of its characters.
        if deep and strings and set(map(type, column)) != {list}:
            raise TypeError("a column mixes bags and ids")


def _with_strings(
    flat: Sequence[Iterable[Any]], is_string: Sequence[bool], bags: KeyedBags, texts: Sequence[Any]
) -> Int64Array:
    if list in set(map(type, texts)):
        raise TypeError("a column mixes bags and ids")
    of_string = np.repeat(np.array(is_string), bags.values_per_key())
    values = np.empty(of_string.size, dtype=np.int64)
    values[of_string] = fingerprint_strings(texts)
    values[~of_string] = np.fromiter(chain.from_iterable(compress(flat, [not one for one in is_string])), np.int64)
    return values


def weights_of_columns(
    bags: KeyedBags, columns: Sequence[Column], weights: Sequence[Column | None]
) -> Float32Array | None:
    """Flattens weights, given in the shape of their ids; 1 where a feature has none.

    Args:
        bags: the bags of `columns`.
        columns: the ids.
        weights: for each column, its weights or None.

    Returns:
        float32 [n], or None if no column has weights.

    Raises:
        TypeError, ValueError: for weights whose shape is not that of their ids.
    """
    given = [one is not None for one in weights]
    if not any(given):
        return None
    result = np.ones(int(bags.offsets[-1]), dtype=np.float32)
    parts: list[Iterable[float]] = []
    for column, weight in zip(columns, weights, strict=True):
        if weight is None:
            continue
        nested = bool(column) and type(column[0]) is list
        shape_of = (lambda rows: list(map(len, rows))) if nested else len
        if shape_of(column) != shape_of(weight):
            raise ValueError("weights do not have the shape of their ids")
        parts.append(chain.from_iterable(weight) if nested else weight)
    of_given = np.repeat(np.array(given), bags.values_per_key())
    with np.errstate(over="ignore"):  # what float32 can't hold becomes inf, and is refused by name afterwards
        result[of_given] = np.fromiter(chain.from_iterable(parts), np.float32)
    return result
