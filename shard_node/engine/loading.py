"""From a snapshot's row files to an engine, on the CPU or on cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot
from shard_node.buckets import Partition
from shard_node.engine.arena_builder import ArenaLoad, TableLoad
from shard_node.engine.memory import RowMemory
from shard_node.node import LoadedTables

if TYPE_CHECKING:
    from shard_node.cuda.card_set import CardSet
    from shard_node.planning.hotness import ObservedCounts


def prepare_load(
    snapshot: Snapshot,
    partition: Partition,
    plan_digest: str,
    *,
    memory_budget_bytes: int | None = None,
    card_set: CardSet | None = None,
    observed: ObservedCounts | None = None,
) -> TableLoad:
    """Prepare the load of a partition, onto cards if there are any; `plan_digest` is of the plan it was cut from.

    `memory_budget_bytes` is RAM that rows may take: of tables beyond it the hottest rows are there, the others on disk;
    where there are cards, it is what may be pinned for them. None: everything goes to RAM. `observed` is how often rows
    of the version before were looked up, where the snapshot does not say.

    Raises InvalidBagsError if the partition is for another model, or another number of cards, MemoryBudgetError if the
    cards can't hold it in any way.
    """
    if card_set is None:
        return ArenaLoad(snapshot, partition, plan_digest, memory_budget_bytes, observed)
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
    """Load a partition, as `prepare_load` and `TableLoad` say, with no other load under way."""
    load = prepare_load(snapshot, partition, plan_digest, memory_budget_bytes=memory_budget_bytes, card_set=card_set)
    return load.run(load.take(RowMemory()), progress)
