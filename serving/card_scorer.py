"""The batches of one ranking replica on one card: a bounded set of buffers and graphs, by class of batch sizes."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from serving.card_batch import CardBatch
from serving.limits import RequestLimits
from serving.models.card_layout import BatchClass, CardLayout, candidate_classes, rounded_candidates
from serving.models.ranking_model import RankingModel
from serving.rank.merge import MergedBatch
from shard_node.bags import KeyedBags
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.lane import Lane
from shard_node.errors import CardError, MemoryBudgetError
from shard_node.node import LocalShard, Shard

logger = logging.getLogger(__name__)

MAX_BATCHES = 64
MAX_BYTES = 512 << 20
"""Of a replica's buffers. Its card's replicas share what is left of rows: 1/8 of the device, and 1/32 at the least."""
MAX_FAILED_CAPTURES = 8
"""After so many a replica records nothing any more: each may keep some memory of the card for ever."""
USES_BEFORE_CAPTURE = 1
"""A class that came once may be the only one of its kind; one that comes again is worth a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class CardModel:
    """A dense model on a card.

    Attributes:
        layout: where its inputs lie.
        model: on the card's device, in the layout's dtype.
    """

    layout: CardLayout
    model: RankingModel


@dataclass(slots=True)
class ScorerCounts:
    """What a scorer has done; only its own thread adds to it.

    Attributes:
        graphs: classes that were captured.
        failed_captures: classes whose work could not be recorded, and is launched piece by piece.
        replays: batches of such classes.
        evicted: classes whose buffers were given up for others.
    """

    graphs: int = 0
    failed_captures: int = 0
    replays: int = 0
    evicted: int = 0


