"""From a snapshot's row files to an engine: choosing tiers, taking memory, copying rows into arenas or onto cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot
from shard_node.buckets import Partition
from shard_node.engine.arena_builder import ArenaBuilder, layout_for
from shard_node.engine.base import Tier
from shard_node.engine.memory import Claim, MemoryClaim, RowMemory
from shard_node.node import DeltaPosition, LoadedTables

if TYPE_CHECKING:
    from shard_node.cuda.card_set import CardSet
    from shard_node.planning.hotness import ObservedCounts


class PreparedLoad(Protocol):
    """The loading of a partition's buckets, before it begins: what it will take is known, nothing is taken yet."""

    def take(self, memory: RowMemory) -> Claim:
        """Claims what the tables will take of this process's RAM, and of cards. Raises MemoryBudgetError."""
        ...

    def run(self, claim: Claim, progress: Progress = no_progress) -> LoadedTables:
        """Load, once; `claim`, of `take`, is given back if there will be no tables. Raises SnapshotCorruptError."""
        ...


class TableLoad:
    """A load into a CPU engine; arguments are those of `prepare_load`. `ram_bytes` is what rows will take."""

    def __init__(
        self, snapshot: Snapshot, partition: Partition, plan_digest: str, memory_budget_bytes: int | None = None
    ) -> None:
        self._snapshot = snapshot
        self._plan_digest = plan_digest
        self._builder = ArenaBuilder(snapshot, layout_for(snapshot, partition), partition)
        sizes = self._builder.table_bytes
        self._tiers = choose_tiers(sizes, memory_budget_bytes)
        self.ram_bytes = sum(size for size, tier in zip(sizes, self._tiers, strict=True) if tier == "ram")

    def take(self, memory: RowMemory) -> MemoryClaim:
        """As `PreparedLoad.take`."""
        return memory.take(self.ram_bytes)

    def run(self, claim: Claim, progress: Progress = no_progress) -> LoadedTables:
        """As `PreparedLoad.run`."""
        try:
            engine = self._builder.build(self._tiers, progress)
        except BaseException:
            claim.give_back()
            raise
        claim.filled()
        position = DeltaPosition(*self._snapshot.manifest.delta_start)
        return LoadedTables(engine, self._snapshot.identity, self._plan_digest, position, claim)


def prepare_load(
    snapshot: Snapshot,
    partition: Partition,
    plan_digest: str,
    *,
    memory_budget_bytes: int | None = None,
    card_set: CardSet | None = None,
    observed: ObservedCounts | None = None,
) -> PreparedLoad:
    """Prepare the load of a partition, onto cards if there are any; `plan_digest` is of the plan it was cut from.

    `memory_budget_bytes` is RAM that rows may take: tables that do not fit stay in the mapped snapshot, the largest
    first; where there are cards, it is what may be pinned for them. None: everything goes to RAM. `observed` is how
    often rows of the version before were looked up, for cards, where the snapshot does not say.

    Raises InvalidBagsError if the partition is for another model, or another number of cards, MemoryBudgetError if the
    cards can't hold it in any way.
    """
    if card_set is None:
        return TableLoad(snapshot, partition, plan_digest, memory_budget_bytes)
    # A node without cards loads nothing of what they need.
    from shard_node.cuda.card_loading import CardTableLoad

    return CardTableLoad(snapshot, partition, plan_digest, card_set, memory_budget_bytes, observed)


def load_tables(
    snapshot: Snapshot,
    partition: Partition,
    plan_digest: str,
    *,
    memory_budget_bytes: int | None = None,
    card_set: CardSet | None = None,
    progress: Progress = no_progress,
) -> LoadedTables:
    """Load a partition, as `prepare_load` and `PreparedLoad` say, with nobody else taking memory."""
    load = prepare_load(snapshot, partition, plan_digest, memory_budget_bytes=memory_budget_bytes, card_set=card_set)
    return load.run(load.take(RowMemory()), progress)


def choose_tiers(table_bytes: Sequence[int], budget_bytes: int | None) -> list[Tier]:
    """Choose the tables that stay in the mapped snapshot: the largest, until the others fit the budget.

    The largest tables are looked up the least per byte. Ties go to the later table.
    """
    total = sum(table_bytes)
    tiers: list[Tier] = ["ram"] * len(table_bytes)
    budget_bytes = total if budget_bytes is None else budget_bytes
    for number in sorted(range(len(table_bytes)), key=lambda one: (table_bytes[one], one), reverse=True):
        if total <= budget_bytes:
            break
        tiers[number] = "mapped"
        total -= table_bytes[number]
    return tiers
