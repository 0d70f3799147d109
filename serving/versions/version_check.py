"""Checks a version before it may serve: is it what training handed over, and is every ranking replica warm?

Its golden requests go through every ranking replica, in the number format that it will serve with. What that needs
once is done then: connections, checks of the nodes, buffers, kernels chosen for shapes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from loader.golden import GoldenRequests
from loader.reader import Snapshot
from router.id_mapping import RejectedIds
from serving.errors import GoldenMismatchError
from serving.formats.schema import RequestSchema
from serving.models.factory import DtypeChoice, choose_dtype, load_model
from serving.models.inputs import InputAssembler
from serving.models.ranking_models import DeviceCopies
from serving.rank.merge import MergedBatch
from serving.rank.ranking import Ranking, RankingParts
from serving.rank.replica import Replica
from shard_node.bags import Float32Array, KeyedBags

logger = logging.getLogger(__name__)


CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """What the check of a version found.

    Attributes:
        dtype: it serves with.
        fallback: why that is not the one that was asked for; "" if it is.
        difference: the largest one from a golden score. None without golden requests, and once deltas were applied to
            the version: then its scores are meant to be others.
        tolerance: what the manifest allows; None without golden requests.
    """

    dtype: torch.dtype
    fallback: str = ""
    difference: float | None = None
    tolerance: float | None = None


def ranking_parts(snapshot: Snapshot, schema: RequestSchema, dtype: torch.dtype) -> RankingParts:
    """The dense model of a snapshot in a number format. Raises RankingModelError."""
    model = load_model(snapshot.spec, snapshot.dense_tensors(), dtype)
    assembler = InputAssembler(snapshot.spec, schema.features, dtype)
    return RankingParts(snapshot.version, schema, DeviceCopies(model), assembler)


def check_version(
    snapshot: Snapshot,
    parts: RankingParts,
    replicas: Sequence[Replica],
    asked: DtypeChoice,
    clock: Callable[[], float],
) -> CheckedVersion:
    """Checks the golden scores, chooses the number format, and warms every replica. Blocks.

    As long as its rows are those of the snapshot, a version must give its golden scores within the tolerance. Once
    deltas were applied to them, the difference is told in the log, and only what does not depend on the rows is asked
    for: every id has one, scores are finite, and bfloat16 is close to float32.

    Args:
        snapshot: the version.
        parts: its dense model in float32; what the replicas use now.
        replicas: started, and without requests.
        asked: the number format that was configured.
        clock: monotonic seconds.

    Raises:
        GoldenMismatchError: it must not serve.
        RankingModelError: bfloat16 was asked for where the device has none.
        RouterError, ShardNodeError: its rows can't be looked up.
    """
    check = _Check(snapshot, parts, replicas, clock)
    deadline = clock() + CONNECT_TIMEOUT_S
    check.on_all(lambda ranking: ranking.connect(deadline))
    wanted, golden = choose_dtype(asked, check.device()), snapshot.golden()
    if golden is not None and snapshot.manifest.golden is not None:
        checked = check.golden(golden, snapshot.manifest.golden.tolerance, wanted)
    elif wanted is torch.float32 or asked != "auto":
        if wanted is not torch.float32:
            check.use(ranking_parts(snapshot, parts.schema, wanted))
        checked = CheckedVersion(wanted)
    else:
        checked = CheckedVersion(torch.float32, "there are no golden requests to check bfloat16 with")

    async def warm(ranking: Ranking) -> None:
        ranking.warm(golden)

    check.on_all(warm)
    return checked


class _Check:
    def __init__(
        self, snapshot: Snapshot, parts: RankingParts, replicas: Sequence[Replica], clock: Callable[[], float]
    ) -> None:
        self._snapshot = snapshot
        self._parts = parts
        self._replicas = replicas
        self._clock = clock
        self._name = f"model {snapshot.spec.model!r} version {snapshot.version}"

    def on_all(self, work: Callable[[Ranking], Coroutine[Any, Any, None]]) -> None:
        for future in [replica.call(work) for replica in self._replicas]:
            future.result()

    def device(self) -> torch.device:
        async def ask(ranking: Ranking) -> torch.device:
            return ranking.device

        return self._replicas[0].call(ask).result()

    def golden(self, golden: GoldenRequests, tolerance: float, wanted: torch.dtype) -> CheckedVersion:
        difference = self._difference(self._replicas[0], self._parts, golden)
        as_exported = self._is_as_exported(difference, tolerance)
        dtype, fallback = torch.float32, ""
        if wanted is not torch.float32:
            parts = ranking_parts(self._snapshot, self._parts.schema, wanted)
            fallback = self._why_not(parts, golden, tolerance)
            if not fallback:
                dtype = wanted
                self.use(parts)
        for replica in self._replicas:
            difference = max(difference, self._difference(replica, None, golden))
        as_exported = as_exported and self._is_as_exported(difference, tolerance)
        return CheckedVersion(dtype, fallback, difference if as_exported else None, tolerance)

    def use(self, parts: RankingParts) -> None:
        for replica in self._replicas:
            replica.ranking.use(parts)

    def _is_as_exported(self, difference: float, tolerance: float) -> bool:
        """Whether the difference is within the tolerance. Raises GoldenMismatchError if no delta accounts for that."""
        if difference <= tolerance:
            return True
        # Asked after the scores: what was applied before them is surely seen.
        if not self._has_deltas():
            raise GoldenMismatchError(
                f"{self._name}: golden scores differ by up to {difference:.3g}, the manifest allows {tolerance:.3g}"
            )
        after = "%s: golden scores differ by up to %.3g since deltas were applied (the manifest allows %.3g)"
        logger.warning(after, self._name, difference, tolerance)
        return False

    def _why_not(self, parts: RankingParts, golden: GoldenRequests, tolerance: float) -> str:
        """Why a number format is not used; "" if it gives the golden scores, or, after deltas, those of float32."""
        difference = self._difference(self._replicas[0], parts, golden)
        if difference > tolerance and self._has_deltas():
            check = partial(dtype_difference, other=parts, golden=golden, clock=self._clock)
            difference = self._replicas[0].call(check).result()
        if difference <= tolerance:
            return ""
        reason = f"in bfloat16 golden scores differ by up to {difference:.3g}, the manifest allows {tolerance:.3g}"
        logger.warning("%s serves in float32: %s", self._name, reason)
        return reason

    def _difference(self, replica: Replica, parts: RankingParts | None, golden: GoldenRequests) -> float:
        async def check(ranking: Ranking) -> float:
            return await golden_difference(ranking if parts is None else ranking.using(parts), golden, self._clock)

        return replica.call(check).result()

    def _has_deltas(self) -> bool:
        async def ask(ranking: Ranking) -> bool:
            model, version = self._snapshot.spec.model, self._snapshot.version
            served = [one for _, info in await ranking.nodes() for one in info.versions]
            return any(
                (one.model, one.version) == (model, version) and one.delta_sequence > one.last_delta for one in served
            )

        return self._replicas[0].call(ask).result()


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
