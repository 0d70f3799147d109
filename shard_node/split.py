"""Split bags by who owns each value, and add the parts: the one operation that shardrank is made of.

Sum pooling is additive over any split of the rows. `split` gives each owner (a shard, or an arena of a card) only the
bags that have a value there, so an owner neither receives nor returns empty bags; `add` puts the pooled parts back.
Used by the router over shards and by the CPU engine over arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shard_node.bags import Float32Array, Int64Array, KeyedBags

MAX_OWNERS = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one owner pools.

    Attributes:
        owner: its number.
        bags: the bags that have a value there, keys without such a bag left out.
        bag_index: int64 [bags.num_bags], strictly ascending: which bag of the whole each of them is.
    """

    owner: int
    bags: KeyedBags
    bag_index: Int64Array


def split(bags: KeyedBags, owner: npt.NDArray[np.uint16]) -> list[Part]:
    """Splits bags by the owner of each value.

    Args:
        bags: the whole.
        owner: uint16 [n], who owns each value.

    Returns:
        One part for each owner that has a value, by owner. Within a bag values keep their order.
    """
    if not bags.num_values:
        return []
    bag_of_value = np.repeat(np.arange(bags.num_bags, dtype=np.int64), bags.lengths)
    # A stable sort of 16-bit keys is a radix sort: linear, whatever the number of owners.
    order = np.argsort(owner, kind="stable")
    sorted_owner, sorted_bag = owner[order], bag_of_value[order]
    values = bags.values[order]
    weights = None if bags.weights is None else bags.weights[order]
    # A new bag of a part begins wherever the owner or the bag changes.
    begins = np.empty(order.size, dtype=bool)
    begins[0] = True
    np.logical_or(sorted_bag[1:] != sorted_bag[:-1], sorted_owner[1:] != sorted_owner[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    part_owner, part_bag = sorted_owner[starts], sorted_bag[starts]
    owners, first = np.unique(part_owner, return_index=True)
    edges = [*first.tolist(), starts.size]
    bag_starts = bags.bag_starts()
    parts = []
    for number, begin, end in zip(owners.tolist(), edges[:-1], edges[1:], strict=True):
        value_begin = int(starts[begin])
        value_end = int(starts[end]) if end < starts.size else order.size
        bag_index = part_bag[begin:end]
        offsets = np.empty(end - begin + 1, dtype=np.int64)
        np.subtract(starts[begin:end], value_begin, out=offsets[:-1])
        offsets[-1] = value_end - value_begin
        bags_per_key = np.diff(np.searchsorted(bag_index, bag_starts))
        has_bags = bags_per_key > 0
        part = KeyedBags(
            keys=bags.keys[has_bags],
            bags_per_key=bags_per_key[has_bags],
            offsets=offsets,
            values=values[value_begin:value_end],
            weights=None if weights is None else weights[value_begin:value_end],
        )
        parts.append(Part(number, part, bag_index))
    return parts


def add(
    parts: Sequence[tuple[Int64Array, Float32Array]], num_bags: int, embedding_dim: int, first_bag: int = 0
) -> Float32Array:
    """Adds pooled parts into one block.

    Args:
        parts: for each part the bags of the whole that it has (int64 [b], strictly ascending) and their sums
            (float32 [b, embedding_dim]). A block may be kept as the answer or written to, unless it is read-only.
        num_bags: bags of the block.
        embedding_dim: width of the block.
        first_bag: number, in the whole, of the block's first bag.

    Returns:
        float32 [num_bags, embedding_dim]; a bag that is in no part is zero.
    """
    covered = sum(index.size for index, _ in parts)
    out: Float32Array | None = None
    rest = list(parts)
    for position, (index, block) in enumerate(rest):
        # A part that has every bag needs no scatter; it can be the sum's first term as it lies.
        if index.size == num_bags:
            out = block if block.flags.writeable or len(rest) == 1 else block.copy()
            del rest[position]
            break
    if out is None:
        disjoint = covered <= num_bags and _are_disjoint(parts, num_bags, first_bag)
        out = np.empty((num_bags, embedding_dim), np.float32)
        if not disjoint or covered < num_bags:
            out.fill(0.0)
        if disjoint:
            for index, block in rest:
                out[index - first_bag] = block
            return out
    for index, block in rest:
        if index.size == num_bags:
            out += block
        else:
            out[index - first_bag] += block
    return out


def _are_disjoint(parts: Sequence[tuple[Int64Array, Float32Array]], num_bags: int, first_bag: int) -> bool:
    if len(parts) == 1:
        return True
    seen = np.zeros(num_bags, dtype=bool)
    for index, _ in parts:
        seen[index - first_bag] = True
    return int(np.count_nonzero(seen)) == sum(index.size for index, _ in parts)
