"""Part 3 of the GPU bench: the kernel beside what one would use instead, on the same rows and ids, taking turns.

torch's `nn.EmbeddingBag` in fp16 and fp32, and gather-then-sum in torch and in CuPy. Their tables hold the dequantised
rows; where a card has no room for all of them, all sides look up the first ones only.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from loadtest.gpu_ids import draw
from loadtest.gpu_pool import Bags, asked_bytes
from loadtest.gpu_report import Work
from loadtest.gpu_rows import ROW_MULTIPLE, RowsOnCard
from loadtest.gpu_size import BenchSize
from loadtest.gpu_timing import captured, clock_name, time_in_turns
from shard_node.cuda.cards import Card, Cards, Memory, Stream
from shard_node.cuda.kernel_params import OutDtype

MIN_BATCH = 8192
MIN_SETS, MAX_SETS = 4, 128
OURS, BAG, GATHER, CUPY = "shardrank_int8", "embedding_bag", "torch_gather_then_sum", "cupy_gather_then_sum"
TOLERANCE = {"fp16": 4e-3, "fp32": 1e-5}
_TORCH: dict[OutDtype, torch.dtype] = {"fp16": torch.float16, "fp32": torch.float32}
_PIECE_ROWS = 1 << 21
NOTES = (
    "All sides pool the same ids from the same rows, in turns, each launch with ids of its own; shardrank reads them "
    "as int8 and writes the dtype of the other's output. torch and shardrank run as graphs, CuPy without.",
    "times is the other's time by shardrank's. correct: shardrank's sums are the reference's; difference: from theirs.",
)
Pool = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Others:
    """The dequantised table, and what pools from it."""

    rows: RowsOnCard
    weight: torch.Tensor
    dtype: OutDtype

    def pools(self, batch: int, hotness: int) -> dict[str, Pool]:
        """By name; each takes the values of a batch, int32 [batch * hotness], and returns [batch, dim]."""
        offsets = torch.arange(0, (batch + 1) * hotness, hotness, dtype=torch.int32, device=self.rows.card.torch_device)
        module = torch.nn.EmbeddingBag.from_pretrained(self.weight, mode="sum", include_last_offset=True)
        shape = (batch, hotness, self.rows.embedding_dim)

        def bag(values: torch.Tensor) -> torch.Tensor:
            pooled: torch.Tensor = module(values, offsets)
            return pooled

        def gather(values: torch.Tensor) -> torch.Tensor:
            return self.weight.index_select(0, values).view(shape).sum(1)

        pools: dict[str, Pool] = {BAG: bag, GATHER: gather}
        if (cupy := _cupy_gather()) is not None:
            pools[CUPY] = lambda values: cupy(self.weight, values, hotness)
        return pools


def _cupy_gather() -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None:
    try:
        module = importlib.import_module("shard_node.cuda.cupy_cards")
    except ImportError:
        return None
    gather: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = getattr(module, "gather_then_sum", None)
    return gather


def measure(work: Work, cards: Cards, size: BenchSize) -> None:
    """Every dim and dtype, until the time is spent."""
    card = cards.cards[0]
    work.part.facts["clock"] = clock_name(card)
    for note in NOTES:
        work.note(note)
    if card.torch_device.type != "cuda" or _cupy_gather() is None:
        work.note(f"{CUPY}: not measured, there is no CuPy with a device here.")
    for dim in size.dims:
        if work.out_of_time(size.cell_s):
            return
        work.say(f"comparing at dim {dim}")
        with RowsOnCard(cards, card, dim, size.table_bytes, 0) as rows:
            for dtype in ("fp16", "fp32"):
                with _table(rows, dtype, size.compared_bytes) as others:
                    _measure_table(work, others, size)
                gc.collect()
                if card.torch_device.type == "cuda":
                    torch.cuda.empty_cache()


@contextmanager
def _table(rows: RowsOnCard, dtype: OutDtype, most_bytes: int) -> Iterator[Others]:
    """The first rows, dequantised, in memory of the card."""
    row_bytes = rows.embedding_dim * _TORCH[dtype].itemsize
    # The gathered rows of the largest batch need room beside the table.
    room = min(most_bytes, rows.card.free_bytes() // 2)
    count = min(rows.card_rows, max(ROW_MULTIPLE, room // row_bytes))
    memory = rows.card.allocate(count * row_bytes)
    try:
        with rows.card.torch_stream(rows.stream):
            for first in range(0, count, _PIECE_ROWS):
                piece = min(_PIECE_ROWS, count - first)
                shape = (piece, rows.embedding_dim)
                part = rows.card.tensor(memory, first * row_bytes, shape, _TORCH[dtype])
                part.copy_(rows.floats(first, piece, _TORCH[dtype]))
        rows.stream.synchronize()
        yield Others(rows, rows.card.tensor(memory, 0, (count, rows.embedding_dim), _TORCH[dtype]), dtype)
    finally:
        rows.stream.synchronize()
        memory.free()


def _measure_table(work: Work, others: Others, size: BenchSize) -> None:
    rows = others.rows
    shapes = list(product(size.hotness, [batch for batch in size.batches if batch >= MIN_BATCH] or size.batches[-1:]))
    values = rows.card.allocate(4 * max(_sets(others, size, *shape) * shape[0] * shape[1] for shape in shapes))
    try:
        with rows.card.torch_stream(rows.stream):
            drawn = draw("uniform", others.weight.shape[0], values.size_bytes // 4, rows.generator)
            rows.card.tensor(values, 0, (drawn.numel(),), torch.int32).copy_(drawn)
        for hotness, batch in shapes:
            if work.out_of_time(size.cell_s):
                work.note(f"stopped before dim {rows.embedding_dim}, {others.dtype}, hotness {hotness}, batch {batch}.")
                return
            _measure_shape(work, others, size, values, hotness, batch)
    finally:
        rows.stream.synchronize()
        values.free()


def _sets(others: Others, size: BenchSize, hotness: int, batch: int) -> int:
    asked = asked_bytes(others.rows, hotness, batch)["all"]
    return min(max(MIN_SETS, -int(-size.cache_bytes // asked)), MAX_SETS, max(size.max_sets, MIN_SETS))


def _measure_shape(work: Work, others: Others, size: BenchSize, values: Memory, hotness: int, batch: int) -> None:
    rows, card, stream = others.rows, others.rows.card, others.rows.stream
    num_sets = _sets(others, size, hotness, batch)
    with Bags(rows, values, batch, hotness, num_sets, others.dtype) as bags, torch.inference_mode():
        sets = [bags.set_of(number) for number in range(num_sets)]
        error = bags.check(1, num_sets - 1)
        ours = partial(captured(card, stream, partial(bags.launch_all, 1)).replay, stream)
        replays: dict[str, Callable[[], None]] = {OURS: ours}
        differences: dict[str, float] = {}
        for name, pool in others.pools(batch, hotness).items():
            with card.torch_stream(stream):
                differences[name] = _difference(pool(sets[-1]), bags.out())
            if not differences[name] <= TOLERANCE[others.dtype]:
                work.note(
                    f"{name} gave other sums at dim {rows.embedding_dim}, {others.dtype}, and was not timed there."
                )
                continue
            all_sets = partial(_pool_all, card, stream, pool, sets)
            replays[name] = all_sets if name == CUPY else partial(captured(card, stream, all_sets).replay, stream)
        timings = time_in_turns(card, stream, replays, num_sets, size.cell_s * len(replays) / 2)
    looked_up = hotness * batch
    work.add(
        {
            "dim": rows.embedding_dim,
            "dtype": others.dtype,
            "hotness": hotness,
            "batch": batch,
            "rows_of_their_table": others.weight.shape[0],
            "ns_per_row": {name: timing.median_s * 1e9 / looked_up for name, timing in timings.items()},
            "spread": {name: timing.spread for name, timing in timings.items()},
            "times": {name: timing.median_s / timings[OURS].median_s for name, timing in timings.items()},
            "largest_error": error,
            "difference": differences,
            "correct": True,
        }
    )


def _pool_all(card: Card, stream: Stream, pool: Pool, sets: Sequence[torch.Tensor]) -> None:
    with card.torch_stream(stream):
        for values in sets:
            pool(values)


def _difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    theirs, ours = theirs.to(torch.float64), ours.to(torch.float64)
    return float((ours - theirs).norm() / theirs.norm())
