"""Rank where rows lie on cards: ids go up once, scores come down once, and all between stays on one card.

The router only maps ids to rows; the replica's own lane pools them straight into the ranking model's input, on the card
that scores, in a bounded set of buffers and graphs by batch sizes. Lookups of the API go the usual way.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from loader.errors import DeadlineExceededError
from loader.snapshot.golden import GoldenRequests
from router.id_mapping import NO_IDS
from serving.cards.layout import BatchClass, CardLayout, candidate_classes, rounded_candidates
from serving.limits import RequestLimits
from serving.models.inputs import RankingInputs, SequenceInput
from serving.models.ranking_models import RankingModel
from serving.observe.calls import BatchTimes
from serving.rank.ranking import MergedBatch, Ranking, RankingParts, Scored
from shard_node.bags import Bags, Float32Array
from shard_node.cuda.card_engine import CardEngine, CardStream
from shard_node.errors import CardError, MemoryBudgetError
from shard_node.node import LocalShard, Shard

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Graph

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4

MAX_BATCHES = 64
MAX_BYTES = 512 << 20
"""Of a replica's buffers. Its card's replicas share what is left of rows: 1/8 of the device, and 1/32 at the least."""
MAX_FAILED_CAPTURES = 8
"""After so many a replica records nothing any more: each may keep some memory of the card for ever."""
USES_BEFORE_CAPTURE = 1
"""A class that came once may be the only one of its kind; one that comes again is worth a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class CardModel:
    """A dense model on a card's device, in the dtype of its layout."""

    layout: CardLayout
    model: RankingModel


