"""What dividing a model's rows over shards sends over the network: bytes of the frames, and their time. Pure.

A bag of L ids is sent to every shard that has one of its rows. With S shards, all as likely, and hot rows at the router
that answer a share h of the lookups, that is S * (1 - (1 - (1 - h) / S) ** L) shards in the mean. Each is sent its ids
and an offset, and replies with a sum; on CPUs, with rows as they are stored where that takes no more. A request waits
for all of it: time = bytes / bandwidth + latency, on the router's line or the busiest shard's, whichever takes longer.
docs/wire-protocol.md has the frames, docs/plan.md what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import ModelSpec
from router.plan import Plan
from router.planning.inputs import (
    ANY_NETWORK,
    GB,
    CapacityOptions,
    CpuNode,
    LookupProfile,
    NetworkOptions,
    TableLookups,
)
from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.cost_model import BYTES_PER_US
from shard_node.planning.hotness import Float64Array, RowHotness
from shard_node.wire.frame import HEADER

Bounded: TypeAlias = Literal["bytes", "rows", "hit rate"]

# As in `split`: with so many owners or fewer, and more values a bag than this, a part that has this share of all bags
# is sent all of them.
MAX_MASKED_OWNERS, MANY_VALUES, NEARLY_ALL = 6, 2, 7 / 8
# As in wire/messages.py: counts of a body, an array's header, and the size up to which numbers of 8 bytes are sent as
# they are. A POOL frame has four arrays and 8 bytes of fields; the model's name is left out.
BODY_BYTES, ARRAY_BYTES, SMALL_ARRAY_BYTES = 8, 16, 2048
POOL_BYTES = HEADER.size + BODY_BYTES + 4 * ARRAY_BYTES + 8
ROUNDING = 1e-9
# Of arrays of 4-byte numbers, half end in the middle of 8 bytes.
MEAN_PADDING = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class NearRows:
    """The hottest rows of a model, which the router has, and answers for.

    Attributes:
        missed: for each table float64 [levels], the share of each level's rows that are not among them.
        num_rows, size_bytes: of all of them, as stored.
        hit_rates, hit_rate: float64 [tables], the share of a table's lookups that they answer; of all lookups.
    """

    missed: tuple[Float64Array, ...]
    num_rows: int
    size_bytes: int
    hit_rates: Float64Array
    hit_rate: float

    @classmethod
    def choose(cls, layout: TableLayout, hotness: Sequence[RowHotness], bounded: Bounded, bound: float) -> NearRows:
        """Return rows by lookups for each byte, the hottest first, as many as a bound allows.

        `hotness` is in layout order; its lookups are those of one batch or sample of all tables. At most as many bytes,
        as stored, or rows, as the bound; or the fewest rows that have this share of all lookups, the last in part.
        """
        row_bytes = stored_row_bytes(layout)
        levels = [of_table.rows().astype(np.float64) for of_table in hotness]
        table = np.repeat(np.arange(len(levels)), [level.size for level in levels])
        rows, lookups = np.concatenate(levels), np.concatenate([of_table.lookups for of_table in hotness])
        order = np.argsort(-lookups / row_bytes[table], kind="stable")
        total = float(rows @ lookups)
        costs = {"bytes": rows * row_bytes[table], "rows": rows, "hit rate": rows * lookups}[bounded][order]
        # Of each level, in order: what is left of the bound once those before it are in.
        left = (bound * total if bounded == "hit rate" else bound) - (np.cumsum(costs) - costs)
        shares = np.empty_like(rows)
        # What costs nothing is left out, too, once the bound is passed.
        shares[order] = np.where(costs > left, (left / np.maximum(costs, 1e-200)).clip(0, 1), 1)
        near = rows * shares if bounded == "hit rate" and bound < 1 else np.floor(rows * shares + 1e-9)
        by_table = np.split(near, np.cumsum([level.size for level in levels])[:-1])
        hits = np.array([float(rows @ of.lookups) for rows, of in zip(by_table, hotness, strict=True)])
        return cls(
            tuple(1 - _ratio(rows, level) for rows, level in zip(by_table, levels, strict=True)),
            sum(int(np.ceil(rows.sum())) for rows in by_table),
            int(np.ceil(near @ row_bytes[table])),
            _ratio(hits, np.array([float(of.rows() @ of.lookups) for of in hotness])),
            float(hits.sum() / total) if total else 0.0,
        )


def stored_row_bytes(layout: TableLayout) -> Float64Array:
    """Return the bytes of a stored row of each table, with its key's, float64 [tables]."""
    rows = [RowFormat.of(table.dtype, table.embedding_dim).row_bytes + table.key_bytes for table in layout.tables]
    return np.array(rows, np.float64)


