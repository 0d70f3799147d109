"""Measure the pooling kernel: the copy bandwidth that bounds it, a grid of sizes, and torch on the same rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

import numpy as np
import torch

from loader.snapshot.buckets import RowBuckets
from loadtest.gpu import fbgemm
from loadtest.gpu.ceiling import GATHER_KERNELS, GatheredRows, RandomGather
from loadtest.gpu.parts import BenchSize, Row, Work
from loadtest.gpu.rows import (
    NO_PLACES,
    ROW_MULTIPLE,
    TORCH_DTYPES,
    Bags,
    Columns,
    Ids,
    OwnedMemory,
    RowsOnCard,
    WrongPoolingError,
    asked_bytes,
    draw,
    draw_split,
    one_table_layout,
    share_of_distinct,
)
from loadtest.gpu.timing import Timing, clock_name, time_graphs, time_in_turns
from shard_node.cuda.cards import Card, Cards, Memory, Stream
from shard_node.cuda.kernel_params import OUT_BYTES, OutDtype, RowFormat
from shard_node.partition import Partition
from shard_node.planning.card_plan import PLACE_BYTES, CardBudget, CardPlan, TablePlaces
from shard_node.planning.cost_model import SYSTEMS, BagLoad, CardSystem, Traffic, batch_time
from shard_node.planning.hotness import Hotness

SECONDS_A_COPY, SECONDS_A_GATHER = 1.0, 0.3
AIM_HOTNESS = 20
"""Rows of a bag from which on the aims hold: below, a launch is too short for the bandwidth."""
_PIECE_BYTES = 1 << 28
DEVICE, UP, DOWN = "within the device", "pinned to device", "device to pinned"
PLAN_ROWS = 1 << 20
"""Of the table that stands for the real one: with uniform ids only the shares of the tiers count."""
MIN_SETS, MAX_COMPARED_SETS = 4, 128
MIN_COMPARED_BATCH = 8192
OURS, BAG, GATHER, TBE = "shardrank_int8", "embedding_bag", "torch_gather_then_sum", "fbgemm_tbe_int8"
TOLERANCE = {"fp16": 4e-3, "fp32": 1e-5}
_PIECE_ROWS = 1 << 21


def measure_copies(work: Work, cards: Cards, size: BenchSize) -> None:
    """Measure copies within the device (bytes read and written) and over the bus (bytes moved), and random gathers."""
    card = cards.cards[0]
    stream = card.stream()
    work.part.facts["clock"] = clock_name(card)
    work.note(
        "Within the device, bytes read and bytes written are both counted; over the bus, bytes moved.",
        "gather: a kernel that computes which rows it reads, at random (loadtest/gpu/ceiling.cu); sectors are counted. "
        "16 bytes a thread; with tail, 8 more of each row, as the pooling kernel reads scale and bias.",
    )
    host_bytes = min(size.copy_bytes, size.pinned_bytes) // 4
    with OwnedMemory(stream) as memory:
        source, target = (memory.own(card.allocate(size.copy_bytes)) for _ in range(2))
        pinned = memory.own(cards.allocate_pinned(host_bytes))
        both = [card.tensor(one, 0, (size.copy_bytes,), torch.uint8) for one in (source, target)]
        generator = torch.Generator(card.torch_device).manual_seed(1)
        with card.torch_stream(stream):
            for whole in both:
                # Random bytes: copies of zeros can be faster than copies of anything else.
                for first in range(0, size.copy_bytes, _PIECE_BYTES):
                    whole[first : first + _PIECE_BYTES].random_(0, 256, generator=generator)
        stream.synchronize()

        def within() -> None:
            with card.torch_stream(stream):
                both[1].copy_(both[0])

        copies = {
            DOWN: (lambda: card.copy_to_host(pinned, 0, source.address, host_bytes, stream), host_bytes, 1),
            UP: (lambda: card.copy_to_card(source.address, pinned, 0, host_bytes, stream), host_bytes, 1),
            DEVICE: (within, size.copy_bytes, 2),
        }
        for name, (copy, num_bytes, passes) in copies.items():
            if work.out_of_time(SECONDS_A_COPY):
                return
            timing = time_in_turns(card, stream, {name: copy}, 1, SECONDS_A_COPY)[name]
            work.add(
                {
                    "copy": name,
                    "bytes_moved": num_bytes * passes,
                    "gb_per_s": num_bytes * passes / timing.median_s / 1e9,
                    "spread": timing.spread,
                    "rounds": timing.rounds,
                }
            )
        stream.synchronize()
        with card.torch_stream(stream):
            same = torch.equal(*both)
        for row in work.part.rows:
            row["correct"] = same
        _measure_gathers(work, cards, size, source, stream)


def _measure_gathers(work: Work, cards: Cards, size: BenchSize, table: Memory, stream: Stream) -> None:
    """Measure how fast rows of several strides are read at random, as many at a time as the largest batch looks up."""
    reads = max(size.batches) * AIM_HOTNESS
    for rows in dict.fromkeys(one for dim in size.dims for one in GatheredRows.around(dim)):
        if work.out_of_time(SECONDS_A_GATHER):
            return
        ceiling = Ceiling(cards, stream, table, table.size_bytes // rows.stride, rows, reads, MIN_SETS, AIM_HOTNESS)
        with ceiling:
            timings = time_graphs(cards.cards[0], stream, ceiling.work(), MIN_SETS, SECONDS_A_GATHER)
        best = ceiling.best(timings)
        seconds = timings[best].median_s
        tail = " with tail" if rows.tail_offset else ""
        work.add(
            {
                "copy": f"gather, stride {rows.stride}, {rows.chunks * 16} bytes{tail}",
                "stride": rows.stride,
                "bytes_of_a_row": rows.read_bytes,
                "bytes_moved": rows.sector_bytes * reads,
                "gb_per_s": rows.sector_bytes * reads / seconds / 1e9,
                "rows_per_s": reads / seconds,
                "kernel": best,
                "spread": timings[best].spread,
                "rounds": timings[best].rounds,
                "correct": True,
            }
        )


class Ceiling(OwnedMemory):
    """Two ways to read as many rows at random as a launch looks up: one of them is the ceiling."""

    def __init__(
        self,
        cards: Cards,
        stream: Stream,
        table: Memory,
        num_rows: int,
        rows: GatheredRows,
        reads: int,
        num_sets: int,
        hotness: int,
    ) -> None:
        super().__init__(stream)
        self._gathers: dict[str, RandomGather] = {}
        for in_flight, a_group in ((4, hotness), (8, max(8, hotness))):
            gather = RandomGather(
                cards, cards.cards[0], stream, table, num_rows, rows, reads, num_sets, a_group, in_flight
            )
            self._gathers[f"{GATHER_KERNELS[in_flight]}, {a_group} a group"] = self.enter_context(gather)
            gather.check(num_sets - 1)

    def work(self) -> dict[str, Callable[[], None]]:
        """Name what is to be timed."""
        return {name: gather.launch_all for name, gather in self._gathers.items()}

    def best(self, timings: Mapping[str, Timing]) -> str:
        """Name the faster one."""
        return min(self._gathers, key=lambda name: timings[name].median_s)


def copy_gb_per_s(work: Work, name: str = DEVICE) -> float | None:
    """Look up what the part `copy` measured."""
    return next((float(row["gb_per_s"]) for row in work.rows_of("copy") if row["copy"] == name), None)


def system_with(copy_gb_per_s: float | None, bus_gb_per_s: float | None) -> CardSystem:
    """Describe one card with the measured bandwidths; what was not measured is an H100's, from its data sheet."""
    base = SYSTEMS["h100"]
    host = base.host if bus_gb_per_s is None else base.host.model_copy(update={"gb_per_s": bus_gb_per_s})
    hbm = base.hbm_gb_per_s if copy_gb_per_s is None else copy_gb_per_s
    return base.model_copy(update={"name": "measured", "cards": 1, "host": host, "hbm_gb_per_s": hbm})


