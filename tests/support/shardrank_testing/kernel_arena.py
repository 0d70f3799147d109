"""Launches of the kernels alone, past the checks of an engine, and batches of lanes; what both must give, in NumPy."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import RowDtype
from shard_node.bags import Bags, TableLayout
from shard_node.buckets import Partition
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_loading import CardTableLoad
from shard_node.cuda.card_rows import Placer
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.cuda.kernel_params import (
    MAX_LANES,
    MODES,
    NO_RUN,
    NOT_HERE,
    OUT_DTYPES,
    POOL_KERNELS,
    THREADS_PER_BLOCK,
    ArenaParams,
    BatchParams,
    Mode,
    OutDtype,
    RowFormat,
    RunParams,
    owners_of,
)
from shard_node.engine.memory import RowMemory
from shardrank_testing.bags import bags_of_random_rows, by_bag, pool_by_definition
from shardrank_testing.card_bytes import fetch, fetch_at, send
from shardrank_testing.card_engines import options_for
from shardrank_testing.card_plans import places_of
from shardrank_testing.deltas import export_state
from shardrank_testing.snapshots import model_of, num_buckets, table_of

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards

Float32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

# What is in the output where nothing was written.
UNTOUCHED = 0x7B
_OUT_STORAGE: dict[OutDtype, npt.DTypeLike] = {"fp32": np.float32, "bf16": np.uint16}


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


def load_partition(
    snapshot: Snapshot, partition: Partition, cards: Cards, options: CardOptions, upload_bytes: int = 1 << 16
) -> CardEngine:
    """The engine of a node that has these buckets of a snapshot."""
    load = CardTableLoad(snapshot, partition, "", CardSet(cards, options), upload_bytes=upload_bytes)
    engine = load.run(load.take(RowMemory())).engine
    assert isinstance(engine, CardEngine)
    return engine


class KernelArena:
    """Tables of one dim and dtype over some cards, in every tier.

    Args:
        cards: where.
        tables: of each, its rows, float32 [n, dim].
        rng: deals the tables' buckets to the cards.
        lost: the fraction of buckets that another node has.

    Attributes:
        owners: of each table, uint8 [n]: a card, num_cards for a hot row, num_cards + 1 for a pinned one, or
            num_cards + 2 for one that is on another node.
    """

    def __init__(
        self, cards: Cards, dtype: RowDtype, tables: Sequence[Float32Array], rng: np.random.Generator, lost: float = 0.0
    ) -> None:
        dim = tables[0].shape[1]
        self.cards, self.num_cards, self.codec = cards, len(cards.cards), RowCodec(dtype, dim)
        self.stored = [self.codec.encode(rows) for rows in tables]
        spec = model_of(
            [
                table_of(f"t{number}", len(rows), dim, dtype=dtype, bucketing="range" if number % 2 else "mixed")
                for number, rows in enumerate(tables)
            ]
        )
        dealt = [rng.integers(0, self.num_cards, num_buckets(table)).astype(np.int16) for table in spec.tables]
        for one in dealt:
            one[rng.random(one.size) < lost] = -1
        with tempfile.TemporaryDirectory() as folder:
            rows_of_tables = {table.name: rows for table, rows in zip(spec.tables, tables, strict=True)}
            snapshot = export_state(Path(folder), spec, rows_of_tables, 1)
            partition = Partition(self.num_cards, tuple(dealt))
            self.engine = load_partition(snapshot, partition, cards, options_for(spec, self.num_cards, "every tier"))
        (self.arena,) = self.engine._arenas
        self.placer = Placer(self.engine.plan)
        self.places = [places_of(self.engine.plan, number) for number in range(len(tables))]
        self.owners = [owners_of(places, self.num_cards) for places in self.places]

    def decoded(self, table: int) -> Float32Array:
        """What the stored rows are worth, zeros where the kernel has none."""
        rows = self.codec.decode(self.stored[table])
        rows[self.places[table] == NOT_HERE] = 0.0
        return rows

    def pool(self, card: int, runs: Sequence[Run], shape: LaunchShape | None = None) -> Pooled:
        """Pools the bags, one after another into the output."""
        return pool_bags(self.cards, card, self.arena.params[card], self.arena.format, runs, shape)

    def write(self, card: int, table: int, rows: npt.NDArray[np.integer], relaid: ByteArray, writes_host: bool) -> None:
        """One launch of the kernel that writes rows."""
        on = self.cards.cards[card]
        numbers, stored = send(self.cards, on, rows.astype(np.uint32)), send(self.cards, on, relaid)
        stream = on.stream()
        self.arena.write(card, table, numbers.address, stored.address, rows.size, stream, writes_host=writes_host)
        stream.synchronize()

    def contents(self) -> dict[tuple[int, int], ByteArray]:
        """The rows of every owner that a card reads as its own memory, by (card, owner); pinned ones by card 0."""
        sizes = self.placer.rows_bytes(self.arena.group)
        hot, pinned = self.num_cards, self.num_cards + 1
        places = [*((card, owner) for card in range(self.num_cards) for owner in (card, hot)), (0, pinned)]
        return {
            (card, owner): fetch_at(
                self.cards, self.cards.cards[card], int(self.arena.params[card].rows[owner]), sizes[owner]
            )
            for card, owner in places
        }

    def expected(self, runs: Sequence[Run]) -> npt.NDArray[np.float64]:
        """float64 [bags, dim], by definition."""
        out = [np.zeros((0, self.codec.embedding_dim))]
        for run in runs:
            rows = self.decoded(run.table)
            num_rows = len(rows)
            # Values outside of the table read a row of zeros.
            bags = [np.where((bag >= 0) & (bag < num_rows), bag, num_rows) for bag in run.bags]
            out.append(pool_by_definition(np.pad(rows, ((0, 1), (0, 0))), bags, run.mode, run.weights))
        return np.concatenate(out)


@dataclass
class LaunchShape:
    """What may be chosen of a launch. gap: untouched elements behind each bag. idle_blocks: with nothing to do."""

    out_dtype: OutDtype = "fp32"
    rotation: int = 0
    lanes_log2: int | None = None
    first: int = 0
    gap: int = 0
    idle_blocks: int = 0


def pool_bags(
    cards: Cards, card: int, arena: ArenaParams, fmt: RowFormat, runs: Sequence[Run], shape: LaunchShape | None = None
) -> Pooled:
    """One launch on a card that pools bags of an arena's tables, one after another into the output.

    Asserts that nothing beside the bags was written.
    """
    shape = shape or LaunchShape()
    lanes_log2 = shape.lanes_log2
    if lanes_log2 is None:
        lanes_log2 = min((fmt.chunks - 1).bit_length(), MAX_LANES.bit_length() - 1)
    storage, stride = np.dtype(_OUT_STORAGE[shape.out_dtype]), fmt.embedding_dim + shape.gap
    params, blocks, written = _runs(runs, shape.first, stride, THREADS_PER_BLOCK >> lanes_log2)
    blocks += [(NO_RUN, 0)] * max(shape.idle_blocks, 0 if blocks else 1)
    bags = [bag for run in runs for bag in run.bags]
    weights: list[Float32Array] = []
    if any(run.weights is not None for run in runs):
        weights = [one for run in runs for one in run.weights or [np.ones(bag.size) for bag in run.bags]]
    arrays = (
        np.concatenate([np.empty(0, np.int64), *bags]).astype(np.uint32),
        np.concatenate([np.empty(0, np.float32), *weights]).astype(np.float32),
        np.cumsum([0, *(bag.size for bag in bags)]).astype(np.uint32),
        np.frombuffer(bytes(params), np.uint8),
        np.array(blocks, np.uint32),
        np.full((shape.first + written * stride) * storage.itemsize, UNTOUCHED, np.uint8),
        np.zeros(2, np.uint64),
    )
    on = cards.cards[card]
    stream, memories = on.stream(), [send(cards, on, array) for array in arrays]
    batch = BatchParams(
        *(memory.address for memory in memories),
        num_blocks=len(blocks),
        rotation=shape.rotation,
        out_dtype=OUT_DTYPES[shape.out_dtype],
        lanes_log2=lanes_log2,
    )
    grid = (len(blocks), -(-fmt.chunks // (1 << lanes_log2)))
    on.launch(POOL_KERNELS[fmt.dtype], grid, (arena, batch), stream)
    stream.synchronize()
    raw = fetch(cards, on, memories[-2])
    outside, not_here = fetch(cards, on, memories[-1]).view(np.uint64).tolist()
    items = raw.view(storage)
    rows = items[shape.first :].reshape(written, stride)
    pooled, beside = rows[:, : fmt.embedding_dim], rows[:, fmt.embedding_dim :]
    assert (np.concatenate([items[: shape.first], beside.reshape(-1)]).view(np.uint8) == UNTOUCHED).all()
    if shape.out_dtype == "bf16":
        pooled = (pooled.astype(np.uint32) << 16).view(np.float32)
    return Pooled(pooled.astype(np.float32), raw, outside, not_here)


def _runs(
    runs: Sequence[Run], first: int, stride: int, bags_per_block: int
) -> tuple[ctypes.Array[RunParams], list[tuple[int, int]], int]:
    """Return what the kernel takes of each run, the blocks, (run, first bag), and how many bags are written."""
    params, blocks = (RunParams * max(1, len(runs)))(), []
    num_bags, num_values, written = 0, 0, 0
    for number, run in enumerate(runs):
        values = sum(bag.size for bag in run.bags)
        num = values if run.mode == "none" else len(run.bags)
        params[number] = RunParams(
            table=run.table,
            first=num_values if run.mode == "none" else num_bags,
            num=num,
            mode=MODES[run.mode],
            out_offset=first + written * stride,
            out_stride=stride,
        )
        blocks += [(number, bag) for bag in range(0, num, bags_per_block)]
        num_bags, num_values, written = num_bags + len(run.bags), num_values + values, written + num
    return params, blocks, written


def runs_in_columns(
    layout: TableLayout, tables: Sequence[int], modes: Sequence[str], size: BatchSize, out_dtype: OutDtype = "fp32"
) -> OutputRuns:
    """Runs of a matrix: key k has its own columns, with three unused elements behind them; bag i is in row i."""
    dims = np.array([layout.tables[table].embedding_dim for table in tables], np.int64)
    ends = np.cumsum(dims + 3)
    numbers = np.array([MODES[mode] for mode in modes], np.int64)
    most = np.where(numbers == MODES["none"], size.num_values, size.bags_per_key)
    num_columns = int(ends[-1])
    return OutputRuns(
        tables=np.array(tables, np.int64),
        modes=numbers,
        out_offsets=ends - dims - 3,
        out_strides=np.full(dims.size, num_columns, np.int64),
        out_dtype=out_dtype,
        out_elements=num_columns * max(1, int(most.max())),
    )


def feature_bags(
    rng: np.random.Generator, layout: TableLayout, runs: OutputRuns, size: BatchSize, weighted: bool = False
) -> Bags:
    """Bags for every run, at most as many as the size says, some of them empty; values are rows."""
    bags_per_key = rng.integers(0, size.bags_per_key + 1)
    lengths = rng.integers(0, 7, int(bags_per_key.sum()))
    lengths[np.cumsum(lengths) > size.num_values] = 0
    limits = [layout.tables[table].num_embeddings for table in runs.tables.tolist()]
    keys = np.arange(runs.tables.size, dtype=np.int32)
    return bags_of_random_rows(rng, keys, bags_per_key, lengths, limits, weighted)


def expected_output(rows: Sequence[np.ndarray], bags: Bags, runs: OutputRuns) -> np.ndarray:
    """float64 [out_elements]; NaN where nothing is written.

    Args:
        rows: float32 [num_embeddings, embedding_dim] of each table, in layout order.
        bags: one key for each run.
        runs: where they go.
    """
    out = np.full(runs.out_elements, np.nan)
    modes = {number: mode for mode, number in MODES.items()}
    for key, table in enumerate(runs.tables.tolist()):
        weights = None if bags.weights is None else by_bag(bags.weights, bags, key)
        pooled = pool_by_definition(rows[table], by_bag(bags.values, bags, key), modes[int(runs.modes[key])], weights)
        for number, row in enumerate(pooled):
            first = int(runs.out_offsets[key]) + number * int(runs.out_strides[key])
            out[first : first + row.size] = row
    return out
