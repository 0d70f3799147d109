"""The tables of docs/nvlink.md, from the cost model: `python -m loadtest.nvlink_page`.

Prints them; with `--write PAGE` puts each between its two marks in the page, `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import click
import numpy as np

from loader.snapshot.manifest import RowDtype
from serving.cli.capacity import DLRM_V2_HOTNESS, CapacityOptions, CapacityPlan, LookupProfile, catalog_model
from shard_node.cuda.partial_pooling import BagShape, gathered_bytes, partial_pooled_bytes, partial_pooling_from
from shard_node.cuda.row_format import RowFormat
from shard_node.planning.card_systems import SYSTEMS
from shard_node.planning.cost_model import line_bytes, mean_pieces, moved_bytes, read_bytes, sector_bytes, table_sizes
from shard_node.planning.hotness import power_law_sums

DTYPES: tuple[RowDtype, ...] = ("int4", "int8", "fp16", "fp32")
TEXTBOOK_ROWS, TEXTBOOK_DIM, TEXTBOOK_HOSTS = 2_000_000_000, 128, 16
TEXTBOOK_LOOKUPS = 65_536 * 40
TEXTBOOK_HIT_RATES = (0.0, 0.57621, 0.75137, 0.85032)
ROWS_OF_CURVE = 40_000_000
EXPONENTS = (0.0, 0.8, 0.95, 1.05, 1.2)
CANDIDATES = 500
_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@lru_cache(maxsize=64)
def capacity(
    name: str,
    system: str = "h100",
    *,
    dtype: RowDtype = "int8",
    zipf: float | None = None,
    hot_gb: float | None = None,
    cards: int | None = None,
    pinned_memory_gb: float = 16.0,
) -> CapacityPlan:
    """What `shardrank plan` reckons for a published model."""
    found = catalog_model(name, dtype)
    node = SYSTEMS[system]
    options = CapacityOptions(
        system=node,
        cards=cards or node.cards,
        card_memory_gb=node.card_memory_gb,
        pinned_memory_gb=pinned_memory_gb,
        hot_gb=hot_gb,
        candidates=CANDIDATES,
    )
    profile = LookupProfile(hotness=found.hotness, zipf=found.zipf if zipf is None else zipf)
    return CapacityPlan.make(found.spec, profile, options)


def systems() -> str:
    """What the model takes for each machine."""
    columns = ("", "cards", "GB a card", "copy, GB/s", "NVLink, GB/s", "host link, GB/s", "host memory, GB/s")
    return _markdown(
        columns,
        [
            (
                f"`{one.name}`", one.cards, f"{one.card_memory_gb:g}", f"{one.hbm_gb_per_s:.0f}",
                f"{one.peer.gb_per_s:g}", f"{one.host.gb_per_s:g}", f"{one.host_memory_gb_per_s:g}",
            )
            for one in SYSTEMS.values()
        ],
    )  # fmt: skip


def rows() -> str:
    """What one row takes, in memory and on the way."""
    peer, host = SYSTEMS["h100"].peer, SYSTEMS["h100"].host
    columns = (
        "dtype", "dim", "stored, B", "on a card, B", "in sectors, B", "packets", "on NVLink, B", "on PCIe, B",
    )  # fmt: skip
    formats = [RowFormat.of(dtype, dim) for dtype in DTYPES for dim in (16, 32, 64, 128)]
    return _markdown(
        columns,
        [
            (
                one.dtype,
                one.embedding_dim,
                one.row_bytes,
                one.stride,
                f"{sector_bytes(one):g}",
                f"{mean_pieces(one.stride, read_bytes(one), peer.packet_bytes):g}",
                f"{line_bytes(one, peer):g}",
                f"{line_bytes(one, host):g}",
            )
            for one in formats
        ],
    )


def textbook_sizes() -> str:
    """2 * 10^9 rows of 128, by dtype."""
    sizes = [(dtype, table_sizes(TEXTBOOK_ROWS, TEXTBOOK_DIM, dtype)) for dtype in ("fp32", "fp16", "int8", "int4")]
    return _markdown(
        ("dtype", "codes alone", f"on each of {TEXTBOOK_HOSTS} hosts", "stored", "on cards", "places, on each card"),
        [
            (
                dtype,
                f"{one.codes / 1e12:.3f} TB",
                f"{one.codes / TEXTBOOK_HOSTS / 1e9:.1f} GB",
                f"{one.stored / 1e12:.3f} TB",
                f"{one.on_cards / 1e12:.3f} TB",
                f"{one.places / 1e9:.1f} GB",
            )
            for dtype, one in sizes
        ],
    )


def textbook_moves() -> str:
    """A step of 65,536 samples with 40 lookups each, by the share of rows that are found where they are pooled."""
    lookups = float(TEXTBOOK_LOOKUPS)
    fp32, int8 = RowFormat.of("fp32", TEXTBOOK_DIM), RowFormat.of("int8", TEXTBOOK_DIM)
    peer = SYSTEMS["h100"].peer
    return _markdown(
        ("hit rate", "fp32 rows", "int8 codes alone", "int8 rows in sectors", "the same on NVLink"),
        [
            (
                f"{rate:.3f}",
                *(
                    f"{moved_bytes(lookups, size, rate) / 1e6:.1f} MB"
                    for size in (fp32.row_bytes, int8.code_bytes, sector_bytes(int8), line_bytes(int8, peer))
                ),
            )
            for rate in TEXTBOOK_HIT_RATES
        ],
    )


def predictions() -> str:
    """The published models on a node of H100s and on a GB200 node."""
    asked: list[tuple[str, RowDtype, float | None]] = [
        ("dlrm-v2", "int8", 0.0), ("dlrm-v2", "int8", 1.05), ("dlrm-v2", "fp16", 0.0),
        ("merlin-tiny", "int8", None), ("merlin-small", "int8", None), ("merlin-medium", "int8", None),
        ("merlin-large", "int8", None), ("merlin-large", "fp16", None), ("merlin-jumbo", "int8", None),
    ]  # fmt: skip
    lines = []
    for system in ("h100", "gb200"):
        for name, dtype, zipf in asked:
            plan = capacity(name, system, dtype=dtype, zipf=zipf, pinned_memory_gb=400)
            skew = f", zipf {zipf:g}" if zipf is not None else ""
            lines.append((f"{len(plan.cards)} x {system}", f"{name} {dtype}{skew}", *_predicted(plan)))
    columns = (
        "node", "model", "rows and places, all on cards, GB a card", "hot", "own card", "peers", "pinned", "mapped",
        "alone, us", "bound by", "all busy, lookups/s", "bound by",
    )  # fmt: skip
    return _markdown(columns, lines)


def thresholds() -> str:
    """The hotness from which partial sums move fewer bytes than rows."""
    peer = SYSTEMS["h100"].peer
    columns = ("dtype", "dim", "2 cards", "4 cards", "8 cards", "8 cards, half hot", "8 cards, 90% hot")
    shapes = [(2, 0.0), (4, 0.0), (8, 0.0), (8, 0.5), (8, 0.9)]
    return _markdown(
        columns,
        [
            (
                dtype,
                dim,
                *(
                    partial_pooling_from(BagShape(RowFormat.of(dtype, dim), cards, hot), peer) or "never"
                    for cards, hot in shapes
                ),
            )
            for dtype in DTYPES
            for dim in (32, 64, 128)
        ],
    )


def pooling_ways() -> str:
    """DLRM-v2's features, one sample on 8 cards: bytes that cross NVLink by gather, and by partial sums."""
    peer = SYSTEMS["h100"].peer
    lines = []
    for dtype in ("int8", "fp16", "fp32"):
        for hot in (0.0, 0.9):
            bag = BagShape(RowFormat.of(dtype, 128), 8, hot)
            gather = np.array([gathered_bytes(bag, ids, peer) for ids in DLRM_V2_HOTNESS])
            partial = np.array([partial_pooled_bytes(bag, ids, peer) for ids in DLRM_V2_HOTNESS])
            lines.append(
                (
                    dtype,
                    f"{hot:.0%}",
                    *(f"{size / 1e3:.1f} kB" for size in (gather.sum(), partial.sum())),
                    f"{np.minimum(gather, partial).sum() / 1e3:.1f} kB",
                    f"{int((partial < gather).sum())} of {gather.size}",
                )
            )
    columns = ("rows", "hot", "peer gather", "partial sums", "the better for each feature", "features better summed")
    return _markdown(columns, lines)


