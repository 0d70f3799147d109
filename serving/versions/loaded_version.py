"""One version of a model: made servable, checked before it may serve, and what the serving process then holds of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from pydantic import Field

from loader.registry.fleet import DenseStep
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ExportedModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import Frozen
from router.feature_schema import FeatureSchema
from router.hot_rows import HotRows, HotRowsConfig
from router.id_mapping import IdMapper
from router.outliers import ReplicaEvents, ReplicaPolicy
from router.plan import Plan
from router.plan_file import PlanFile
from router.router import Router
from serving.cards.ranking import CardRanking, scorer_on_card
from serving.description import ModelInfo, NumberFormat
from serving.errors import RankingModelError, not_ready
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.models.exported import load_exported
from serving.models.inputs import InputAssembler
from serving.models.layers import DtypeChoice, ObservedProduct, Steps, bfloat16_is_native, choose_dtype
from serving.models.ranking_models import DeviceCopies, RankingModel, load_model
from serving.observe.calls import VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.rank.batcher import Batcher
from serving.rank.ranking import MergedBatch, Ranking, RankingParts
from serving.rank.replica import LoopReplica, Replica
from shard_node.access_counts import LookupSampler
from shard_node.answer import UNKNOWN_SEQUENCE, ReplyEncoding, SumFormat
from shard_node.bags import Bags
from shard_node.node import LocalShard, NodeInfo, Shard, ShardNode
from shard_node.wire.tls import TlsClientConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
AnyReplica: TypeAlias = Replica | LoopReplica
Clock: TypeAlias = Callable[[], float]
WireDtypeChoice: TypeAlias = Literal["auto"] | SumFormat
"""Number format of sums that shards send: `auto` is the narrowest that the golden scores allow."""
_NARROW_SUMS: tuple[SumFormat, ...] = ("int8", "float16")
ShardsFactory: TypeAlias = Callable[[ReplicaEvents], Sequence[Shard]]
"""Makes one replica's own connections to all shards of the plan; called on the replica's event loop."""

CHECKED_CANDIDATES = 128
"""Of golden requests at once: in float32 they take a millisecond or two, for which requests wait."""
_mismatch = partial(RankingModelError, kind="golden_mismatch")
INFO_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 5.0
GOLDEN_TIMEOUT_S = 30.0
DELTA_TRIES = 3


class LoadOptions(Frozen):
    """How versions are loaded, checked and ranked.

    Attributes:
        verify: check every file's SHA-256.
        num_replicas: ranking replicas, each a thread; with cards they take turns over these. 0 for one on the event
            loop that requests come from: not for rows that a disk or a card may have to be waited for.
        card_graphs: rank on cards by CUDA graphs; without, every launch is the host's.
        node_tls: for shard nodes at TCP addresses; None for plain text.
        plan: how rows are divided, in place of what the fleet's record and the snapshot say.
        hot_rows: copies of each version's hottest rows in this process; None for none.
        trust_exported: run exported programs, which are code; without, a version that has one is refused.
    """

    verify: bool = True
    num_replicas: int = Field(default=1, ge=0, le=64)
    dtype: DtypeChoice = "auto"
    wire_dtype: WireDtypeChoice = "auto"
    card_graphs: bool = True
    node_tls: TlsClientConfig | None = None
    plan: PlanFile | None = None
    hot_rows: HotRowsConfig | None = None
    replica_policy: ReplicaPolicy = ReplicaPolicy()
    trust_exported: bool = False


@dataclass(eq=False, repr=False)
class LoadedVersion:
    """A version with its schema, its queue and its ranking replicas. Made by `load`.

    `batcher` queues its requests; `access` returns the counts of lookups that this process answers itself,
    without a shard node; `dense_step` is the newest step of weights that it may answer with, 0 for the snapshot's;
    `dense_record` its record; `dense_fallback` says why the snapshot's answer in place of a step, "" if they do not.
    """

    schema: RequestSchema
    description: ModelInfo
    batcher: Batcher
    replicas: list[AnyReplica]
    on_close: Callable[[], None]
    counter: VersionCounter
    checked: CheckedVersion
    access: Callable[[], Sequence[LookupSampler]]
    dense_step: int = 0
    dense_fallback: str = ""
    dense_record: DenseStep | None = None

    def __post_init__(self) -> None:
        self.model, self.version = self.description.model, self.description.version

    @classmethod
    def load(
        cls,
        snapshot: Snapshot,
        plan: Plan,
        shards: ShardsFactory,
        options: LoadOptions,
        *,
        limits: RequestLimits | None = None,
        metrics: ServingMetrics | None = None,
        clock: Clock = time.monotonic,
        on_close: Callable[[], None] = lambda: None,
        loop: asyncio.AbstractEventLoop | None = None,
        hot: HotRows | None = None,
    ) -> LoadedVersion:
        """Make a version servable: connect, check it against its golden requests, warm every replica. Blocks.

        Ranking replicas are threads; where rows are on cards they take turns over these. With `num_replicas` 0 `loop`
        ranks in their place, for rows in this process's memory or on shard nodes: the event loop that requests come
        from, which runs in another thread. `on_close` is called when the version is unloaded, after its replicas have
        ended. `hot` are copies of rows of shard nodes, used by all replicas. Raises as `check_version` and
        `load_exported`.
        """
        spec, limits, metrics = snapshot.spec, limits or RequestLimits(), metrics or ServingMetrics()
        schema = RequestSchema(FeatureSchema.of(spec), limits)
        parts = ranking_parts(snapshot, schema, "float32", trust_exported=options.trust_exported)
        is_none, mapper = schema.features.is_none, IdMapper.of_snapshot(snapshot, schema.features)
        batcher, counter = Batcher(limits, clock, is_none if is_none.any() else None), VersionCounter()
        nodes: dict[ShardNode, None] = {}

        def ranking(number: int) -> Ranking:
            connected = shards(metrics.replica_events(spec.model))
            nodes.update(dict.fromkeys(shard.node for shard in connected if isinstance(shard, LocalShard)))
            router = Router(schema.features, mapper, plan, connected, hot=hot)
            scorer = scorer_on_card(connected, spec.model, snapshot.version, number, limits, options.card_graphs)
            if scorer is None:
                return Ranking(parts, router, connected, metrics, counter, clock)
            if isinstance(spec.dense_model, ExportedModelSpec):
                scorer.close()
                problem = "an exported program is run on the CPU, but its rows are on cards"
                raise RankingModelError(f"model {spec.model!r}: {problem}")
            return CardRanking(parts, router, connected, metrics, counter, clock, scorer=scorer)

        # What ranks on the loop of the APIs is checked on a thread, so that the loop goes on meanwhile.
        checked_with = batcher if options.num_replicas else Batcher(limits, clock)
        name = f"rank-{spec.model}-{snapshot.version}"
        replicas = _started(name, options.num_replicas or 1, checked_with, ranking, clock)
        try:
            checked = check_version(snapshot, parts, replicas, options, clock)
        except BaseException:
            _stop(checked_with, replicas)
            raise
        if options.num_replicas == 0:
            assert loop is not None
            checked_parts, checkers = replicas[0].ranking.parts, replicas
            try:
                replicas = [_on_loop(lambda: ranking(0).with_weights(checked_parts), batcher, loop, clock)]
            finally:
                _stop(checked_with, checkers)
        metrics.set_version("dense_step", spec.model, snapshot.version, 0)
        metrics.set_version("dtype_fallback", spec.model, snapshot.version, bool(checked.fallback))
        metrics.set_version("wire_fallback", spec.model, snapshot.version, bool(checked.wire_fallback))
        description = ModelInfo.of(snapshot, limits, checked.dtype, checked.fallback)

        def access() -> list[LookupSampler]:
            rows = [node.generations.payload(spec.model, snapshot.version).engine.access for node in nodes]
            return rows if hot is None else [*rows, hot.access]

        return cls(schema, description, batcher, replicas, on_close, counter, checked, access)

    @property
    def rankings(self) -> list[Ranking]:
        """List those of its replicas."""
        return [replica.ranking for replica in self.replicas]

    async def nodes(self) -> list[tuple[str, NodeInfo]]:
        """Return what the nodes of all shards report, by address.

        Raises UnavailableError if a replica has ended, a shard does not answer in time, or no node of a shard has this
        version any more: the fleet went on without this process, which lost sight of the registry.
        """
        if dead := [replica for replica in self.replicas if not replica.is_alive]:
            raise not_ready(f"{len(dead)} of {len(self.replicas)} ranking replicas of {self.model!r} have ended")
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                nodes = await asyncio.wrap_future(self.replicas[0].call(Ranking.nodes))
        except TimeoutError:
            raise not_ready(f"the shards of {self.model!r} did not answer within {INFO_TIMEOUT_S} s") from None
        have = {info.identity.shard_index for _, info in nodes if info.has(self.model, self.version)}
        if lacking := {info.identity.shard_index for _, info in nodes} - have:
            where = f"shard {min(lacking)} that answers"
            raise not_ready(f"no node of {where} has version {self.version} of model {self.model!r}")
        return nodes

    async def on_each(self, work: Callable[[Ranking], Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run a coroutine on each replica, between batches. Raises UnavailableError if one has ended."""
        return await asyncio.gather(*(asyncio.wrap_future(replica.call(work)) for replica in self.replicas))

    async def accepts_dense(self, sequence: float = math.inf) -> bool:
        """Return whether a step that needs the delta `sequence` may replace the one before. Raises ShardrankError."""
        return all(await self.on_each(partial(Ranking.weights_active, sequence=sequence)))

    def change_dense(
        self, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], record: DenseStep, max_drift: float
    ) -> None:
        """Answer with other dense weights, checked, as soon as rows have the deltas that they need. Blocks.

        What answers now goes on until then, and for rows of replicas that lag. Raises RankingModelError for tensors of
        another model, or if a golden score drifts further than `max_drift`, or is not finite; another
        ShardrankError if it can't be checked now.
        """
        current = self.replicas[0].ranking.parts
        model = load_model(snapshot.spec, tensors, current.dtype, current.models.original.int8)
        parts = replace(current, models=DeviceCopies(model), dense_step=record.step, min_sequence=record.sequence)
        golden = snapshot.golden()
        if golden is not None:
            check = _GoldenCheck(snapshot, current, self.replicas, golden, max_drift, time.monotonic)
            if (drift := check.difference(self.replicas[0], parts, to_current=True)) > max_drift:
                difference = f"{drift:.3g} from those of dense step {current.dense_step}, of the same rows"
                raise _mismatch(f"golden scores are up to {difference}; max_drift is {max_drift:g}")

        async def offer(ranking: Ranking) -> None:
            await ranking.prepare(parts)
            ranking.stage_weights(parts)

        _on_all(self.replicas, offer)
        self.dense_step, self.dense_record = record.step, record

    def use_snapshot_weights(self, snapshot: Snapshot) -> None:
        """Answer with the snapshot's weights, which its load has checked, and forget all dense steps. Blocks."""
        current = self.replicas[0].ranking.parts
        int8 = current.models.original.int8
        models = DeviceCopies(load_model(snapshot.spec, snapshot.dense_tensors(), current.dtype, int8))
        parts = replace(current, models=models, dense_step=0, min_sequence=UNKNOWN_SEQUENCE)

        async def use(ranking: Ranking) -> None:
            ranking.set_weights(parts)
            ranking.stage_weights(parts)

        _on_all(self.replicas, use)
        self.dense_step, self.dense_record = 0, None

    def close(self) -> None:
        """End the replicas and free what they hold. Not from a replica's own thread; no lease may be out."""
        _stop(self.batcher, self.replicas)
        self.on_close()


