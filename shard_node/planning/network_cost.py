"""What dividing a model's rows over shards sends over the network: bytes of the frames, and their time. Pure.

A bag of L ids is asked of every shard that has one of its rows. With S shards, all as likely, and hot rows at the
router that answer a share h of the lookups, that is S * (1 - (1 - (1 - h) / S) ** L) shards in the mean. Each is sent
its ids and an offset, and answers with one sum, or with the rows themselves where those travel as stored
(`travel_as_stored`). A request waits for all of it: time = bytes / bandwidth + latency.
docs/wire-protocol.md has the frames, docs/plan.md what is left out. Counters of real sockets are within 2%
(docs/measurements/2026-11-23-network-bytes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.snapshot.tables import Frozen
from shard_node.bags import Int64Array, TableLayout
from shard_node.planning.cost_model import BYTES_PER_US, BagLoad
from shard_node.planning.hotness import Float64Array, RowHotness
from shard_node.wire.frame import HEADER

Int16Array: TypeAlias = npt.NDArray[np.int16]
NetworkBound: TypeAlias = Literal["bandwidth", "latency"]

# As in `split`: with so many owners or fewer, and more values a bag than this, a part that has this share of all bags
# is sent all of them.
MAX_MASKED_OWNERS, MANY_VALUES, NEARLY_ALL = 6, 2, 7 / 8
# As in wire/messages.py: counts of a body, an array's header, fields of a POOL frame beside the model's name, and the
# size up to which numbers of 8 bytes are not looked at whether they fit 4.
BODY_BYTES, ARRAY_BYTES, POOL_FIELD_BYTES, SMALL_ARRAY_BYTES = 8, 16, 8, 2048
# Of arrays of 4-byte numbers, half end in the middle of 8 bytes.
MEAN_PADDING = 2.0
_BISECTIONS = 60


def shards_hit(num_shards: int, bag_ids: float, hit_rate: float = 0.0) -> float:
    """Return how many shards a bag is asked of, in the mean: S * (1 - (1 - (1 - h) / S) ** L).

    Args:
        num_shards: S; each has a row with the same chance.
        bag_ids: L, ids of the bag.
        hit_rate: h, the share of lookups that hot rows at the router answer.
    """
    return float(num_shards * (1 - (1 - (1 - hit_rate) / num_shards) ** bag_ids))


def moved_bytes(lookups: float, row_bytes: float, hit_rate: float = 0.0) -> float:
    """Return the bytes of rows that are not found where they are pooled: lookups * (1 - h) * row_bytes."""
    return lookups * (1 - hit_rate) * row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class BatchBags:
    """A batch's bags by table and number of ids; means over batches need not be whole.

    Attributes:
        num_tables: of the layout.
        table: int64 [k], ascending, number in the layout; every table comes.
        lengths: float64 [k], ids of a bag.
        bags: float64 [k], how many bags of that table have as many ids.
    """

    num_tables: int
    table: Int64Array
    lengths: Float64Array
    bags: Float64Array

    @classmethod
    def of(cls, loads: Sequence[BagLoad]) -> BatchBags:
        """Take all bags of a table as long as their mean. `loads` are in layout order."""
        lengths = [load.values / load.bags if load.bags else 0.0 for load in loads]
        return cls(len(loads), np.arange(len(loads)), np.array(lengths), np.array([load.bags for load in loads]))

    @classmethod
    def counted(cls, lengths: Sequence[Int64Array], batches: int = 1) -> BatchBags:
        """Count bags, int64 [bags] for each table, of so many batches together, as the mean of one."""
        found = [np.unique(one if one.size else [0], return_counts=True) for one in lengths]
        counts = [times * bool(one.size) for one, (_, times) in zip(lengths, found, strict=True)]
        return cls(
            len(lengths),
            np.repeat(np.arange(len(lengths)), [one.size for one in counts]),
            np.concatenate([one for one, _ in found]).astype(np.float64),
            np.concatenate(counts) / batches,
        )

    def by_table(self, each: Float64Array) -> Float64Array:
        """Add up numbers, float64 [k] or [k, shards], of each table."""
        sums: Float64Array = np.add.reduceat(each, np.searchsorted(self.table, np.arange(self.num_tables)), axis=0)
        return sums

    @property
    def num_filled(self) -> float:
        """Bags that are not empty."""
        return float(self.bags[self.lengths > 0].sum())


@dataclass(frozen=True, slots=True, eq=False)
class NearRows:
    """The hottest rows of a model, which the router has, and answers for.

    Attributes:
        missed: for each table float64 [levels], the share of each level's rows that are not among them.
        rows: int64 [tables].
        size_bytes: as stored.
        hit_rates: float64 [tables], the share of a table's lookups that they answer.
        hit_rate: the same of all lookups.
    """

    missed: tuple[Float64Array, ...]
    rows: Int64Array
    size_bytes: int
    hit_rates: Float64Array
    hit_rate: float

    @classmethod
    def choose(
        cls,
        layout: TableLayout,
        hotness: Sequence[RowHotness],
        *,
        num_rows: float = np.inf,
        size_bytes: float = np.inf,
        hit_rate: float = 1.0,
    ) -> NearRows:
        """Take rows by lookups for each byte, the hottest first, until the first of three bounds.

        Args:
            layout: the model's tables.
            hotness: of each, in layout order; its lookups are those of one batch or sample of all tables.
            num_rows: at most so many rows.
            size_bytes: at most so many bytes, as stored.
            hit_rate: as few as answer this share of all lookups.
        """
        row_bytes = _of_tables(layout, [group.row_bytes for group in layout.groups])
        levels = [one.rows() for one in hotness]
        table = np.repeat(np.arange(len(levels)), [one.size for one in levels])
        rows, each = np.concatenate(levels).astype(np.float64), np.concatenate([one.lookups for one in hotness])
        order = np.argsort(-each / row_bytes[table], kind="stable")
        total = float(rows @ each)
        # Of each level, in order: what is left of every bound once those before it are in.
        bounds = ((num_rows, 1.0 * rows), (size_bytes, rows * row_bytes[table]), (hit_rate * total, rows * each))
        shares = np.ones_like(rows)
        for most, costs in bounds:
            ordered = costs[order]
            left = most - (np.cumsum(ordered) - ordered)
            # What costs nothing has no place either once the bound is passed.
            fitting = (left / np.maximum(ordered, 1e-200)).clip(0, 1)
            shares[order] = np.minimum(shares[order], np.where(ordered > left, fitting, 1))
        taken = rows * shares if hit_rate < 1 else np.floor(rows * shares + 1e-9)
        ends = np.cumsum([one.size for one in levels])[:-1]
        by_table = np.split(taken, ends)
        lookups = np.array([float(one @ level.lookups) for one, level in zip(by_table, hotness, strict=True)])
        of_table = np.array([float(one.rows() @ one.lookups) for one in hotness])
        return cls(
            tuple(1 - _ratio(one, level.astype(np.float64)) for one, level in zip(by_table, levels, strict=True)),
            np.array([int(np.ceil(one.sum())) for one in by_table], np.int64),
            int(np.ceil(taken @ row_bytes[table])),
            _ratio(lookups, of_table),
            float(lookups.sum() / total) if total else 0.0,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SentLookups:
    """Which lookups go to which shard.

    Attributes:
        shares: float64 [tables, shards], of each table's lookups. What a row lacks to 1 the router answers itself.
        takes_turns: bool [tables], whether every shard has the table, so that each batch's lookups of it go to one of
            them; `shares` are means over batches.
    """

    shares: Float64Array
    takes_turns: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        hotness: Sequence[RowHotness],
        shard_of_bucket: Sequence[Int16Array],
        rows_by_shard: Sequence[Int64Array],
        hot: NearRows | None = None,
    ) -> SentLookups:
        """Find the shares of a plan.

        Args:
            hotness: of each table, in layout order.
            shard_of_bucket: int16 [buckets] for each table; -1 where every shard has the table.
            rows_by_shard: what `RowHotness.rows_by_owner` finds for each, int64 [levels, shards]. It does not depend on
                hot rows, and takes longer than all else.
            hot: what the router answers itself.
        """
        shares = np.zeros((len(hotness), rows_by_shard[0].shape[1]))
        takes_turns = np.array([bool(owners[0] < 0) for owners in shard_of_bucket])
        for table, rows in enumerate(hotness):
            each = rows.lookups if rows.lookups.any() else np.ones_like(rows.lookups)
            total = float(each @ rows.rows())
            left = each if hot is None else each * hot.missed[table]
            # In turns: each shard has all rows, and the mean of its lookups.
            here = rows.rows()[:, None] / shares.shape[1] if takes_turns[table] else rows_by_shard[table]
            shares[table] = left @ here / total
        return cls(shares, takes_turns)

    @property
    def hits(self) -> Float64Array:
        """float64 [tables], the share of each table's lookups that go to no shard."""
        hits: Float64Array = np.clip(1 - self.shares.sum(axis=1), 0, 1)
        return hits


