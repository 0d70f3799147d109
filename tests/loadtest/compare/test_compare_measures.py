"""From rounds to ratios, reckoned by hand."""

from __future__ import annotations

import io
from functools import cache

import pytest
from rich.console import Console

from loadtest.compare.arms import CompareConfig
from loadtest.compare.run import ArmRound, Measurements, compared
from loadtest.load.closed_loop import Weighed
from loadtest.load.config import OfferedLoad
from loadtest.load.result import LoadResult
from loadtest.report.comparison import Comparison
from loadtest.report.page import html
from loadtest.rounds import show_comparison
from shardrank_testing.load_results import QueueLoad

CONFIG = CompareConfig(cards=(1, 2), rounds=3, rate=200)
LOAD = OfferedLoad(target="grpc://127.0.0.1:1")


@cache
def example() -> LoadResult:
    return QueueLoad(rate=200, duration_s=2, warmup_s=0).run()


def run(times: float, *, throughput: float = 100.0, p99: bool = True, why: tuple[str, ...] = ()) -> LoadResult:
    """A run whose percentiles are `times` 1, 2 and 4 ms."""
    latency = example().latency_of_due.model_copy(
        update={"p50_ms": times, "p99_ms": 2 * times if p99 else None, "p999_ms": 4 * times}
    )
    return example().model_copy(
        update={"latency_of_due": latency, "throughput": throughput, "valid": not why, "invalid_because": why}
    )


def busy(requests: int, *, client_cpu_s: float = 1.0) -> Weighed:
    return Weighed(requests=requests, seconds=2.0, server_cpu_s=3.0, client_cpu_s=client_cpu_s, p50_ms=1.0, p99_ms=2.0)


def rounds(*of_two: ArmRound, config: CompareConfig = CONFIG) -> Measurements:
    """Three rounds of the first arm, and three of the second."""
    one = ArmRound(cold=run(8), warm=run(1), busy=busy(1000))
    of_arms = {config.arms[0]: [one] * 3, config.arms[1]: list(of_two)}
    return Measurements(of_arms, dtype="float32", checked_requests=8, largest_difference=3e-7)


def test_a_measure_is_the_ratio_to_one_card_round_by_round():
    found = compared(
        CONFIG, LOAD, rounds(*[ArmRound(cold=run(4), warm=run(times), busy=busy(2000)) for times in (0.5, 0.5, 4)])
    )
    measures = {one.name: one for one in found.measures}
    for name, base in (("p50", 1), ("p99", 2), ("p99.9", 4)):
        warm, cold = measures[f"{name}, warm"], measures[f"{name}, cold"]
        assert warm.values == ((base,) * 3, (base * 0.5, base * 0.5, base * 4))
        assert warm.middle == (base, base * 0.5)
        # The geometric mean of 1/2, 1/2 and 4 is 1.
        assert warm.ratios[1].value == pytest.approx(1)
        assert warm.ratios[1].low == pytest.approx(0.5)
        assert warm.ratios[1].high == pytest.approx(4)
        assert cold.ratios[1].value == pytest.approx(0.5)
        assert cold.values[0] == (8 * base,) * 3
    assert measures["throughput, 32 in flight"].middle == (500, 1000)
    assert measures["throughput, 32 in flight"].ratios[1].value == pytest.approx(2)
    assert measures["throughput, 32 in flight"].better == "higher"
    assert measures["CPU of a request, 32 in flight"].middle == (3, 1.5)
    assert measures["throughput at 200/s, warm"].ratios[1].value == 1
    assert found.valid
    assert [arm.name for arm in found.arms] == ["1 card", "2 cards"]


def test_warm_and_cold_runs_are_kept_and_results_without_cold_ones_are_still_read():
    odd = [ArmRound(cold=run(4), warm=run(times), busy=busy(2000)) for times in (1, 2, 3)]
    found = compared(CONFIG, LOAD, rounds(*odd))
    assert [run.latency_of_due.p50_ms for run in found.arms[1].runs] == [1, 2, 3]
    assert [run.latency_of_due.p50_ms for run in found.arms[1].cold_runs] == [4, 4, 4]
    old = found.model_dump(mode="json")
    for arm in old["arms"]:
        del arm["cold_runs"]
    assert Comparison.model_validate(old).arms[0].cold_runs == ()


