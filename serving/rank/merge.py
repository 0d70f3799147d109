"""Join the requests of a batch into one feature-major batch, in a fixed number of vector operations.

Each request is feature-major by itself: the segments (one feature's bags) of request b are (0, b), (1, b), ... In the
batch the segments of one feature are neighbours, (0, 0), (0, 1), ..., (1, 0), ..., so segments are transposed.

Where neighbouring features have as many ids as each other in every request, as with a fixed number of ids in a bag,
their segments of one request are a matrix, and the batch's are these matrices side by side: blocks are copied, and no
id's position is worked out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from serving.formats.requests import RankRequest
from shard_node.bags import Float32Array, Int64Array, KeyedBags

Join: TypeAlias = Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any]]
"""Makes one array, in the batch's order, of each request's elements."""

# What copying one block costs, in values whose positions could be worked out meanwhile (measured: 0.7 us, 13 ns each).
BLOCK_COST_VALUES = 50
# So few runs are always copied as blocks: there the other way's own steps take longer.
FEW_RUNS = 4


@dataclass(frozen=True, slots=True, eq=False)
class MergedBatch:
    """A batch of B requests with N candidates in all.

    Attributes:
        bags: all keys of the model; a context feature has B bags, a candidate feature N.
        candidate_starts: int64 [B + 1], the first candidate of each request, then N.
        request_of_candidate: int64 [N].
        context_dense: float32 [B, Kc].
        candidate_dense: float32 [N, Kd].
    """

    bags: KeyedBags
    candidate_starts: Int64Array
    request_of_candidate: Int64Array
    context_dense: Float32Array
    candidate_dense: Float32Array


def merge(requests: Sequence[RankRequest]) -> MergedBatch:
    """Join requests of one model version. A single request is not copied."""
    if len(requests) == 1:
        one = requests[0]
        count = one.num_candidates
        starts = np.array((0, count), np.int64)
        return MergedBatch(one.bags, starts, np.zeros(count, np.int64), one.context_dense[None, :], one.candidate_dense)
    counts = np.array([request.num_candidates for request in requests], dtype=np.int64)
    return MergedBatch(
        merge_bags([request.bags for request in requests]),
        _starts(counts),
        np.repeat(np.arange(counts.size), counts),
        np.concatenate([request.context_dense for request in requests]).reshape(counts.size, -1),
        np.concatenate([request.candidate_dense for request in requests]),
    )


def merge_bags(batch: Sequence[KeyedBags]) -> KeyedBags:
    """Join B keyed bags with the same S keys, key by key: for each key the bags of the first, of the second, ..."""
    num_requests, num_keys = len(batch), batch[0].keys.size
    # [B, S]: how many bags and values each key has in each request.
    bags_per_segment = np.concatenate([bags.bags_per_key for bags in batch]).reshape(num_requests, num_keys)
    # All requests' offsets, one behind the other, and where each request's begin, then where they end.
    offsets = np.concatenate([bags.offsets for bags in batch])
    firsts = [0, *itertools.accumulate(bags.offsets.size for bags in batch)]
    edges = np.zeros((num_requests, num_keys + 1), np.int64)
    np.add.accumulate(bags_per_segment, axis=1, out=edges[:, 1:])
    edges += np.array(firsts[:-1])[:, None]
    starts = offsets[edges]
    values_per_segment = starts[:, 1:] - starts[:, :-1]
    # Between two requests lies the difference of their neighbouring offsets, which is no bag's length.
    lengths, pairs = offsets[1:] - offsets[:-1], itertools.pairwise(firsts)
    join_lengths, join_values = _joins(bags_per_segment, values_per_segment)
    weights = None
    if any(bags.weights is not None for bags in batch):
        weights = join_values([_weights(bags) for bags in batch])
    return KeyedBags(
        batch[0].keys,
        bags_per_segment.sum(axis=0),
        _starts(join_lengths([lengths[first : end - 1] for first, end in pairs])),
        join_values([bags.values for bags in batch]),
        weights,
    )


def _joins(bags_per_segment: Int64Array, values_per_segment: Int64Array) -> tuple[Join, Join]:
    """Choose what joins arrays with an element for each bag, and for each value: by blocks where there are few."""
    runs = _runs_alike(bags_per_segment, values_per_segment)
    num_blocks = len(runs) * len(bags_per_segment)
    if len(runs) > FEW_RUNS and num_blocks * BLOCK_COST_VALUES > int(values_per_segment.sum()):
        return _join_by_index(bags_per_segment), _join_by_index(values_per_segment)
    return _join_by_blocks(bags_per_segment, runs), _join_by_blocks(values_per_segment, runs)


def _runs_alike(bags_per_segment: Int64Array, values_per_segment: Int64Array) -> list[tuple[int, int]]:
    """Find runs [first, end) of keys that have equal numbers of bags, and of values, in each request."""
    changes = (bags_per_segment[:, 1:] != bags_per_segment[:, :-1]) | (
        values_per_segment[:, 1:] != values_per_segment[:, :-1]
    )
    edges = [0, *(np.flatnonzero(changes.any(axis=0)) + 1).tolist(), bags_per_segment.shape[1]]
    return list(itertools.pairwise(edges))


def _join_by_blocks(per_segment: Int64Array, runs: list[tuple[int, int]]) -> Join:
    """Join segments that have equal sizes, in each request, within a run of keys: block by block."""

    def join(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        if len(runs) == 1:
            return np.concatenate([array.reshape(runs[0][1], -1) for array in arrays], axis=1).reshape(-1)
        out = np.empty(sum(array.size for array in arrays), arrays[0].dtype)
        begins, at = [0] * len(arrays), 0
        for first, end in runs:
            num_keys, sizes = end - first, per_segment[:, first].tolist()
            ends = [begin + num_keys * size for begin, size in zip(begins, sizes, strict=True)]
            blocks = [
                array[begin:stop].reshape(num_keys, size)
                for array, begin, stop, size in zip(arrays, begins, ends, sizes, strict=True)
            ]
            stop = at + num_keys * sum(sizes)
            np.concatenate(blocks, axis=1, out=out[at:stop].reshape(num_keys, -1))
            begins, at = ends, stop
        return out

    return join


def _join_by_index(per_segment: Int64Array) -> Join:
    """Join segments of any sizes: every element's position is worked out."""
    num_requests, num_keys = per_segment.shape
    # Segment s of the batch is request s % B's feature s // B.
    order = np.arange(num_requests * num_keys).reshape(num_requests, num_keys).T.reshape(-1)
    sizes = per_segment.reshape(-1)
    starts, sizes = _starts(sizes)[order], sizes[order]
    ends = _starts(sizes)
    positions = np.repeat(starts - ends[:-1], sizes)
    positions += np.arange(int(ends[-1]))
    # Indexing with brackets takes half as long again.
    return lambda arrays: np.concatenate(arrays).take(positions)


def _weights(bags: KeyedBags) -> Float32Array:
    return np.ones(bags.num_values, np.float32) if bags.weights is None else bags.weights


def _starts(sizes: npt.NDArray[np.int64]) -> Int64Array:
    """Find the first position of each run, then the total: int64 [n + 1]."""
    starts = np.zeros(sizes.size + 1, dtype=np.int64)
    np.add.accumulate(sizes, out=starts[1:])
    return starts


def rank_order(scores: Float32Array, candidate_starts: Int64Array, request_of_candidate: Int64Array) -> Int64Array:
    """Order positions within each request by descending score, then position: int64 [N]. Arguments as `MergedBatch`."""
    counts = candidate_starts[1:] - candidate_starts[:-1]
    if counts.size == 1 or (counts == counts[0]).all():
        return (-scores).reshape(counts.size, -1).argsort(axis=1, kind="stable").reshape(-1)
    # lexsort is stable and its last key is the first to be sorted by.
    order = np.lexsort((-scores, request_of_candidate))
    order -= candidate_starts[request_of_candidate]
    return order
