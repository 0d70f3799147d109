"""Split bags by who owns each value, and add the parts: the one operation that shardrank is made of.

Sum pooling is additive over any split of the rows. `split` gives each owner (a shard, or an arena of a card) only the
bags that have a value there; `add` puts the pooled parts back. Used by the router and by the CPU engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from loader.snapshot.buckets import starts_of
from shard_node.bags import Bags, Float32Array, Int64Array
from shard_node.engine.kernels import pool_rows, unpack_int8

# Up to so many owners a pass for each is faster than a sort (measured: 266,240 values cost 0.4 ms a pass, 2 ms sorted).
MAX_MASKED_OWNERS = 6
Sums: TypeAlias = npt.NDArray[np.floating[Any]] | npt.NDArray[np.uint8]
# More values a bag than these are counted; fewer are looked at one by one (measured: at 1 a bag in half of the time).
MANY_VALUES = 2
# Of the bags; with a value at an owner.
NEARLY_ALL = 7 / 8
# For each owner: its number, the positions of its values, the bags that they are in, and their offsets; None for one
# value in each bag.
Owners: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Division: TypeAlias = Iterator[tuple[int, Int64Array, Int64Array, Int64Array | None]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one owner pools.

    Attributes:
        owner: its number.
        bags: the bags that have a value there, keys without such a bag left out; or all bags.
        bag_index: int64 [bags.num_bags], strictly ascending: which bag of the whole each of them is.
        positions: int64 [bags.num_values]: which value of the whole each of them is.
        shares_no_bag: whether it is known that no other part has a bag of this one.
    """

    owner: int
    bags: Bags
    bag_index: Int64Array
    positions: Int64Array
    shares_no_bag: bool


def whole(bags: Bags) -> Part:
    """Make the one part of bags that have a single owner, number 0."""
    return Part(0, bags, np.arange(bags.num_bags), np.arange(bags.num_values), shares_no_bag=True)


def split(bags: Bags, owner: Owners, owners: range) -> list[Part]:
    """Split bags by the owner of each value (uint8 or uint16 [n], each in `owners`).

    Returns one part for each owner that has a value, by owner. Within a bag values keep their order. A part has all of
    the bags, empty ones too, if hardly any would be left out; else those that have a value there.
    """
    filled = bags.lengths.nonzero()[0]
    if not filled.size:
        return []
    if len(owners) > MAX_MASKED_OWNERS:
        divide = _divide_by_sorting
    else:
        divide = _divide_by_counting if bags.num_values > MANY_VALUES * filled.size else _divide_by_runs
    one_each = filled.size == bags.num_values
    bag_starts = bags.bag_starts()
    return [
        Part(number, _part(bags, bag_starts, positions, bag_index, offsets), bag_index, positions, one_each)
        for number, positions, bag_index, offsets in divide(bags, filled, owner, owners)
    ]


def _masks(owner: Owners, owners: range) -> Iterator[tuple[int, npt.NDArray[np.bool_], Int64Array]]:
    for number in owners:
        mask = owner == number
        positions = mask.nonzero()[0]
        if positions.size:
            yield number, mask, positions


def _bag_of_value(bags: Bags, filled: Int64Array) -> Int64Array:
    return filled if filled.size == bags.num_values else filled.repeat(bags.lengths[filled])


def _divide_by_runs(bags: Bags, filled: Int64Array, owner: Owners, owners: range) -> Division:
    """For few owners, and few values in each bag: a bag begins wherever the next value is another's."""
    bag_of_value = _bag_of_value(bags, filled)
    for number, _, positions in _masks(owner, owners):
        bag_of_each = bag_of_value.take(positions)
        starts = positions if bag_of_value is filled else changes(bag_of_each).nonzero()[0]
        if starts.size == positions.size:
            yield number, positions, bag_of_each, None
        else:
            yield number, positions, bag_of_each.take(starts), np.append(starts, positions.size)


def _divide_by_counting(bags: Bags, filled: Int64Array, owner: Owners, owners: range) -> Division:
    """For few owners, and many values in each bag: an owner's are counted."""
    all_filled = filled.size == bags.num_bags
    starts = bags.offsets[:-1] if all_filled else bags.offsets[filled]
    left = bags.lengths if all_filled else bags.lengths[filled]
    num_left = bags.num_values
    for number, mask, positions in _masks(owner, owners):
        num_left -= positions.size
        # Counting is the slowest pass. What nobody before had is the last one's; it needs no counting.
        counts = np.add.reduceat(mask.view(np.uint8), starts, dtype=np.int64) if num_left else left
        if num_left:
            left = left - counts
        index, num_counted = filled, int(np.count_nonzero(counts))
        if num_counted >= NEARLY_ALL * bags.num_bags:
            # To leave a few bags out would take longer than to pool nothing for them and to add zeros.
            index = np.arange(bags.num_bags)
            if not all_filled:
                of_filled, counts = counts, np.zeros(bags.num_bags, np.int64)
                counts[filled] = of_filled
        elif num_counted < filled.size:
            has_values = counts.nonzero()[0]
            index, counts = filled[has_values], counts[has_values]
        yield number, positions, index, starts_of(counts)


