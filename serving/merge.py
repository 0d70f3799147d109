"""Joins the requests of a batch into one feature-major batch, in a fixed number of vector operations.

Each request is feature-major by itself: the segments (one feature's bags) of request b are (0, b), (1, b), ... In the
batch the segments of one feature are neighbours: (0, 0), (0, 1), ..., (1, 0), (1, 1), ... So segments are transposed,
and every id moves with its segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.request import RankRequest
from shard_node.bags import Float32Array, Int64Array, KeyedBags


@dataclass(frozen=True, slots=True, eq=False)
class MergedBatch:
    """A batch of B requests with N candidates in all.

    Attributes:
        bags: a context feature has B bags, a candidate feature N.
        candidates_per_request: int64 [B].
        candidate_starts: int64 [B + 1], the first candidate of each request, then N.
        request_of_candidate: int64 [N].
        context_dense: float32 [B, Kc].
        candidate_dense: float32 [N, Kd].
    """

    bags: KeyedBags
    candidates_per_request: Int64Array
    candidate_starts: Int64Array
    request_of_candidate: Int64Array
    context_dense: Float32Array
    candidate_dense: Float32Array


def merge(requests: Sequence[RankRequest]) -> MergedBatch:
    """Joins requests of one model version. A single request is not copied."""
    counts = np.array([request.num_candidates for request in requests], dtype=np.int64)
    starts = _starts(counts)
    request_of_candidate = np.repeat(np.arange(counts.size), counts)
    if len(requests) == 1:
        one = requests[0]
        return MergedBatch(
            one.bags, counts, starts, request_of_candidate, one.context_dense[None, :], one.candidate_dense
        )
    return MergedBatch(
        merge_bags([request.bags for request in requests]),
        counts,
        starts,
        request_of_candidate,
        np.stack([request.context_dense for request in requests]),
        np.concatenate([request.candidate_dense for request in requests]),
    )


def merge_bags(batch: Sequence[KeyedBags]) -> KeyedBags:
    """Joins bags that have the same keys, key by key: for each key the bags of the first, of the second, ...

    Args:
        batch: B keyed bags with S keys each, the same ones.
    """
    num_keys = batch[0].keys.size
    bags_per_segment = np.concatenate([bags.bags_per_key for bags in batch])
    # The last offset of one and the first of the next are neighbours once joined; their difference is no bag's length.
    ends = np.cumsum([bags.offsets.size for bags in batch])
    lengths = np.delete(np.diff(np.concatenate([bags.offsets for bags in batch])), ends[:-1] - 1)
    first_value = _starts(lengths)
    first_bag = _starts(bags_per_segment)
    values_per_segment = np.diff(first_value[first_bag])
    # Segment s of the batch is request s % B's feature s // B.
    order = np.arange(len(batch) * num_keys).reshape(len(batch), num_keys).T.reshape(-1)
    bag_index = _segments_in_order(first_bag[:-1], bags_per_segment, order)
    value_index = _segments_in_order(first_value[first_bag[:-1]], values_per_segment, order)
    return KeyedBags.from_lengths(
        batch[0].keys,
        bags_per_segment.reshape(len(batch), num_keys).sum(axis=0),
        lengths.take(bag_index),
        # Indexing with brackets takes half as long again.
        np.concatenate([bags.values for bags in batch]).take(value_index),
        _merge_weights(batch, value_index),
    )


def _merge_weights(batch: Sequence[KeyedBags], value_index: Int64Array) -> Float32Array | None:
    if all(bags.weights is None for bags in batch):
        return None
    sizes = [bags.num_values for bags in batch]
    ones = np.ones(max(sizes), dtype=np.float32)
    given = [ones[: bags.num_values] if bags.weights is None else bags.weights for bags in batch]
    weights: Float32Array = np.concatenate(given)[value_index]
    return weights


def _segments_in_order(starts: Int64Array, sizes: Int64Array, order: npt.NDArray[np.int64]) -> Int64Array:
    """int64, the positions of all elements of the segments, segment after segment in the given order."""
    starts, sizes = starts[order], sizes[order]
    ends = _starts(sizes)
    positions = np.repeat(starts - ends[:-1], sizes)
    positions += np.arange(int(ends[-1]))
    return positions


def _starts(sizes: npt.NDArray[np.int64]) -> Int64Array:
    """int64 [n + 1], the first position of each run, then the total."""
    starts = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def rank_order(scores: Float32Array, request_of_candidate: Int64Array) -> Int64Array:
    """int64 [N], positions within the batch by request, then descending score, then position."""
    # lexsort is stable and its last key is the first to be sorted by.
    return np.lexsort((-scores, request_of_candidate))
