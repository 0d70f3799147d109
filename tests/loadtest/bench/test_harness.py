"""Subjects are measured in alternation, and their ratios are those of each round."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.bench.harness import Bench, BenchTable, bench_command
from loadtest.rounds import Measure

MEASURES = (Measure("time", "ms"), Measure("hits", "%", "higher"))


def test_each_round_measures_all_subjects_in_turning_order():
    """The baseline comes last in the first round; tables alternate within a round, which is entered and left."""
    events: list[str] = []

    @contextmanager
    def around(number: int):
        events.append(f"begin {number}")
        yield
        events.append("end")

    def subject(name: str):
        def run(number: int) -> dict[str, float]:
            events.append(f"{name}{number}")
            return {"time": 1.0}

        return run

    tables = [BenchTable(title, MEASURES, {name: subject(name) for name in title}) for title in ("abc", "de")]
    with asyncio.Runner() as runner:
        Bench("order", 3, Path(), runner, quick=False).run(tables, around)
    rounds = ("begin 0,b0,c0,a0,e0,d0,end", "begin 1,c1,a1,b1,d1,e1,end", "begin 2,a2,b2,c2,e2,d2,end")
    assert ",".join(events) == ",".join(rounds)


@bench_command
def small_bench(bench: Bench) -> None:
    """Compare two subjects."""
    slow = {"slow": lambda number: {"time": 4.0 * (number + 1), "hits": 50.0}}
    fast = {"fast": lambda number: {"time": 1.0 + number}}
    bench.run([BenchTable("both", MEASURES, slow | fast, {"rows": "3"})])
    bench.results["stages"] = {"seconds": bench.seconds(5.0)}


@pytest.mark.parametrize(
    ("flags", "rounds", "seconds"), [([], 5, 5.0), (["--quick"], 2, 1.0), (["--rounds", "3"], 3, 5)]
)
def test_the_json_form_has_values_medians_ratios_and_intervals(tmp_path, flags, rounds, seconds):
    file = tmp_path / "bench.json"
    result = CliRunner().invoke(small_bench, [*flags, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(file.read_text())
    assert (document["bench"], document["rounds"], document["stages"]) == ("small-bench", rounds, {"seconds": seconds})
    table = document["tables"]["both"]
    assert (table["baseline"], table["setup"]) == ("slow", {"rows": "3"})
    fast = table["subjects"]["fast"]["time"]
    assert fast["values"] == [1.0 + number for number in range(rounds)]
    assert fast["median"] == (rounds + 1) / 2
    assert fast["ratio"] == pytest.approx(0.25)
    assert fast["interval"] == pytest.approx([0.25, 0.25])
    assert (fast["unit"], fast["better"]) == ("ms", "lower")
    # A measure that one subject lacks has no ratios.
    assert table["subjects"]["slow"]["hits"]["ratio"] is None
    assert "0.250" in result.output


def test_a_computed_baseline_is_of_the_same_round(tmp_path):
    subjects = {"one": lambda number: {"time": 2.0 + number}, "two": lambda number: {"time": 3.0 - number}}
    best = "best", lambda values: {"time": min(values[name]["time"] for name in subjects)}
    with asyncio.Runner() as runner:
        bench = Bench("best", 2, Path(), runner, quick=False)
        bench.run([BenchTable("both", MEASURES[:1], subjects, baseline=best)])
    table = bench.document()["tables"]["both"]
    assert table["baseline"] == "best"
    assert [measures["time"]["values"] for measures in table["subjects"].values()] == [(2, 2), (2, 3), (3, 2)]