class CardBatch:
    """Buffers for batches of one class, one at a time; once captured, graphs. Belongs to the thread of its lane.

    Raises MemoryBudgetError if the card or the host has no room; nothing is kept then.
    """

    def __init__(self, lane: CardStream, model: CardModel, batch_class: BatchClass) -> None:
        self.batch_class = batch_class
        self.num_uses = 0
        self.can_capture = True
        self._lane = lane
        self._card = lane.card
        self._layout = layout = model.layout
        self._model = model.model
        self._ranking: Graph | None = None
        with ExitStack() as undo:
            self._slot = lane.prepare(layout.runs(batch_class), layout.size(batch_class))
            undo.callback(self._slot.close)
            self._scores = self._card.allocate(FLOAT_BYTES * batch_class.num_candidates)
            undo.callback(self._scores.free)
            self._down = lane.rows.cards.allocate_pinned(self._scores.size_bytes)
            undo.callback(self._down.free)
            self._host_scores: Float32Array = self._down.array.view(np.float32)
            # Candidates behind a batch's last are of some request too.
            self._slot.extra.fill(0)
            self._host_extra = tuple(
                view.numpy() for view in layout.extra(batch_class, torch.from_numpy(self._slot.extra))
            )
            starts, total = layout.area_starts(batch_class)
            self._output = self._card.tensor(self._slot.out, 0, (total,), layout.dtype)
            shapes = [(batch_class[area.rows], area.width) for area in layout.areas]
            self._areas = [
                self._output[first : first + math.prod(shape)].view(shape)
                for first, shape in zip(starts, shapes, strict=True)
            ]
            columns, context, *others = self._areas
            self._sequence_rows = others[: len(layout.sequences)]
            sent = self._card.tensor(
                self._slot.batch, self._slot.extra_at, (layout.extra_bytes(batch_class),), torch.uint8
            )
            self._extra = layout.extra(batch_class, sent)
            self._scores_on_card = self._card.tensor(self._scores, 0, (batch_class.num_candidates,), torch.float32)
            self._inputs = RankingInputs(context, columns, {}, self._extra.owner)
            with self._card.torch_stream(lane.stream), torch.inference_mode():
                # Columns of padding must be zeros, and no other may ever hold NaN.
                self._output.zero_()
            undo.pop_all()
        self.size_bytes = self._slot.batch.size_bytes + self._slot.out.size_bytes + self._scores.size_bytes

    @property
    def is_captured(self) -> bool:
        """Return whether its work is recorded, as far as it can be."""
        return self._slot.is_captured

    @property
    def is_graph(self) -> bool:
        """Return whether all of its work is recorded."""
        return self._ranking is not None

    def fill(self, batch: MergedBatch, bags: Bags, pooled: Bags) -> None:
        """Pack a batch, whose bags have rows for ids, into pinned memory. Raises InvalidBagsError for a wrong row.

        `pooled` is what the layout makes of the bags. Nothing of the last batch may be under way.
        """
        self._slot.fill(pooled)
        num_candidates, num_requests = batch.candidate_dense.shape[0], batch.context_dense.shape[0]
        owner, context_dense, candidate_dense, sequences = self._host_extra
        # What lies behind the batch stays as it was: candidates that nobody reads, each of some request.
        owner[:num_candidates] = batch.request_of_candidate
        context_dense[:num_requests] = batch.context_dense
        candidate_dense[:num_candidates] = batch.candidate_dense
        bag_starts, value_starts = bags.bag_starts(), bags.value_starts()
        for target, (index, _, _) in zip(sequences, self._layout.sequences, strict=True):
            offsets = bags.offsets[int(bag_starts[index]) : int(bag_starts[index + 1]) + 1]
            np.subtract(offsets[:-1], value_starts[index], out=target[0, :num_requests])
            np.subtract(offsets[1:], offsets[:-1], out=target[1, :num_requests])

    def run_empty(self) -> None:
        """Run the work of the whole class without a batch. Raises MemoryBudgetError if the dense model has no room."""
        keys, no_bags = np.arange(self._layout.num_keys, dtype=np.int32), np.zeros(self._layout.num_keys, np.int64)
        self._slot.fill(Bags(keys, no_bags, np.zeros(1, np.int64), np.zeros(0, np.int64)))
        self._put(None)
        self._lane.stream.synchronize()

    def capture(self) -> None:
        """Record its work as graphs, after it has run once. Raises CardError, MemoryBudgetError.

        Two of them, so that row writes, which wait for lookups, do not wait for the dense model too. Sequences are laid
        out as long as a batch has them, so a model with some has only the first.
        """
        try:
            ranking = None if self._layout.sequences else self._card.capture(self._lane.stream, self._rank)
            self._slot.capture()
        except BaseException:
            self.can_capture = False
            raise
        self._ranking = ranking

    def score(self, batch: MergedBatch, fill: Callable[[], None] = lambda: None) -> Float32Array:
        """Score what was filled in: float32 [N], a copy. Blocks, without the GIL. Raises MemoryBudgetError.

        Or what `fill` fills in: no row write comes between that and the lookup.
        """
        self._put(batch, fill)
        self._lane.stream.synchronize()
        self.num_uses += 1
        return self._host_scores[: batch.candidate_dense.shape[0]].copy()

    def free(self) -> None:
        """Give the buffers back; nothing may be under way. Idempotent."""
        self._ranking = None
        self._slot.close()
        self._scores.free()
        self._down.free()

    def _put(self, batch: MergedBatch | None, fill: Callable[[], None] = lambda: None) -> None:
        """Put the work on the stream: of the batch that was filled in, or, for None, what all of the class share."""

        def enqueue() -> None:
            fill()
            self._slot.enqueue()

        self._lane.launch(enqueue)
        if self._ranking is not None:
            self._ranking.replay(self._lane.stream)
        elif not self._layout.sequences:
            self._rank()
        elif batch is not None:
            self._rank(batch)

    def _rank(self, batch: MergedBatch | None = None) -> None:
        """Put the dense model's work on the stream: of the batch's own size, or, for None, of the class's."""
        count = self.batch_class.num_candidates if batch is None else batch.candidate_dense.shape[0]
        try:
            with self._card.torch_stream(self._lane.stream), torch.inference_mode():
                self._layout.combine(self._areas, self._model.projections_by_part)
                inputs = self._inputs if batch is None else self._inputs_of(batch)
                shapes, num_candidates = self._layout.shapes, inputs.candidates.shape[0]
                if shapes.context.dense_width:
                    inputs.context[:, shapes.context.dense_columns].copy_(self._extra.context_dense)
                if shapes.candidate.dense_width:
                    target = inputs.candidates[:, shapes.candidate.dense_columns]
                    target.copy_(self._extra.candidate_dense[:num_candidates])
                torch.sigmoid(self._model(inputs), out=self._scores_on_card[:num_candidates])
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(
                f"card {self._card.number} has no room for the dense model's work on {count} candidates: {error}"
            ) from error
        self._card.copy_to_host(self._down, 0, self._scores.address, FLOAT_BYTES * count, self._lane.stream)

    def _inputs_of(self, batch: MergedBatch) -> RankingInputs:
        """Lay ragged rows side by side, [R, longest, D], ending in zeros."""
        num_candidates, num_requests = batch.candidate_dense.shape[0], batch.context_dense.shape[0]
        sequences = {}
        for number, (_, name, dim) in enumerate(self._layout.sequences):
            longest = int(self._host_extra[3][number, 1, :num_requests].max(initial=0))
            starts, lengths = self._extra.sequences[number, :, :num_requests].unbind(0)
            within = torch.arange(longest, device=starts.device)
            mask = within < lengths[:, None]
            # Behind the end of a sequence any row may be read: it is overwritten.
            rows = (starts[:, None] + within).clamp_(max=self.batch_class.num_values - 1).flatten()
            padded = self._sequence_rows[number].index_select(0, rows).view(num_requests, longest, dim)
            sequences[name] = SequenceInput(padded.masked_fill_(~mask[:, :, None], 0), mask)
        return self._inputs._replace(
            candidates=self._inputs.candidates[:num_candidates],
            sequences=sequences,
            request_of_candidate=self._extra.owner[:num_candidates],
        )


