"""Part 2 of the GPU bench: the pooling kernel alone, on a table far larger than any cache, at every size that matters.

Each launch has ids of its own, drawn at random; those of one round read more than the device's cache holds. Launches of
a round are captured in one graph, and rounds of the compared numbers of logical cards take turns. Before it is timed,
each configuration's answer is compared with the reference.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from loadtest.gpu_copy import DEVICE, UP, copy_gb_per_s
from loadtest.gpu_ids import Ids, draw, draw_split, share_of_distinct
from loadtest.gpu_pool import Bags, WrongAnswerError, asked_bytes
from loadtest.gpu_predict import predicted_us, system_with
from loadtest.gpu_report import Row, Work
from loadtest.gpu_rows import RowsOnCard
from loadtest.gpu_size import BenchSize
from loadtest.gpu_timing import Timing, captured, clock_name, time_in_turns
from shard_node.cuda.cards import Cards, Memory

MIN_SETS = 4
NOTES = (
    "ns_per_row: time of a launch by rows looked up; launches follow each other in a graph, so the gap between two "
    "kernels is in it.",
    "gb_per_s_all: sectors of 32 bytes of the rows and of the places (a uint32 each, at random: one sector), plus ids, "
    "offsets and pooled bags as they are, each counted as often as it is looked up; gb_per_s_rows: rows' sectors only. "
    "share_of_copy is gb_per_s_all by the copy bandwidth within the device (bytes read and written).",
    "Sectors are those asked for, not those that memory delivered: with Zipf ids caches answer a part, and the share "
    "of the copy bandwidth can exceed 1. distinct_share says how many rows of a launch are different ones.",
    "predicted_ns_per_row: the cost model (docs/nvlink.md) with the copy bandwidths measured here, and an H100's where "
    "they were not; it leaves caches and the gap between kernels out, and has no figure for Zipf ids.",
    "Logical cards split one device's memory: ratio_to_one_card is the cost of finding the owner, not of NVLink.",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration of the grid; `share_on_card` 1 means that nothing is in pinned memory."""

    ids: Ids
    hotness: int
    batch: int
    share_on_card: float = 1.0


def measure(work: Work, cards: Cards, size: BenchSize) -> None:
    """All configurations of each dim, until the dim's part of the budget is spent."""
    for note in NOTES:
        work.note(note)
    work.part.facts["clock"] = clock_name(cards.cards[0])
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
            _measure_dim(work, rows, size, reserve_s)
        gc.collect()


def _measure_dim(work: Work, rows: RowsOnCard, size: BenchSize, reserve_s: float) -> None:
    values = rows.card.allocate(4 * max(_sets(rows, size, cell) * cell.hotness * cell.batch for cell in _cells(size)))
    try:
        drawn: tuple[Ids, float] | None = None
        for cell in _cells(size):
            if work.out_of_time(reserve_s + size.cell_s):
                work.note(f"dim {rows.embedding_dim} stopped before {cell}: its time was spent.")
                return
            if cell.share_on_card < 1 and not rows.host_rows:
                continue
            if drawn != (cell.ids, cell.share_on_card):
                drawn = (cell.ids, cell.share_on_card)
                _draw(rows, values, cell)
                work.say(f"dim {rows.embedding_dim}: {cell.ids} ids, {cell.share_on_card:.0%} of them on the card")
            _measure_cell(work, rows, size, cell, values)
    finally:
        rows.stream.synchronize()
        values.free()


def _cells(size: BenchSize) -> list[Cell]:
    shapes = list(product(size.hotness, size.batches))
    grid = [Cell(ids, *shape) for ids in ("uniform", "zipf") for shape in shapes]
    return grid + [Cell("uniform", *shape, share) for share in size.shares_on_card for shape in shapes]


def _sets(rows: RowsOnCard, size: BenchSize, cell: Cell) -> int:
    asked = asked_bytes(rows, cell.hotness, cell.batch)["all"]
    return min(max(MIN_SETS, -int(-size.cache_bytes // asked)), max(size.max_sets, MIN_SETS))


def _draw(rows: RowsOnCard, values: Memory, cell: Cell) -> None:
    count = values.size_bytes // 4
    with rows.card.torch_stream(rows.stream):
        drawn = (
            draw(cell.ids, rows.card_rows, count, rows.generator)
            if cell.share_on_card == 1
            else draw_split(rows.card_rows, rows.host_rows, cell.share_on_card, count, rows.generator)
        )
        rows.card.tensor(values, 0, (count,), torch.int32).copy_(drawn)
    rows.stream.synchronize()


def _measure_cell(work: Work, rows: RowsOnCard, size: BenchSize, cell: Cell, values: Memory) -> None:
    numbers_of_cards = size.logical_cards if cell.share_on_card == 1 else size.logical_cards[:1]
    with Bags(rows, values, cell.batch, cell.hotness, _sets(rows, size, cell)) as bags:
        right: dict[int, float] = {}
        for num_cards in numbers_of_cards:
            try:
                right[num_cards] = bags.check(num_cards, bags.num_sets - 1)
            except WrongAnswerError as error:
                work.add({**_head(rows, cell), "logical_cards": num_cards, "correct": False, "error": str(error)})
        if not right:
            return
        graphs = {
            num_cards: captured(rows.card, rows.stream, partial(bags.launch_all, num_cards)) for num_cards in right
        }
        replays = {str(n): partial(graph.replay, rows.stream) for n, graph in graphs.items()}
        timings = time_in_turns(rows.card, rows.stream, replays, bags.num_sets, size.cell_s * (1 + len(replays)) / 2)
        distinct = share_of_distinct(bags.set_of(0))
    for num_cards, largest in right.items():
        timing = timings[str(num_cards)]
        one = timings.get(str(size.logical_cards[0]))
        work.add(
            {
                **_head(rows, cell),
                "logical_cards": num_cards,
                **_figures(work, rows, cell, timing),
                "ratio_to_one_card": timing.median_s / one.median_s if one else None,
                "distinct_share": distinct,
                "launches_a_round": bags.num_sets,
                "largest_error": largest,
                "correct": True,
            }
        )


def _head(rows: RowsOnCard, cell: Cell) -> Row:
    return {
        "dim": rows.embedding_dim,
        "ids": cell.ids,
        "hotness": cell.hotness,
        "batch": cell.batch,
        "share_on_card": cell.share_on_card,
    }


def _figures(work: Work, rows: RowsOnCard, cell: Cell, timing: Timing) -> Row:
    looked_up = cell.hotness * cell.batch
    asked = asked_bytes(rows, cell.hotness, cell.batch)
    copy, bus = copy_gb_per_s(work, DEVICE), copy_gb_per_s(work, UP)
    gb_per_s = asked["all"] / timing.median_s / 1e9
    predicted = None
    if cell.ids == "uniform":
        system = system_with(copy, bus)
        predicted = predicted_us(system, rows.embedding_dim, cell.hotness, cell.batch, cell.share_on_card)
    return {
        "us_per_launch": timing.median_s * 1e6,
        "us_low": timing.low_s * 1e6,
        "us_high": timing.high_s * 1e6,
        "rounds": timing.rounds,
        "ns_per_row": timing.median_s * 1e9 / looked_up,
        "predicted_ns_per_row": None if predicted is None else predicted * 1e3 / looked_up,
        "gb_per_s_rows": asked["rows"] / timing.median_s / 1e9,
        "gb_per_s_all": gb_per_s,
        "gb_per_s_bus": asked["rows"] * (1 - cell.share_on_card) / timing.median_s / 1e9,
        "share_of_copy": None if copy is None else gb_per_s / copy,
    }
