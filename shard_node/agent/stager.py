"""Staging a shard's rows of a published version: nothing is taken on trust, and memory is counted before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loader.errors import SnapshotCorruptError
from loader.progress import Pace, Progress, no_progress
from loader.registry.fleet import PublishedVersion
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from shard_node.engine.loading import prepare_load
from shard_node.engine.row_memory import RowMemory
from shard_node.node import LoadedTables, Partition
from shard_node.planning.hotness import ObservedCounts

if TYPE_CHECKING:
    from shard_node.cuda.card_set import CardSet

PlanOf = Callable[[ModelSpec], tuple[Partition, str]]
"""The buckets of a model that a shard holds, and the digest of the plan that says so."""


def stage_tables(
    folder: Path,
    published: PublishedVersion,
    plan_of: PlanOf,
    *,
    memory: RowMemory,
    memory_budget_bytes: int | None = None,
    card_set: CardSet | None = None,
    observed: ObservedCounts | None = None,
    verify: bool = True,
    pace: Pace | None = None,
    progress: Progress = no_progress,
) -> LoadedTables:
    """Loads what a shard holds of a version. Blocks for long; allocates only what `memory` and the cards grant.

    Checked are: that it is the version that was published; sizes, headers, shapes and SHA-256 of its row files; that it
    has every table of its spec; that each row here decodes to finite values. Rows that stay in mapped files are brought
    into memory.

    Args:
        folder: of the snapshot.
        published: what it must be.
        plan_of: which rows.
        memory: takes account of RAM, over all versions.
        memory_budget_bytes: as of `prepare_load`.
        card_set: where rows go; None to pool on the CPU.
        observed: as of `prepare_load`.
        verify: compare SHA-256; may be left out for a local store that is trusted.
        pace: rests in between; None for none.
        progress: told bytes.

    Raises:
        MemoryBudgetError: there is no room, with the numbers.
        SnapshotError: as `Snapshot.open`; and for a version of another identity, or with a row that is not finite.
        PlanError: as `plan_of`.
    """
    paced = (pace or Pace()).over(progress)
    snapshot = Snapshot.open(folder, verify=False, files="rows")
    if snapshot.identity != published.identity:
        raise SnapshotCorruptError(
            f"{folder}: identity (SHA-256 of its manifest) is {snapshot.identity}, published was {published.identity}"
        )
    partition, plan_digest = plan_of(snapshot.spec)
    load = prepare_load(
        snapshot,
        partition,
        plan_digest,
        memory_budget_bytes=memory_budget_bytes,
        card_set=card_set,
        observed=observed,
    )
    claim = load.take(memory)
    try:
        # One thread: it is background work, and shares a budget.
        if verify:
            snapshot.check_content("rows", threads=1, progress=paced)
    except BaseException:
        claim.give_back()
        raise
    return load.run(claim, paced)


def share_of(tell: Callable[[float], None]) -> Progress:
    """The progress of `stage_tables` as one number, 0 to 1: half of it is checking, half is loading."""

    def told(what: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        if what == "checking SHA-256":
            tell(share / 2)
        elif what == "load":
            tell(0.5 + share / 2)

    return told