class StoredLookups(NamedTuple):
    """What a batch looks up of stored tables, in layout order; `near` are rows at the router.

    `sends_stored` is whether shards may reply with rows as they are stored, as those on CPUs do.
    """

    layout: TableLayout
    lookups: tuple[TableLookups, ...]
    rows: tuple[RowHotness, ...]
    near: NearRows
    network: NetworkOptions = ANY_NETWORK
    sends_stored: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, layout: TableLayout, fleet: CapacityOptions, profile: LookupProfile) -> StoredLookups:
        """Return the lookups of a fleet's batch."""
        lookups = profile.lookups(spec, layout, fleet.requests, fleet.candidates)
        rows, network = profile.rows(spec, layout, lookups).of(layout), fleet.shard_network
        bounded: tuple[Bounded, float] = ("bytes", network.hot_rows_gb * GB)
        if network.hot_rows is not None:
            bounded = ("rows", network.hot_rows)
        if network.hit_rate is not None:
            bounded = ("hit rate", network.hit_rate)
        near, sends_stored = NearRows.choose(layout, rows, *bounded), isinstance(fleet.system, CpuNode)
        return cls(layout, lookups, rows, near, network, sends_stored)


@dataclass(frozen=True, slots=True, eq=False)
class ShardLookups:
    """What a batch sends to shards and gets back, in the mean; its ids are drawn independently of each other.

    Attributes:
        values, hit: float64 [tables, shards]: values, and bags that have one.
        turns: int64 [tables], between how many shards batches alternate: all of them for tables that each has.
        shards_hit: by a bag that is not empty.
        parts: bytes, float64 [shards]: "ids" (rows' numbers), "offsets" (where bags begin), "keys" (tables and their
            bags), "sums" (pooled), "stored" (rows as they are stored), and "framing" (headers, fields and padding, both
            ways; frames have a batch each).
        requests, replies: all bytes to shards and from them, float64 [shards].
    """

    values: Float64Array
    hit: Float64Array
    turns: Int64Array
    shards_hit: float
    parts: dict[str, Float64Array]
    requests: Float64Array
    replies: Float64Array

    @classmethod
    def of(cls, stored: StoredLookups, shares: Float64Array, is_copied: npt.NDArray[np.bool_]) -> ShardLookups:
        """Divide a batch by `shares`, float64 [tables, shards], of each table's lookups.

        What a row lacks to 1 the router answers itself. Of a table that every shard has, all lookups go to one of them.
        """
        layout, lookups, num_shards = stored.layout, stored.lookups, shares.shape[1]
        # [tables, features], padded with features of no bags.
        lengths, bags = np.zeros((2, len(lookups), max(len(of_table.lengths) for of_table in lookups)))
        for table, of_table in enumerate(lookups):
            lengths[table, : len(of_table.lengths)], bags[table, : len(of_table.lengths)] = np.array(of_table.lengths).T
        num_values, all_bags = (lengths * bags).sum(axis=1)[:, None], bags.sum(axis=1)[:, None]
        num_filled = float(bags[lengths > 0].sum())
        turns = np.where(is_copied, num_shards, 1)[:, None]
        left = np.clip(1 - shares * turns, 0, 1)
        hit = (bags[:, :, None] * (1 - left[:, None, :] ** lengths[:, :, None])).sum(axis=1) / turns
        is_hit = (1 - left**num_values) / turns
        values = num_values * shares
        # In the mean: of batches near that share `split` sends some in one way and some in the other.
        owners = num_shards + bool(values.sum() < num_values.sum())
        is_counted = owners <= MAX_MASKED_OWNERS and num_values.sum() > MANY_VALUES * num_filled
        sends_all = (is_counted & (hit.sum(axis=0) >= NEARLY_ALL * all_bags.sum())).astype(np.float64)
        num_bags = (1 - sends_all) * hit.sum(axis=0) + sends_all * all_bags.sum()
        num_keys = (1 - sends_all) * is_hit.sum(axis=0) + sends_all * np.count_nonzero(all_bags)
        is_used = 1 - np.prod(1 - is_hit, axis=0)
        # Numbers are int32 where every row of the model fits it, and none is named by a key.
        is_wide = layout.has_keys or max(table.num_embeddings for table in layout.tables) > 2**31
        number_bytes = 8 if is_wide else 4
        ids, offsets = values.sum(axis=0) * number_bytes, (num_bags + is_used) * number_bytes
        keys = num_keys * np.where(8 * num_keys > SMALL_ARRAY_BYTES, 8, 12)
        num_sums = (1 - sends_all) * hit + sends_all * all_bags / turns
        formats = [RowFormat.of(table.dtype, table.embedding_dim) for table in layout.tables]
        sizes = [(row.row_bytes, 2 * row.embedding_dim, stored.network.sum_bytes(row.embedding_dim)) for row in formats]
        row_bytes, float16_bytes, sum_bytes = np.array(sizes, np.float64).T[:, :, None]
        # As `shard_node.answer.travel_as_stored` decides.
        stored_limit = num_sums * np.maximum(row_bytes, float16_bytes) * (1 + ROUNDING) * stored.sends_stored
        is_stored = values * row_bytes <= stored_limit
        sums = (num_sums * sum_bytes * ~is_stored).sum(axis=0)
        rows = (values * row_bytes * is_stored).sum(axis=0)
        request_framing = is_used * (POOL_BYTES + MEAN_PADDING * 4)
        num_arrays = len(layout.groups) * (1 + stored.sends_stored)
        reply_framing = is_used * (HEADER.size + BODY_BYTES + ARRAY_BYTES * num_arrays)
        requests, replies = ids + offsets + keys + request_framing, sums + rows + reply_framing
        shards_hit = float(hit.sum() / num_filled) if num_filled else 0.0
        parts = {"ids": ids, "offsets": offsets, "keys": keys, "sums": sums, "stored": rows}
        parts["framing"] = request_framing + reply_framing
        return cls(values, hit, turns[:, 0], shards_hit, parts, requests, replies)


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """What a batch takes on the network, in microseconds.

    Attributes:
        out_us, back_us: of the bytes to shards and from them, one after the other.
        latency_us: of the round trip; none if nothing is sent.
        busy_us: of the line for each batch, while it is never idle: its two directions overlap, latencies too.
    """

    out_us: float
    back_us: float
    latency_us: float
    alone_us: float
    bound: str
    busy_us: float

    @classmethod
    def of(cls, sent: ShardLookups, network: NetworkOptions) -> NetworkTime:
        """Return bytes / bandwidth + latency, of the router's line or of the shard's that has the most bytes."""
        line, shard_line = network.gb_per_s * BYTES_PER_US, (network.shard_gb_per_s or np.inf) * BYTES_PER_US
        sides = sent.requests, sent.replies
        there, back = (max(float(size.sum()) / line, float(size.max()) / shard_line) for size in sides)
        latency = network.latency_us if there else 0.0
        bound = "bandwidth" if there + back > latency else "latency"
        return cls(there, back, latency, there + back + latency, bound, max(there, back))