@dataclass(slots=True, eq=False)
class CardScorer:
    """Scores batches on one card. Belongs to one thread; the least recently used buffers go first.

    `limits` bound the batches that get graphs; `max_batches` and `max_bytes` the classes whose buffers are kept.
    """

    engine: CardEngine
    lane: CardStream
    on_close: Callable[[], None]
    limits: RequestLimits
    max_batches: int = MAX_BATCHES
    max_bytes: int = MAX_BYTES
    use_graphs: bool = True
    failed_captures: int = 0
    _batches: OrderedDict[tuple[CardModel, BatchClass], CardBatch] = field(default_factory=OrderedDict)

    @property
    def classes(self) -> list[BatchClass]:
        """Those that have buffers, the least recently used first."""
        return [batch_class for _, batch_class in self._batches]

    def classes_of(self, model: CardModel) -> list[BatchClass]:
        """List those that have buffers for a model, the latest used first."""
        return [batch_class for of, batch_class in reversed(self._batches) if of is model]

    def buffers(self, model: CardModel, batch: MergedBatch, num_values: int) -> CardBatch:
        """Find or make the buffers for a batch, of which so many values are pooled.

        Raises MemoryBudgetError where a batch of that size has no room.
        """
        counts = batch.candidate_dense.shape[0], batch.context_dense.shape[0], num_values
        key = model, BatchClass.of(*counts)
        if (buffers := self._batches.get(key)) is None:
            try:
                buffers = CardBatch(self.lane, *key)
            except MemoryBudgetError as error:
                if not self._batches:
                    raise
                logger.warning("buffers for %d sizes of batches are freed to make room: %s", len(self._batches), error)
                self.keep([])
                buffers = CardBatch(self.lane, *key)
            self._batches[key] = buffers
            self._trim()
        self._batches.move_to_end(key)
        if buffers.num_uses >= USES_BEFORE_CAPTURE and self._deserves_graph(model, buffers):
            self._capture(buffers)
        return buffers

    def warm(self, model: CardModel, batch_class: BatchClass, fraction: float = 1.0) -> bool:
        """Make buffers and a graph for a class; False where the model has that fraction of the room, or there is none.

        Raises MemoryBudgetError if nothing has room.
        """
        sizes = [batch.size_bytes for (of, _), batch in self._batches.items() if of is model]
        if len(sizes) >= fraction * self.max_batches or sum(sizes) >= fraction * self.max_bytes:
            return False
        key = model, batch_class
        try:
            if (batch := self._batches.get(key)) is None:
                batch = self._batches[key] = CardBatch(self.lane, *key)
            if self._deserves_graph(model, batch):
                batch.run_empty()
                self._capture(batch)
                # A graph's first launch uploads it to the card; one that fails does so before the version is live.
                batch.run_empty()
        except MemoryBudgetError as error:
            if key in self._batches:
                self._batches.pop(key).free()
            if not self._batches:
                raise
            count = batch_class.num_candidates
            logger.warning("no room is reserved for batches of %d candidates and more: %s", count, error)
            return False
        self._trim()
        return True

    def keep(self, models: Collection[CardModel]) -> None:
        """Let go of the buffers of all models but these."""
        for key in [key for key in self._batches if key[0] not in models]:
            self._batches.pop(key).free()

    def close(self) -> None:
        """Free all buffers and the lane, once."""
        try:
            self.keep([])
            self.lane.close()
        finally:
            self.on_close()

    def _trim(self) -> None:
        while len(self._batches) > 1 and (
            len(self._batches) > self.max_batches
            or sum(batch.size_bytes for batch in self._batches.values()) > self.max_bytes
        ):
            self._batches.popitem(last=False)[1].free()

    def _deserves_graph(self, model: CardModel, batch: CardBatch) -> bool:
        if not self.use_graphs or batch.is_captured or not batch.can_capture:
            return False
        max_candidates = rounded_candidates(self.limits.max_batch_candidates)
        # Values are rounded up to a power of two: the class of the largest batch holds at most twice as many.
        max_values = 2 * self.limits.max_batch_ids * int(model.layout.values_per_id.max())
        size = batch.batch_class
        return size.num_candidates <= max_candidates and size.num_values <= max_values

    def _capture(self, batch: CardBatch) -> None:
        """Record a class's work. A class that can't be is scored without a graph: slower, and as right."""
        try:
            batch.capture()
        except (CardError, MemoryBudgetError) as error:
            self.failed_captures += 1
            self.use_graphs = self.failed_captures < MAX_FAILED_CAPTURES
            others = "" if self.use_graphs else ", and so are all that come from now on"
            name = batch.batch_class
            logger.warning("%s are ranked without a CUDA graph, which is slower%s: %s", name, others, error)


