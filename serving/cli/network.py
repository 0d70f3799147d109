"""What `shardrank plan` says of the network: what a batch moves over it, and when dividing rows costs more than copies.

`NetworkUse.make` takes any division of buckets over shards, and the time that its slowest shard needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import click
import numpy as np
from pydantic import Field

from loader.snapshot.tables import Frozen
from router.plan import Plan
from serving.cli.output import human_bytes, print_table
from shard_node.bags import TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.cost_model import BagLoad, CardSystem, Traffic, batch_time
from shard_node.planning.hotness import Float64Array, RowHotness
from shard_node.planning.network_cost import (
    AskedShards,
    BatchBags,
    NearRows,
    Network,
    NetworkBytes,
    NetworkTime,
    SentLookups,
    WireForm,
    crossover_hit_rate,
    moved_bytes,
)

GB = 1e9
MAX_COMPARED = 32
OF_CARDS = WireForm(stored=False)
"""Cards answer with float16 sums: their rows do not lie as they are stored."""


class NetworkOptions(Frozen):
    """The network between router and shards, and what the router looks up itself.

    Attributes:
        network: its line.
        hot_rows_gb: of the router's process, for the hottest rows.
        hit_rate: in place of `hot_rows_gb`, what share of the lookups they shall answer.
        compare_hit_rates, compare_hot_rows: further hit rates, and numbers of hot rows, to compare by.
    """

    network: Network
    hot_rows_gb: float = Field(default=0.0, ge=0)
    hit_rate: float | None = Field(default=None, ge=0, le=1)
    compare_hit_rates: tuple[float, ...] = Field(default=(), max_length=MAX_COMPARED)
    compare_hot_rows: tuple[float, ...] = Field(default=(), max_length=MAX_COMPARED)

    def hot_rows(self, layout: TableLayout, hotness: Sequence[RowHotness]) -> NearRows | None:
        """Choose what the router looks up itself; None for nothing."""
        if self.hit_rate is not None:
            return NearRows.choose(layout, hotness, hit_rate=self.hit_rate)
        return NearRows.choose(layout, hotness, size_bytes=self.hot_rows_gb * GB) if self.hot_rows_gb else None


class HitRateUse(Frozen):
    """What one hit rate of hot rows at the router leaves to do.

    Attributes:
        hot_rows, hot_bytes: how many of the hottest rows that takes, and their bytes as stored.
        moved_bytes, moved_us: if the rows that are missed travelled, without scale and bias, to where they are pooled;
            latency left out.
        network_bytes: ids out and sums back, as shardrank has it.
        network_us: of these, latency included.
        request_us: with the time of the busiest shard, all of whose rows lie in card memory.
    """

    hit_rate: float
    hot_rows: int
    hot_bytes: int
    moved_bytes: float
    moved_us: float
    network_bytes: float
    network_us: float
    request_us: float


class NetworkUse(Frozen):
    """What a batch moves between router and shards, and takes.

    Attributes:
        hit_rate, hot_rows, hot_bytes: of the hottest rows, at the router.
        shards_hit: in the mean, of a bag that is not empty.
        ids_bytes, offsets_bytes, keys_bytes: to all shards together.
        sums_bytes: back from them.
        framing_bytes: headers and padding, both ways.
        busiest_to_mean: lookups of the busiest shard, by the mean.
        time: of the network.
        slowest_shard, slowest_us: which shard takes longest for its part, and how long.
        request_us: the slowest shard and the network.
        bound: which of the two budgets it is bound by: the network's bandwidth or latency, or the shard's own bound.
        replicated_us: if each node had all rows in the memory of its cards; no network.
        replicated_bytes, sharded_bytes: of all rows as stored, and of the part of one shard.
        crossover_hit_rate: from which on sharding takes no longer than that; None if the latency alone does.
        crossover_hot_bytes: of the rows that have this hit rate.
        compared: by hit rate.
    """

    hit_rate: float
    hot_rows: int
    hot_bytes: int
    shards_hit: float
    ids_bytes: float
    offsets_bytes: float
    keys_bytes: float
    sums_bytes: float
    framing_bytes: float
    busiest_to_mean: float
    time: NetworkTime
    slowest_shard: int
    slowest_us: float
    request_us: float
    bound: str
    replicated_us: float
    replicated_bytes: int
    sharded_bytes: int
    crossover_hit_rate: float | None
    crossover_hot_bytes: int | None
    compared: tuple[HitRateUse, ...]

    @classmethod
    def make(
        cls, lookups: FleetLookups, options: NetworkOptions, shard_time: Callable[[NearRows | None, int], ShardTime]
    ) -> Self:
        """Reckon a batch.

        Args:
            lookups: of the batch, and where its rows are.
            options: the network and the router's hot rows.
            shard_time: of a shard's part of the batch, by what the router answers itself.
        """
        hot = options.hot_rows(lookups.layout, lookups.hotness)
        sent = lookups.sent(hot)
        moved = NetworkBytes.of(lookups.layout, lookups.batch, sent, OF_CARDS)
        network = NetworkTime.of(float(moved.out.sum()), float(moved.back.sum()), options.network)
        shards = sorted({int(moved.values.argmax()), lookups.fullest_shard})
        slowest = max((shard_time(hot, shard) for shard in shards), key=lambda one: one.total_us)
        replicated_us = lookups.resident_us(lookups.loads)
        found = crossover_hit_rate(lambda rate: lookups.at(rate, options.network).request_us, replicated_us)
        at_crossover = None if found is None else lookups.at(found, options.network)
        more = (lookups.at(rate, options.network) for rate in options.compare_hit_rates)
        of_rows = (
            lookups.compared(NearRows.choose(lookups.layout, lookups.hotness, num_rows=rows), options.network)
            for rows in options.compare_hot_rows
        )
        return cls(
            hit_rate=0.0 if hot is None else hot.hit_rate,
            hot_rows=0 if hot is None else int(hot.rows.sum()),
            hot_bytes=0 if hot is None else hot.size_bytes,
            shards_hit=moved.shards_hit,
            ids_bytes=float(moved.ids.sum()),
            offsets_bytes=float(moved.offsets.sum()),
            keys_bytes=float(moved.keys.sum()),
            sums_bytes=float(moved.sums.sum()),
            framing_bytes=float((moved.framing_out + moved.framing_back).sum()),
            busiest_to_mean=float(moved.values.max() / moved.values.mean()) if moved.values.any() else 1.0,
            time=network,
            slowest_shard=slowest.shard,
            slowest_us=slowest.total_us,
            request_us=slowest.total_us + network.alone_us,
            bound=slowest.bound if slowest.total_us > network.alone_us else f"network {network.bound}",
            replicated_us=replicated_us,
            replicated_bytes=lookups.all_bytes,
            sharded_bytes=lookups.shard_bytes,
            crossover_hit_rate=found,
            crossover_hot_bytes=None if at_crossover is None else at_crossover.hot_bytes,
            compared=(*more, *of_rows),
        )


class ShardTime(Frozen):
    """What one shard takes for its part of a batch, and what bounds it."""

    shard: int
    total_us: float
    bound: str


class FleetLookups:
    """A batch of lookups in a fleet: what is asked of which rows, and where they are.

    Args:
        plan: which shard has which rows.
        hotness: of each table, in layout order; its lookups are the batch's, in proportion.
        loads: of each table, all shards together.
        batch: the same by length of bags.
        system: of the cards.
    """

    def __init__(
        self,
        plan: Plan,
        hotness: Sequence[RowHotness],
        loads: Sequence[BagLoad],
        batch: BatchBags,
        system: CardSystem,
    ) -> None:
        self.layout = layout = plan.layout
        self.hotness = hotness
        self.loads = tuple(loads)
        self.batch = batch
        self._owners = plan.shard_of_bucket
        self._system = system
        self._code_bytes = [RowFormat.of(table.dtype, table.embedding_dim).code_bytes for table in layout.tables]
        shards = plan.num_shards
        self._rows = [one.rows_by_owner(owners, shards) for one, owners in zip(hotness, self._owners, strict=True)]
        each = np.concatenate([[group.row_bytes] * (group.end_table - group.first_table) for group in layout.groups])
        sizes: Float64Array = each * [table.num_embeddings for table in layout.tables]
        # Buckets of tables that every shard has are nobody's.
        held = (np.array([one.sum(axis=0) for one in self._rows]) * each[:, None]).sum(axis=0)
        self.fullest_shard = int(held.argmax())
        self.all_bytes = int(sizes.sum())
        self.shard_bytes = int(held.max() + sizes[[bool(owners[0] < 0) for owners in self._owners]].sum())

    def sent(self, hot: NearRows | None) -> SentLookups:
        """Return which lookups go to which shard."""
        return SentLookups.of(self.hotness, self._owners, self._rows, hot)

    def part(self, hot: NearRows | None, shard: int) -> tuple[BagLoad, ...]:
        """Return what is asked of each table, with only those bags of which a shard has a row."""
        own = AskedShards.of(self.batch, self.sent(hot)).loads(shard, self.loads)
        return tuple(whole._replace(bags=one.bags) for whole, one in zip(self.loads, own, strict=True))

    def resident_us(self, loads: Sequence[BagLoad]) -> float:
        """Return the time of lookups whose rows all lie in the memory of the card that pools them."""
        return batch_time(Traffic.resident(self.layout, loads, self._system), self._system).alone_us

    def at(self, hit_rate: float, network: Network) -> HitRateUse:
        """Reckon the batch with as many of the hottest rows at the router as have this hit rate."""
        return self.compared(NearRows.choose(self.layout, self.hotness, hit_rate=hit_rate), network)

    def compared(self, hot: NearRows, network: Network) -> HitRateUse:
        """Reckon the batch with hot rows at the router."""
        sent = self.sent(hot)
        moved = NetworkBytes.of(self.layout, self.batch, sent, OF_CARDS)
        time = NetworkTime.of(float(moved.out.sum()), float(moved.back.sum()), network)
        asked = AskedShards.of(self.batch, sent)
        shard_us = self.resident_us(asked.loads(int(moved.values.argmax()), self.loads)) if moved.values.any() else 0.0
        missed = zip((load.values for load in self.loads), self._code_bytes, hot.hit_rates.tolist(), strict=True)
        rows = sum(moved_bytes(*one) for one in missed)
        return HitRateUse(
            hit_rate=hot.hit_rate,
            hot_rows=int(hot.rows.sum()),
            hot_bytes=hot.size_bytes,
            moved_bytes=rows,
            moved_us=NetworkTime.of(0, rows, network).back_us,
            network_bytes=float((moved.out + moved.back).sum()),
            network_us=time.alone_us,
            request_us=time.alone_us + shard_us,
        )


def print_network(use: NetworkUse, shards: int, network: Network) -> None:
    """Print what a batch moves, and whether to replicate or to shard."""
    time = use.time
    line = (
        f"Between router and {shards} shards, {network.gb_per_s:g} GB/s and {network.latency_us:g} us: a bag is asked "
        f"of {use.shards_hit:.3g} of them"
    )
    out, back = (us * network.gb_per_s * 1e3 for us in (time.out_us, time.back_us))
    rows = (
        ("ids to shards", use.ids_bytes, None),
        ("offsets", use.offsets_bytes, None),
        ("tables and numbers of bags", use.keys_bytes, None),
        ("sums back", use.sums_bytes, None),
        ("headers and padding, both ways", use.framing_bytes, None),
        ("all of it, out and then back", out + back, time.out_us + time.back_us),
        ("latency of a round trip", None, time.latency_us),
    )
    table = [
        (part, "" if size is None else human_bytes(round(size)), "" if us is None else f"{us:.1f}")
        for part, size, us in rows
    ]
    print_table(line, ("part", "#bytes", "#us"), table)
    if use.hot_rows:
        click.echo(
            f"hot rows at the router: {use.hot_rows} of {human_bytes(use.hot_bytes)}, hit rate {use.hit_rate:.4g}"
        )
    click.echo(
        f"request {use.request_us:.1f} us: shard {use.slowest_shard} (the slowest) {use.slowest_us:.1f} and the "
        f"network {time.alone_us:.1f}, bound by {use.bound}; busiest shard {use.busiest_to_mean:.2f} x the mean"
    )
    compared = [
        (
            f"{one.hit_rate:.4f}", f"{one.hot_rows}", human_bytes(one.hot_bytes), f"{one.moved_bytes / 1e6:.1f}",
            f"{one.moved_us / 1e3:.2f}", f"{one.network_bytes / 1e6:.2f}", f"{one.network_us / 1e3:.3f}",
            f"{one.request_us / 1e3:.3f}",
        )
        for one in use.compared
    ]  # fmt: skip
    heads = ("hit rate", "#hot rows", "#of", "#rows moved, MB", "#ms", "#ids and sums, MB", "#ms ", "#request, ms")
    print_table("Replicate or shard, by hit rate of hot rows at the router", heads, compared)
    copies, part = human_bytes(use.replicated_bytes), human_bytes(use.sharded_bytes)
    click.echo(f"replicated: {use.replicated_us / 1e3:.3f} ms in {copies} of each node; sharded: {part} of each node")
    if use.crossover_hit_rate is None:
        click.echo("no hit rate makes sharding as fast as replication: the network's latency alone takes longer")
    else:
        click.echo(
            f"crossover: from a hit rate of {use.crossover_hit_rate:.4f} on, with "
            f"{human_bytes(use.crossover_hot_bytes or 0)} of hot rows, sharding takes no longer than replication"
        )