def _started(
    name: str, count: int, batcher: Batcher, ranking: Callable[[int], Ranking], clock: Clock
) -> list[AnyReplica]:
    replicas: list[AnyReplica] = []

    def replica_failed() -> None:
        if all(replica.failure for replica in replicas):
            batcher.close("all its ranking replicas have ended")

    replicas += [
        Replica(f"{name}-{number}", batcher, partial(ranking, number), clock, replica_failed) for number in range(count)
    ]
    try:
        for replica in replicas:
            replica.start()
    except BaseException:
        _stop(batcher, replicas)
        raise
    return replicas


def _on_loop(
    make: Callable[[], Ranking], batcher: Batcher, loop: asyncio.AbstractEventLoop, clock: Clock
) -> LoopReplica:
    async def connect() -> Ranking:
        ranking = make()
        try:
            await ranking.connect(clock() + CONNECT_TIMEOUT_S)
        except BaseException:
            await ranking.close()
            raise
        return ranking

    ranking = asyncio.run_coroutine_threadsafe(connect(), loop).result(2 * CONNECT_TIMEOUT_S)
    replica = LoopReplica(ranking, batcher, loop, clock)
    replica.start()
    return replica


def _stop(batcher: Batcher, replicas: list[AnyReplica]) -> None:
    batcher.close()
    for replica in replicas:
        replica.join()
    # They know each other by this list: emptied, the last reference frees the dense model and the vocabularies at once
    # and not when the interpreter next looks for cycles, which a large process rarely does.
    replicas.clear()


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """What the check of a version found.

    Attributes:
        fallback: why it does not serve with the dtype that was asked for; "" if it does.
        wire_fallback: why sums of shards travel in float32 although a narrower format was asked for; "" if they don't.
        int8: which layers are in int8, and how many inputs of golden requests were beyond their codes; "" for none.
        difference: the largest one from a golden score. None without golden requests, and once deltas were applied to
            the version: then its scores are meant to be others.
        tolerance: what the manifest allows; None without golden requests.
    """

    dtype: NumberFormat
    fallback: str = ""
    wire_fallback: str = ""
    int8: str = ""
    difference: float | None = None
    tolerance: float | None = None