def scorer_on_card(
    shards: Sequence[Shard], model: str, version: int, replica: int, limits: RequestLimits, use_graphs: bool = True
) -> CardScorer | None:
    """Make a scorer for one replica, by number, of a version with all rows on cards of this process; else None."""
    if len(shards) != 1 or not isinstance(shards[0], LocalShard):
        return None
    with ExitStack() as undo:
        engine = undo.enter_context(shards[0].node.generations.lease(model, version)).payload.engine
        if not isinstance(engine, CardEngine):
            return None
        lane = engine.lane(replica % len(engine.card_set.cards.cards))
        return CardScorer(engine, lane, undo.pop_all().close, limits, use_graphs=use_graphs)


@dataclass(eq=False, repr=False, kw_only=True)
class CardRanking(Ranking):
    """Ranks batches on one card. Belongs to the event loop, and thread, of its replica.

    The stage `lookup` is the host's part of a batch: ids to rows, and packing; `rank` is pooling and the dense model,
    and, of tables with keys, finding these and packing too.
    """

    scorer: CardScorer

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = self.scorer.lane.card.torch_device
        self._models: dict[RankingParts, CardModel] = {}

    def set_weights(self, parts: RankingParts) -> None:
        """Go on with another dense model, and no other."""
        super().set_weights(parts)
        self._models = {}

    async def prepare(self, parts: RankingParts) -> None:
        """Make buffers and graphs of the classes that are in use, the latest first, for up to half of the room."""
        model, current = self._on_card(parts), self._on_card(self.parts)
        for batch_class in self.scorer.classes_of(current):
            started_at = self.clock()
            if not self.scorer.warm(model, batch_class, 0.5):
                return
            await asyncio.sleep(self.clock() - started_at)

    def stage_weights(self, parts: RankingParts) -> None:
        """As `Ranking.stage_weights`; nothing stays on the card of steps that can't answer any more."""
        super().stage_weights(parts)
        self._models = {step: model for step, model in self._models.items() if step in self._steps}
        self.scorer.keep(self._models.values())

    async def score(self, batch: MergedBatch, deadline: float, times: BatchTimes | None = None) -> Scored:
        """Score as `Ranking.score` does. Raises MemoryBudgetError too, where a batch of that size has no room."""
        started_at = self.clock()
        mapped = self.router.mapper.map(batch.bags)
        sequence, age_ms = self.router.local_freshness(self._model_name, self.parts.version)
        chosen = self.choose(sequence, age_ms)
        model = self._on_card(chosen)
        looked_up, missing = model.layout.looked_up(self.router, mapped), NO_IDS
        buffers = self.scorer.buffers(model, batch, looked_up.rows.num_values)

        def find_and_fill() -> None:
            nonlocal missing
            rows, positions = self.scorer.lane.find_keys(looked_up.rows, model.layout.tables)
            by_feature, by_lookup = mapped.bags, looked_up._replace(rows=rows)
            if positions.size:
                # A key that is left out is no part of a mean, or of a sequence: it is not pooled.
                missing, by_feature, by_lookup = self.router.without_missing(by_feature, by_lookup, positions)
            buffers.fill(batch, by_feature, by_lookup.rows)

        if self._keys is None:
            buffers.fill(batch, mapped.bags, looked_up.rows)
        ready = self.clock()
        if ready >= deadline:
            raise DeadlineExceededError("the deadline passed while the batch was packed")
        scores = buffers.score(batch) if self._keys is None else buffers.score(batch, find_and_fill)
        if self._keys is not None:
            self._keys.add(batch.bags, missing)
        if times is not None:
            times.lookup_s, times.rank_s = ready - started_at, self.clock() - ready
        self.metrics.count("card_batches", self._model_name, "graph" if buffers.is_graph else "launches")
        return Scored(scores[None, :], mapped.rejected, chosen.dense_step, sequence, age_ms, missing)

    async def warm(self, golden: GoldenRequests | None) -> None:
        """Make buffers and graphs for the usual classes of batches: as golden requests have, or one id a feature."""
        model, features = self._on_card(self.parts), self.parts.schema.features
        # Values that are pooled for one request's context, and for one candidate, on average.
        ids, num_requests, num_candidates = model.layout.values_per_id, 1, 1
        if golden is not None:
            ids = ids * np.array([golden.lengths[feature.name].sum(dtype=np.int64) for feature in features.features])
            num_requests, num_candidates = golden.num_candidates.size, int(golden.num_candidates.sum(dtype=np.int64))
        context_values = ids[features.is_context].sum() / num_requests
        values = ids[~features.is_context].sum() / num_candidates
        self.scorer.keep([model])
        for count in candidate_classes(self.scorer.limits.max_batch_candidates):
            if not self.scorer.warm(model, BatchClass.of(count, 1, math.ceil(context_values + values * count))):
                return

    async def close(self) -> None:
        """Free the lane, give the rows back, and close the router."""
        try:
            self.scorer.close()
        finally:
            await super().close()

    def _on_card(self, parts: RankingParts) -> CardModel:
        model = self._models.get(parts)
        if model is None:
            features = parts.schema.features
            layout = CardLayout(features.spec, features, parts.assembler.dtype)
            model = self._models[parts] = CardModel(layout, parts.models.on(self.device))
        return model
