"""The plan: which shard owns which rows, and on which of its cards they lie.

A plan is either read from a plan file, which says it for each table, or a pure function of the model and a few numbers.
So router and shard nodes have it for themselves and only compare digests. By numbers, rows are divided by bucket
(`hash` of tables stored `mixed`, `range` of those stored `range`) or by whole tables (`table`). Small tables are
replicated to every shard: their bags add no fan-out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import TableSpec
from router.errors import PlanError
from router.plan_file import MAX_CARDS_PER_SHARD, MAX_SHARDS, PlanFile, RanksOfBuckets
from shard_node.bags import Bags, TableLayout
from shard_node.buckets import BucketCells, NodeIdentity, Partition, Sharding

if TYPE_CHECKING:
    # Both take PyTorch, which takes a second.
    from loader.snapshot.reader import Snapshot
    from shard_node.split import Owners

REPLICATED = -1
DEFAULT_REPLICATE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Plan:
    """Who owns what.

    Attributes:
        sharding: how tables are divided, where no plan file says it.
        shard_of_bucket: int16 [buckets] for each table in layout order, the shard that owns a bucket, or `REPLICATED`.
        file: the plan file that says so, if there is one.
        ranks: of such a file, who owns each table, in layout order.
    """

    layout: TableLayout
    num_shards: int
    cards_per_shard: int
    sharding: Sharding
    shard_of_bucket: tuple[npt.NDArray[np.int16], ...]
    file: PlanFile | None = None
    ranks: tuple[RanksOfBuckets, ...] = ()

    @classmethod
    def of_file(
        cls, spec: ModelSpec, file: PlanFile, num_shards: int, cards_per_shard: int | None, sharding: Sharding = "hash"
    ) -> Plan:
        """Take a plan from a file, for a fleet of so many shards and cards that would else be divided by `sharding`.

        `cards_per_shard` is None for a router, which need not know it. Raises PlanError: the file is of another model,
        other tables, or another number of shards or cards.
        """
        cards_per_shard = cards_per_shard or file.cards_per_shard
        if cards_per_shard != file.cards_per_shard:
            raise PlanError(f"plan: cards_per_shard is {file.cards_per_shard}, allowed here is {cards_per_shard}")
        file.check_fits(spec)
        if num_shards != file.num_shards:
            raise PlanError(f"plan: num_shards is {file.num_shards}, allowed here is {num_shards}")
        layout = TableLayout.of(spec)
        ranks_of = file.ranks_of(spec)
        ranks = tuple(ranks_of[table.name] for table in layout.tables)
        owners = []
        for table, of_table in zip(layout.tables, ranks, strict=True):
            if of_table.is_copied:
                owners.append(_all_buckets(table, REPLICATED))
            else:
                shards = of_table.rank_of_bucket(RowBuckets.of(table).count) // file.cards_per_shard
                owners.append(shards.astype(np.int16))
        return cls(layout, num_shards, cards_per_shard, sharding, tuple(owners), file, ranks)

    @classmethod
    def of_snapshot(
        cls,
        snapshot: Snapshot,
        num_shards: int,
        sharding: Sharding = "hash",
        cards_per_shard: int | None = None,
        replicate_bytes: int = DEFAULT_REPLICATE_BYTES,
        file: PlanFile | None = None,
    ) -> Plan:
        """Plan a version: by the file that is given, if it is of this model, else by the snapshot's, else as `make`.

        The snapshot's own is taken if it is for so many shards. If it is for another number of cards, a shard divides
        what it owns over the cards it has: routers, which do not know them (None), agree all the same.

        Raises PlanError as `of_file` and `make`, SnapshotCorruptError if the snapshot's plan can't be read.
        """
        spec = snapshot.spec
        if file is not None and file.model == spec.model:
            return cls.of_file(spec, file, num_shards, cards_per_shard, sharding)
        cards_per_shard = cards_per_shard or 1
        text = snapshot.plan_text()
        carried = None if text is None else PlanFile.parse(f"{snapshot.path}: plan", text)
        if carried is not None and carried.num_shards == num_shards:
            planned = cls.of_file(spec, carried, num_shards, None, sharding)
            return replace(planned, cards_per_shard=cards_per_shard)
        return cls.make(spec, num_shards, sharding, cards_per_shard, replicate_bytes)

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        num_shards: int = 1,
        sharding: Sharding = "hash",
        cards_per_shard: int = 1,
        replicate_bytes: int = DEFAULT_REPLICATE_BYTES,
    ) -> Plan:
        """Plan a model.

        By `hash` or `range` every table's buckets are divided evenly; tables must be stored with the bucketing `mixed`
        or `range`, unless they are replicated or there is one shard only. By `table` each table is given to one shard,
        the largest first to the emptiest shard. Tables of at most `replicate_bytes` go to every shard.

        Raises PlanError for numbers out of range, or a table stored with another bucketing than `sharding` needs.
        """
        limits = {"num_shards": (num_shards, MAX_SHARDS), "cards_per_shard": (cards_per_shard, MAX_CARDS_PER_SHARD)}
        for name, (count, limit) in limits.items():
            if not 1 <= count <= limit:
                raise PlanError(f"{name} is {count}, allowed is 1..{limit}")
        layout = TableLayout.of(spec)
        owners: list[npt.NDArray[np.int16]] = [np.zeros(0, np.int16)] * len(layout.tables)
        loads = [0] * num_shards
        for number, table in _largest_first(layout):
            if num_shards > 1 and table_bytes(table) <= replicate_bytes:
                owners[number] = _all_buckets(table, REPLICATED)
            elif sharding == "table":
                shard = loads.index(min(loads))
                loads[shard] += table_bytes(table)
                owners[number] = _all_buckets(table, shard)
            elif num_shards == 1 or (table.bucketing == "range") == (sharding == "range"):
                # One shard owns every bucket, however rows were put into them.
                owners[number] = _spread_buckets(table, num_shards)
            else:
                needed, fitting = ("range", "hash") if sharding == "range" else ("mixed", "range")
                raise PlanError(
                    f"sharding {sharding!r} needs tables stored with bucketing {needed!r}, but table {table.name!r} "
                    f"is stored with {table.bucketing!r}; use sharding {fitting!r} or 'table', or re-export it"
                )
        return cls(layout, num_shards, cards_per_shard, sharding, tuple(owners))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of who owns what; router and shard nodes must agree on it. Of a plan file it is the file's."""
        if self.file is not None:
            return self.file.digest
        digest = hashlib.sha256(f"{self.num_shards}\n{self.sharding}\n".encode())
        for table in self.layout.tables:
            digest.update(f"{table.name}\n{table.num_embeddings}\n{table.bucketing}\n".encode())
        for owners in self.shard_of_bucket:
            digest.update(owners.astype("<i2").tobytes())
        return digest.hexdigest()

    def identity(self, shard_index: int) -> NodeIdentity:
        """Return the identity of the node that serves a shard."""
        _check_index(shard_index, self.num_shards)
        return NodeIdentity(
            shard_index=shard_index, num_shards=self.num_shards, num_cards=self.cards_per_shard, sharding=self.sharding
        )

    def partition(self, shard_index: int) -> Partition:
        """Return the buckets that a shard holds, and the card of each.

        A plan file says it, if it is for so many cards. Else a table divided over shards is divided over the shard's
        cards as well; one that the shard holds whole because it is small or because tables are placed whole goes to
        the emptiest card.
        """
        _check_index(shard_index, self.num_shards)
        if self.file is not None and self.file.cards_per_shard == self.cards_per_shard:
            planned = []
            for owners, ranks in zip(self.shard_of_bucket, self.ranks, strict=True):
                if owners[0] == REPLICATED:
                    planned.append(np.full(owners.size, ranks.ranks[shard_index] % self.cards_per_shard, np.int16))
                else:
                    card_of_bucket = ranks.rank_of_bucket(owners.size) % self.cards_per_shard
                    planned.append(np.where(owners == shard_index, card_of_bucket, -1).astype(np.int16))
            return Partition(self.cards_per_shard, tuple(planned))
        cards: list[npt.NDArray[np.int16]] = [np.zeros(0, np.int16)] * len(self.layout.tables)
        loads = [0] * self.cards_per_shard
        for number, table in _largest_first(self.layout):
            owners = self.shard_of_bucket[number]
            mine = (owners == shard_index) | (owners == REPLICATED)
            cards[number] = np.full(owners.size, -1, np.int16)
            if self.sharding != "table" and owners[0] != REPLICATED:
                cards[number][mine] = _spread_over_cards(table, mine, self.cards_per_shard)
            elif mine.any():
                card = loads.index(min(loads))
                loads[card] += table_bytes(table)
                cards[number][mine] = card
        return Partition(self.cards_per_shard, tuple(cards))


