"""An arena on cards, made by hand for tests of the kernels alone, and what pooling it must give, in NumPy.

Every array has memory of its own, of exactly its size, so that AddressSanitizer sees a read beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import codec_for
from loader.snapshot.tables import RowDtype
from shard_node.cuda.cards import Card, Cards, Memory
from shard_node.cuda.kernel_params import (
    MAX_LANES,
    MODES,
    NO_RUN,
    NOT_HERE,
    OUT_DTYPES,
    POOL_KERNELS,
    THREADS_PER_BLOCK,
    WRITE_KERNEL,
    ArenaParams,
    BatchParams,
    Mode,
    OutDtype,
    RowFormat,
    RunParams,
    TableParams,
    WriteParams,
    owner_bits,
)
from shardrank_testing.card_bytes import fetch, send

Float32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

# Instead of an owner's number.
NOWHERE = -1
# What is in the output where nothing was written.
UNTOUCHED = 0x7B
_OUT_STORAGE: dict[OutDtype, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


@dataclass
class Run:
    """Bags of one table: their rows, and the rows' weights."""

    table: int
    bags: list[npt.NDArray[np.integer]]
    mode: Mode = "sum"
    weights: list[Float32Array] | None = None


@dataclass
class Pooled:
    """What a launch left behind. out: float32 [bags, dim]. raw: every byte of the output."""

    out: Float32Array
    raw: ByteArray
    outside: int
    not_here: int