class WireForm(NamedTuple):
    """How ids and answers travel.

    Attributes:
        sum_item_bytes: 2 for float16 sums, 4 for float32.
        stored: whether rows may travel as they are stored: of shards on CPUs; cards send sums alone.
        weighted: whether values have weights.
        model_bytes: of the model's name.
    """

    sum_item_bytes: int = 2
    stored: bool = True
    weighted: bool = False
    model_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class NetworkBytes:
    """What one batch sends to each shard and gets back, in the mean: float64 [shards].

    Attributes:
        values, bags: asked of a shard; bags that are sent empty count as well.
        shards_hit: in the mean over bags that are not empty, how many shards have one of their rows.
        ids, offsets, keys: bytes of rows' numbers (and weights), of where bags begin, and of tables and their bags.
        framing_out, framing_back: headers, fields and padding; frames are taken to hold a batch each.
        stored, sums: bytes of rows as they are stored, and of pooled sums.
    """

    values: Float64Array
    bags: Float64Array
    shards_hit: float
    ids: Float64Array
    offsets: Float64Array
    keys: Float64Array
    framing_out: Float64Array
    stored: Float64Array
    sums: Float64Array
    framing_back: Float64Array

    @property
    def out(self) -> Float64Array:
        """Bytes to each shard."""
        return self.ids + self.offsets + self.keys + self.framing_out

    @property
    def back(self) -> Float64Array:
        """Bytes from each shard."""
        return self.stored + self.sums + self.framing_back

    @classmethod
    def of(cls, layout: TableLayout, batch: BatchBags, sent: SentLookups, form: WireForm) -> NetworkBytes:
        """Reckon a batch of bags of each table, in layout order, whose ids are drawn independently of each other."""
        num_shards = sent.shares.shape[1]
        asked = AskedShards.of(batch, sent)
        filled, all_bags = batch.num_filled, batch.by_table(batch.bags)
        sends_all = _chance_of_all_bags(
            asked, all_bags, filled, num_shards, is_split=num_shards > 1 or bool(sent.hits.any())
        )
        answer = _answer_bytes(layout, batch, sent, form, np.zeros(num_shards))
        answer_to_all = _answer_bytes(layout, batch, sent, form, np.ones(num_shards))
        num_bags = (1 - sends_all) * asked.hit.sum(axis=0) + sends_all * all_bags.sum()
        num_keys = (1 - sends_all) * asked.is_there.sum(axis=0) + sends_all * np.count_nonzero(all_bags)
        num_values = asked.values.sum(axis=0)
        is_used = 1 - np.prod(1 - asked.is_there, axis=0)
        ids, offsets = (_item_bytes(layout, num_shards, count) for count in (num_values, num_bags + 1))
        arrays = 5 if form.weighted else 4
        fields = BODY_BYTES + ARRAY_BYTES * arrays + POOL_FIELD_BYTES + form.model_bytes
        answered = len(layout.groups) * (2 if form.stored else 1)
        return cls(
            values=num_values,
            bags=num_bags,
            shards_hit=float(asked.hit.sum() / filled) if filled else 0.0,
            ids=num_values * (ids + 4 * form.weighted),
            offsets=(num_bags + is_used) * offsets,
            keys=num_keys * np.where(8 * num_keys > SMALL_ARRAY_BYTES, 8, 12),
            framing_out=is_used * (HEADER.size + fields + -fields % 8 + MEAN_PADDING * arrays),
            stored=(1 - sends_all) * answer.stored + sends_all * answer_to_all.stored,
            sums=(1 - sends_all) * answer.sums + sends_all * answer_to_all.sums,
            framing_back=is_used * (HEADER.size + BODY_BYTES + ARRAY_BYTES * answered),
        )