def table_bytes(table: TableSpec) -> int:
    """Count the bytes that a table's rows take as stored, with their keys."""
    return table.num_embeddings * (RowCodec(table.dtype, table.embedding_dim).row_bytes + table.key_bytes)


def _largest_first(layout: TableLayout) -> list[tuple[int, TableSpec]]:
    return sorted(enumerate(layout.tables), key=lambda numbered: -table_bytes(numbered[1]))


def _all_buckets(table: TableSpec, owner: int) -> npt.NDArray[np.int16]:
    return np.full(RowBuckets.of(table).count, owner, np.int16)


def _spread_buckets(table: TableSpec, num_shards: int) -> npt.NDArray[np.int16]:
    buckets = np.arange(RowBuckets.of(table).count)
    if table.bucketing == "mixed":
        # Neighbouring rows are in buckets that differ in their low bits: so they are on different shards.
        return (buckets % num_shards).astype(np.int16)
    # Contiguous runs of the buckets that hold rows.
    used = int(np.count_nonzero(RowBuckets.of(table).rows_per_bucket()))
    return np.minimum(buckets * num_shards // used, num_shards - 1).astype(np.int16)


def _spread_over_cards(table: TableSpec, mine: npt.NDArray[np.bool_], num_cards: int) -> npt.NDArray[np.int16]:
    """Divide a shard's buckets, bool [buckets], over its cards: int16 [of mine]."""
    if table.bucketing == "mixed":
        return (np.arange(np.count_nonzero(mine)) % num_cards).astype(np.int16)
    # Buckets behind the used ones hold no rows; they only need some owner, so that none is missing.
    used = (RowBuckets.of(table).rows_per_bucket() > 0)[mine]
    num_used = int(np.count_nonzero(used))
    cards = np.full(used.size, num_cards - 1, np.int16)
    cards[used] = np.arange(num_used) * num_cards // max(1, num_used)
    return cards


def _check_index(shard_index: int, num_shards: int) -> None:
    if not 0 <= shard_index < num_shards:
        raise PlanError(f"shard_index is {shard_index}, allowed is 0..{num_shards - 1}")


class BucketOwners:
    """Who owns which bucket, of one plan."""

    def __init__(self, plan: Plan) -> None:
        # What one shard has, or every shard, has one owner for all rows.
        by_table = plan.shard_of_bucket
        self._cells = BucketCells(plan.layout, np.array([bool((owners == owners[0]).all()) for owners in by_table]))
        dtype = np.uint8 if plan.num_shards <= 255 else np.uint16
        self._replicated = np.iinfo(dtype).max
        shards = [np.where(owners == REPLICATED, self._replicated, owners) for owners in by_table]
        self._owner = self._cells.spread(shards, 0, dtype)
        self._has_replicated = any(owners[0] == REPLICATED for owners in by_table)

    def of(self, bags: Bags, up: Callable[[], npt.NDArray[np.int16]], counter: int) -> Owners:
        """Find the shard of each value, uint8 [n], or uint16 [n] if there are more than 255 shards.

        `up` gives the shards (int16, at least one) that may stand in as owners of what every shard has; it is not asked
        if there is no such table. The tables of a batch take turns, beginning with `counter`.
        """
        values_per_key = bags.values_per_key()
        owner: Owners = self._owner.take(self._cells.of(bags, values_per_key), mode="wrap")
        if self._has_replicated:
            # Turning from batch to batch spreads these rows evenly, a table at a time.
            shards = up()
            stand_in = shards[(bags.keys + counter % shards.size) % shards.size].astype(owner.dtype)
            np.copyto(owner, np.repeat(stand_in, values_per_key), where=owner == self._replicated)
        return owner
