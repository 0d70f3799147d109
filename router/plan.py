"""The plan: which shard owns which rows, and on which of its cards they lie.

A plan is a pure function of the model and a few numbers, so router and shard nodes compute it for themselves and only
compare digests. Rows are divided by bucket (`hash`, `range`: the table's own bucketing decides which rows a bucket
has) or by whole tables (`table`). Small tables are replicated to every shard: their bags add no fan-out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import bucket_shift, codec_for, num_buckets_used
from loader.snapshot.manifest import NUM_BUCKETS, ModelSpec, TableSpec
from router.errors import PlanError
from shard_node.bags import Int64Array, KeyedBags, TableLayout
from shard_node.partition import NodeIdentity, Partition, Sharding

if TYPE_CHECKING:
    # What splits also adds, by PyTorch.
    from shard_node.split import Owners

REPLICATED = -1
MAX_SHARDS = 1024
MAX_CARDS_PER_SHARD = 64
DEFAULT_REPLICATE_BYTES = 1 << 20
# Up to so many shards, comparing each bucket with where the next shard's begin is faster than looking it up (measured:
# 52,000 rows take 8 us a comparison, 38 us looked up).
MAX_COMPARED_SHARDS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """Who owns what.

    Attributes:
        layout: the model's tables.
        num_shards: shards of the fleet.
        cards_per_shard: cards of each shard node.
        sharding: how tables are divided.
        shard_of_bucket: int16 [tables in layout order, 256], the shard that owns a bucket, or `REPLICATED`.
    """

    layout: TableLayout
    num_shards: int
    cards_per_shard: int
    sharding: Sharding
    shard_of_bucket: npt.NDArray[np.int16]

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        num_shards: int = 1,
        sharding: Sharding = "hash",
        cards_per_shard: int = 1,
        replicate_bytes: int = DEFAULT_REPLICATE_BYTES,
    ) -> Plan:
        """Plans a model.

        Args:
            spec: the model.
            num_shards: shards of the fleet.
            sharding: `hash` or `range` divides every table's buckets evenly and needs tables stored with that
            bucketing,
                unless they are replicated or there is one shard only; `table` gives each table to one shard, the
                largest
                first to the emptiest shard.
            cards_per_shard: cards of each shard node.
            replicate_bytes: tables of at most this size go to every shard.

        Raises:
            PlanError: for numbers out of range, or a table stored with another bucketing than `sharding` needs.
        """
        for name, count, most in (
            ("num_shards", num_shards, MAX_SHARDS),
            ("cards_per_shard", cards_per_shard, MAX_CARDS_PER_SHARD),
        ):
            if not 1 <= count <= most:
                raise PlanError(f"{name} is {count}, allowed is 1..{most}")
        layout = TableLayout.of(spec)
        owners = np.zeros((len(layout.tables), NUM_BUCKETS), np.int16)
        small = [num_shards > 1 and table_bytes(table) <= replicate_bytes for table in layout.tables]
        loads = [0] * num_shards
        for number in sorted(range(len(small)), key=lambda one: -table_bytes(layout.tables[one])):
            table = layout.tables[number]
            if small[number]:
                owners[number] = REPLICATED
            elif sharding == "table":
                shard = loads.index(min(loads))
                loads[shard] += table_bytes(table)
                owners[number] = shard
            elif table.bucketing == sharding or num_shards == 1:
                # One shard owns every bucket, however rows were put into them.
                owners[number] = _spread_buckets(table, num_shards)
            else:
                raise PlanError(
                    f"sharding {sharding!r} needs tables stored with that bucketing, but table {table.name!r} "
                    f"is stored with {table.bucketing!r}; use sharding {table.bucketing!r} or 'table', or re-export it"
                )
        return cls(layout, num_shards, cards_per_shard, sharding, owners)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of who owns what; router and shard nodes must agree on it."""
        digest = hashlib.sha256(f"{self.num_shards}\n{self.sharding}\n".encode())
        for table in self.layout.tables:
            digest.update(f"{table.name}\n{table.num_embeddings}\n{table.bucketing}\n".encode())
        digest.update(self.shard_of_bucket.astype("<i2").tobytes())
        return digest.hexdigest()

    def identity(self, shard_index: int) -> NodeIdentity:
        """Return the identity of the node that serves a shard."""
        _check_index(shard_index, self.num_shards)
        return NodeIdentity(
            shard_index=shard_index,
            num_shards=self.num_shards,
            num_cards=self.cards_per_shard,
            sharding=self.sharding,
        )

    def partition(self, shard_index: int) -> Partition:
        """Return the buckets that a shard holds, and the card of each.

        A table divided over shards is divided over the shard's cards as well, in runs of its buckets; one that the
        shard holds whole because it is small or because tables are placed whole goes to the emptiest card.
        """
        _check_index(shard_index, self.num_shards)
        held = (self.shard_of_bucket == shard_index) | (self.shard_of_bucket == REPLICATED)
        cards = np.full(held.shape, -1, np.int16)
        loads = [0] * self.cards_per_shard
        tables = self.layout.tables
        for number in sorted(range(len(tables)), key=lambda one: -table_bytes(tables[one])):
            table, mine = tables[number], held[number]
            used = np.flatnonzero(mine[: num_buckets_used(table)])
            replicated = self.shard_of_bucket[number, 0] == REPLICATED
            if self.sharding == "table" or replicated:
                if used.size:
                    card = loads.index(min(loads))
                    loads[card] += table_bytes(table)
                    cards[number, mine] = card
            else:
                # Buckets behind the used ones hold no rows; they only need some owner, so that none is missing.
                cards[number, mine] = self.cards_per_shard - 1
                cards[number, used] = np.arange(used.size) * self.cards_per_shard // max(1, used.size)
        return Partition(self.cards_per_shard, cards)