def predicted_us(
    system: CardSystem,
    dim: int,
    hotness: int,
    batch: int,
    share_on_card: float = 1.0,
    out_dtype: OutDtype = "fp32",
    places: bool = True,
) -> float:
    """Predict one launch with uniform ids on one card: the longest of card memory, bus and latency."""
    load = BagLoad(float(hotness * batch), float(batch), float(hotness))
    time = batch_time(Traffic.of(_plan(dim, share_on_card, places), [load], system, OUT_BYTES[out_dtype]), system)
    return max(time.hbm_us, time.host_us, time.latency_us)


@lru_cache(maxsize=64)
def _plan(dim: int, share_on_card: float, places: bool) -> CardPlan:
    layout = one_table_layout(dim, PLAN_ROWS)
    stride = RowFormat.of("int8", dim).stride
    on_card = round(PLAN_ROWS * share_on_card)
    budget = CardBudget((on_card * stride + PLAN_ROWS * PLACE_BYTES,), (PLAN_ROWS - on_card) * stride)
    partition = Partition(1, (np.zeros(RowBuckets.of(layout.tables[0]).count, np.int16),))
    plan = CardPlan.make(layout, partition, budget, Hotness())
    # Unless it is on one card, what is measured finds each row by its place, as a table on several cards is found.
    return replace(plan, places=(TablePlaces(None, PLAN_ROWS, 0) if places else TablePlaces(0, 0, 0),))


