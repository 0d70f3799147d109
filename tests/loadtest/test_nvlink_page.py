"""docs/nvlink.md: its tables are those that the cost model makes, and what the text says of them is true."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from loadtest.nvlink_page import TABLES, capacity, main, with_tables
from serving.cli.capacity import DLRM_V2_HOTNESS
from shard_node.cuda.partial_pooling import BagShape, partial_pooling_from
from shard_node.cuda.row_format import RowFormat
from shard_node.planning.card_systems import SYSTEMS
from shard_node.planning.cost_model import line_bytes, moved_bytes, sector_bytes, table_sizes

PAGE = Path(__file__).resolve().parents[2] / "docs/nvlink.md"
TEXT = PAGE.read_text(encoding="utf-8")
# As a reader sees it: lines of a paragraph are one.
PROSE = " ".join(TEXT.split())
H100 = SYSTEMS["h100"]
INT8, FP32 = RowFormat.of("int8", 128), RowFormat.of("fp32", 128)


def peer_share(plan):
    return next(one.lookup_share for one in plan.tiers if one.tier == "peer")


def test_the_pages_tables_are_what_its_command_makes(tmp_path):
    assert with_tables(TEXT) == TEXT
    copy = tmp_path / "nvlink.md"
    copy.write_text(TEXT.replace("| int8 | 128 |", "| int8 | 129 |"), encoding="utf-8")
    assert CliRunner().invoke(main, ["--write", str(copy)]).exit_code == 0
    assert copy.read_text(encoding="utf-8") == TEXT


def test_the_command_prints_every_table():
    # What the test above made is not reckoned again: `capacity` remembers.
    printed = CliRunner().invoke(main).output
    for name in TABLES:
        assert f"{name}\n\n| " in printed
        marked = TEXT.partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end -->")[0]
        assert marked.strip() in printed


def test_a_page_that_does_not_mark_every_table_once_is_refused():
    for wrong in (TEXT.replace("table: rows", "table: columns"), TEXT + "<!-- table: rows -->\n<!-- end -->\n"):
        with pytest.raises(click.ClickException, match="the page marks the tables"):
            with_tables(wrong)


@pytest.mark.parametrize(
    "figure", ["1.024 TB", "64.0 GB", "0.256 TB", "0.128 TB", "1342.2 MB", "568.8 MB", "333.7 MB", "200.9 MB"]
)
def test_the_textbooks_figures_are_on_the_page(figure):
    assert figure in TEXT


def test_what_is_said_of_rows_is_so():
    shares = sector_bytes(INT8) / sector_bytes(FP32), line_bytes(INT8, H100.peer) / line_bytes(FP32, H100.peer)
    assert f"{shares[0]:.2f} of fp32's bytes in memory and {shares[1]:.2f} on NVLink, not 0.25" in PROSE
    sizes = table_sizes(10**9, 128, "int8")
    alone, shared = sizes.places / sizes.on_cards, 8 * sizes.places / sizes.on_cards
    assert f"which is {alone:.1%} beside such int8 rows on one card, but {shared:.0%} beside a card's own" in PROSE


def test_what_is_said_of_hit_rates_is_so():
    moved = [moved_bytes(65_536 * 40, 512, rate) / 1e6 for rate in (0.576, 0.751, 0.85)]
    assert f"it would be {moved[0]:.1f}, {moved[1]:.1f} and {moved[2]:.1f} MB" in PROSE


def test_what_is_said_of_the_nodes_is_so():
    bytes_in_time = H100.host.copied_bytes(4) / H100.host.gb_per_s * H100.hbm_gb_per_s
    assert f"take as long as {bytes_in_time:.0f} bytes of card memory" in PROSE
    dlrm = capacity("dlrm-v2", zipf=0.0)
    assert f"DLRM-v2 ({dlrm.size.on_cards_bytes / 1e9:.0f} GB)" in PROSE
    assert dlrm.time.bound == "latency"
    assert dlrm.time.latency_us > dlrm.time.hbm_us
    assert [peer_share(capacity(f"merlin-{size}")) for size in ("tiny", "small", "medium")] == pytest.approx([0] * 3)
    assert peer_share(capacity("merlin-large")) > 0
    assert peer_share(capacity("merlin-jumbo", pinned_memory_gb=400)) < 0.05
    assert {capacity(name).time.busy_bound for name in ("dlrm-v2", "merlin-small", "merlin-large")} == {"host link"}
    assert capacity("merlin-jumbo", "gb200", pinned_memory_gb=400).cards[0].places_bytes // 10**9 == 22


def test_what_is_said_of_gathering_is_so():
    none, most = (partial_pooling_from(BagShape(INT8, 8, hot), H100.peer) for hot in (0.0, 0.9))
    assert f"gathering is cheaper up to {none - 1} ids a bag, and up to {most - 1} once 90%" in PROSE
    assert partial_pooling_from(BagShape(FP32, 8), H100.peer) == 2
    assert sorted(DLRM_V2_HOTNESS)[-2:] == [27, 100]


def test_what_is_said_of_copies_is_so():
    without, few = (capacity("dlrm-v2", zipf=1.05, hot_gb=size) for size in (0.0, 0.1))
    assert peer_share(few) / peer_share(without) == pytest.approx(1 / 6, rel=0.1)
    uniform = capacity("dlrm-v2", zipf=0.0, hot_gb=0.0)
    assert without.time.lookups_per_s < uniform.time.lookups_per_s / 3
