"""The GPU bench on next to nothing: on emulated cards, and on a GPU where there is one."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from loadtest.gpu import pooling
from loadtest.gpu.pooling import GROUP, measure_pooling, time_graphs
from loadtest.gpu.ranking import measure_ranking
from loadtest.gpu.rows import TOLERANCE, BenchSize, Results
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
)
with_cards = pytest.mark.parametrize("kind", ["emulated", pytest.param("logical", marks=pytest.mark.gpu)])


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "gpu.json", {"benchmark": "gpu"})


@pytest.mark.nightly
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
    rows = results.rows
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


@pytest.mark.nightly
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


def test_a_peer_with_other_sums_fails_the_part(results, monkeypatch):
    ones = lambda rows: lambda ids, offsets: torch.ones(offsets.numel() - 1, rows.embedding_dim)  # noqa: E731
    monkeypatch.setattr(pooling, "_embedding_bag", ones)
    with results.part("pooling"):
        measure_pooling(results, card_factory("emulated")(1), TINY)
    assert results.status["pooling"].startswith("failed: WrongAnswerError: embedding_bag, dim 16: a bag is")


@pytest.mark.parametrize(("num_sets", "repeats"), [(32, 1), (3, 11)])
def test_work_is_timed_in_alternation(num_sets, repeats):
    """Each once, then captured and replayed once; a replay without a time, then the rounds. Graphs have 32 launches.

    Each of them has all sets in turn.
    """
    card = card_factory("emulated")(1).cards[0]
    calls: list[str] = []
    work = {name: (lambda number, name=name: calls.append(f"{name}{number}")) for name in "ab"}
    timings = time_graphs(card, card.stream(), work, num_sets, seconds=0.0)
    a, b = ("".join(f"{name}{number}" for number in range(num_sets)) * repeats for name in "ab")
    assert "".join(calls) == f"a0{a}{a}b0{b}{b}" + a + (a + b) * GROUP
    assert all(timing.low_us <= timing.us <= timing.high_us for timing in timings.values())