KERNEL_NOTES = (
    "ns_per_row: time of a launch by rows looked up; launches follow each other in a graph, so the gap between two "
    "kernels is in it. launches_a_round are between two events: 32 or more, unless they take longer than 20 ms.",
    "Bags are written as the product writes them (columns product): 26 features side by side, each of a 26th of the "
    "bags, then 13 dense inputs and zeros, in out_dtype; with columns dense, one bag behind the other.",
    "places false: all rows on one card, whose places say nothing and are not there, as the product has such a table; "
    "all else looks each row's place up. ratio_to_one_card: to one logical card with places, so it is the cost of "
    "finding the owner, not of NVLink; ratio_to_no_places: to the table without.",
    "ceiling_us: a kernel that reads as many rows of the same table at random, in turns with the others, and computes "
    "which (loadtest/gpu/ceiling.cu); share_of_ceiling is its time by the kernel's, ceiling_share_of_copy its sectors "
    "by the copy bandwidth, and l2_fetch_bytes the switch that both ran under (0: as the device has it).",
    "gb_per_s_all: sectors of 32 bytes of the rows and of the places (a uint32 each, at random: one sector), plus ids, "
    "offsets and pooled bags as they are, each counted as often as it is looked up; gb_per_s_rows: rows' sectors only; "
    "gb_per_s_stored: rows' bytes as a snapshot stores them. "
    "share_of_copy is gb_per_s_all by the copy bandwidth within the device (bytes read and written).",
    "Sectors are those asked for, not those that memory delivered: with Zipf ids caches answer a part, and the share "
    "of the copy bandwidth can exceed 1. distinct_share says how many rows of a launch are different ones.",
    "predicted_ns_per_row: the cost model (docs/nvlink.md) with the copy bandwidths measured here, and an H100's where "
    "they were not; it leaves caches and the gap between kernels out, and has no figure for Zipf ids.",
)


@dataclass(frozen=True, slots=True)
class KernelCell:
    """One configuration of the grid; `share_on_card` 1 means that nothing is in pinned memory."""

    ids: Ids
    hotness: int
    batch: int
    share_on_card: float = 1.0
    out_dtype: OutDtype = "bf16"
    columns: Columns = "product"

    @property
    def looked_up(self) -> int:
        """Count the rows of a launch."""
        return self.hotness * self.batch