class KernelArena:
    """Tables of one dim and dtype over some cards.

    Args:
        cards: where.
        tables: of each, its rows, float32 [n, dim].
        owners: of each, int [n]: a card, num_cards for a hot row, num_cards + 1 for a pinned one, or
            `NOWHERE`. What is there of the places of a table with an only owner is `NOT_HERE`, as nobody is to look.
    """

    def __init__(
        self,
        cards: Cards,
        dtype: RowDtype,
        tables: Sequence[Float32Array],
        owners: Sequence[npt.NDArray[np.integer]],
    ) -> None:
        self.cards, self.num_cards, self.dim = cards, len(cards.cards), tables[0].shape[1]
        self.dtype: RowDtype = dtype
        self.format, self._codec = RowFormat.of(dtype, self.dim), codec_for(dtype, self.dim)
        self.stored = [self._codec.encode(rows) for rows in tables]
        self.owners = [np.asarray(one) for one in owners]
        self.slots = [_slots(one) for one in self.owners]
        counts = np.array([np.bincount(one[one >= 0], minlength=self.num_cards + 2) for one in self.owners])
        sizes = counts.astype(np.uint64) * np.uint64(self.format.stride)
        self.starts = np.concatenate([np.zeros_like(sizes[:1]), np.cumsum(sizes, axis=0)[:-1]])
        self.pinned = cards.allocate_pinned(max(1, int(sizes[:, -1].sum())))
        relaid = [self._rows_of(owner) for owner in range(self.num_cards + 2)]
        self.pinned.array[: relaid[-1].size] = relaid[-1]
        self.own = [send(cards, card, relaid[card.number]) for card in cards.cards]
        self.hot = [send(cards, card, relaid[self.num_cards]) for card in cards.cards]
        self._held: list[Memory] = []
        self.params = [self._params(card) for card in cards.cards]

    def decoded(self, table: int) -> Float32Array:
        """What the stored rows are worth, zeros where the kernel has none."""
        rows = self._codec.decode(self.stored[table])
        rows[self.owners[table] < 0] = 0.0
        return rows

    def _rows_of(self, owner: int) -> ByteArray:
        relaid = [
            self.format.relay(stored[owners == owner]) for stored, owners in zip(self.stored, self.owners, strict=True)
        ]
        return np.concatenate(relaid).reshape(-1)

    def _params(self, card: Card) -> ArenaParams:
        bits = owner_bits(self.num_cards)
        rows = [*(memory.address for memory in self.own), self.hot[card.number].address, self.pinned.address]
        places = []
        for owners, slots in zip(self.owners, self.slots, strict=True):
            coded = slots.astype(np.uint32) << np.uint32(bits) | np.maximum(owners, 0).astype(np.uint32)
            is_read = (owners != NOWHERE) & (owners != owners[0]).any()
            places.append(np.where(is_read, coded, NOT_HERE))
        sizes = [one.size for one in places]
        tables = (TableParams * len(sizes))()
        for number, owners in enumerate(self.owners):
            tables[number] = TableParams(begin=sum(sizes[:number]), num_rows=owners.size)
            if (only := owners[0]) >= 0 and (owners == only).all():
                tables[number].begin, tables[number].owner_after = int(self.starts[number, only]), only + 1
        self._held += (
            memories := [
                send(self.cards, card, array)
                for array in (
                    np.concatenate(places).astype(np.uint32),
                    _bytes_of(tables),
                    self.cards.switches.starts(self.starts, rows),
                )
            ]
        )
        params = ArenaParams(
            places=memories[0].address,
            tables=memories[1].address,
            starts=memories[2].address,
            num_tables=len(sizes),
            num_cards=self.num_cards,
            owner_bits=bits,
            row_stride=self.format.stride,
            embedding_dim=self.dim,
        )
        params.rows[: len(rows)] = rows
        return params

    def pool(self, card: int, runs: Sequence[Run], shape: LaunchShape | None = None) -> Pooled:
        """Pools the bags, one after another into the output."""
        return pool_bags(self.cards, card, self.params[card], self.format, runs, shape)

    def write(self, card: int, table: int, rows: npt.NDArray[np.integer], relaid: ByteArray, writes_host: bool) -> None:
        """One launch of the kernel that writes rows."""
        on = self.cards.cards[card]
        numbers, stored = send(self.cards, on, rows.astype(np.uint32)), send(self.cards, on, relaid)
        params = WriteParams(
            numbers=numbers.address,
            stored=stored.address,
            num_rows=rows.size,
            table=table,
            card=card,
            writes_host=writes_host,
        )
        chunks = rows.size * self.format.stride // 16
        stream = on.stream()
        on.launch(WRITE_KERNEL, (-(-chunks // THREADS_PER_BLOCK), 1), (self.params[card], params), stream)
        stream.synchronize()

    def expected(self, runs: Sequence[Run]) -> npt.NDArray[np.float64]:
        """float64 [bags, dim], by definition."""
        out: list[npt.NDArray[np.float64]] = []
        for run in runs:
            rows = self.decoded(run.table).astype(np.float64)
            for number, bag in enumerate(run.bags):
                weights = np.ones(bag.size) if run.weights is None else run.weights[number].astype(np.float64)
                inside = (bag >= 0) & (bag < rows.shape[0])
                terms = np.where(inside[:, None], rows[np.where(inside, bag, 0)], 0.0) * weights[:, None]
                if run.mode == "none":
                    out.extend(terms)
                    continue
                total = terms.sum(axis=0)
                out.append(total / bag.size if run.mode == "mean" and bag.size else total)
        return np.array(out).reshape(-1, self.dim)


def pool_bags(
    cards: Cards,
    card: int,
    arena: ArenaParams,
    fmt: RowFormat,
    runs: Sequence[Run],
    shape: LaunchShape | None = None,
) -> Pooled:
    """One launch on a card that pools bags of an arena's tables, one after another into the output."""
    shape = shape or LaunchShape()
    lanes_log2 = (
        min((fmt.chunks - 1).bit_length(), MAX_LANES.bit_length() - 1) if shape.lanes_log2 is None else shape.lanes_log2
    )
    batch = _Batch(fmt.embedding_dim, runs, shape, cards.switches.bags_per_block(lanes_log2))
    on = cards.cards[card]
    values, weights, offsets, run_params, blocks, counters = (send(cards, on, array) for array in batch.arrays())
    out = send(cards, on, np.full(batch.out_bytes, UNTOUCHED, np.uint8))
    params = BatchParams(
        values=values.address,
        weights=weights.address,
        offsets=offsets.address,
        runs=run_params.address,
        blocks=blocks.address,
        out=out.address,
        counters=counters.address,
        num_blocks=len(batch.blocks),
        rotation=shape.rotation,
        out_dtype=OUT_DTYPES[shape.out_dtype],
        lanes_log2=lanes_log2,
    )
    grid = (len(batch.blocks), -(-fmt.chunks // (1 << lanes_log2)))
    stream = on.stream()
    on.launch(POOL_KERNELS[fmt.dtype], grid, (arena, params), stream)
    stream.synchronize()
    raw = fetch(cards, on, out)
    outside, not_here = fetch(cards, on, counters).view(np.uint64).tolist()
    return Pooled(batch.read(raw), raw, outside, not_here)


@dataclass
class LaunchShape:
    """What may be chosen of a launch. gap: untouched elements behind each bag. idle_blocks: with nothing to do."""

    out_dtype: OutDtype = "fp32"
    rotation: int = 0
    lanes_log2: int | None = None
    first: int = 0
    gap: int = 0
    idle_blocks: int = 0


@dataclass
class _Batch:
    dim: int
    runs: Sequence[Run]
    shape: LaunchShape
    bags_per_block: int
    blocks: list[tuple[int, int]] = field(init=False)
    out_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._storage = np.dtype(_OUT_STORAGE[self.shape.out_dtype])
        self._stride = self.dim + self.shape.gap
        self._params = (RunParams * max(1, len(self.runs)))()
        self.blocks, bags, values, written = [], 0, 0, 0
        for number, run in enumerate(self.runs):
            num_values = sum(bag.size for bag in run.bags)
            num = num_values if run.mode == "none" else len(run.bags)
            self._params[number] = RunParams(
                table=run.table,
                first=values if run.mode == "none" else bags,
                num=num,
                mode=MODES[run.mode],
                out_offset=self.shape.first + written * self._stride,
                out_stride=self._stride,
            )
            self.blocks += [(number, first) for first in range(0, num, self.bags_per_block)]
            bags, values, written = bags + len(run.bags), values + num_values, written + num
        self.blocks += [(NO_RUN, 0)] * max(self.shape.idle_blocks, 0 if self.blocks else 1)
        self._written = written
        self.out_bytes = (self.shape.first + written * self._stride) * self._storage.itemsize

    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Values, weights, offsets, runs, blocks, counters."""
        bags = [bag for run in self.runs for bag in run.bags]
        values = np.concatenate(bags) if bags else np.empty(0, np.uint32)
        weights = np.empty(0, np.float32)
        if bags and any(run.weights is not None for run in self.runs):
            weights = np.concatenate(
                [
                    np.ones(bag.size, np.float32) if run.weights is None else run.weights[number]
                    for run in self.runs
                    for number, bag in enumerate(run.bags)
                ]
            )
        offsets = np.cumsum([0, *(bag.size for bag in bags)]).astype(np.uint32)
        return (
            values.astype(np.uint32),
            weights,
            offsets,
            _bytes_of(self._params),
            np.array(self.blocks, np.uint32),
            np.zeros(2, np.uint64),
        )

    def read(self, raw: ByteArray) -> Float32Array:
        """float32 [bags, dim] of the output's bytes. Asserts that nothing beside the bags was written."""
        items = raw.view(self._storage)
        rows = items[self.shape.first :].reshape(self._written, self._stride)
        beside = np.concatenate([items[: self.shape.first], rows[:, self.dim :].reshape(-1)])
        assert (beside.view(np.uint8) == UNTOUCHED).all()
        pooled = rows[:, : self.dim]
        if self.shape.out_dtype == "bf16":
            return (pooled.astype(np.uint32) << 16).view(np.float32)
        return pooled.astype(np.float32)


def _slots(owners: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Each row's slot: how many rows of the table before it have its owner."""
    slots = np.zeros(owners.size, np.int64)
    for owner in np.unique(owners):
        here = owners == owner
        slots[here] = np.arange(here.sum())
    return slots


def _bytes_of(structures: object) -> ByteArray:
    return np.frombuffer(bytes(structures), np.uint8)  # type: ignore[call-overload]
