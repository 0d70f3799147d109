"""How much the GPU bench measures: all of it, a quick look, or (in tests) next to nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchSize:
    """What the parts measure.

    Attributes:
        table_bytes: of int8 rows as a snapshot stores them.
        pinned_bytes: of the host, for rows that the card reads in place.
        copy_bytes: of one copy within the card.
        dims, hotness, batches: of the grid.
        logical_cards: that one device's table is split over; the first is what the others are compared with.
        shares_on_card: of the lookups; the rest finds its rows in pinned memory.
        cell_s: seconds for one configuration of one grid.
        cache_bytes: input sets of a configuration read at least this much together.
        compared_bytes: of the torch table in the comparison, at most.
        max_sets: of input sets.
        request_table_rows: rows that a table of the ranking models is cut to.
        request_hotness: ids that a bag of theirs is cut to.
        layer_divisor: by which their hidden layers are cut.
        candidates: of a request.
        max_batch_candidates: that requests in flight are joined up to.
        requests: timed in each configuration of the ranking part.
        throughput_s: for which requests are kept in flight there.
    """

    table_bytes: int = 20_000_000_000
    pinned_bytes: int = 4_000_000_000
    copy_bytes: int = 4_000_000_000
    dims: tuple[int, ...] = (128, 64)
    hotness: tuple[int, ...] = (1, 20, 100)
    batches: tuple[int, ...] = (256, 1024, 8192, 65536)
    logical_cards: tuple[int, ...] = (1, 2, 4, 8)
    shares_on_card: tuple[float, ...] = (0.0, 0.5, 0.9, 0.99)
    cell_s: float = 0.2
    cache_bytes: int = 200_000_000
    compared_bytes: int = 20_000_000_000
    max_sets: int = 4096
    request_table_rows: int = 500_000
    request_hotness: int = 100
    layer_divisor: int = 1
    candidates: tuple[int, ...] = (100, 500)
    max_batch_candidates: int = 2048
    requests: int = 300
    throughput_s: float = 1.0


FULL = BenchSize()
QUICK = BenchSize(
    table_bytes=2_000_000_000,
    pinned_bytes=500_000_000,
    copy_bytes=1_000_000_000,
    hotness=(1, 20),
    batches=(8192, 65536),
    logical_cards=(1, 8),
    shares_on_card=(0.5,),
    cell_s=0.1,
    compared_bytes=4_000_000_000,
    request_table_rows=100_000,
    requests=100,
    throughput_s=0.5,
)