def hot_share() -> str:
    """Share of lookups that the hottest rows take, of 40 million rows."""
    shares = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3)
    size = RowFormat.of("int8", 128).stride
    lines = []
    for share in shares:
        ranks = np.array([round(share * ROWS_OF_CURVE), ROWS_OF_CURVE])
        curve = [power_law_sums(ranks, exponent) for exponent in EXPONENTS]
        lines.append((f"{share:.3%}", f"{ranks[0] * size / 1e6:.1f} MB", *(f"{one[0] / one[1]:.1%}" for one in curve)))
    return _markdown(("hot rows", "int8, dim 128", *(f"zipf {exponent:g}" for exponent in EXPONENTS)), lines)


def replication() -> str:
    """DLRM-v2 in int8 on 8 H100s: what copies of hot rows on every card buy."""
    lines = []
    for zipf in (0.0, 1.05):
        for hot_gb in (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
            plan = capacity("dlrm-v2", zipf=zipf, hot_gb=hot_gb)
            far = sum(one.lookup_share for one in plan.tiers if one.tier == "peer")
            lines.append(
                (
                    f"{zipf:g}",
                    f"{hot_gb:g}",
                    f"{max(one.hot_bytes + one.own_bytes for one in plan.cards) / 1e9:.1f}",
                    f"{far:.1%}",
                    f"{plan.batch.peer_line_bytes / 1e6:.1f} MB",
                    f"{plan.time.peer_us:.1f}",
                    f"{plan.time.hbm_us:.1f}",
                    _si(plan.time.lookups_per_s),
                    plan.time.busy_bound,
                )
            )
    columns = (
        "zipf", "hot GB a card", "rows, GB a card", "lookups at peers", "on NVLink, a batch", "NVLink, us",
        "card memory, us", "all busy, lookups/s", "bound by",
    )  # fmt: skip
    return _markdown(columns, lines)


TABLES: dict[str, Callable[[], str]] = {
    "systems": systems,
    "rows": rows,
    "textbook-sizes": textbook_sizes,
    "textbook-moves": textbook_moves,
    "predictions": predictions,
    "thresholds": thresholds,
    "pooling-ways": pooling_ways,
    "hot-share": hot_share,
    "replication": replication,
}


def with_tables(text: str) -> str:
    """A page with its tables made anew.

    Raises:
        ClickException: a table that the page does not mark, or marks twice, or an unknown one.
    """
    marked = [name for _, name, _ in _MARKED.findall(text)]
    if sorted(marked) != sorted(TABLES):
        raise click.ClickException(f"the page marks the tables {sorted(marked)}, there are {sorted(TABLES)}")
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


@click.command()
@click.option("--write", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="PAGE")
def main(write: Path | None) -> None:
    """Print the tables of docs/nvlink.md, or put them into the page."""
    if write is None:
        for name, make in TABLES.items():
            click.echo(f"{name}\n\n{make()}")
    else:
        write.write_text(with_tables(write.read_text(encoding="utf-8")), encoding="utf-8")


def _predicted(plan: CapacityPlan) -> tuple[object, ...]:
    shares = {one.tier: one.lookup_share for one in plan.tiers}
    return (
        f"{plan.all_on_cards_bytes / 1e9:.1f}",
        *(f"{shares[tier]:.1%}" for tier in ("hot", "card", "peer", "pinned", "mapped")),
        f"{plan.time.alone_us:.0f}",
        plan.time.bound,
        _si(plan.time.lookups_per_s),
        plan.time.busy_bound,
    )


def _si(value: float) -> str:
    return f"{value / 1e9:.1f} G" if value >= 1e9 else f"{value / 1e6:.0f} M"


def _markdown(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    table = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in table)


if __name__ == "__main__":
    main()