class AskedShards(NamedTuple):
    """What shards are asked in the mean.

    Attributes:
        values, hit, is_there: float64 [tables, shards]: values, bags that have one, the chance of any such bag.
        num_values: of the whole batch, hot rows at the router included.
    """

    values: Float64Array
    hit: Float64Array
    is_there: Float64Array
    num_values: float

    @classmethod
    def of(cls, batch: BatchBags, sent: SentLookups) -> AskedShards:
        """Reckon a batch whose ids are drawn independently of each other."""
        num_values = batch.by_table(batch.lengths * batch.bags)[:, None]
        # A table that takes turns is asked of one shard for all of its lookups, or not at all.
        turns = np.where(sent.takes_turns, sent.shares.shape[1], 1)[:, None]
        left = np.clip(1 - sent.shares * turns, 0, 1)
        hit = batch.bags[:, None] * (1 - left[batch.table] ** batch.lengths[:, None])
        return cls(
            num_values * sent.shares,
            batch.by_table(hit) / turns,
            (1 - left**num_values) / turns,
            float(num_values.sum()),
        )

    def loads(self, shard: int, loads: Sequence[BagLoad]) -> tuple[BagLoad, ...]:
        """Return what one shard is asked of each table, of loads of all shards together."""
        return tuple(
            BagLoad(values, bags, min(load.longest_bag, load.longest_bag * values / load.values) if values else 0.0)
            for values, bags, load in zip(
                self.values[:, shard].tolist(), self.hit[:, shard].tolist(), loads, strict=True
            )
        )


