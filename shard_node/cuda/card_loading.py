"""From a snapshot's row files to a CUDA engine: planning, taking memory on cards and host, filling it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot
from shard_node.bags import TableLayout
from shard_node.cuda.arena_on_card import ArenaOnCards, finder_bytes
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_fill import NUM_UPLOADS, UPLOAD_BYTES, CardFill
from shard_node.cuda.card_memory import CardClaim
from shard_node.cuda.card_set import CardSet
from shard_node.cuda.placer import Placer
from shard_node.cuda.places import owner_bits
from shard_node.engine.arena_builder import ArenaBuilder, layout_for
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.memory import Claim, MemoryClaim, RowMemory
from shard_node.node import DeltaPosition, LoadedTables, Partition
from shard_node.planning.card_plan import CardBudget, CardPlan
from shard_node.planning.hotness import Hotness, ObservedCounts, RowCounts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TablesClaim:
    """What a version's tables take of the cards and of this process's RAM, and of the cards while they are loaded."""

    cards: CardClaim
    staging: CardClaim
    ram: MemoryClaim

    def filled(self) -> None:
        """All is loaded: what loading took is free again."""
        self.cards.filled()
        self.ram.filled()
        self.staging.give_back()

    def give_back(self) -> None:
        """Ends all of it. Idempotent."""
        self.staging.give_back()
        self.ram.give_back()
        self.cards.give_back()


class CardTableLoad:
    """A load onto cards, before it begins: what it will take is known, nothing is taken yet.

    The plan depends on the card set's options, not on what other versions hold: a version is never placed worse because
    another one is still there. If there is no room beside that, `take` refuses.

    Args:
        snapshot: the opened snapshot.
        partition: the buckets to load, and the card of each.
        plan_digest: identifies the plan that the partition was cut from.
        card_set: the cards, and what a version may take of them.
        memory_budget_bytes: RAM that its pinned rows may take, if that is less than the card set's options say.
        observed: how often rows of the version before were looked up, by table; counts for another number of rows are
            left out. What the snapshot says itself goes first. They decide only where rows go: counts of another
            vocabulary's rows place them no better than chance, and no worse.
        upload_bytes: of each of the buffers that rows pass through.

    Attributes:
        plan: which rows go where.
        card_bytes: by card, what rows and places will take.
        pinned_bytes: of RAM, what rows will take.

    Raises:
        InvalidBagsError: the partition is for another model, or another number of cards.
        MemoryBudgetError: a card can't even hold the places.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        partition: Partition,
        plan_digest: str,
        card_set: CardSet,
        memory_budget_bytes: int | None = None,
        observed: ObservedCounts | None = None,
        upload_bytes: int = UPLOAD_BYTES,
    ) -> None:
        layout = layout_for(snapshot, partition)
        card_set.check_num_cards(partition.num_cards)
        self._snapshot = snapshot
        self._partition = partition
        self._plan_digest = plan_digest
        self._card_set = card_set
        self._upload_bytes = upload_bytes
        budget = _budget(card_set, memory_budget_bytes)
        self.plan = CardPlan.make(layout, partition, budget, _hotness(snapshot, layout, observed or {}))
        beside = sum(finder_bytes(group.end_table - group.first_table, partition.num_cards) for group in layout.groups)
        self.card_bytes = tuple(self.plan.bytes(card).total + beside for card in range(partition.num_cards))
        self.pinned_bytes = self.plan.pinned_bytes

    def take(self, memory: RowMemory) -> TablesClaim:
        """As `PreparedLoad.take`: of the cards, and of this process's RAM."""
        with ExitStack() as undo:
            cards = self._card_set.memory.take(self.card_bytes)
            undo.callback(cards.give_back)
            staging = self._card_set.memory.take([NUM_UPLOADS * self._upload_bytes] * len(self.card_bytes))
            undo.callback(staging.give_back)
            ram = memory.take(self.pinned_bytes)
            undo.pop_all()
        return TablesClaim(cards, staging, ram)

    def run(self, claim: Claim, progress: Progress = no_progress) -> LoadedTables:
        """As `PreparedLoad.run`."""
        try:
            engine = self._load(progress)
        except BaseException:
            claim.give_back()
            raise
        claim.filled()
        for use in engine.memory():
            logger.info(
                "%s %d: card %d holds %d bytes in tier %s",
                self._snapshot.spec.model,
                self._snapshot.version,
                use.card,
                use.size_bytes,
                use.tier,
            )
        position = DeltaPosition(*self._snapshot.manifest.delta_start)
        return LoadedTables(engine, self._snapshot.identity, self._plan_digest, position, claim)

    def _load(self, progress: Progress) -> CardEngine:
        """Whatever fails, nothing is held afterwards."""
        cards = self._card_set.cards
        placer = Placer(self.plan)
        with ExitStack() as undo:
            arenas: list[ArenaOnCards] = []
            # Last in, first out: the cards have ended what was put on them before any memory is freed.
            for group in self.plan.layout.groups:
                tables = self.plan.layout.tables[group.first_table : group.end_table]
                sizes = [placer.rows_bytes(owner, group) for owner in range(self.plan.num_cards + 2)]
                bits = owner_bits(self.plan.num_cards)
                arena = ArenaOnCards(cards, group, tables, placer.starts(group), sizes, bits)
                undo.callback(arena.free)
                arenas.append(arena)
            with CardFill(self._snapshot, self.plan, cards, progress, self._upload_bytes) as fill:
                for arena in arenas:
                    fill.arena(arena)
                fill.finish()
            mapped = self._mapped(progress)
            if mapped is not None:
                undo.callback(mapped.close)
            engine = CardEngine(self.plan.layout, self._card_set, arenas, self.plan, mapped)
            undo.pop_all()
        return engine

    def _mapped(self, progress: Progress) -> CpuEngine | None:
        """The tables of which rows stay in the mapped snapshot, whole; None if there are none."""
        is_mapped = np.array([split.mapped_rows > 0 for split in self.plan.splits])
        if not is_mapped.any():
            return None
        card_of_bucket = np.where(is_mapped[:, None], self._partition.card_of_bucket, np.int16(-1))
        partition = replace(self._partition, card_of_bucket=card_of_bucket)
        builder = ArenaBuilder(self._snapshot, self.plan.layout, partition)

        def brought_in(what: str, done: int, total: int) -> None:
            if what != "load":  # of which there is nothing more
                progress(what, done, total)

        return builder.build(["mapped"] * len(self.plan.layout.tables), brought_in)


def _budget(card_set: CardSet, memory_budget_bytes: int | None) -> CardBudget:
    pinned_bytes = card_set.options.pinned_bytes
    if memory_budget_bytes is not None:
        pinned_bytes = min(pinned_bytes, memory_budget_bytes)
    return CardBudget(card_set.card_bytes, pinned_bytes, card_set.options.hot_bytes, card_set.cards.peer_access)


def _hotness(snapshot: Snapshot, layout: TableLayout, observed: ObservedCounts) -> Hotness:
    """The snapshot's access counts if it has any, else what was observed, else tables by their lookups per byte.

    Not both: they were counted over other batches, and would not compare.
    """
    stated = {table.name: snapshot.access_counts(table.name) for table in layout.tables}
    known: dict[str, RowCounts] = {name: counts for name, counts in stated.items() if counts is not None}
    if not known:
        known = {
            table.name: observed[table.name]
            for table in layout.tables
            if table.name in observed and observed[table.name].shape == (table.num_embeddings,)
        }
    return Hotness.from_counts(known) if known else Hotness.by_table(layout)
