"""Does a loaded version give the scores that training stored with it? Asked of the very path that will serve."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loader.golden import GoldenRequests
from serving.errors import GoldenMismatchError
from serving.merge import MergedBatch
from serving.parse_schema import RequestSchema
from serving.ranking import Ranking
from shard_node.bags import KeyedBags

GOLDEN_TIMEOUT_S = 30.0


async def golden_difference(ranking: Ranking, golden: GoldenRequests, now: float) -> float:
    """The largest |served - expected| over all golden scores.

    Args:
        ranking: what serves.
        golden: requests with expected scores.
        now: monotonic seconds.

    Raises:
        GoldenMismatchError: if an id of a golden request has no row, or a score is not finite.
        RouterError, ShardNodeError: if the rows can't be looked up.
    """
    largest = 0.0
    schema = ranking.parts.schema
    model = f"model {schema.features.spec.model!r} version {ranking.parts.version}"
    for batch, expected in golden_batches(schema, golden):
        scores, rejected = await ranking.score(batch, now + GOLDEN_TIMEOUT_S)
        if len(rejected):
            feature = schema.features.features[int(rejected.feature[0])].name
            raise GoldenMismatchError(f"{model}: golden id {int(rejected.id[0])} of feature {feature!r} has no row")
        if not np.isfinite(scores).all():
            raise GoldenMismatchError(f"{model}: a golden request got a score that is not finite")
        largest = max(largest, float(np.abs(scores - expected).max()))
    return largest


def golden_batches(schema: RequestSchema, golden: GoldenRequests) -> Iterator[tuple[MergedBatch, np.ndarray]]:
    """The golden requests as batches of about `max_batch_candidates`, with their expected scores float32 [N]."""
    counts = golden.num_candidates.astype(np.int64)
    ends = np.cumsum(counts)
    # A request is in the batch that its first candidate falls into.
    batch_of_request = (ends - counts) // schema.limits.max_batch_candidates
    edges = np.flatnonzero(np.diff(batch_of_request, prepend=-1, append=batch_of_request[-1] + 1))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        candidates = slice(int(ends[first] - counts[first]), int(ends[end - 1]))
        own = counts[first:end]
        starts = np.concatenate([[0], np.cumsum(own)])
        batch = MergedBatch(
            _bags(schema, golden, slice(first, end), candidates),
            own,
            starts,
            np.repeat(np.arange(own.size), own),
            golden.context_dense[first:end],
            golden.candidate_dense[candidates],
        )
        yield batch, golden.scores[candidates]


def _bags(schema: RequestSchema, golden: GoldenRequests, requests: slice, candidates: slice) -> KeyedBags:
    lengths, values, weights = [], [], []
    for feature in schema.features.features:
        bags = requests if feature.side == "context" else candidates
        offsets = np.concatenate([[0], np.cumsum(golden.lengths[feature.name], dtype=np.int64)])
        ids = slice(int(offsets[bags.start]), int(offsets[bags.stop]))
        lengths.append(golden.lengths[feature.name][bags])
        values.append(golden.values[feature.name][ids])
        own = golden.weights.get(feature.name)
        weights.append(np.ones(values[-1].size, np.float32) if own is None else own[ids])
    return KeyedBags.from_lengths(
        schema.keys,
        np.array([one.size for one in lengths], dtype=np.int64),
        np.concatenate(lengths),
        np.concatenate(values),
        np.concatenate(weights) if golden.weights else None,
    )