class FleetLookups:
    """A batch of lookups in a fleet: what is looked up of which rows, and where they are."""

    def __init__(self, plan: Plan, stored: StoredLookups) -> None:
        self.stored = stored
        # float64 [tables, 3]: ids, bags, and ids of the longest bag.
        self.loads = np.array([of_table[:3] for of_table in stored.lookups], np.float64)
        self.is_copied = np.array([bool(owners[0] < 0) for owners in plan.shard_of_bucket])
        # Independent of hot rows, and slower than all else.
        self._rows_by_shard = [
            rows.rows_by_owner(owners, plan.num_shards)
            for rows, owners in zip(stored.rows, plan.shard_of_bucket, strict=True)
        ]

    def table_bytes(self, shard: int) -> list[int]:
        """Return the bytes of each table's rows on a shard, as stored."""
        rows = np.array([by_shard[:, shard].sum() for by_shard in self._rows_by_shard])
        of_copies = [table.num_embeddings for table in self.stored.layout.tables]
        sizes = np.where(self.is_copied, of_copies, rows) * stored_row_bytes(self.stored.layout)
        return [int(size_bytes) for size_bytes in sizes]

    @property
    def stored_bytes(self) -> Float64Array:
        """Bytes of the rows that each shard has alone, as stored: float64 [shards]."""
        rows = np.array([by_shard.sum(axis=0) for by_shard in self._rows_by_shard])
        return np.asarray((rows * stored_row_bytes(self.stored.layout)[:, None]).sum(axis=0))

    def sent(self, near: NearRows) -> ShardLookups:
        """Return what goes to which shard, with hot rows at the router."""
        shares = np.zeros((len(self.stored.rows), self._rows_by_shard[0].shape[1]))
        for table, (rows, by_shard) in enumerate(zip(self.stored.rows, self._rows_by_shard, strict=True)):
            lookups = rows.lookups if rows.lookups.any() else np.ones_like(rows.lookups)
            # Of a copied table each shard has all rows, and the mean of its lookups.
            on_shards = rows.rows()[:, None] / shares.shape[1] if self.is_copied[table] else by_shard
            shares[table] = (lookups * near.missed[table]) @ on_shards / float(lookups @ rows.rows())
        return ShardLookups.of(self.stored, shares, self.is_copied)

    def part(self, shard: int, sent: ShardLookups) -> Float64Array:
        """Return the loads of each table, float64 [tables, 3], with only those bags of which a shard has a row."""
        values, _, longest = self.loads.T
        is_used = sent.values[:, shard] > 0
        return np.column_stack([values * is_used / sent.turns, sent.hit[:, shard], longest * is_used])

    @property
    def moved_bytes(self) -> float:
        """Bytes of the rows that are missed at the router if they travelled there, without scale and bias."""
        row_bytes = [RowFormat.of(table.dtype, table.embedding_dim).code_bytes for table in self.stored.layout.tables]
        return float(sum((self.loads[:, 0] * (1 - self.stored.near.hit_rates) * row_bytes).tolist()))


