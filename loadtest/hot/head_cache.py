"""The textbook's cache of the hottest rows, simulated: `python -m loadtest.hot.head_cache`.

A step looks up 65,536 bags of 40 ids in one table. An id is, with probability 0.85, from a head of 5,000 rows by a
power law of exponent 1.1, else any row of the table alike. A static cache holds the first k rows of the head: its hit
rate is hits / ids, and what it misses is moved, 512 bytes a row. Beside what is drawn stands the closed form,

    hit rate = 0.85 * H(k) / H(5000) + 0.15 * k / rows,    H(k) = sum of i ** -1.1 over i = 1 .. k

and what is quoted of the same cache, with the distance of the two in standard errors of so many ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import numpy as np

from loader.snapshot.tables import Frozen
from serving.cli.output import print_json, print_table
from shard_node.bags import Int64Array
from shard_node.planning.hotness import Float64Array
from shard_node.planning.network_cost import moved_bytes

BAGS, BAG_IDS, ROW_BYTES = 65_536, 40, 512
HEAD_ROWS, HEAD_SHARE, EXPONENT = 5000, 0.85, 1.1
TEXTBOOK_ROWS = 2_000_000_000
NETWORK_GB_PER_S = 100.0
QUOTED = {100: 0.5762, 1000: 0.7514, 5000: 0.85035}
"""Hit rates as the source's own code is said to give them, by rows of the cache. Nothing here is computed from them."""
PIECE_IDS = 1 << 18


class CacheHits(Frozen):
    """One size of the cache.

    Attributes:
        rows: that it holds.
        hits: of all ids of a step.
        hit_rate, closed_form: drawn, and expected.
        standard_error: of a hit rate that is drawn from so many ids.
        moved_bytes: of the misses that were drawn; `closed_form_bytes` of those that are expected.
        moved_ms: over the network.
        quoted: a hit rate from elsewhere; None for none.
    """

    rows: int
    hits: int
    hit_rate: float
    closed_form: float
    standard_error: float
    moved_bytes: float
    closed_form_bytes: float
    moved_ms: float
    quoted: float | None


def draw_ids(rng: np.random.Generator, count: int, num_rows: int) -> Int64Array:
    """Draw ids, int64 [count], each below num_rows; the head is rows 0 .. 4,999, the hottest first."""
    cumulated = np.cumsum(np.arange(1, HEAD_ROWS + 1) ** -EXPONENT)
    of_head = np.searchsorted(cumulated, rng.random(count) * cumulated[-1], side="right")
    return np.where(rng.random(count) < HEAD_SHARE, of_head, rng.integers(0, num_rows, count))


def closed_form(cached_rows: int, num_rows: int) -> float:
    """Return the expected hit rate of a cache of the first rows, at most 5,000 of them."""
    harmonic: Float64Array = np.cumsum(np.arange(1, HEAD_ROWS + 1) ** -EXPONENT)
    of_head = harmonic[cached_rows - 1] / harmonic[-1] if cached_rows else 0.0
    return float(HEAD_SHARE * of_head + (1 - HEAD_SHARE) * cached_rows / num_rows)


def simulated(seed: int, num_rows: int = TEXTBOOK_ROWS, cached: tuple[int, ...] = (0, *QUOTED)) -> Iterator[CacheHits]:
    """Look up one step, and count what caches of these sizes hit."""
    rng, total = np.random.default_rng(seed), BAGS * BAG_IDS
    hits = np.zeros(len(cached), np.int64)
    for first in range(0, total, PIECE_IDS):
        ids = draw_ids(rng, min(PIECE_IDS, total - first), num_rows)
        hits += [np.count_nonzero(ids < rows) for rows in cached]
    for rows, count in zip(cached, hits.tolist(), strict=True):
        expected = closed_form(rows, num_rows)
        moved = moved_bytes(total, ROW_BYTES, count / total)
        yield CacheHits(
            rows=rows,
            hits=count,
            hit_rate=count / total,
            closed_form=expected,
            standard_error=float(np.sqrt(expected * (1 - expected) / total)),
            moved_bytes=moved,
            closed_form_bytes=moved_bytes(total, ROW_BYTES, expected),
            moved_ms=moved / NETWORK_GB_PER_S / 1e6,
            quoted=QUOTED.get(rows),
        )


@click.command()
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the ids.")
@click.option(
    "--rows", type=click.IntRange(HEAD_ROWS, 2**40), default=TEXTBOOK_ROWS, show_default=True, help="Of the table."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def main(seed: int, rows: int, as_json: bool) -> None:
    """Simulate one step of the textbook's cache, and print hit rates and moved bytes."""
    found = list(simulated(seed, rows))
    if as_json:
        for one in found:
            print_json(one)
        return
    lines = [
        (
            f"{one.rows}", f"{one.hit_rate:.5f}", f"{one.closed_form:.5f}", f"{one.moved_bytes / 1e6:.1f}",
            f"{one.closed_form_bytes / 1e6:.1f}", f"{one.moved_ms:.2f}", *_beside(one),
        )
        for one in found
    ]  # fmt: skip
    heads = ("#cached rows", "#hit rate", "#closed form", "#moved, MB", "#closed form ", "#ms at 100 GB/s")
    quoted = ("#quoted", "#off by", "#standard errors")
    print_table(f"{BAGS} x {BAG_IDS} ids of {rows} rows, seed {seed}", (*heads, *quoted), lines)


def _beside(one: CacheHits) -> tuple[str, str, str]:
    if one.quoted is None:
        return "", "", ""
    off = one.quoted - one.closed_form
    return f"{one.quoted:.5f}", f"{off:+.5f}", f"{off / one.standard_error:+.1f}"


if __name__ == "__main__":
    main()