def ranking_parts(
    snapshot: Snapshot,
    schema: RequestSchema,
    dtype: NumberFormat,
    int8: Mapping[str, Steps] | None = None,
    *,
    trust_exported: bool = False,
) -> RankingParts:
    """Load a dense model in a number format, with these int8 layers; a (trusted) exported program in its own.

    Raises RankingModelError.
    """
    model: RankingModel
    if isinstance(snapshot.spec.dense_model, ExportedModelSpec):
        model = load_exported(snapshot.spec, snapshot.program_path, trusted=trust_exported)
    else:
        model = load_model(snapshot.spec, snapshot.dense_tensors(), dtype, int8)
    assembler = InputAssembler(snapshot.spec, schema.features, model.dtype, model.int8.get(model.reads_candidates))
    return RankingParts(snapshot.version, schema, DeviceCopies(model), assembler)


def check_version(
    snapshot: Snapshot, parts: RankingParts, replicas: Sequence[AnyReplica], options: LoadOptions, clock: Clock
) -> CheckedVersion:
    """Check the golden scores, choose the number formats, and warm every replica. Blocks.

    As long as its rows are those of the snapshot, a version must give its golden scores within the tolerance. Once
    deltas were applied to them, the difference is logged, and only what does not depend on the rows is required: every
    id has one, scores are finite, and narrower formats, of layers and of sums of shards, are close to float32.

    The replicas are started, have no requests yet, and use `parts`, which are in float32. Raises RankingModelError if
    it must not serve, also for bfloat16 on a device without, ShardrankError if its rows can't be looked up.
    """
    deadline, dtype, wire_dtype = clock() + CONNECT_TIMEOUT_S, options.dtype, options.wire_dtype
    _on_all(replicas, lambda ranking: ranking.connect(deadline))
    device, golden = replicas[0].ranking.device, snapshot.golden()
    is_exported = isinstance(snapshot.spec.dense_model, ExportedModelSpec)
    # A program is in the number format that it was exported in.
    chosen = "float32" if is_exported else choose_dtype(dtype, device)
    has_remote = replicas[0].ranking.router.waits
    if golden is not None and snapshot.manifest.golden is not None:
        check = _GoldenCheck(snapshot, parts, replicas, golden, snapshot.manifest.golden.tolerance, clock)
        narrow = _NARROW_SUMS[wire_dtype == "float16" :] if has_remote and wire_dtype != "float32" else ()
        checked = check.run(chosen, narrow)
    else:
        no_golden = "there are no golden requests to check {} with"
        needs_golden = chosen == "int8" or (chosen != "float32" and dtype == "auto")
        fallback = no_golden.format(chosen) if needs_golden else ""
        wire_fallback = no_golden.format("int8 sums") if has_remote and wire_dtype == "auto" else ""
        checked = CheckedVersion(parts.dtype if fallback or is_exported else chosen, fallback, wire_fallback)
        if checked.dtype != parts.dtype:
            parts = ranking_parts(snapshot, parts.schema, chosen)
            checked = replace(checked, dtype=parts.dtype)
        if wire_dtype != "auto":
            parts = replace(parts, forms=ReplyEncoding(stored=True, sums=wire_dtype))
        _use(replicas, parts)
    _on_all(replicas, lambda ranking: ranking.warm(golden))
    if is_exported and dtype not in ("auto", current := parts.dtype):
        checked = replace(checked, fallback=f"an exported program is computed as it was exported, in {current}")
    return checked