def measure_kernel(work: Work, cards: Cards, size: BenchSize) -> None:
    """Measure all configurations of each dim, until the dim's part of the budget is spent.

    Each launch has ids of its own; those of one round read more than the device's cache holds. Launches of a round are
    captured in one graph, and rounds of the compared numbers of logical cards take turns. Before it is timed, each
    configuration's answer is compared with the reference.
    """
    work.note(*KERNEL_NOTES)
    work.part.facts["clock"] = clock_name(cards.cards[0])
    shapes = list(product(size.hotness, size.batches))
    cells = [KernelCell("uniform", *shape) for shape in shapes]
    cells += [KernelCell("uniform", AIM_HOTNESS, max(size.batches), columns="dense")]
    cells += [KernelCell("uniform", *shape, out_dtype="fp32") for shape in shapes]
    cells += [KernelCell("zipf", *shape) for shape in shapes]
    shared = [KernelCell("uniform", *shape, share) for share in size.shares_on_card for shape in shapes]
    for number, dim in enumerate(size.dims):
        reserve_s = work.part.budget_s * (len(size.dims) - 1 - number) / len(size.dims)
        work.say(f"making {size.table_bytes / 1e9:.1f} GB of int8 rows, dim {dim}")
        with RowsOnCard(cards, cards.cards[0], dim, size.table_bytes, size.pinned_bytes) as rows:
            work.part.facts[f"table_dim_{dim}"] = {
                "rows_on_card": rows.card_rows,
                "rows_in_pinned_memory": rows.host_rows,
                "int8_bytes_as_stored": rows.card_rows * rows.format.row_bytes,
                "stride_bytes": rows.stride,
            }
            grid = cells + shared if rows.host_rows else cells
            measure = partial(_measure_cell, work, rows, size)
            _measure_grid(work, rows, size, grid, rows.card_rows, size.max_sets, measure, reserve_s)
        gc.collect()