def _chance_of_all_bags(
    asked: AskedShards, all_bags: Float64Array, filled: float, num_shards: int, *, is_split: bool
) -> Float64Array:
    """float64 [shards], the chance that a shard is sent all bags, empty ones too, rather than those with a value there.

    Rows of one owner need no split. Else it is where a count that varies from batch to batch is large enough.
    """
    if not is_split:
        return np.ones(num_shards)
    owners = num_shards + bool(asked.values.sum() < asked.num_values)
    if owners > MAX_MASKED_OWNERS or asked.num_values <= MANY_VALUES * filled:
        return np.zeros(num_shards)
    variance = (asked.hit - _ratio(asked.hit**2, np.broadcast_to(all_bags[:, None], asked.hit.shape))).sum(axis=0)
    return _chance_not_negative(asked.hit.sum(axis=0) - NEARLY_ALL * all_bags.sum(), variance)


def _chance_not_negative(mean: Float64Array, variance: Float64Array) -> Float64Array:
    """Return the chance that a sum of many parts is at least 0: of a normal distribution, to 3 digits."""
    certain = (mean >= -1e-9 * np.abs(mean).max(initial=1.0)).astype(np.float64)
    z = np.divide(mean, np.sqrt(np.maximum(variance, 0)), out=np.zeros_like(mean), where=variance > 1e-6)
    z = np.clip(z, -8, 8)
    chance: Float64Array = np.where(variance > 1e-6, (1 + np.tanh(0.7978846 * (z + 0.044715 * z**3))) / 2, certain)
    return chance


def _item_bytes(layout: TableLayout, num_shards: int, count: Float64Array) -> Float64Array:
    """float64 [shards], of a row's number or an offset: int32 where every row of the model fits it.

    For one shard they are narrowed when they are sent, which is not done to short arrays.
    """
    narrow = max(table.num_embeddings for table in layout.tables) <= 2**31
    is_short = (count * 8 <= SMALL_ARRAY_BYTES) & (num_shards == 1)
    return np.where(narrow & ~is_short, 4.0, 8.0)


class _AnswerBytes(NamedTuple):
    """float64 [shards]: rows as they are stored, and sums."""

    stored: Float64Array
    sums: Float64Array


