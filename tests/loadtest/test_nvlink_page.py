"""docs/nvlink.md: its tables are those that the cost model makes, and what the text says of them is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.hot.head_cache import simulated
from loadtest.nvlink_page import TABLES, capacity, main
from shard_node.cuda.kernel_params import RowFormat
from shard_node.errors import MemoryBudgetError
from shard_node.planning.cost_model import SYSTEMS, line_bytes, sector_bytes, table_sizes

PAGE = Path(__file__).resolve().parents[2] / "docs/nvlink.md"
TEXT = PAGE.read_text(encoding="utf-8")
# As a reader sees it: lines of a paragraph are one.
PROSE = " ".join(TEXT.split())
H100 = SYSTEMS["h100"]
INT8, FP32 = RowFormat.of("int8", 128), RowFormat.of("fp32", 128)


def peer_share(plan):
    return next(one.lookup_share for one in plan.tiers if one.tier == "peer")


def test_the_pages_tables_are_what_its_command_makes(tmp_path):
    copy = tmp_path / "nvlink.md"
    copy.write_text(TEXT.replace("| int8 | 128 |", "| int8 | 129 |"), encoding="utf-8")
    assert CliRunner().invoke(main, [str(copy)]).exit_code == 0
    assert copy.read_text(encoding="utf-8") == TEXT
    assert all(TEXT.count(f"<!-- table: {name} -->\n") == 1 for name in TABLES)


@pytest.mark.parametrize(
    "figure",
    ["1.024 TB", "64.0 GB", "0.256 TB", "0.128 TB", "1342.2 MB", "671.1 MB", "201.3 MB", "13.4 MB", "13.42", "2.01"],
)
def test_the_textbooks_figures_are_on_the_page(figure):
    assert figure in TEXT


def test_what_is_said_of_quoted_hit_rates_is_so():
    for one in simulated(0):
        if one.quoted is not None:
            assert one.quoted * 20_000 == pytest.approx(round(one.quoted * 20_000))
            of_fewer = (one.closed_form * (1 - one.closed_form) / 20_000) ** 0.5
            assert 0 < one.quoted - one.closed_form < of_fewer
            more_bytes = (one.quoted - one.closed_form) / (1 - one.closed_form)
            assert 0.001 < more_bytes < 0.007
    far = {one.rows: (one.quoted - one.closed_form) / one.standard_error for one in simulated(0) if one.quoted}
    assert round(far[1000]) == 6
    # The table that would explain each by uniform ids that fall into the head.
    rows = [0.15 * one.rows / (one.quoted - one.closed_form) for one in simulated(0) if one.quoted]
    assert max(rows) > 20 * min(rows)


def test_what_is_said_of_rows_is_so():
    shares = sector_bytes(INT8) / sector_bytes(FP32), line_bytes(INT8, H100.peer) / line_bytes(FP32, H100.peer)
    assert f"{shares[0]:.2f} of fp32's bytes in memory and {shares[1]:.2f} on NVLink, not 0.25" in PROSE
    sizes = table_sizes(10**9, 128, "int8")
    alone, shared = sizes.places / sizes.on_cards, 8 * sizes.places / sizes.on_cards
    assert f"{alone:.1%} beside such int8 rows on one card, but {shared:.0%} beside a card's own" in PROSE


def test_what_is_said_of_the_nodes_is_so():
    bytes_in_time = H100.host.copied_bytes(4) / H100.host.gb_per_s * H100.hbm_gb_per_s
    assert f"take as long as {bytes_in_time:.0f} bytes of card memory" in PROSE
    dlrm = capacity("dlrm-v2", "h100", "int8", 0.0)
    assert f"DLRM-v2 ({dlrm.size.on_cards_bytes / 1e9:.0f} GB)" in PROSE
    assert dlrm.time.bound == "latency"
    assert dlrm.time.latency_us > dlrm.time.hbm_us
    merlin = {size: capacity(f"merlin-{size}", "h100", "int8", 1.05) for size in ("tiny", "small", "medium", "large")}
    assert [peer_share(merlin[size]) for size in ("tiny", "small", "medium")] == pytest.approx([0] * 3)
    assert 0 < peer_share(merlin["large"]) < 0.05
    assert {one.time.busy_bound for one in (dlrm, merlin["small"], merlin["large"])} == {"host link"}
    with pytest.raises(MemoryBudgetError, match="holds at most 268435455 rows of one table"):
        capacity("merlin-jumbo", "h100", "int8", 1.05)
    assert capacity("merlin-jumbo", "gb200", "int8", 1.05).cards[0].places_bytes // 10**9 == 22


def test_what_is_said_of_copies_is_so():
    without, few = (capacity("dlrm-v2", "h100", "int8", 1.05, size) for size in (0.0, 0.1))
    assert peer_share(few) / peer_share(without) == pytest.approx(1 / 6, rel=0.1)
    uniform = capacity("dlrm-v2", "h100", "int8", 0.0, 0.0)
    assert without.time.lookups_per_s / uniform.time.lookups_per_s == pytest.approx(4 / 5, abs=0.05)