@dataclass(slots=True, eq=False)
class CardScorer:
    """Scores batches on one card. Belongs to one thread; the least recently used buffers go first.

    Attributes:
        engine: the rows.
        lane: of the engine; where the work goes; closed by `close`.
        on_close: called when that is done.
        limits: of batches; one beyond them gets buffers, but no graph.
        max_batches, max_bytes: how many classes' buffers are kept, and of what size together.
        use_graphs: whether work that is the same for all batches of a class is recorded.
        counts: what it has done.
    """

    engine: CardEngine
    lane: Lane
    on_close: Callable[[], None]
    limits: RequestLimits
    max_batches: int = MAX_BATCHES
    max_bytes: int = MAX_BYTES
    use_graphs: bool = True
    counts: ScorerCounts = field(default_factory=ScorerCounts)
    _batches: OrderedDict[tuple[CardModel, BatchClass], CardBatch] = field(default_factory=OrderedDict)

    @property
    def device(self) -> torch.device:
        """Where torch sees the card's memory."""
        return self.lane.card.torch_device

    @property
    def classes(self) -> list[BatchClass]:
        """Those that have buffers, the least recently used first."""
        return [most for _, most in self._batches]

    def pack(self, model: CardModel, batch: MergedBatch, bags: KeyedBags) -> CardBatch:
        """Finds or makes the buffers for a batch, and packs it.

        Args:
            model: that will score it.
            batch: as merged.
            bags: its bags, all features, with rows for ids.

        Raises:
            InvalidBagsError: for a row outside its table.
            MemoryBudgetError: the card or the host has no room for a batch of that size.
        """
        most = BatchClass.of(batch.candidate_dense.shape[0], batch.context_dense.shape[0], bags.num_values)
        found = self._batches.get((model, most)) or self._make_room_for(model, most)
        self._batches.move_to_end((model, most))
        if found.num_uses >= USES_BEFORE_CAPTURE and self._deserves_graph(found):
            self._capture(found)
        found.fill(batch, bags)
        self.counts.replays += found.is_captured
        return found

    def warm(self, model: CardModel, context_ids: float, candidate_ids: float) -> None:
        """Makes buffers and graphs for all classes of one request, and lets go of those of other models.

        Args:
            model: that will score from now on.
            context_ids: ids of a request's context, as many as are usual.
            candidate_ids: ids of one candidate.

        Raises:
            MemoryBudgetError: not even the smallest class has room.
        """
        for key in [key for key in self._batches if key[0] is not model]:
            self._batches.pop(key).free()
        for count in candidate_classes(self.limits.max_batch_candidates):
            most = BatchClass.of(count, 1, math.ceil(context_ids + candidate_ids * count))
            if len(self._batches) >= self.max_batches or self._size_bytes() >= self.max_bytes:
                return
            try:
                self._warm_class(model, most)
            except MemoryBudgetError as error:
                if not self._batches:
                    raise
                logger.warning("batches of %d candidates and more find room when they come, or none: %s", count, error)
                return

    def close(self) -> None:
        """Frees all buffers and the lane, once."""
        try:
            while self._batches:
                self._batches.popitem()[1].free()
            self.lane.close()
        finally:
            self.on_close()

    def _warm_class(self, model: CardModel, most: BatchClass) -> None:
        found = self._batches.get((model, most)) or self._make(model, most)
        if self._deserves_graph(found):
            try:
                found.run_empty()
            except MemoryBudgetError:
                self._batches.pop((model, most)).free()
                raise
            self._capture(found)

    def _make(self, model: CardModel, most: BatchClass) -> CardBatch:
        made = self._batches[model, most] = CardBatch(self.lane, model.layout, model.model, most)
        return made

    def _make_room_for(self, model: CardModel, most: BatchClass) -> CardBatch:
        try:
            made = self._make(model, most)
        except MemoryBudgetError as error:
            if not self._batches:
                raise
            logger.warning("buffers of %d classes of batches are given up: %s", len(self._batches), error)
            self._evict(len(self._batches))
            made = self._make(model, most)
        while len(self._batches) > 1 and (len(self._batches) > self.max_batches or self._size_bytes() > self.max_bytes):
            self._evict(1)
        return made

    def _evict(self, count: int) -> None:
        for _ in range(count):
            self._batches.popitem(last=False)[1].free()
            self.counts.evicted += 1

    def _deserves_graph(self, batch: CardBatch) -> bool:
        if not self.use_graphs or batch.is_captured or not batch.can_capture:
            return False
        most = rounded_candidates(self.limits.max_batch_candidates)
        # Ids are rounded up to a power of two: the class of the largest batch holds at most twice as many.
        return batch.most.num_candidates <= most and batch.most.num_values <= 2 * self.limits.max_batch_ids

    def _capture(self, batch: CardBatch) -> None:
        """Records a class's work. A class that can't be is scored without a graph: slower, and as right."""
        try:
            batch.capture()
        except (CardError, MemoryBudgetError) as error:
            self.counts.failed_captures += 1
            self.use_graphs = self.counts.failed_captures < MAX_FAILED_CAPTURES
            others = "" if self.use_graphs else ", and so are all that come from now on"
            logger.warning("%s are ranked without a CUDA graph, which is slower%s: %s", batch.most, others, error)
        else:
            self.counts.graphs += 1

    def _size_bytes(self) -> int:
        return sum(batch.size_bytes for batch in self._batches.values())


def scorer_on_card(
    shards: Sequence[Shard], model: str, version: int, replica: int, limits: RequestLimits, use_graphs: bool = True
) -> CardScorer | None:
    """A scorer for one replica of a version, if its rows are all in this process and on cards; else None.

    The rows are leased until it is closed. Replicas take turns over the cards.

    Args:
        shards: of the version.
        model: its name.
        version: its number.
        replica: number of the replica.
        limits: of batches.
        use_graphs: as of `CardScorer`.

    Raises:
        GenerationNotFoundError: the rows are not here.
    """
    if len(shards) != 1 or not isinstance(shards[0], LocalShard):
        return None
    lease = shards[0].node.generations.lease(model, version)
    try:
        engine = lease.payload.engine
        if isinstance(engine, CardEngine):
            lane = engine.lane(replica % len(engine.card_set.cards.cards))
            return CardScorer(engine, lane, lease.release, limits, use_graphs=use_graphs)
    except BaseException:
        lease.release()
        raise
    lease.release()
    return None