def _answer_bytes(
    layout: TableLayout, batch: BatchBags, sent: SentLookups, form: WireForm, sends_all: Float64Array
) -> _AnswerBytes:
    """Bytes of answers about bags with a value at a shard, or, where `sends_all` is 1, about all bags.

    The rows of a table travel as stored if its values take no more bytes than `most` for each bag (`travel_as_stored`).
    A bag has X values at a shard, X binomial in its length; whether all together pass is taken as normally distributed.
    """
    row = _of_tables(layout, [group.row_bytes for group in layout.groups])[:, None]
    dims = _of_tables(layout, [group.embedding_dim for group in layout.groups])[:, None]
    most = np.maximum(row, 2 * dims)
    turns = np.where(sent.takes_turns, sent.shares.shape[1], 1)[:, None]
    share = np.clip(sent.shares * turns, 0, 1)[batch.table]
    lengths, bags = batch.lengths[:, None], batch.bags[:, None]
    is_asked = np.maximum(1 - (1 - share) ** lengths, sends_all)
    values = lengths * share
    most_k, row_k = most[batch.table], row[batch.table]
    mean = most_k * is_asked - row_k * values
    variance = (
        most_k**2 * is_asked * (1 - is_asked)
        + row_k**2 * values * (1 - share)
        - 2 * most_k * row_k * values * (1 - is_asked)
    )
    # Lengths vary from batch to batch as they do within one.
    means = batch.by_table(bags * mean)
    counts = np.broadcast_to(batch.by_table(batch.bags)[:, None], means.shape)
    spread = batch.by_table(bags * (variance + mean**2)) - _ratio(means**2, counts)
    is_stored = _chance_not_negative(means, spread) * form.stored
    stored = (batch.by_table(bags * values) / turns * is_stored * row).sum(axis=0)
    sums = (batch.by_table(bags * is_asked) / turns * (1 - is_stored) * dims * form.sum_item_bytes).sum(axis=0)
    return _AnswerBytes(stored, sums)


class Network(Frozen):
    """What lies between the router and the shards.

    Attributes:
        gb_per_s: of the router's line, in 10^9 bytes a second of one direction; it carries what all shards send.
        latency_us: of a round trip, unloaded.
    """

    gb_per_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)


class NetworkTime(Frozen):
    """What a batch takes on the network, in microseconds.

    Attributes:
        out_us, back_us: of the bytes, one after the other.
        latency_us: of the round trip; none if nothing is sent.
        alone_us: out_us + back_us + latency_us.
        bound: what most of it is.
        busy_us: of the line for each batch, while it is never idle: its two directions overlap, latencies too.
    """

    out_us: float
    back_us: float
    latency_us: float
    alone_us: float
    bound: NetworkBound
    busy_us: float

    @classmethod
    def of(cls, out_bytes: float, back_bytes: float, network: Network) -> NetworkTime:
        """Return bytes / bandwidth + latency."""
        out, back = (size / (network.gb_per_s * BYTES_PER_US) for size in (out_bytes, back_bytes))
        latency = network.latency_us if out else 0.0
        return cls(
            out_us=out,
            back_us=back,
            latency_us=latency,
            alone_us=out + back + latency,
            bound="bandwidth" if out + back > latency else "latency",
            busy_us=max(out, back),
        )


def crossover_hit_rate(sharded_us: Callable[[float], float], replicated_us: float) -> float | None:
    """Return the hit rate from which on dividing rows takes no longer than having all of them on every node.

    Args:
        sharded_us: of a hit rate from 0 to just below 1; must not rise.
        replicated_us: without any network.

    Returns:
        0 if rows may be divided at no loss of time without hot rows; None if they may not at any hit rate, because
        the network's latency alone takes longer.
    """
    low, high = 0.0, 1.0 - 1e-9
    if sharded_us(low) <= replicated_us:
        return 0.0
    if sharded_us(high) > replicated_us:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sharded_us(middle) <= replicated_us else (middle, high)
    return high


def _of_tables(layout: TableLayout, of_groups: Sequence[int]) -> Float64Array:
    sizes = [group.end_table - group.first_table for group in layout.groups]
    return np.repeat(np.array(of_groups, np.float64), sizes)


def _ratio(part: Float64Array, whole: Float64Array) -> Float64Array:
    return np.divide(part, whole, out=np.zeros(whole.shape), where=whole > 0)
