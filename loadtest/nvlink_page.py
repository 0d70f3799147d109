"""Make the tables of docs/nvlink.md from the cost model: `python -m loadtest.nvlink_page docs/nvlink.md`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import click
import numpy as np

from loader.snapshot.tables import RowDtype
from loadtest.hot.head_cache import BAG_IDS, BAGS, NETWORK_GB_PER_S, ROW_BYTES, simulated
from serving.cli.capacity import CapacityOptions, CapacityPlan, LookupProfile, catalog_model
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.cost_model import SYSTEMS, line_bytes, mean_pieces, read_bytes, sector_bytes, table_sizes
from shard_node.planning.hotness import power_law_sums
from shard_node.planning.network_cost import moved_bytes

DTYPES: tuple[RowDtype, ...] = ("int4", "int8", "fp16", "fp32")
TEXTBOOK_ROWS, TEXTBOOK_HOSTS = 2_000_000_000, 16
CACHE_SEED, FEWER_IDS = 0, 20_000
ROWS_OF_CURVE, EXPONENTS = 40_000_000, (0.0, 0.8, 0.95, 1.05, 1.2)
MODELS: tuple[tuple[str, RowDtype, float], ...] = (
    ("dlrm-v2", "int8", 0.0), ("dlrm-v2", "int8", 1.05), ("dlrm-v2", "fp16", 0.0), ("merlin-tiny", "int8", 1.05),
    ("merlin-small", "int8", 1.05), ("merlin-medium", "int8", 1.05), ("merlin-large", "int8", 1.05),
    ("merlin-large", "fp16", 1.05),
)  # fmt: skip
Rows = Iterable[tuple[object, ...]]
_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n\n(?:\|.*\n){2})(?:\|.*\n)*(\n<!-- end -->)")


@lru_cache(maxsize=64)
def capacity(name: str, system: str, dtype: RowDtype, zipf: float, hot_gb: float | None = None) -> CapacityPlan:
    """Plan a published model on a whole node, as `shardrank plan` does, with 400 GB of pinned memory."""
    node = SYSTEMS[system]
    options = CapacityOptions(
        system=node, cards=node.cards, card_memory_gb=node.card_memory_gb, pinned_memory_gb=400, hot_gb=hot_gb
    )
    found = catalog_model(name, dtype)
    return CapacityPlan.make(found.spec, LookupProfile(hotness=found.hotness, zipf=zipf), options)


def _systems() -> Rows:
    for one in SYSTEMS.values():
        rates = (one.hbm_gb_per_s, one.peer.gb_per_s, one.host.gb_per_s, one.host_memory_gb_per_s)
        yield f"`{one.name}`", one.cards, f"{one.card_memory_gb:g}", *(f"{round(rate, 1):g}" for rate in rates)


def _rows() -> Rows:
    links = SYSTEMS["h100"].peer, SYSTEMS["h100"].host
    for one in (RowFormat.of(dtype, dim) for dtype in DTYPES for dim in (16, 32, 64, 128)):
        packets = mean_pieces(one.stride, read_bytes(one), links[0].packet_bytes)
        sizes = sector_bytes(one), packets, *(line_bytes(one, link) for link in links)
        yield one.dtype, one.embedding_dim, one.row_bytes, one.stride, *(f"{size:g}" for size in sizes)


def _textbook_sizes() -> Rows:
    for dtype in reversed(DTYPES):
        one = table_sizes(TEXTBOOK_ROWS, 128, dtype)
        host = f"{one.codes / TEXTBOOK_HOSTS / 1e9:.1f} GB"
        terabytes = [f"{size / 1e12:.3f} TB" for size in (one.codes, one.stored, one.on_cards)]
        options = CapacityOptions(
            system=SYSTEMS["h100"], cards=1, card_memory_gb=80, pinned_memory_gb=0, shards=TEXTBOOK_HOSTS
        )
        found = CapacityPlan.make(catalog_model("textbook", dtype).spec, LookupProfile(), options)
        yield dtype, terabytes[0], host, *terabytes[1:], f"{found.cards[0].places_bytes / 1e9:.2f} GB"


def _head_cache() -> Rows:
    int8 = RowFormat.of("int8", 128)
    sizes = int8.code_bytes, sector_bytes(int8), line_bytes(int8, SYSTEMS["h100"].peer)
    for one in simulated(CACHE_SEED):
        misses = BAGS * BAG_IDS - one.hits
        of_int8 = (f"{misses * size / 1e6:.1f} MB" for size in sizes)
        rates = f"{one.hit_rate:.5f}", f"{one.closed_form:.5f}"
        moved = f"{one.moved_bytes / 1e6:.1f} MB", f"{one.closed_form_bytes / 1e6:.1f} MB", f"{one.moved_ms:.2f}"
        yield one.rows, *rates, *moved, *of_int8


def _quoted_cache() -> Rows:
    for one in simulated(CACHE_SEED):
        if one.quoted is not None:
            moved = f"{moved_bytes(BAGS * BAG_IDS, ROW_BYTES, one.quoted) / 1e6:.1f} MB"
            off = f"{one.quoted - one.closed_form:+.5f}"
            errors = (f"{(one.quoted - one.closed_form) / error:+.1f}" for error in _standard_errors(one.closed_form))
            yield one.rows, f"{one.quoted:g}", moved, f"{one.closed_form:.5f}", off, *errors


def _standard_errors(hit_rate: float) -> tuple[float, ...]:
    """Of hit rates drawn from a step's ids, and from 20,000."""
    return tuple((hit_rate * (1 - hit_rate) / count) ** 0.5 for count in (BAGS * BAG_IDS, FEWER_IDS))


