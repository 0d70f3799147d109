"""What a ranking replica does with a batch: merge, look up, assemble, rank. No queue, no leases, no threads."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from loader.errors import DeadlineExceededError, UnavailableError
from loader.snapshot.buckets import ranges, starts_of
from loader.snapshot.golden import GoldenRequests
from router.id_mapping import NO_IDS, BagIds
from router.router import Embeddings, Router
from router.shard import ReplicatedShard
from serving.description import NumberFormat
from serving.errors import InternalError, InvalidRequestError
from serving.formats.requests import LookupRequest, RankRequest, value_path
from serving.formats.schema import RequestSchema
from serving.models.inputs import InputAssembler
from serving.models.layers import CPU, SAMPLED
from serving.models.ranking_models import DeviceCopies
from serving.observe.calls import BatchTimes, Call, VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.observe.traces import batch_spans, traced_batch, traced_lookup
from serving.rank.missing_keys import KeyCounter, missing_of
from serving.results import LookupResult, Ragged, RankResult
from shard_node.answer import EXACT, UNKNOWN_SEQUENCE, ReplyEncoding
from shard_node.bags import Bags, Float32Array, Int64Array
from shard_node.freshness import FORKED_AGE_MS, UNKNOWN_AGE_MS, FreshnessBound, strictest
from shard_node.node import NodeInfo, Shard

_REQUEST, _DEADLINE, _IS_PINNED, _TRACE = map(attrgetter, ("request", "deadline", "is_pinned", "trace"))
_RETURNS_MISSING = attrgetter("return_missing")

Join: TypeAlias = Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any]]
"""Makes one array, in the batch's order, of each request's elements."""

# Segments of this many elements are cut out one by one: 0.35 us each; working positions out takes 1.7 ns an element.
LONG_SEGMENT = 200
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
        bound: the strictest one of its requests; None if rows may be of any age.
    """

    bags: Bags
    candidate_starts: Int64Array
    request_of_candidate: Int64Array
    context_dense: Float32Array
    candidate_dense: Float32Array
    bound: FreshnessBound | None = None


def merge(requests: Sequence[RankRequest]) -> MergedBatch:
    """Join requests of one model version, feature by feature. A single request is not copied."""
    if len(requests) == 1:
        only, count = requests[0], requests[0].num_candidates
        starts, owner = np.array((0, count), np.int64), np.zeros(count, np.int64)
        return MergedBatch(only.bags, starts, owner, only.context_dense[None, :], only.candidate_dense, only.bound)
    counts = np.array([request.num_candidates for request in requests], dtype=np.int64)
    return MergedBatch(
        merge_bags([request.bags for request in requests]),
        starts_of(counts),
        np.repeat(np.arange(counts.size), counts),
        np.concatenate([request.context_dense for request in requests]).reshape(counts.size, -1),
        np.concatenate([request.candidate_dense for request in requests]),
        strictest(request.bound for request in requests),
    )


def merge_bags(batch: Sequence[Bags]) -> Bags:
    """Join B batches of bags with the same S keys, key by key: for each key the bags of the first, of the second, ...

    Request b's bags of key s stand at b * S + s before, and at s * B + b after: these segments are transposed.
    Where neighbouring keys have as many bags, or ids, as each other in every request, their segments of one request are
    a matrix, and the batch's are these matrices side by side: blocks are copied, and no id's position is worked out.
    """
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
    join_lengths, join_values = _join(bags_per_segment), _join(values_per_segment)
    weights = None
    if any(bags.weights is not None for bags in batch):
        weights = join_values(
            [np.ones(bags.num_values, np.float32) if bags.weights is None else bags.weights for bags in batch]
        )
    return Bags(
        batch[0].keys,
        bags_per_segment.sum(axis=0),
        starts_of(join_lengths([lengths[first : end - 1] for first, end in pairs])),
        join_values([bags.values for bags in batch]),
        weights,
    )