def _on_all(replicas: Sequence[AnyReplica], work: Callable[[Ranking], Coroutine[Any, Any, Result]]) -> list[Result]:
    return [future.result() for future in [replica.call(work) for replica in replicas]]


def _use(replicas: Sequence[AnyReplica], parts: RankingParts) -> None:
    for replica in replicas:
        replica.ranking.set_weights(parts)


@dataclass(frozen=True, slots=True)
class _GoldenCheck:
    snapshot: Snapshot
    parts: RankingParts
    replicas: Sequence[AnyReplica]
    golden: GoldenRequests
    tolerance: float
    clock: Clock

    @property
    def name(self) -> str:
        return f"model {self.snapshot.spec.model!r} version {self.snapshot.version}"

    def run(self, chosen: NumberFormat, wire_formats: Sequence[SumFormat]) -> CheckedVersion:
        parts, fallbacks, wire_fallbacks = self.parts, list[str](), list[str]()
        exact = parts.models.original
        with exact.observed() if chosen == "int8" else contextlib.nullcontext(dict[str, ObservedProduct]()) as noted:
            difference = self.difference(self.replicas[0])
        as_exported = self.is_as_exported(difference)
        for narrower in self.narrower(chosen, exact.steps(noted)):
            fallback = self.why_not(narrower, narrower.dtype, "the dense model is computed in a wider number format")
            if not fallback:
                parts = narrower
                _use(self.replicas, parts)
                break
            fallbacks.append(fallback)
        if parts.dtype == chosen:
            fallbacks.clear()
        for sums in wire_formats:
            narrower = replace(parts, forms=ReplyEncoding(stored=True, sums=sums))
            fallback = self.why_not(narrower, f"{sums} sums of shards", "shards answer with wider sums")
            if not fallback:
                _use(self.replicas, narrower)
                wire_fallbacks.clear()
                break
            wire_fallbacks.append(fallback)
        # One after the other: others serve meanwhile.
        difference = max(difference, *map(self.difference, self.replicas))
        as_exported = as_exported and self.is_as_exported(difference)
        golden_difference = difference if as_exported else None
        sampled, beyond = parts.models.original.take_sampled()
        layers = ", ".join(parts.models.original.int8)
        int8 = f"{layers} in int8, {beyond} of {sampled} inputs beyond their codes" if layers else ""
        fallback, wire_fallback = "; ".join(fallbacks), "; ".join(wire_fallbacks)
        return CheckedVersion(parts.dtype, fallback, wire_fallback, int8, golden_difference, self.tolerance)

    def narrower(self, chosen: NumberFormat, int8: Mapping[str, Steps]) -> Iterator[RankingParts]:
        """Yield what may be served, the fastest first: with all int8 layers, without the smallest, ..., without any."""
        layers = list(int8.items())
        while layers:
            yield ranking_parts(self.snapshot, self.parts.schema, "int8", dict(layers))
            layers.pop()
        if chosen == "bfloat16" or (chosen == "int8" and bfloat16_is_native()):
            yield ranking_parts(self.snapshot, self.parts.schema, "bfloat16")

    def is_as_exported(self, difference: float) -> bool:
        """Tell whether the difference is within the tolerance. Raises RankingModelError if no delta explains it."""
        if difference <= self.tolerance:
            return True
        # Asked after the scores: what was applied before them is surely seen.
        if not self.has_deltas():
            allowed = f"the manifest allows {self.tolerance:.3g}"
            raise _mismatch(f"{self.name}: golden scores differ by up to {difference:.3g}, {allowed}")
        after = "%s: golden scores differ by up to %.3g since deltas were applied (the manifest allows %.3g)"
        logger.warning(after, self.name, difference, self.tolerance)
        return False

    def why_not(self, parts: RankingParts, what: str, instead: str) -> str:
        """Say why a number format is not used; "" if it gives the golden scores, or, after deltas, the present ones."""
        difference = self.difference(self.replicas[0], parts)
        if difference > self.tolerance and self.has_deltas():
            # Where two lookups are compared, a delta may have come between them.
            for _ in range(DELTA_TRIES):
                difference = self.difference(self.replicas[0], parts, to_current=True)
                if difference <= self.tolerance:
                    break
        if difference <= self.tolerance:
            return ""
        reason = f"with {what} golden scores differ by up to {difference:.3g}, the manifest allows {self.tolerance:.3g}"
        logger.warning("%s: %s: %s", self.name, instead, reason)
        return reason

    def difference(self, replica: AnyReplica, other: RankingParts | None = None, *, to_current: bool = False) -> float:
        """Return the largest difference between a replica's scores and the golden ones.

        It sleeps between batches for as long as the last one took: others serve meanwhile. With `to_current` the
        scores of other parts are compared to those of its current ones, of the very same rows if their forms allow it:
        where deltas are applied meanwhile, a second lookup would give others.
        """
        name, version, clock = self.snapshot.spec.model, self.snapshot.version, self.clock

        async def check(current: Ranking) -> float:
            ranking, largest = current if other is None else current.with_weights(other), 0.0
            for batch, exported in golden_batches(self.parts.schema, self.golden):
                started_at = clock()
                deadline = started_at + GOLDEN_TIMEOUT_S
                if to_current:
                    forms = current.parts.forms
                    embeddings = await current.router.lookup(name, version, batch.bags, deadline, forms)
                    expected, rejected = current.score_rows(batch, embeddings), embeddings.rejected
                    if ranking.parts.forms != forms:
                        forms = ranking.parts.forms
                        embeddings = await current.router.lookup(name, version, batch.bags, deadline, forms)
                    scores = ranking.score_rows(batch, embeddings)
                else:
                    expected = exported
                    scores, rejected, *_ = await ranking.score(batch, deadline)
                if len(rejected):
                    feature = self.parts.schema.features.features[int(rejected.feature[0])].name
                    golden_id = f"golden id {int(rejected.id[0])} of feature {feature!r}"
                    raise _mismatch(f"{self.name}: {golden_id} has no row")
                differences = np.abs(scores - expected)
                if not np.isfinite(differences).all():
                    raise _mismatch(f"{self.name}: a golden request got a score that is not finite")
                largest = max(largest, float(differences.max()))
                await asyncio.sleep(clock() - started_at)
            return largest

        return _on_all([replica], check)[0]

    def has_deltas(self) -> bool:
        (nodes,) = _on_all(self.replicas[:1], Ranking.nodes)
        key = self.snapshot.spec.model, self.snapshot.version
        return any(
            (served.model, served.version) == key and served.delta_sequence > served.last_delta
            for _, info in nodes
            for served in info.versions
        )