def test_the_setup_says_what_servers_were_told_and_how_far_they_agree():
    told = {"shards": (1,), "sharding": "table", "workers": 2, "hosts": True, "delay_ms": 0.5}
    config = CompareConfig.model_validate(CONFIG.model_dump() | told)
    setup = compared(config, LOAD, rounds(*[ArmRound(run(1), run(1), busy(10))] * 3, config=config)).setup
    assert setup["sharding"] == "table"
    assert setup["serving processes"] == "2"
    assert setup["dense model in"] == "float32 (auto)"
    assert setup["same scores"] == "of 8 requests, to 3e-07; allowed is 1e-05"
    assert setup["network"] == "a veth pair for each host, netem adds 0.5 ms to a round trip"
    assert setup["rows"].endswith("asked over TCP")


def test_a_run_that_is_not_valid_makes_the_comparison_so_and_is_named():
    good = ArmRound(cold=run(1), warm=run(1), busy=busy(10))
    late = ArmRound(cold=run(1, why=("it was late.",)), warm=run(1), busy=busy(10))
    short = ArmRound(cold=run(1), warm=run(1), busy=busy(10, client_cpu_s=1.9))
    found = compared(CONFIG, LOAD, rounds(good, late, short))
    assert not found.valid
    assert found.invalid_because == (
        "2 cards, round 2, cold: it was late.",
        "2 cards, round 3, throughput: the client used 95% of a core; at most 90% is allowed",
    )


def test_a_percentile_that_some_round_does_not_have_is_left_out_and_said():
    good = ArmRound(cold=run(1), warm=run(1), busy=busy(10))
    failed = ArmRound(cold=run(1), warm=run(1, p99=False), busy=busy(10))
    found = compared(CONFIG, LOAD, rounds(good, failed, good))
    assert "p99, warm" not in {one.name for one in found.measures}
    assert {"p50, warm", "p99, cold"} <= {one.name for one in found.measures}
    assert found.invalid_because == ("p99, warm is left out: some rounds have none; too many requests failed",)
    assert not found.valid


@pytest.mark.parametrize(
    ("errors", "problem"),
    [
        (
            {"timeout": 90, "http_504": 5},
            "95 of 400 requests failed (timeout 90, http_504 5): not answered within 250 ms. "
            "Offer less (--rate), give requests longer (--timeout-ms), or make them smaller (--candidates)",
        ),
        ({"connection": 5, "timeout": 90}, "95 of 400 requests failed (connection 5, timeout 90)"),
    ],
)
def test_a_run_whose_requests_fail_says_how_and_what_to_do_about_those_that_were_late(errors, problem):
    good = ArmRound(cold=run(1), warm=run(1), busy=busy(10))
    failed = ArmRound(
        cold=run(1), warm=run(1, p99=False).model_copy(update={"errors": errors, "due": 400}), busy=busy(10)
    )
    found = compared(CONFIG, LOAD, rounds(good, failed, good))
    assert found.invalid_because[0] == f"2 cards, round 2, warm: {problem}"


def test_the_table_and_the_page_have_every_measure_with_its_interval_and_what_is_wrong():
    odd = [ArmRound(cold=run(1), warm=run(times), busy=busy(10)) for times in (0.5, 0.5, 4)]
    odd[0] = ArmRound(cold=run(1, why=("it was late.",)), warm=odd[0].warm, busy=busy(10))
    found = compared(CONFIG, LOAD, rounds(*odd))
    out = io.StringIO()
    show_comparison(Console(file=out, width=200), found)
    assert "requests are varied: ragged bags, headers that change" in out.getvalue()
    page = html(Comparison.model_validate_json(found.model_dump_json()))
    for text in (out.getvalue(), page):
        for one in found.measures:
            assert one.name in text
        assert "2 cards, round 1, cold: it was late." in text
    assert "1.00 × [0.500, 4.00]" in out.getvalue()