def _join(per_segment: Int64Array) -> Join:
    """Choose what joins arrays whose segments, int64 [B, S], have these sizes: what is fastest for so many."""
    runs = _runs_alike(per_segment)
    if len(runs) <= FEW_RUNS:
        return _join_by_blocks(per_segment, runs)
    if int(per_segment.sum()) < per_segment.size * LONG_SEGMENT:
        return _join_by_index(per_segment)
    return _join_by_segments(per_segment)


def _runs_alike(per_segment: Int64Array) -> list[tuple[int, int]]:
    """Find runs [first, end) of keys that have segments of equal sizes in each request."""
    changes = (per_segment[:, 1:] != per_segment[:, :-1]).any(axis=0)
    return list(itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), per_segment.shape[1]]))


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


def _join_by_segments(per_segment: Int64Array) -> Join:
    """Join segments of any sizes: each is cut out of its request's array."""
    cuts = [[0, *itertools.accumulate(sizes)] for sizes in per_segment.tolist()]

    def join(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        pieces = (
            [array[begin:end] for begin, end in itertools.pairwise(cut)]
            for array, cut in zip(arrays, cuts, strict=True)
        )
        return np.concatenate(list(itertools.chain.from_iterable(zip(*pieces, strict=True))))

    return join


def _join_by_index(per_segment: Int64Array) -> Join:
    """Join segments of any sizes: every element's position is worked out."""
    num_requests, num_keys = per_segment.shape
    # Segment s of the batch is request s % B's feature s // B.
    order = np.arange(num_requests * num_keys).reshape(num_requests, num_keys).T.reshape(-1)
    sizes = per_segment.reshape(-1)
    positions = ranges(starts_of(sizes)[order], sizes[order])
    # Indexing with brackets takes half as long again.
    return lambda arrays: np.concatenate(arrays).take(positions)


def rank_order(scores: Float32Array, candidate_starts: Int64Array, request_of_candidate: Int64Array) -> Int64Array:
    """Order positions within each request by descending score, then position: int64 [N]. Arguments as `MergedBatch`."""
    counts = candidate_starts[1:] - candidate_starts[:-1]
    if counts.size == 1 or (counts == counts[0]).all():
        return (-scores).reshape(counts.size, -1).argsort(axis=1, kind="stable").reshape(-1)
    # lexsort is stable and its last key is the first to be sorted by.
    order = np.lexsort((-scores, request_of_candidate))
    order -= candidate_starts[request_of_candidate]
    return order


@dataclass(frozen=True, eq=False)
class RankingParts:
    """What replicas of one version share, only read.

    Rows must be of the delta `min_sequence`, or a later one, to be scored with these weights, which are of `dense_step`
    (0 for those of the snapshot).
    """

    version: int
    schema: RequestSchema
    models: DeviceCopies
    assembler: InputAssembler
    forms: ReplyEncoding = EXACT
    dense_step: int = 0
    min_sequence: int = UNKNOWN_SEQUENCE

    @property
    def dtype(self) -> NumberFormat:
        """Return the number format that the dense model is computed in."""
        return self.models.original.number_format


class Scored(NamedTuple):
    """Scores of a batch, float32 [1 + outputs, N], below them what the model names; ids without a row, missing keys.

    Every row was of the delta `sequence` or a later one, and at most `age_ms` old; negative where that is not known.
    """

    scores: Float32Array
    rejected: BagIds
    dense_step: int = 0
    sequence: int = UNKNOWN_SEQUENCE
    age_ms: int = UNKNOWN_AGE_MS
    missing: BagIds = NO_IDS


@dataclass(eq=False, repr=False)
class Ranking:
    """Ranks batches with one router. Belongs to the event loop that the router's shards belong to.

    Dense weights change while it serves: a batch is scored with the newest step whose deltas all of its rows have;
    `parts` are the newest that one was scored with. The step before is kept for rows of replicas that lag.
    Where rows are not within `desired`, other replicas are requested; not within `required`, requests are refused.
    `lacking_s` is for how long all batches had rows that are too old for any step; below 0 if the last had not.
    """

    parts: RankingParts
    router: Router
    shards: Sequence[Shard]
    metrics: ServingMetrics
    counter: VersionCounter
    clock: Callable[[], float] = time.monotonic
    device: torch.device = field(default=CPU, init=False)
    desired: FreshnessBound | None = field(default=None, init=False)
    required: FreshnessBound | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        features, version = self.parts.schema.features, self.parts.version
        self._counted = 0
        self._model_name, self._output_names = features.spec.model, tuple(features.spec.dense_model.outputs)
        has_keys = features.layout.has_keys
        self._keys = KeyCounter(self.metrics, self.counter, features, version) if has_keys else None
        Ranking.set_weights(self, self.parts)

    def with_weights(self, parts: RankingParts) -> Self:
        """Make a ranking of the same router with another dense model; it ends with this one."""
        other = copy.copy(self)
        other.set_weights(parts)
        return other

    def set_weights(self, parts: RankingParts) -> None:
        """Go on with another dense model, and no other."""
        self.parts = parts
        self._steps = [parts]
        self._lacking_since, self.lacking_s = math.inf, -1.0
        self._columns = parts.assembler.buffer()

    async def prepare(self, parts: RankingParts) -> None:
        """Do beforehand what batches need once that another step is to score; others are scored meanwhile."""

    def stage_weights(self, parts: RankingParts) -> None:
        """Score with another step of the same model's weights as soon as rows have the deltas that it needs."""
        self._steps = [parts, self.parts]
        for shard in self.shards:
            if isinstance(shard, ReplicatedShard):
                shard.min_sequence = self.parts.min_sequence

    async def require_step(self) -> None:
        """Score with the step in use, not with the one before: of a shard, replicas with its rows are asked."""
        self.stage_weights(self.parts)

    async def weights_active(self, sequence: float = math.inf) -> bool:
        """Return whether the last step offered answers, or rows reach `sequence` before; calls `nodes` if need be."""
        offered = self._steps[0]
        if offered is not self.parts:
            key = self._model_name, offered.version
            told = [one for _, info in await self.nodes() for one in info.versions if (one.model, one.version) == key]
            oldest = min((0 if one.forked else one.delta_sequence for one in told), default=math.inf)
            # Another may have been offered meanwhile.
            if offered is self._steps[0] and oldest >= offered.min_sequence:
                self.parts = offered
            elif oldest >= sequence:
                return True
        return self._steps[0] is self.parts

    def choose(self, sequence: int, age_ms: int = UNKNOWN_AGE_MS) -> RankingParts:
        """Find what rows of a delta and an age may be scored with. Raises UnavailableError if they are too old."""
        if age_ms >= FORKED_AGE_MS:
            # The stream may have another delta of that number by now, which a later step needs.
            sequence = min(sequence, self.parts.min_sequence)
        chosen = next((parts for parts in self._steps if parts.min_sequence <= sequence), None)
        if chosen is None or chosen.dense_step < min(1, self._steps[0].dense_step):
            self._lacking_since = min(self._lacking_since, now := self.clock())
            self.lacking_s = now - self._lacking_since
        else:
            self._lacking_since, self.lacking_s = math.inf, -1.0
        if chosen is not None:
            if chosen.dense_step > self.parts.dense_step:
                self.parts = chosen
            return chosen
        oldest = self._steps[-1]
        raise UnavailableError(
            f"model {self._model_name!r} version {oldest.version}: rows are of delta {sequence}, dense step "
            f"{oldest.dense_step} needs {oldest.min_sequence}; the shard's replica lags too far behind",
            kind="shard_unavailable",
        )

    async def warm(self, golden: GoldenRequests | None) -> None:
        """Do beforehand what batches like the golden requests need once. Here: nothing."""

    async def close(self) -> None:
        """Close the router, after the last batch."""
        if self._keys is not None:
            self._keys.close()
        await self.router.close()

    async def nodes(self) -> list[tuple[str, NodeInfo]]:
        """Return what all shards' nodes report, by address (or `local`). Raises ShardrankError."""
        infos = await asyncio.gather(*(shard.infos() for shard in self.shards))
        return [node for shard_nodes in infos for node in shard_nodes]

    async def connect(self, deadline: float) -> None:
        """Connect to every node of every shard. Raises UnavailableError if a shard has none that can be used."""
        remote = [shard for shard in self.shards if isinstance(shard, ReplicatedShard)]
        await asyncio.gather(*(one.connect(deadline) for one in remote))

    async def rank(self, waiting: Sequence[Call]) -> list[RankResult | Exception]:
        """Rank requests together: each gets its answer, or its error (an unknown id, a score not finite).

        Raises ShardrankError if the rows can't be looked up; then no request has an answer.
        """
        started_at = self.clock()
        requests = cast(list[RankRequest], list(map(_REQUEST, waiting)))
        batch = merge(requests)
        merge_s = self.clock() - started_at
        times = BatchTimes(len(requests), int(batch.candidate_starts[-1]), merge_s, started_at=started_at)
        if traces := list(filter(None, map(_TRACE, waiting))):
            times.trace = traced_batch(traces)
        try:
            scored = await self.score(batch, max(map(_DEADLINE, waiting)), times)
        except BaseException as error:
            self._end_trace(times, "rank", error)
            raise
        scored_at = self.clock()
        pinned = list(map(_IS_PINNED, waiting))
        is_counted = ~np.array(pinned) if True in pinned else None
        outcomes = self._outcomes(requests, batch, scored, is_counted)
        self._end_batch(times, scored_at, waiting, "rank")
        return outcomes

    def _outcomes(
        self,
        requests: Sequence[RankRequest],
        batch: MergedBatch,
        scored: Scored,
        is_counted: npt.NDArray[np.bool_] | None,
    ) -> list[RankResult | Exception]:
        """Return an answer or error of each request; `is_counted`, bool [B], says whose scores guards compare.

        None of all.
        """
        scores, rejected, dense_step, sequence, age_ms, missing = scored
        order = rank_order(scores[0], batch.candidate_starts, batch.request_of_candidate)
        starts = batch.candidate_starts.tolist()
        model, version, names = self._model_name, self.parts.version, self._output_names
        outcomes: list[RankResult | Exception] = []
        for request, start, end in zip(requests, starts[:-1], starts[1:], strict=True):
            best = order[start:end][: request.top_k]
            named = dict(zip(names, scores[1:, start:end], strict=True)) if names else {}
            of_request, request_id = scores[0, start:end], request.request_id
            known = dense_step, named, sequence, age_ms
            outcomes.append(RankResult(model, version, of_request, best, request_id, *known))
        if True in map(_RETURNS_MISSING, requests):
            owner, bag = self._owners(batch, missing)
            for number, one in enumerate(requests):
                if one.return_missing:
                    told = missing_of(self.parts.schema.features, missing, owner == number, bag)
                    outcomes[number] = replace(cast(RankResult, outcomes[number]), missing=told)
        # A sum is finite only if all of them are, and one number is asked faster than many.
        has_bound = batch.bound is not None or self.required is not None
        if not has_bound and not rejected.feature.size and math.isfinite(np.add.reduce(scores, axis=None)):
            self.counter.scored(scores[0] if is_counted is None else scores[0, is_counted[batch.request_of_candidate]])
            return outcomes
        if has_bound:
            outcomes = [
                self._refusal(one, sequence, age_ms) or ranked for one, ranked in zip(requests, outcomes, strict=True)
            ]
        finite = np.logical_and.reduceat(np.isfinite(scores).all(axis=0), batch.candidate_starts[:-1])
        for number in np.flatnonzero(~finite).tolist():
            outcomes[number] = InternalError(
                f"model {model!r} version {version} gave a score that is not finite", kind="model_output"
            )
        if len(rejected):
            owner, bag = self._owners(batch, rejected)
            # The first refused id of each request is the one that it is told.
            for number, which in zip(*np.unique(owner, return_index=True), strict=True):
                outcomes[number] = unknown_id(self.parts.schema, requests[number], rejected, which, int(bag[which]))
        is_answered = np.array([isinstance(one, RankResult) for one in outcomes])
        is_counted = is_answered if is_counted is None else is_counted & is_answered
        self.counter.scored(scores[0, is_counted[batch.request_of_candidate]])
        return outcomes

    def _owners(self, batch: MergedBatch, ids: BagIds) -> tuple[Int64Array, Int64Array]:
        """Return the request of each id, and the number of its bag within that: int64 [k]."""
        # A context feature has one bag for each request, a candidate feature one for each candidate.
        is_context = self.parts.schema.features.is_context[ids.feature]
        # A context bag's number may be beyond the candidates.
        of_candidate = batch.request_of_candidate.take(ids.bag, mode="clip")
        owner = np.where(is_context, ids.bag, of_candidate)
        return owner, np.where(is_context, 0, ids.bag - batch.candidate_starts[owner])

    def _refusal(self, request: RankRequest | LookupRequest, sequence: int, age_ms: int) -> UnavailableError | None:
        """Return why a request is refused rows of a delta and an age, with the field that it is due to, if any."""
        for bound in (request.bound, self.required):
            if bound is not None and not bound.allows(sequence, age_ms):
                field = "min_sequence" if sequence < bound.min_sequence else "max_age_ms"
                problem = f"rows of delta {sequence} are {age_ms} ms old; {field} is {getattr(bound, field)}"
                return UnavailableError(problem, kind="rows_stale", field="" if bound is self.required else field)
        return None

    def _forms(self, forms: ReplyEncoding, bound: FreshnessBound | None) -> ReplyEncoding:
        """Return what shards may answer to requests with a bound; the model's may be stricter."""
        if self.desired is not None:
            bound = strictest((bound, self.desired))
        return forms if bound is None else replace(forms, bound=bound)

    async def score(self, batch: MergedBatch, deadline: float, times: BatchTimes | None = None) -> Scored:
        """Score a batch until `deadline`, monotonic seconds; `times` gets the times of its parts.

        Scores of candidates with an id without a row mean nothing. Raises DeadlineExceededError before scoring,
        ShardrankError if the lookup failed.
        """
        started_at = self.clock()
        parts = self.parts
        forms = self._forms(parts.forms, batch.bound)
        lookup = self.router.lookup(self._model_name, parts.version, batch.bags, deadline, forms)
        trace = None if times is None else times.trace
        embeddings = await (lookup if trace is None else traced_lookup(trace, lookup))
        routed_at = self.clock()
        if self._keys is not None:
            self._keys.add(batch.bags, embeddings.missing)
        if times is not None:
            times.lookup, times.lookup_s = embeddings.times, routed_at - started_at
        if routed_at >= deadline:
            raise DeadlineExceededError("the deadline passed while the rows were looked up")
        # Weights may have changed meanwhile.
        parts = self.parts
        if len(self._steps) > 1 or embeddings.sequence < parts.min_sequence:
            parts = self.choose(embeddings.sequence, embeddings.age_ms)
        scores = self.score_rows(batch, embeddings, parts)
        if times is not None:
            times.rank_s = self.clock() - routed_at
        freshness = embeddings.sequence, embeddings.age_ms
        return Scored(scores, embeddings.rejected, parts.dense_step, *freshness, embeddings.missing)

    async def lookup(self, waiting: Call) -> LookupResult:
        """Look embeddings up, and pass the times to the request. Raises InvalidRequestError for an id without a row."""
        version, request = self.parts.version, cast(LookupRequest, waiting.request)
        times = BatchTimes(started_at=self.clock())
        if waiting.trace is not None:
            times.trace = traced_batch([waiting.trace])
        forms = self._forms(EXACT, request.bound)
        embeddings = self.router.lookup(self._model_name, version, request.bags, waiting.deadline, forms)
        try:
            pooled = await (embeddings if times.trace is None else traced_lookup(times.trace, embeddings))
        except BaseException as error:
            self._end_trace(times, "lookup", error)
            raise
        routed_at, freshness, missing = self.clock(), (pooled.sequence, pooled.age_ms), pooled.missing
        if self._keys is not None:
            self._keys.add(request.bags, missing)
        if len(pooled.rejected):
            raise unknown_id(self.parts.schema, request, pooled.rejected, 0, int(pooled.rejected.bag[0]))
        if (refusal := self._refusal(request, *freshness)) is not None:
            raise refusal
        features, projections = self.parts.schema.features, self.parts.models.original.projections_by_part
        of_parts = {name: matrix.numpy() for name, matrix in projections.items()}
        by_feature = dict[str, Float32Array | Ragged]()
        for key in request.bags.keys.tolist():
            rows = pooled.feature(key, of_parts)
            is_none = features.is_none[key]
            by_feature[features.features[key].name] = Ragged(rows, pooled.lengths(key)) if is_none else rows
        every, head = np.ones(len(missing), np.bool_), (self._model_name, version, by_feature, request.request_id)
        told = missing_of(features, missing, every, missing.bag) if request.return_missing else None
        answer = LookupResult(*head, *freshness, told)
        times.lookup, times.lookup_s = pooled.times, routed_at - times.started_at
        self._end_batch(times, routed_at, [waiting], "lookup")
        return answer

    def score_rows(self, batch: MergedBatch, embeddings: Embeddings, parts: RankingParts | None = None) -> Float32Array:
        """Score a batch whose rows were looked up: float32 [1 + outputs, N], as `RankingModel.scores`."""
        parts = parts or self.parts
        with torch.inference_mode():
            inputs = parts.assembler.assemble(
                embeddings,
                batch.request_of_candidate,
                batch.context_dense,
                batch.candidate_dense,
                self._columns,
                parts.models.original.projections_by_part,
            )
            if self.device is CPU:
                scored = parts.models.original.scores(inputs)
                if parts.models.original.int8:
                    self._count_inputs(parts)
            else:
                scored = parts.models.on(self.device).scores(inputs.on(self.device)).cpu()
            scores: Float32Array = scored.numpy()
        # What a batch was rounded up by is nobody's.
        return scores[:, : batch.request_of_candidate.size]

    def _count_inputs(self, parts: RankingParts) -> None:
        self._counted = (self._counted + 1) % SAMPLED
        if not self._counted:
            sampled, beyond = parts.models.original.take_sampled()
            self.metrics.count("int8_inputs", self._model_name, parts.version, by=sampled)
            self.metrics.count("int8_inputs_beyond", self._model_name, parts.version, by=beyond)

    def _end_batch(self, times: BatchTimes, scored_at: float, waiting: Sequence[Call], method: str) -> None:
        times.ended_at = self.clock()
        times.answer_s = times.ended_at - scored_at
        for call in waiting:
            call.batch = times
        self.metrics.batch_ended(self._model_name, times, method)
        if times.trace is not None:
            self._end_trace(times, method)

    def _end_trace(self, times: BatchTimes, method: str, error: BaseException | None = None) -> None:
        if times.trace is not None:
            times.ended_at = times.ended_at or self.clock()
            batch_spans(times.trace, times, self._model_name, self.parts.version, method, error)


def unknown_id(
    schema: RequestSchema, request: RankRequest | LookupRequest, rejected: BagIds, which: int, bag: int
) -> InvalidRequestError:
    """Make the error for one of the rejected ids, with its place in the request: `bag` counts within the feature."""
    key, rejected_id = int(rejected.feature[which]), int(rejected.id[which])
    bags = request.bags
    flat_bag = int(bags.bag_starts()[np.searchsorted(bags.keys, key)]) + bag
    first, end = int(bags.offsets[flat_bag]), int(bags.offsets[flat_bag + 1])
    index = first + int((bags.values[first:end] == rejected_id).argmax())
    path = value_path(schema, bags, index, is_lookup=isinstance(request, LookupRequest))
    table = schema.features.spec.table_of(schema.features.features[key].name)
    shown: object = rejected_id
    if schema.is_string[key]:
        # The request's texts are its string ids, in their order.
        is_text = np.repeat(schema.is_string[bags.keys], bags.values_per_key())
        shown = repr(request.texts[int(is_text[:index].sum())])[:80]
    if table.id_mapping.kind == "identity":
        allowed = f"not in 0..{table.num_embeddings - 1} (num_embeddings = {table.num_embeddings})"
    else:
        allowed = f"not among the {table.num_embeddings} ids (num_embeddings) of its vocabulary"
    return InvalidRequestError(path, f"{shown} has no row in table {table.name!r}: {allowed}", kind="unknown_id")
