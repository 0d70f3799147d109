"""Time the pooling kernel in alternation with the gather ceiling and with `nn.EmbeddingBag` on the same rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loadtest.gpu.rows import (
    GATHER_KERNELS,
    WITHOUT_PLACES,
    BenchSize,
    CardBags,
    MemoryStack,
    RandomGather,
    Results,
    Row,
    RowsOnCard,
    WrongAnswerError,
)
from shard_node.cuda.kernel_params import OUT_BYTES
from shard_node.planning.cost_model import INDEX_BYTES, SECTOR_BYTES, sector_bytes

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Card, Cards, Stream

GROUP, MAX_ROUNDS = 5, 200
MIN_LAUNCHES = 32
"""Of a graph: with so many in it, the gap between an event and a graph is negligible."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a launch: the median of the rounds, and the 10th and 90th percentile."""

    us: float
    low_us: float
    high_us: float


class HostEvent(NamedTuple):
    """A recorded `torch.cuda.Event` by the host's clock, for emulated cards, which do their work at once."""

    at_s: float

    def synchronize(self) -> None:
        """Return: all work is done."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds until another event."""
        return (end.at_s - self.at_s) * 1e3


def _mark(card: Card) -> Any:
    if card.torch_device.type != "cuda":
        return HostEvent(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def time_graphs(
    card: Card, stream: Stream, work: Mapping[str, Callable[[int], object]], num_sets: int, seconds: float
) -> dict[str, Timing]:
    """Capture the launches of each piece of work, one for each set, as a graph, and time replays in alternation.

    Rounds are put on the stream in groups, each after a replay that is not timed: the host is then ahead of the card,
    and no measured time contains a wait of the card for the host. At most MAX_ROUNDS, in `seconds`.
    """
    repeats = -(-MIN_LAUNCHES // num_sets)
    replays: dict[str, Callable[[], None]] = {}

    def put_all(put: Callable[[int], object]) -> None:
        for number in [*range(num_sets)] * repeats:
            put(number)

    for name, put in work.items():
        put(0)  # A capture demands that it has run once.
        stream.synchronize()
        replays[name] = partial(card.capture(stream, partial(put_all, put)).replay, stream)
        replays[name]()  # The first replay uploads the graph.
    stream.synchronize()
    times: dict[str, list[float]] = {name: [] for name in work}
    started_at = time.perf_counter()
    for _ in range(MAX_ROUNDS // GROUP):
        with card.torch_stream(stream):
            next(iter(replays.values()))()
            marks = []
            for name, replay in [*replays.items()] * GROUP:
                start = _mark(card)
                replay()
                marks.append((name, start, _mark(card)))
        for name, start, end in marks:
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / (num_sets * repeats))
        if time.perf_counter() - started_at >= seconds:
            break
    percentiles = {name: np.percentile(each, (50, 10, 90)).tolist() for name, each in times.items()}
    return {name: Timing(*each) for name, each in percentiles.items()}


MIN_SETS, MAX_SETS = 4, 4096
CACHES = 4
"""Sets of ids, each pooled by a launch, read so many times the bytes of the device's cache."""
PEER = "embedding_bag"
MIN_PEER_BATCH = 8192
PEER_TOLERANCE = 4e-3
"""As `rows.TOLERANCE`: EmbeddingBag's rows are float16."""
PIECE_ROWS = 1 << 21


def measure_pooling(results: Results, cards: Cards, size: BenchSize) -> None:
    """Time the kernel, undivided without places and on logical cards, and `nn.EmbeddingBag` from 8,192 bags on."""
    card = cards.cards[0]
    for dim in size.dims:
        with ExitStack() as stack, torch.inference_mode():
            rows = stack.enter_context(RowsOnCard(cards, dim, size.table_bytes))
            peer = _embedding_bag(rows)
            for hotness, batch in product(size.hotness, size.batches):
                large = batch >= min(MIN_PEER_BATCH, max(size.batches))
                _measure_cell(results, rows, size, hotness, batch, peer if large else None)
        gc.collect()
        if card.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def _embedding_bag(rows: RowsOnCard) -> torch.nn.EmbeddingBag:
    shape = (rows.count, rows.embedding_dim)
    weight = rows.card.tensor(rows.allocate(2 * rows.count * rows.embedding_dim), 0, shape, torch.float16)
    with rows.card.torch_stream(rows.stream):
        for first in range(0, rows.count, PIECE_ROWS):
            piece = weight[first : first + PIECE_ROWS]
            stored, scale_bias = rows.stored(first, piece.shape[0])
            piece.copy_(stored[:, : rows.embedding_dim].float().mul_(scale_bias[:, :1]).add_(scale_bias[:, 1:]))
    rows.stream.synchronize()
    return torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)


def _measure_cell(
    results: Results, rows: RowsOnCard, size: BenchSize, hotness: int, batch: int, peer: torch.nn.EmbeddingBag | None
) -> None:
    num_rows, row_bytes = hotness * batch, sector_bytes(rows.format)
    with MemoryStack(rows.card, rows.stream) as stack:
        device = rows.card.torch_device
        properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        cache_bytes = CACHES * properties.L2_cache_size if properties else 0
        num_sets = min(max(MIN_SETS, int(cache_bytes / (num_rows * row_bytes))), MAX_SETS)
        ids = stack.allocate(INDEX_BYTES * num_sets * num_rows)
        with rows.card.torch_stream(rows.stream):
            drawn = rows.card.tensor(ids, 0, (num_sets * num_rows,), torch.int32)
            drawn.random_(0, rows.count, generator=rows.generator)
            offsets = torch.arange(0, num_rows + 1, hotness, dtype=torch.int32, device=device)
        bags = stack.enter_context(CardBags(rows, ids, batch, hotness))
        errors = {number: bags.check(number, num_sets - 1) for number in (WITHOUT_PLACES, *size.logical_cards)}
        work: dict[str, Callable[[int], object]] = {f"{number}": partial(bags.launch, number) for number in errors}
        for in_flight, kernel in GATHER_KERNELS.items():
            gather = RandomGather(rows, num_rows, max(in_flight, hotness), in_flight)
            stack.enter_context(gather).check(num_sets - 1)
            work[kernel] = gather.launch
        sets = [bags.ids(number).view(-1) for number in range(num_sets)]
        if peer is not None:

            def pool(number: int) -> Any:
                with rows.card.torch_stream(rows.stream):
                    return peer(sets[number], offsets)

            with rows.card.torch_stream(rows.stream):
                error = bags.error(pool(num_sets - 1), num_sets - 1)
            if not error <= PEER_TOLERANCE:
                raise WrongAnswerError(f"{PEER}, dim {rows.embedding_dim}: a bag is {error:.2e} off")
            work[PEER] = pool
        timings = time_graphs(rows.card, rows.stream, work, num_sets, size.cell_s)
    ceiling_us = min(timings[kernel].us for kernel in GATHER_KERNELS.values())
    for number, error in errors.items():
        timing, places = timings[str(number)], number != WITHOUT_PLACES
        # Rows and places are at random, so they count in sectors; ids, offsets and sums are contiguous.
        read = num_rows * (row_bytes + SECTOR_BYTES * places + INDEX_BYTES) + INDEX_BYTES * (batch + 1)
        row: Row = {
            "dim": rows.embedding_dim,
            "hotness": hotness,
            "batch": batch,
            "logical_cards": max(1, number),
            "places": places,
            **asdict(timing),
            "ns_per_row": timing.us * 1e3 / num_rows,
            "gb_per_s": (read + batch * rows.embedding_dim * OUT_BYTES["bf16"]) / timing.us / 1e3,
            "error": error,
        }
        if number > 1:
            row["one_card_ratio"] = timing.us / timings["1"].us
        if not places:
            row |= {
                "ceiling_us": ceiling_us,
                "ceiling_gb_per_s": row_bytes * num_rows / ceiling_us / 1e3,
                "ceiling_fraction": ceiling_us / timing.us,
            }
            if peer is not None:
                row |= {f"{PEER}_us": timings[PEER].us, f"{PEER}_ratio": timings[PEER].us / timing.us}
        results.add("pooling", row)