def _measure_grid(
    work: Work,
    rows: RowsOnCard,
    size: BenchSize,
    grid: Sequence[KernelCell],
    card_rows: int,
    max_sets: int,
    measure: Callable[[KernelCell, Memory, int], None],
    reserve_s: float = 0.0,
) -> None:
    """Measure each configuration with its ids and its number of input sets, until only `reserve_s` is left."""
    asked = {cell: asked_bytes(rows, cell.hotness, cell.batch, places=False)["rows"] for cell in grid}
    sets = {cell: min(max(MIN_SETS, -int(-size.cache_bytes // asked[cell])), max(max_sets, MIN_SETS)) for cell in grid}
    drawn: tuple[Ids, float] | None = None
    with OwnedMemory(rows.stream) as memory:
        values = memory.own(rows.card.allocate(4 * max(sets[cell] * cell.looked_up for cell in grid)))
        for cell in grid:
            if work.out_of_time(reserve_s + size.cell_s):
                work.note(f"dim {rows.embedding_dim} stopped before {cell}: its time was spent.")
                return
            if drawn != (cell.ids, cell.share_on_card):
                drawn = (cell.ids, cell.share_on_card)
                _draw(rows, values, cell, card_rows)
                work.say(f"dim {rows.embedding_dim}: {cell.ids} ids, {cell.share_on_card:.0%} of them on the card")
            measure(cell, values, sets[cell])


def _draw(rows: RowsOnCard, values: Memory, cell: KernelCell, card_rows: int) -> None:
    count = values.size_bytes // 4
    with rows.card.torch_stream(rows.stream):
        drawn = (
            draw(cell.ids, card_rows, count, rows.generator)
            if cell.share_on_card == 1
            else draw_split(card_rows, rows.host_rows, cell.share_on_card, count, rows.generator)
        )
        rows.card.tensor(values, 0, (count,), torch.int32).copy_(drawn)
    rows.stream.synchronize()


def _measure_cell(
    work: Work, rows: RowsOnCard, size: BenchSize, cell: KernelCell, values: Memory, num_sets: int
) -> None:
    """Measure one configuration: without places, with those of each number of logical cards, and its ceiling."""
    whole = cell.share_on_card == 1
    numbers_of_cards = (NO_PLACES, *size.logical_cards) if whole else size.logical_cards[:1]
    with ExitStack() as stack:
        bags = stack.enter_context(Bags(rows, values, cell.batch, cell.hotness, num_sets, cell.out_dtype, cell.columns))
        right: dict[int, float] = {}
        for num_cards in numbers_of_cards:
            try:
                right[num_cards] = bags.check(num_cards, num_sets - 1)
            except WrongPoolingError as error:
                work.add({**_head(rows, cell, num_cards), "correct": False, "error": str(error)})
        if not right:
            return
        pieces: dict[str, Callable[[], None]] = {str(one): partial(bags.launch_all, one) for one in right}
        ceiling = None
        if cell.ids == "uniform" and whole:
            ceiling = stack.enter_context(ceiling_of(rows, cell.looked_up, cell.hotness, num_sets))
            pieces |= ceiling.work()
        timings = time_graphs(rows.card, rows.stream, pieces, num_sets, size.cell_s * (1 + len(right)) / 2)
        distinct = share_of_distinct(bags.set_of(0))
    one, bare = timings.get(str(size.logical_cards[0])), timings.get(str(NO_PLACES))
    for num_cards, error_of in right.items():
        timing = timings[str(num_cards)]
        work.add(
            {
                **_head(rows, cell, num_cards),
                **_figures(work, rows, cell, timing, num_cards),
                **(
                    {} if ceiling is None else _beside_ceiling(work, rows, cell, timing, ceiling.best(timings), timings)
                ),
                "ratio_to_one_card": timing.median_s / one.median_s if one else None,
                "ratio_to_no_places": timing.median_s / bare.median_s if bare else None,
                "distinct_share": distinct,
                "launches_a_round": timing.launches,
                "largest_error": error_of,
                "correct": True,
            }
        )


def ceiling_of(rows: RowsOnCard, reads: int, hotness: int, num_sets: int) -> Ceiling:
    """Make what reads as many rows of the card's at random as a launch looks up."""
    gathered = GatheredRows.of(rows.format)
    return Ceiling(rows.cards, rows.stream, rows.memory, rows.card_rows, gathered, reads, num_sets, hotness)


def _head(rows: RowsOnCard, cell: KernelCell, num_cards: int) -> Row:
    return {
        "dim": rows.embedding_dim,
        "ids": cell.ids,
        "hotness": cell.hotness,
        "batch": cell.batch,
        "share_on_card": cell.share_on_card,
        "out_dtype": cell.out_dtype,
        "columns": cell.columns,
        "logical_cards": max(1, num_cards),
        "places": num_cards != NO_PLACES,
    }


def _figures(work: Work, rows: RowsOnCard, cell: KernelCell, timing: Timing, num_cards: int) -> Row:
    places = num_cards != NO_PLACES
    asked = asked_bytes(rows, cell.hotness, cell.batch, cell.out_dtype, places)
    copy, bus = copy_gb_per_s(work, DEVICE), copy_gb_per_s(work, UP)
    gb_per_s = asked["all"] / timing.median_s / 1e9
    predicted = None
    if cell.ids == "uniform":
        shape = (rows.embedding_dim, cell.hotness, cell.batch, cell.share_on_card, cell.out_dtype, places)
        predicted = predicted_us(system_with(copy, bus), *shape)
    return {
        "us_per_launch": timing.median_s * 1e6,
        "us_low": timing.low_s * 1e6,
        "us_high": timing.high_s * 1e6,
        "rounds": timing.rounds,
        "ns_per_row": timing.median_s * 1e9 / cell.looked_up,
        "predicted_ns_per_row": None if predicted is None else predicted * 1e3 / cell.looked_up,
        "gb_per_s_rows": asked["rows"] / timing.median_s / 1e9,
        "gb_per_s_stored": rows.format.row_bytes * cell.looked_up / timing.median_s / 1e9,
        "gb_per_s_all": gb_per_s,
        "gb_per_s_bus": asked["rows"] * (1 - cell.share_on_card) / timing.median_s / 1e9,
        "share_of_copy": None if copy is None else gb_per_s / copy,
    }


def _beside_ceiling(
    work: Work, rows: RowsOnCard, cell: KernelCell, timing: Timing, name: str, timings: Mapping[str, Timing]
) -> Row:
    """Compare a launch with the ceiling's, which reads the rows' sectors and nothing else."""
    ceiling_s, copy = timings[name].median_s, copy_gb_per_s(work, DEVICE)
    gb_per_s = asked_bytes(rows, cell.hotness, cell.batch)["rows"] / ceiling_s / 1e9
    return {
        "ceiling_us": ceiling_s * 1e6,
        "ceiling_kernel": name,
        "ceiling_gb_per_s": gb_per_s,
        "ceiling_rows_per_s": cell.looked_up / ceiling_s,
        "share_of_ceiling": ceiling_s / timing.median_s,
        "ceiling_share_of_copy": None if copy is None else gb_per_s / copy,
        "l2_fetch_bytes": rows.cards.switches.l2_fetch_bytes,
    }


COMPARED_NOTES = (
    "All sides pool the same ids from the same rows, in turns, each launch with ids of its own; shardrank reads them "
    "as int8, without places as it has such a table, and writes the dtype of the other's output. All run as graphs.",
    "fbgemm_tbe_int8: torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function, with fp16 scales and biases.",
    "times is the other's time by shardrank's. correct: shardrank's sums are the reference's; difference: from theirs.",
)


def _others(weight: torch.Tensor, cell: KernelCell) -> dict[str, fbgemm.Pool]:
    """Make what pools from the dequantised table, by name."""
    offsets = torch.arange(0, cell.looked_up + 1, cell.hotness, dtype=torch.int32, device=weight.device)
    module = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)

    def bag(values: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = module(values, offsets)
        return pooled

    def gather(values: torch.Tensor) -> torch.Tensor:
        return weight.index_select(0, values).view(cell.batch, cell.hotness, -1).sum(1)

    return {BAG: bag, GATHER: gather}


def measure_others(work: Work, cards: Cards, size: BenchSize) -> None:
    """Measure `nn.EmbeddingBag`, gather-then-sum, and FBGEMM where it is, beside the kernel, until the time is spent.

    Their tables hold the dequantised rows; where a card has no room for all of them, all sides look up the first ones.
    """
    card = cards.cards[0]
    work.part.facts["clock"] = clock_name(card)
    work.note(*COMPARED_NOTES)
    missing = fbgemm.load(size.fbgemm)
    if missing is not None:
        work.note(f"{TBE} was not measured: {missing}")
    batches = [batch for batch in size.batches if batch >= MIN_COMPARED_BATCH] or size.batches[-1:]
    grid = [KernelCell("uniform", *shape) for shape in product(size.hotness, batches)]
    max_sets = min(size.max_sets, MAX_COMPARED_SETS)
    for dim in size.dims:
        if work.out_of_time(size.cell_s):
            return
        work.say(f"comparing at dim {dim}")
        with RowsOnCard(cards, card, dim, size.table_bytes, 0) as rows:
            for dtype in ("fp16", "fp32"):
                with ExitStack() as stack:
                    weight = stack.enter_context(_table(rows, dtype, size.compared_bytes))
                    tbe = None if missing else stack.enter_context(fbgemm.Table(rows, weight.shape[0], dtype))
                    measure = partial(_measure_beside, work, rows, size, weight, tbe, dtype)
                    _measure_grid(work, rows, size, grid, weight.shape[0], max_sets, measure)
                gc.collect()
                if card.torch_device.type == "cuda":
                    torch.cuda.empty_cache()


@contextmanager
def _table(rows: RowsOnCard, dtype: OutDtype, most_bytes: int) -> Iterator[torch.Tensor]:
    """Lay the first rows, dequantised, in memory of the card."""
    row_bytes = rows.embedding_dim * TORCH_DTYPES[dtype].itemsize
    # The gathered rows of the largest batch need room beside the table.
    room = min(most_bytes, rows.card.free_bytes() // 2)
    count = min(rows.card_rows, max(ROW_MULTIPLE, room // row_bytes))
    with OwnedMemory(rows.stream) as memory:
        owned = memory.own(rows.card.allocate(count * row_bytes))
        weight = rows.card.tensor(owned, 0, (count, rows.embedding_dim), TORCH_DTYPES[dtype])
        with rows.card.torch_stream(rows.stream):
            for first in range(0, count, _PIECE_ROWS):
                piece = weight[first : first + _PIECE_ROWS]
                piece.copy_(rows.floats(first, piece.shape[0], TORCH_DTYPES[dtype]))
        rows.stream.synchronize()
        yield weight


def _measure_beside(
    work: Work,
    rows: RowsOnCard,
    size: BenchSize,
    weight: torch.Tensor,
    tbe: fbgemm.Table | None,
    dtype: OutDtype,
    cell: KernelCell,
    values: Memory,
    num_sets: int,
) -> None:
    card, stream = rows.card, rows.stream
    with Bags(rows, values, cell.batch, cell.hotness, num_sets, dtype) as bags, torch.inference_mode():
        sets = [bags.set_of(number) for number in range(num_sets)]
        error = bags.check(NO_PLACES, num_sets - 1)
        pieces: dict[str, Callable[[], None]] = {OURS: partial(bags.launch_all, NO_PLACES)}
        differences: dict[str, float] = {}
        # What they make beforehand is on the stream that uses it: no other one waits for torch's own.
        with card.torch_stream(stream):
            others = _others(weight, cell)
            if tbe is not None:
                others[TBE] = tbe.pooling(cell.batch, cell.hotness)
        for name, pool in others.items():
            try:
                with card.torch_stream(stream):
                    differences[name] = _difference(pool(sets[-1]), bags.out())
            except RuntimeError as failed:
                work.note(f"{name} can't be called at dim {rows.embedding_dim}, {dtype}: {str(failed)[:300]}")
                continue
            if differences[name] <= TOLERANCE["fp16" if name == TBE else dtype]:
                pieces[name] = partial(_pool_all, card, stream, pool, sets)
            else:
                work.note(f"{name} gave other sums at dim {rows.embedding_dim}, {dtype}, and was not timed there.")
        timings = time_graphs(card, stream, pieces, num_sets, size.cell_s * len(pieces) / 2)
    work.add(
        {
            "dim": rows.embedding_dim,
            "dtype": dtype,
            "hotness": cell.hotness,
            "batch": cell.batch,
            "rows_of_their_table": weight.shape[0],
            "ns_per_row": {name: timing.median_s * 1e9 / cell.looked_up for name, timing in timings.items()},
            "spread": {name: timing.spread for name, timing in timings.items()},
            "times": {name: timing.median_s / timings[OURS].median_s for name, timing in timings.items()},
            "largest_error": error,
            "difference": differences,
            "correct": True,
        }
    )


def _pool_all(card: Card, stream: Stream, pool: fbgemm.Pool, sets: Sequence[torch.Tensor]) -> None:
    with card.torch_stream(stream):
        for values in sets:
            pool(values)


def _difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    theirs, ours = theirs.to(torch.float64), ours.to(torch.float64)
    return float((ours - theirs).norm() / theirs.norm())