def _replicate_or_shard() -> Rows:
    for hit_rate in (0.0, 0.5, 0.85, 0.99):
        moved = moved_bytes(BAGS * BAG_IDS, ROW_BYTES, hit_rate)
        yield f"{hit_rate:g}", f"{moved / 1e6:.1f} MB", f"{moved / NETWORK_GB_PER_S / 1e6:.2f}"


def _predictions() -> Rows:
    for system in ("h100", "gb200"):
        for name, dtype, zipf in MODELS:
            plan = capacity(name, system, dtype, zipf)
            shares = [f"{tier.lookup_share:.1%}" for tier in plan.tiers]
            busy = f"{plan.time.lookups_per_s / 1e9:.1f} G", plan.time.busy_bound
            model = f"{name} {dtype}, zipf {zipf:g}"
            needed = f"{plan.all_on_cards_bytes / 1e9:.1f}"
            node = f"{len(plan.cards)} x {system}"
            yield node, model, needed, *shares, f"{plan.time.alone_us:.0f}", plan.time.bound, *busy


def _hot_share() -> Rows:
    for share in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3):
        ranks = np.array([round(share * ROWS_OF_CURVE), ROWS_OF_CURVE])
        curves = [power_law_sums(ranks, exponent) for exponent in EXPONENTS]
        size = f"{ranks[0] * RowFormat.of('int8', 128).stride / 1e6:.1f} MB"
        yield f"{share:.3%}", size, *(f"{first / total:.1%}" for first, total in curves)


def _replication() -> Rows:
    for zipf in (0.0, 1.05):
        for hot_gb in (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
            plan = capacity("dlrm-v2", "h100", "int8", zipf, hot_gb)
            far = next(one.lookup_share for one in plan.tiers if one.tier == "peer")
            rows_gb = max(one.hot_bytes + one.own_bytes for one in plan.cards) / 1e9
            moved = f"{far:.1%}", f"{plan.batch.peer_line_bytes / 1e6:.1f} MB"
            times = f"{plan.time.peer_us:.1f}", f"{plan.time.hbm_us:.1f}", f"{plan.time.lookups_per_s / 1e9:.1f} G"
            yield f"{zipf:g}", f"{hot_gb:g}", f"{rows_gb:.1f}", *moved, *times, plan.time.busy_bound


TABLES: dict[str, Callable[[], Rows]] = {
    "systems": _systems,
    "rows": _rows,
    "textbook-sizes": _textbook_sizes,
    "head-cache": _head_cache,
    "quoted-cache": _quoted_cache,
    "replicate-or-shard": _replicate_or_shard,
    "predictions": _predictions,
    "hot-share": _hot_share,
    "replication": _replication,
}


@click.command()
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(page: Path) -> None:
    """Make the rows of a page's tables anew, below the heads that it has."""

    def table(found: re.Match[str]) -> str:
        lines = (f"| {' | '.join(map(str, row))} |\n" for row in TABLES[found[2]]())
        return found[1] + "".join(lines) + found[3]

    page.write_text(_MARKED.sub(table, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
