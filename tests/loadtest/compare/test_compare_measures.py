"""From rounds to ratios, reckoned by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from loadtest.compare.arms import CompareConfig
from loadtest.compare.measure import ASKED, ArmRound, Measurements, rates_of, wire_bytes
from loadtest.compare.run import compared
from loadtest.load.closed_loop import CpuTime, Role, Weighed
from loadtest.load.config import OfferedLoad
from loadtest.load.result import LoadResult
from loadtest.report.page import html
from loadtest.rounds import Comparison, show_comparison
from shardrank_testing.load_results import QueueLoad

CONFIG = CompareConfig(cards=(1, 2), rounds=3, rate=200, shares=(50,))
SHARDED = CompareConfig(cards=(1,), shards=(2,), rounds=3, rate=200, shares=(50,))
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


ALONE: dict[Role, CpuTime] = {"serve": CpuTime(2.5, 0.5)}


def busy(requests: int, *, client_cpu_s: float = 1.0, p50_ms: float = 1.0, cpu: dict[Role, CpuTime] = ALONE) -> Weighed:
    times = {"p50_ms": p50_ms, "p99_ms": 2 * p50_ms}
    return Weighed(requests=requests, seconds=2.0, server_cpu=cpu, client_cpu_s=client_cpu_s, **times)


def one_round(**changed: object) -> ArmRound:
    same = ArmRound(cold=run(1), warm=run(1), alone=busy(10), shares=(run(1),), busy=busy(10), wire={})
    return replace(same, **changed)


def rounds(*of_two: ArmRound, config: CompareConfig = CONFIG) -> Measurements:
    """Three rounds of the first arm, and three of the second."""
    first, second = config.arms[:2]
    of_arms = {first: [one_round(cold=run(8), busy=busy(1000))] * 3, second: list(of_two)}
    capacity = {first: 450.0, second: 400.0}
    return Measurements(of_arms, capacity, dtype="float32", checked_requests=8, largest_difference=3e-7)


def test_a_measure_is_the_ratio_to_one_card_round_by_round():
    found = compared(
        CONFIG, LOAD, rounds(*[one_round(cold=run(4), warm=run(times), busy=busy(2000)) for times in (0.5, 0.5, 4)])
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


def test_one_request_after_the_other_and_shares_of_capacity_have_percentiles_of_their_own():
    found = compared(CONFIG, LOAD, rounds(*[one_round(alone=busy(10, p50_ms=1.5), shares=(run(3),))] * 3))
    measures = {one.name: one for one in found.measures}
    assert measures["p50, 1 in flight"].middle == (1, 1.5)
    assert measures["p99, 1 in flight"].ratios[1].value == pytest.approx(1.5)
    assert measures["p50 at 50% of capacity"].middle == (1, 3)
    assert measures["p99 at 50% of capacity"].middle == (2, 6)
    assert found.valid


def test_cpu_is_told_by_role_and_bytes_by_form_where_there_are_shards():
    cpu: dict[Role, CpuTime] = {"serve": CpuTime(2.0, 1.0), "nodes": CpuTime(0.5, 0.25)}
    sharded = one_round(busy=busy(1000, cpu=cpu), wire={"float16": 800.0, "stored": 50.0, ASKED: 400.0})
    found = compared(SHARDED, LOAD, rounds(*[sharded] * 3, config=SHARDED))
    middle = {one.name: one.middle for one in found.measures}
    assert middle["CPU of a request, 32 in flight"] == (3, 3.75)
    assert middle["CPU of a request, serve"] == (3, 3)
    assert middle["CPU of a request, serve, kernel"] == (0.5, 1)
    assert middle["CPU of a request, nodes"] == (0, 0.75)
    assert middle["CPU of a request, nodes, kernel"] == (0, 0.25)
    assert middle["bytes of a request, back"] == (0, 850)
    assert middle["bytes of a request, back as float16"] == (0, 800)
    assert middle["bytes of a request, back as stored"] == (0, 50)
    assert middle["bytes of a request, to shards"] == (0, 400)
    ratios = {one.name: one.ratios for one in found.measures}
    assert ratios["CPU of a request, serve, kernel"][1].value == pytest.approx(2)
    # To nothing, there is no ratio.
    assert ratios["CPU of a request, nodes"] == ratios["bytes of a request, back"] == ()
    assert found.valid


def test_a_server_that_does_not_count_bytes_has_no_rows_for_them():
    names = [one.name for one in compared(SHARDED, LOAD, rounds(*[one_round()] * 3, config=SHARDED)).measures]
    assert not [name for name in names if name.startswith("bytes")]
    assert "CPU of a request, nodes" not in names


def test_every_arm_is_offered_the_same_shares_of_what_the_slowest_one_answered():
    first, second = SHARDED.arms
    assert rates_of((30, 60), {first: 1000.0, second: 412.3}) == (124.0, 247.0)
    assert rates_of((), {first: 1.0}) == ()


METRICS = """\
# TYPE shardrank_requests counter
shardrank_requests_total{{api="grpc",method="rank",model="m",status="ok"}} {ok}
shardrank_requests_total{{api="grpc",method="infer",model="m",status="ok"}} 5
shardrank_requests_total{{api="grpc",method="rank",model="m",status="deadline"}} {late}
# TYPE shardrank_shard_answer_bytes counter
shardrank_shard_answer_bytes_total{{form="float16",model="m",shard="0"}} {half}
shardrank_shard_answer_bytes_total{{form="float16",model="m",shard="1"}} {half}
shardrank_shard_answer_bytes_total{{form="float32",model="m",shard="1"}} 70
# TYPE shardrank_shard_request_bytes counter
shardrank_shard_request_bytes_total{{model="m"}} {asked}
"""


def test_bytes_of_a_request_are_what_counters_grew_by_for_each_that_was_answered():
    before, after = (
        METRICS.format(ok=100, late=3, half=1000, asked=500.0),
        METRICS.format(ok=110, late=9, half=6000, asked=3500.0),
    )
    assert wire_bytes(before, after) == {"float16": 1000.0, ASKED: 300.0}
    # The server's first requests, and those of one that does not count.
    assert wire_bytes("", after)["float32"] == pytest.approx(70 / 115)
    assert wire_bytes("", "") == wire_bytes(after, after) == {}


def test_warm_and_cold_runs_are_kept_and_results_without_cold_ones_are_still_read():
    odd = [one_round(cold=run(4), warm=run(times)) for times in (1, 2, 3)]
    found = compared(CONFIG, LOAD, rounds(*odd))
    assert [run.latency_of_due.p50_ms for run in found.arms[1].runs] == [1, 2, 3]
    assert [run.latency_of_due.p50_ms for run in found.arms[1].cold_runs] == [4, 4, 4]
    old = found.model_dump(mode="json")
    for arm in old["arms"]:
        del arm["cold_runs"]
    assert Comparison.model_validate(old).arms[0].cold_runs == ()


def test_the_setup_says_what_servers_were_told_and_how_far_they_agree():
    told = {"cards": (1,), "shards": (2,), "sharding": "table", "workers": 2, "transports": ("tcp",)}
    config = CompareConfig.model_validate(CONFIG.model_dump() | told)
    setup = compared(config, LOAD, rounds(*[one_round()] * 3, config=config)).setup
    assert setup["sharding"] == "table"
    assert setup["serving processes"] == "2"
    assert setup["dense model in"] == "float32 (auto)"
    assert setup["same scores"] == "of 8 requests, to 3e-07; allowed is 1e-05"
    assert setup["rows"].endswith("asked over TCP")
    assert setup["replicated tables"] == "up to 0 bytes"
    assert setup["shares of capacity"] == (
        "50% of the 400/s that 2 shards, TCP answered in the rehearsal, the least of all arms: 200/s, open loop"
    )


def test_a_run_that_is_not_valid_makes_the_comparison_so_and_is_named():
    late = one_round(cold=run(1, why=("it was late.",)), shares=(run(1, why=("this too.",)),))
    short = one_round(busy=busy(10, client_cpu_s=1.9))
    found = compared(CONFIG, LOAD, rounds(one_round(), late, short))
    assert not found.valid
    assert found.invalid_because == (
        "2 cards, round 2, cold: it was late.",
        "2 cards, round 2, 50% of capacity: this too.",
        "2 cards, round 3, throughput: the client used 95% of a core; at most 90% is allowed",
    )


def test_a_percentile_that_some_round_does_not_have_is_left_out_and_said():
    found = compared(CONFIG, LOAD, rounds(one_round(), one_round(warm=run(1, p99=False)), one_round()))
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
            "Offer less (--rate, --shares), give requests longer (--timeout-ms), or make them smaller (--candidates)",
        ),
        ({"connection": 5, "timeout": 90}, "95 of 400 requests failed (connection 5, timeout 90)"),
    ],
)
def test_a_run_whose_requests_fail_says_how_and_what_to_do_about_those_that_were_late(errors, problem):
    failed = one_round(warm=run(1, p99=False).model_copy(update={"errors": errors, "due": 400}))
    found = compared(CONFIG, LOAD, rounds(one_round(), failed, one_round()))
    assert found.invalid_because[0] == f"2 cards, round 2, warm: {problem}"


def test_the_table_and_the_page_have_every_measure_with_its_interval_and_what_is_wrong():
    odd = [one_round(warm=run(times)) for times in (0.5, 0.5, 4)]
    odd[0] = replace(odd[0], cold=run(1, why=("it was late.",)))
    found = compared(CONFIG, LOAD, rounds(*odd))
    out = io.StringIO()
    show_comparison(Console(file=out, width=200), found)
    assert "requests are varied: ragged bags, headers that change" in out.getvalue()
    assert "shares of capacity: 50% of the 400/s that 2 cards answered in the rehearsal" in out.getvalue()
    page = html(Comparison.model_validate_json(found.model_dump_json()))
    for text in (out.getvalue(), page):
        for one in found.measures:
            assert one.name in text
        assert "2 cards, round 1, cold: it was late." in text
    assert "1.00 × [0.500, 4.00]" in out.getvalue()


def test_on_a_narrow_terminal_arms_stand_in_groups_each_beside_the_baseline():
    config = CONFIG.model_copy(update={"cards": (1, 2, 4, 8)})
    of_arms = {arm: [one_round()] * 3 for arm in config.arms}
    measurements = replace(rounds(*[one_round()] * 3), rounds=of_arms)
    out = io.StringIO()
    show_comparison(Console(file=out, width=100), compared(config, LOAD, measurements))
    headers = [line.split("  ") for line in out.getvalue().splitlines() if "1 card" in line and "cards" in line]
    assert [[name.strip() for name in one if name.strip()] for one in headers[1:]] == [
        ["1 card", "2 cards", "4 cards"],
        ["1 card", "8 cards"],
    ]
