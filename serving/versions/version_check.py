"""Checks a version before it may serve: is it what training handed over, and is every ranking replica warm?

Its golden requests go through every ranking replica, in the number format that it will serve with. What that needs
once is done then: connections, checks of the nodes, buffers, kernels chosen for shapes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 5.0
GOLDEN_TIMEOUT_S = 30.0


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
    deadline = clock() + CONNECT_TIMEOUT_S

    async def connect(ranking: Ranking) -> torch.device:
        await ranking.connect(deadline)
        return ranking.device

    wanted, golden = choose_dtype(asked, _on_all(replicas, connect)[0]), snapshot.golden()
    if golden is not None and snapshot.manifest.golden is not None:
        check = _GoldenCheck(snapshot, parts, replicas, golden, snapshot.manifest.golden.tolerance, clock)
        checked = check.run(wanted)
    elif wanted is torch.bfloat16 and asked == "auto":
        checked = CheckedVersion(torch.float32, "there are no golden requests to check bfloat16 with")
    else:
        checked = CheckedVersion(wanted)
        if wanted is not torch.float32:
            _use(replicas, ranking_parts(snapshot, parts.schema, wanted))

    async def warm(ranking: Ranking) -> None:
        ranking.warm(golden)

    _on_all(replicas, warm)
    return checked


def _on_all(replicas: Sequence[Replica], work: Callable[[Ranking], Coroutine[Any, Any, Result]]) -> list[Result]:
    return [future.result() for future in [replica.call(work) for replica in replicas]]


def _use(replicas: Sequence[Replica], parts: RankingParts) -> None:
    for replica in replicas:
        replica.use(parts)


@dataclass(frozen=True, slots=True)
class _GoldenCheck:
    snapshot: Snapshot
    parts: RankingParts
    replicas: Sequence[Replica]
    golden: GoldenRequests
    tolerance: float
    clock: Callable[[], float]

    @property
    def name(self) -> str:
        return f"model {self.snapshot.spec.model!r} version {self.snapshot.version}"

    def run(self, wanted: torch.dtype) -> CheckedVersion:
        first, dtype, fallback = self.replicas[0], torch.float32, ""
        difference = self.difference(first)
        as_exported = self.is_as_exported(difference)
        if wanted is not torch.float32:
            parts = ranking_parts(self.snapshot, self.parts.schema, wanted)
            fallback = self.why_not(parts)
            if not fallback:
                dtype = wanted
                _use(self.replicas, parts)
        # One after the other: others serve meanwhile.
        difference = max(difference, *map(self.difference, self.replicas))
        as_exported = as_exported and self.is_as_exported(difference)
        return CheckedVersion(dtype, fallback, difference if as_exported else None, self.tolerance)

    def is_as_exported(self, difference: float) -> bool:
        """Whether the difference is within the tolerance. Raises GoldenMismatchError if no delta accounts for that."""
        if difference <= self.tolerance:
            return True
        # Asked after the scores: what was applied before them is surely seen.
        if not self.has_deltas():
            raise GoldenMismatchError(
                f"{self.name}: golden scores differ by up to {difference:.3g}, the manifest allows {self.tolerance:.3g}"
            )
        after = "%s: golden scores differ by up to %.3g since deltas were applied (the manifest allows %.3g)"
        logger.warning(after, self.name, difference, self.tolerance)
        return False

    def why_not(self, parts: RankingParts) -> str:
        """Why a number format is not used; "" if it gives the golden scores, or, after deltas, those of float32."""
        difference = self.difference(self.replicas[0], parts)
        if difference > self.tolerance and self.has_deltas():
            difference = self.difference(self.replicas[0], parts, to_own=True)
        if difference <= self.tolerance:
            return ""
        reason = f"in bfloat16 golden scores differ by up to {difference:.3g}, the manifest allows {self.tolerance:.3g}"
        logger.warning("%s serves in float32: %s", self.name, reason)
        return reason

    def difference(self, replica: Replica, other: RankingParts | None = None, *, to_own: bool = False) -> float:
        """The largest difference between a replica's scores and the golden ones.

        Between batches it rests for as long as the last one took: others serve meanwhile.

        Args:
            replica: what serves.
            other: another dense model to score with; None for the replica's own.
            to_own: compare to the scores of the replica's own dense model, and not to golden ones. Both score the very
                same rows: where deltas are applied meanwhile, a second lookup would give others.
        """
        name, version, clock = self.snapshot.spec.model, self.snapshot.version, self.clock

        async def check(own: Ranking) -> float:
            ranking, largest = own if other is None else own.using(other), 0.0
            for batch, exported in golden_batches(self.parts.schema, self.golden):
                began = clock()
                deadline = began + GOLDEN_TIMEOUT_S
                if to_own:
                    embeddings = await own.router.lookup(name, version, batch.bags, deadline)
                    scores, rejected = ranking.score_rows(batch, embeddings), embeddings.rejected
                    expected = own.score_rows(batch, embeddings)
                else:
                    expected = exported
                    scores, rejected = await ranking.score(batch, deadline)
                largest = max(largest, self.batch_difference(scores, expected, rejected))
                await asyncio.sleep(clock() - began)
            return largest

        return _on_all([replica], check)[0]

    def batch_difference(self, scores: Float32Array, expected: Float32Array, rejected: RejectedIds) -> float:
        if len(rejected):
            feature = self.parts.schema.features.features[int(rejected.feature[0])].name
            raise GoldenMismatchError(f"{self.name}: golden id {int(rejected.id[0])} of feature {feature!r} has no row")
        differences = np.abs(scores - expected)
        if not np.isfinite(differences).all():
            raise GoldenMismatchError(f"{self.name}: a golden request got a score that is not finite")
        return float(differences.max())

    def has_deltas(self) -> bool:
        async def ask(ranking: Ranking) -> bool:
            served = [one for _, info in await ranking.nodes() for one in info.versions]
            return any(
                (one.model, one.version) == (self.snapshot.spec.model, self.snapshot.version)
                and one.delta_sequence > one.last_delta
                for one in served
            )

        return _on_all(self.replicas[:1], ask)[0]


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