def golden_batches(schema: RequestSchema, golden: GoldenRequests) -> Iterator[tuple[MergedBatch, np.ndarray]]:
    """Yield golden requests in batches of some `CHECKED_CANDIDATES`, with their float32 [1 + outputs, N] scores."""
    counts = golden.num_candidates.astype(np.int64)
    ends = np.cumsum(counts)
    # A request is in the batch that its first candidate falls into.
    batch_of_request = (ends - counts) // min(CHECKED_CANDIDATES, schema.limits.max_batch_candidates)
    edges = np.flatnonzero(np.diff(batch_of_request, prepend=-1, append=batch_of_request[-1] + 1))
    outputs = [golden.outputs[name] for name in schema.features.spec.dense_model.outputs]
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        candidates = slice(int(ends[first] - counts[first]), int(ends[end - 1]))
        batch = MergedBatch(
            golden_bags(schema, golden, slice(first, end), candidates),
            np.concatenate([[0], np.cumsum(counts[first:end])]),
            np.repeat(np.arange(end - first), counts[first:end]),
            golden.context_dense[first:end],
            golden.candidate_dense[candidates],
        )
        yield batch, np.stack([scores[candidates] for scores in (golden.scores, *outputs)])


def golden_bags(schema: RequestSchema, golden: GoldenRequests, requests: slice, candidates: slice) -> Bags:
    """Return the bags of some golden requests and of their candidates."""
    lengths, values, weights = [], [], []
    for feature in schema.features.features:
        name, bags = feature.name, requests if feature.side == "context" else candidates
        offsets = np.concatenate([[0], np.cumsum(golden.lengths[name], dtype=np.int64)])
        ids = slice(int(offsets[bags.start]), int(offsets[bags.stop]))
        lengths.append(golden.lengths[name][bags])
        values.append(golden.values[name][ids])
        weights.append(golden.weights[name][ids] if name in golden.weights else np.ones(values[-1].size, np.float32))
    return Bags.from_lengths(
        schema.keys,
        np.array([bags.size for bags in lengths], dtype=np.int64),
        np.concatenate(lengths),
        np.concatenate(values),
        np.concatenate(weights) if golden.weights else None,
    )