def _divide_by_sorting(bags: Bags, filled: Int64Array, owner: Owners, owners: range) -> Division:
    """Sort 16-bit keys once, stably, which is a radix sort: linear for any number of owners."""
    order = np.argsort(owner, kind="stable")
    bag_of_value = _bag_of_value(bags, filled)[order]
    sorted_owner = owner[order]
    # A new bag of a part begins wherever the owner or the bag changes.
    starts = np.flatnonzero(changes(bag_of_value) | changes(sorted_owner))
    present, first = np.unique(sorted_owner[starts], return_index=True)
    edges = [*first.tolist(), starts.size]
    starts = np.append(starts, order.size)
    for number, begin, end in zip(present.tolist(), edges[:-1], edges[1:], strict=True):
        offsets = starts[begin : end + 1] - starts[begin]
        yield number, order[starts[begin] : starts[end]], bag_of_value[starts[begin:end]], offsets


def changes(numbers: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
    """Return where another number than the one before begins, bool [n]."""
    begins = np.ones(numbers.size, np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
    return begins


def _part(
    bags: Bags, bag_starts: Int64Array, positions: Int64Array, bag_index: Int64Array, offsets: Int64Array | None
) -> Bags:
    if bag_index.size == bags.num_bags:
        keys, bags_per_key = bags.keys, bags.bags_per_key
    else:
        edges = bag_index.searchsorted(bag_starts)
        keys, bags_per_key = bags.keys, edges[1:] - edges[:-1]
        if not bags_per_key.all():
            has_bags = bags_per_key > 0
            keys, bags_per_key = keys[has_bags], bags_per_key[has_bags]
    if offsets is None:
        offsets = np.arange(bag_index.size + 1)
    # Offsets are as narrow as the values: both travel as they are.
    offsets = offsets.astype(bags.values.dtype, copy=False)
    weights = None if bags.weights is None else bags.weights[positions]
    return Bags(keys, bags_per_key, offsets, bags.values.take(positions), weights)


def add(
    parts: Sequence[tuple[Int64Array, Sums]],
    num_bags: int,
    embedding_dim: int,
    first_bag: int = 0,
    *,
    share_no_bag: bool = False,
) -> Float32Array:
    """Add pooled parts into one block, float32 [num_bags, embedding_dim]; a bag that is in no part is zero.

    Each part is the bags that it has (int64 [b], strictly ascending; `first_bag` is the number of the block's first
    one) and their sums (float32 or float16 [b, embedding_dim], or int8 rows). A block may be kept as the answer or
    written to, unless it is read-only. `share_no_bag` tells that no bag is known to be in two parts.
    """
    if len(parts) == 1 and parts[0][0].size == num_bags:
        return widened(parts[0][1])
    if parts and all(index.size == num_bags for index, _ in parts):
        block = widened(parts[0][1])
        out = torch.from_numpy(block if block.flags.writeable else block.copy())
        for _, sums in parts[1:]:
            out += torch.from_numpy(widened(sums))
        return out.numpy()
    if share_no_bag or not parts:
        # One item per bag: NumPy puts such whole, in half of the time of rows of numbers.
        covered = sum(index.size for index, _ in parts)
        put = (np.empty if covered == num_bags else np.zeros)((num_bags, embedding_dim), np.float32)
        for index, sums in parts:
            np.put(_as_items(put), index - first_bag if first_bag else index, _as_items(widened(sums)))
        return put
    # By the operator that pools rows: parts, one after the other, are the rows.
    bag_of_row = np.concatenate([index for index, _ in parts])
    rows = torch.empty(bag_of_row.size, embedding_dim)
    begin = 0
    for index, sums in parts:
        rows[begin : begin + index.size] = torch.from_numpy(widened(sums))
        begin += index.size
    offsets = starts_of(np.bincount(bag_of_row - first_bag, minlength=num_bags))
    # Ascending runs, one for each part: a stable sort only has to merge them.
    return pool_rows("fp32", rows, bag_of_row.argsort(kind="stable"), offsets, None)


def widened(sums: Sums) -> Float32Array:
    """Return sums in any format as float32 [b, embedding_dim], themselves where they are."""
    if sums.dtype == np.float32:
        return cast("Float32Array", sums)
    # PyTorch converts twenty times as fast as NumPy.
    if sums.dtype == np.uint8:
        return unpack_int8(cast("npt.NDArray[np.uint8]", sums))
    return torch.from_numpy(sums).float().numpy()


def _as_items(block: Float32Array) -> npt.NDArray[np.void]:
    # Each row of a block, float32 [b, dim], is one item.
    contiguous = np.ascontiguousarray(block)
    return contiguous.view(f"V{contiguous.shape[1] * contiguous.itemsize}").reshape(-1)