def network_use(
    lookups: FleetLookups, sent: ShardLookups, line: NetworkOptions, shard_time: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Return what a batch moves between router and shards and how long it takes, by the time of a shard's cards.

    Bytes are to all shards together, or back from them; `bound` is the larger of the two budgets: the network's
    bandwidth or latency, or the shard's own bound.
    """
    near, network = lookups.stored.near, NetworkTime.of(sent, line)
    values = sent.values.sum(axis=0)
    busiest, fullest = int(values.argmax()), int(lookups.stored_bytes.argmax())
    times = {shard: shard_time(shard) for shard in sorted({busiest, fullest})}
    slowest = max(times, key=lambda shard: float(times[shard]["alone_us"]))
    slowest_us = times[slowest]["alone_us"]
    return {
        "hit_rate": near.hit_rate,
        "hot_rows": near.num_rows,
        "hot_bytes": near.size_bytes,
        "moved_bytes": lookups.moved_bytes,
        "shards_hit": sent.shards_hit,
        **{f"{name}_bytes": float(size.sum()) for name, size in sent.parts.items()},
        "busiest_to_mean": float(values.max() / values.mean()) if values.any() else 1.0,
        "time": asdict(network),
        "slowest_shard": slowest,
        "slowest_us": slowest_us,
        "request_us": slowest_us + network.alone_us,
        "bound": times[slowest]["bound"] if slowest_us > network.alone_us else f"network {network.bound}",
    }


def _ratio(part: Float64Array, total: Float64Array) -> Float64Array:
    return np.divide(part, total, out=np.zeros(total.shape), where=total > 0)
