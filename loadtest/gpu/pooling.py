"""Time the pooling kernel in alternation with the gather ceiling and with peers on the same rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import product

import torch

from loadtest.gpu import fbgemm
from loadtest.gpu.bench import BenchSize, Results, Row
from loadtest.gpu.ceiling import GATHER_KERNELS, RandomGather
from loadtest.gpu.rows import WITHOUT_PLACES, Bags, MemoryStack, RowsOnCard, WrongAnswerError
from loadtest.gpu.timing import time_graphs
from shard_node.cuda.cards import Cards
from shard_node.cuda.kernel_params import OUT_BYTES
from shard_node.planning.cost_model import INDEX_BYTES, SECTOR_BYTES, sector_bytes

MIN_SETS, MAX_SETS = 4, 4096
CACHES = 4
"""Sets of ids, each pooled by a launch, read so many times the bytes of the device's cache."""
MIN_PEER_BATCH = 8192
PEER_TOLERANCE = 4e-3
"""As `rows.TOLERANCE`: FBGEMM's scales and biases, and EmbeddingBag's rows, are float16."""
PIECE_ROWS = 1 << 21
Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From ids, int32 [batch * hotness], and offsets, int32 [batch + 1], to sums, [batch, dim]."""


def measure_pooling(results: Results, cards: Cards, size: BenchSize) -> None:
    """Time each dim, hotness and batch.

    The kernel: undivided without places, and with those of logical cards. `nn.EmbeddingBag` in fp16, and FBGEMM's int8
    lookup where its libraries are, from 8,192 bags on.
    """
    card = cards.cards[0]
    for dim in size.dims:
        with ExitStack() as stack, torch.inference_mode():
            rows = stack.enter_context(RowsOnCard(cards, dim, size.table_bytes))
            peers: dict[str, Pool] = {"embedding_bag": _embedding_bag(rows)}
            try:
                peers["fbgemm"] = stack.enter_context(fbgemm.Table(rows, size.fbgemm)).pool
            except fbgemm.LibraryError as error:
                results.add("pooling", {"dim": dim, "fbgemm": str(error)})
            for hotness, batch in product(size.hotness, size.batches):
                large = batch >= min(MIN_PEER_BATCH, max(size.batches))
                _measure_cell(results, rows, size, hotness, batch, peers if large else {})
        gc.collect()
        if card.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def _embedding_bag(rows: RowsOnCard) -> Pool:
    """Return `nn.EmbeddingBag` over the dequantised rows in fp16."""
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
    results: Results, rows: RowsOnCard, size: BenchSize, hotness: int, batch: int, peers: dict[str, Pool]
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
        bags = stack.enter_context(Bags(rows, ids, batch, hotness, num_sets))
        errors = {number: bags.check(number, num_sets - 1) for number in (WITHOUT_PLACES, *size.logical_cards)}
        work: dict[str, Callable[[], None]] = {str(number): partial(bags.launch_all, number) for number in errors}
        for in_flight, kernel in GATHER_KERNELS.items():
            gather = RandomGather(rows, num_rows, num_sets, max(in_flight, hotness), in_flight)
            stack.enter_context(gather).check(num_sets - 1)
            work[kernel] = gather.launch_all
        sets = [bags.ids(number).view(-1) for number in range(num_sets)]
        for peer, pool in peers.items():
            with rows.card.torch_stream(rows.stream):
                error = bags.error(pool(sets[-1], offsets), num_sets - 1)
            if not error <= PEER_TOLERANCE:
                raise WrongAnswerError(f"{peer}, dim {rows.embedding_dim}: a bag is {error:.2e} off")
            work[peer] = partial(_pool_all, rows, pool, sets, offsets)
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
                **{f"{peer}_us": timings[peer].us for peer in peers},
                **{f"{peer}_ratio": timings[peer].us / timing.us for peer in peers},
            }
        results.add("pooling", row)


def _pool_all(rows: RowsOnCard, pool: Pool, sets: list[torch.Tensor], offsets: torch.Tensor) -> None:
    with rows.card.torch_stream(rows.stream):
        for ids in sets:
            pool(ids, offsets)
