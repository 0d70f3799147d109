"""The GPU bench on next to nothing: on emulated cards, and on a GPU where there is one."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console

from loadtest.gpu.bench import BenchSize, Results, aims_table
from loadtest.gpu.pooling import GROUP, FbgemmTable, measure_pooling, time_graphs
from loadtest.gpu.ranking import measure_ranking
from loadtest.gpu.rows import TOLERANCE
from shardrank_testing.card_engines import card_factory

TINY = BenchSize(
    table_bytes=20_000,
    dims=(16, 8),
    hotness=(1, 5),
    batches=(32, 100),
    logical_cards=(1, 8),
    cell_s=0.0,
    workload="merlin-tiny:0.000001",
    candidates=(2, 5),
    requests=4,
    fbgemm=Path("missing"),
)
PEER = "int_nbit_split_embedding_codegen_lookup_function"
with_cards = pytest.mark.parametrize("kind", ["emulated", pytest.param("logical", marks=pytest.mark.gpu)])


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "gpu.json", {"benchmark": "gpu"}, Console(file=io.StringIO(), width=140))


@with_cards
def test_pooling_is_measured_at_every_size(kind, results):
    cards = card_factory(kind)(1)
    free = cards.cards[0].free_bytes()
    with results.part("pooling"):
        measure_pooling(results, cards, TINY)
    if kind == "emulated":
        assert cards.cards[0].free_bytes() == free
    written = json.loads(results.path.read_text())
    assert written == {"benchmark": "gpu", "status": {"pooling": "done"}, "rows": results.rows}
    assert [row["dim"] for row in results.rows if "missing" in row.get("fbgemm", "")] == [16, 8]
    rows = [row for row in results.rows if "us" in row]
    placements = [(1, False), (1, True), (8, True)]
    assert [(row["dim"], row["hotness"], row["batch"], (row["logical_cards"], row["places"])) for row in rows] == list(
        product(TINY.dims, TINY.hotness, TINY.batches, placements)
    )
    for row in rows:
        assert row["low_us"] <= row["us"] <= row["high_us"]
        assert 0 < row["error"] < TOLERANCE
        assert row["ns_per_row"] == pytest.approx(row["us"] * 1e3 / (row["hotness"] * row["batch"]))
        assert ("ceiling_us" in row) == (not row["places"])
        assert ("embedding_bag_ratio" in row) == (not row["places"] and row["batch"] == 100)
        assert ("one_card_ratio" in row) == (row["logical_cards"] == 8)
    bare = next(row for row in rows if (row["dim"], row["hotness"], row["batch"]) == (16, 5, 32))
    assert bare["gb_per_s"] == pytest.approx((160 * (32 + 4) + 4 * 33 + 32 * 16 * 2) / bare["us"] / 1e3)
    assert bare["ceiling_gb_per_s"] == pytest.approx(160 * 32 / bare["ceiling_us"] / 1e3)


@with_cards
def test_requests_are_ranked_as_the_cpu_engine_ranks_them(kind, results):
    with results.part("ranking"):
        measure_ranking(results, card_factory(kind), TINY)
    assert results.status == {"ranking": "done"}
    configurations = [(row["graphs"], row["logical_cards"], row["candidates"]) for row in results.rows]
    assert configurations == list(product((True, False), (1, 4), TINY.candidates))
    for row in results.rows:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["requests_per_s"] > 0
        assert (row["graph_fraction"] > 0) == row["graphs"]
        assert row["stage_ms"].keys() >= {"lookup", "rank"}


@pytest.fixture
def fbgemm_folder(monkeypatch):
    """FBGEMM's libraries where SHARDRANK_FBGEMM names them; else its lookup in torch, from its rows' layout."""
    if "SHARDRANK_FBGEMM" in os.environ:
        yield Path(os.environ["SHARDRANK_FBGEMM"])
        return

    def lookup(*, dev_weights, indices, offsets, total_D, row_alignment, **_):  # noqa: N803
        stride = -(-(4 + total_D) // row_alignment) * row_alignment
        stored = dev_weights.view(-1, stride)
        scale_bias = stored[:, :4].contiguous().view(torch.float16).float()
        rows = stored[:, 4 : 4 + total_D].float() * scale_bias[:, :1] + scale_bias[:, 1:]
        return torch.nn.functional.embedding_bag(
            indices, rows, offsets.to(indices.dtype), mode="sum", include_last_offset=True
        ).half()

    monkeypatch.setattr(torch.ops.fbgemm, PEER, lookup, raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    yield Path("libraries")


def test_fbgemm_pools_the_same_sums(fbgemm_folder, results):
    with results.part("pooling"):
        measure_pooling(results, card_factory("emulated")(1), replace(TINY, dims=(64,), fbgemm=fbgemm_folder))
    assert results.status == {"pooling": "done"}
    assert len([row for row in results.rows if row.get("fbgemm_ratio", 0) > 0]) == len(TINY.hotness)


def test_a_peer_with_other_sums_fails_the_part(fbgemm_folder, results, monkeypatch):
    monkeypatch.setattr(FbgemmTable, "pool", lambda self, ids, offsets: torch.ones(offsets.numel() - 1, self._dim))
    with results.part("pooling"):
        measure_pooling(results, card_factory("emulated")(1), TINY)
    assert results.status["pooling"].startswith("failed: WrongAnswerError: fbgemm, dim 16: a bag is")


def test_aims_are_judged_by_their_worst_figure():
    row = {"dim": 128, "hotness": 20, "batch": 65536, "logical_cards": 1, "places": False}
    rows = [
        {**row, "ceiling_fraction": 0.95, "embedding_bag_ratio": 1.9},
        {**row, "dim": 64, "ceiling_fraction": 0.76, "embedding_bag_ratio": 1.2},
        {**row, "hotness": 1, "ceiling_fraction": 0.1},
        {**row, "batch": 256, "ceiling_fraction": 0.1},
        {**row, "places": True, "logical_cards": 8, "one_card_ratio": 1.04},
        {"candidates": 500, "graphs": True, "logical_cards": 4, "p50_ms": 2.25},
        {"candidates": 500, "graphs": False, "logical_cards": 4, "p50_ms": 9.0},
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(aims_table(rows))
    lines = [re.split(" {2,}", line.strip())[1:] for line in console.file.getvalue().splitlines()]
    assert [cells for cells in lines if cells][1:] == [
        ["dim 64, hotness 20, batch 65536, logical_cards 1", "≥ 0.9", "0.760", "0.950", "2"],
        ["dim 128, hotness 20, batch 65536, logical_cards 8", "≤ 1.05", "1.040", "1.040", "1"],
        ["dim 64, hotness 20, batch 65536, logical_cards 1", "≥ 1.3", "1.200", "1.200", "1"],
        ["dim 128, hotness 20, batch 65536, logical_cards 1", "≥ 1.8", "1.900", "1.900", "1"],
        ["not measured", "≥ 1"],
        ["logical_cards 4, graphs True", "≤ 2", "2.250", "2.250", "1"],
    ]


@pytest.mark.parametrize(("launches", "repeats"), [(32, 1), (3, 11)])
def test_work_is_timed_in_alternation(launches, repeats):
    """Each once, then captured and replayed once; a replay without a time, then the rounds. Graphs have 32 launches."""
    card = card_factory("emulated")(1).cards[0]
    calls: list[str] = []
    work = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    timings = time_graphs(card, card.stream(), work, launches, seconds=0.0)
    a, b = "a" * repeats, "b" * repeats
    assert "".join(calls) == f"a{a}{a}b{b}{b}" + a + (a + b) * GROUP
    assert all(timing.low_us <= timing.us <= timing.high_us for timing in timings.values())
