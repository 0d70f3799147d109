"""Does a loaded version give the scores that training stored with it? Asked of the very path that will serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np

from loader.golden import GoldenRequests
from router.id_mapping import RejectedIds
from serving.errors import GoldenMismatchError
from serving.formats.schema import RequestSchema
from serving.rank.merge import MergedBatch
from serving.rank.ranking import Ranking, RankingParts
from shard_node.bags import Float32Array, KeyedBags

GOLDEN_TIMEOUT_S = 30.0


async def golden_difference(ranking: Ranking, golden: GoldenRequests, clock: Callable[[], float]) -> float:
    """The largest |served - expected| over all golden scores.

    Between batches it rests for as long as the last one took: others serve meanwhile.

    Args:
        ranking: what serves.
        golden: requests with expected scores.
        clock: monotonic seconds.

    Raises:
        GoldenMismatchError: if an id of a golden request has no row, or a score is not finite.
        RouterError, ShardNodeError: if the rows can't be looked up.
    """
    largest = 0.0
    async for batch, expected in _paced(ranking.parts.schema, golden, clock):
        scores, rejected = await ranking.score(batch, clock() + GOLDEN_TIMEOUT_S)
        _check(ranking.parts, scores, rejected)
        largest = max(largest, float(np.abs(scores - expected).max()))
    return largest


async def dtype_difference(
    ranking: Ranking, other: RankingParts, golden: GoldenRequests, clock: Callable[[], float]
) -> float:
    """The largest difference that another dense model makes to the scores of the golden requests.

    Both score the very same rows: where deltas are applied meanwhile, a second lookup would give others. Arguments and
    errors as `golden_difference`.
    """
    largest, name = 0.0, ranking.parts.schema.features.spec.model
    async for batch, _ in _paced(ranking.parts.schema, golden, clock):
        deadline = clock() + GOLDEN_TIMEOUT_S
        embeddings = await ranking.router.lookup(name, ranking.parts.version, batch.bags, deadline)
        scores, others = ranking.score_rows(batch, embeddings), ranking.using(other).score_rows(batch, embeddings)
        for one in (scores, others):
            _check(ranking.parts, one, embeddings.rejected)
        largest = max(largest, float(np.abs(others - scores).max()))
    return largest


def _check(parts: RankingParts, scores: Float32Array, rejected: RejectedIds) -> None:
    features = parts.schema.features
    model = f"model {features.spec.model!r} version {parts.version}"
    if len(rejected):
        feature = features.features[int(rejected.feature[0])].name
        raise GoldenMismatchError(f"{model}: golden id {int(rejected.id[0])} of feature {feature!r} has no row")
    if not np.isfinite(scores).all():
        raise GoldenMismatchError(f"{model}: a golden request got a score that is not finite")


async def _paced(
    schema: RequestSchema, golden: GoldenRequests, clock: Callable[[], float]
) -> AsyncIterator[tuple[MergedBatch, np.ndarray]]:
    for one in golden_batches(schema, golden):
        began = clock()
        yield one
        await asyncio.sleep(clock() - began)


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