def table_bytes(table: TableSpec) -> int:
    """Count the bytes that a table's rows take as stored."""
    return table.num_embeddings * codec_for(table.dtype, table.embedding_dim).row_bytes


def _spread_buckets(table: TableSpec, num_shards: int) -> npt.NDArray[np.int16]:
    # Contiguous runs of the buckets that hold rows, so that each shard reads one run of every row file.
    used = num_buckets_used(table)
    return np.minimum(np.arange(NUM_BUCKETS) * num_shards // used, num_shards - 1).astype(np.int16)


def _check_index(shard_index: int, num_shards: int) -> None:
    if not 0 <= shard_index < num_shards:
        raise PlanError(f"shard_index is {shard_index}, allowed is 0..{num_shards - 1}")


class BucketOwners:
    """Who owns which bucket, of one plan.

    Most plans divide all large tables alike, in runs of buckets: then a row's owner follows from its bucket without
    knowing its table.
    """

    def __init__(self, plan: Plan) -> None:
        self._owner = plan.shard_of_bucket.reshape(-1)
        self._shift = np.array([bucket_shift(one.bucketing, one.num_embeddings) for one in plan.layout.tables])
        self._dtype: type[np.uint8] | type[np.uint16] = np.uint8 if plan.num_shards <= 256 else np.uint16
        is_replicated = plan.shard_of_bucket[:, 0] == REPLICATED
        self._has_replicated = bool(is_replicated.any())
        divided = np.flatnonzero(~is_replicated)
        owners, shifts = plan.shard_of_bucket[divided], self._shift[divided]
        self._alike = bool(divided.size and (owners == owners[0]).all() and (shifts == shifts[0]).all())
        # Shard s has the buckets from the s-th of these on; only if each has a run of them.
        self._run_begins: tuple[int, ...] = ()
        if self._alike:
            self._common_shift = int(self._shift[divided[0]])
            self._common_owner = plan.shard_of_bucket[divided[0]].astype(self._dtype)
            if plan.num_shards <= MAX_COMPARED_SHARDS and (np.diff(self._common_owner.astype(np.int16)) >= 0).all():
                begins = np.searchsorted(self._common_owner, np.arange(1, plan.num_shards)).tolist()
                self._run_begins = tuple(begins) if all(begin < 256 for begin in begins) else ()

    def of(self, bags: KeyedBags, up: Callable[[], npt.NDArray[np.int16]], turn: int) -> Owners:
        """Find the shard of each value, uint8 [n], or uint16 [n] if there are more than 256 shards.

        `up` gives the shards (int16, at least one) that may stand in as owners of what every shard has; it is not asked
        if
        there is no such table. The tables of a batch take turns, beginning with `turn`.
        """
        if self._alike and not self._has_replicated:
            return self._of_alike(bags.values)
        values_per_key = bags.values_per_key()
        cell = (bags.values >> np.repeat(self._shift[bags.keys], values_per_key)) & 255
        cell += np.repeat(bags.keys.astype(np.int64) << 8, values_per_key)
        owner = self._owner.take(cell)
        if self._has_replicated:
            # Turning from batch to batch spreads these rows evenly, a table at a time.
            shards = up()
            stand_in = shards[(bags.keys + turn % shards.size) % shards.size]
            owner = np.where(owner == REPLICATED, np.repeat(stand_in, values_per_key), owner)
        owners: Owners = owner.astype(self._dtype)
        return owners

    def _of_alike(self, rows: Int64Array) -> Owners:
        # The low 8 bits are the bucket: narrowing is what masks.
        bucket = (rows >> self._common_shift if self._common_shift else rows).astype(np.uint8)
        if not self._run_begins:
            looked_up: Owners = self._common_owner.take(bucket)
            return looked_up
        owner: Owners = (bucket >= self._run_begins[0]).view(np.uint8)
        for begin in self._run_begins[1:]:
            owner += bucket >= begin
        return owner
