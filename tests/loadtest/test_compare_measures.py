"""From rounds to ratios, computed by hand, and what makes a comparison not valid or ends it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from loadtest.compare import TO_SHARDS, ArmRound, CompareConfig, Dtype, Measurements, compared, wire_bytes
from loadtest.errors import LoadError
from loadtest.load.config import OfferedLoad
from loadtest.load.loops import CpuTime, Role, Weighed
from loadtest.load.result import LoadResult
from loadtest.rounds import Comparison
from shardrank_testing.load_results import QueueLoad

CONFIG = CompareConfig(cards=(1, 2), rounds=3, rate=200, shares=(50,))
SHARDED = CompareConfig(cards=(1,), shards=(2,), rounds=3, rate=200, shares=(50,))
LOAD = OfferedLoad(target="grpc://127.0.0.1:1")
ALONE: dict[Role, CpuTime] = {"serve": CpuTime(2.5, 0.5)}


@cache
def example() -> LoadResult:
    return QueueLoad(rate=200, duration_s=2, warmup_s=0).run()


def run(times: float, *, why: tuple[str, ...] = ()) -> LoadResult:
    """A run whose percentiles are `times` 1, 2 and 4 ms."""
    percentiles = {"p50_ms": times, "p99_ms": 2 * times, "p999_ms": 4 * times}
    latency = example().latency_of_due.model_copy(update=percentiles)
    changes = {"latency_of_due": latency, "throughput": 100.0, "valid": not why, "invalid_because": why}
    return example().model_copy(update=changes)


def failing(errors: dict[str, int]) -> LoadResult:
    """A run of 400 requests without a p99."""
    latency = run(1).latency_of_due.model_copy(update={"p99_ms": None})
    return run(1).model_copy(update={"latency_of_due": latency, "errors": errors, "due": 400})


def busy(requests: int, *, client_cpu_s: float = 1.0, p50_ms: float = 1.0, cpu: dict[Role, CpuTime] = ALONE) -> Weighed:
    times = {"p50_ms": p50_ms, "p99_ms": 2 * p50_ms}
    return Weighed(requests=requests, seconds=2.0, server_cpu=cpu, client_cpu_s=client_cpu_s, **times)


def one_round(**changed: object) -> ArmRound:
    same = ArmRound(cold=run(1), warm=run(1), alone=busy(10), shares=(run(1),), busy=busy(10), wire={})
    return replace(same, **changed)


def answered(*scores: list[float], dtype: Dtype = "float32") -> ArmRound:
    return one_round(dtype=dtype, scores=tuple(np.array(of_request, np.float32) for of_request in scores))


def rounds(*of_two: ArmRound, config: CompareConfig = CONFIG) -> Measurements:
    """Three rounds of the first arm, and three of the second."""
    first, second = config.arms[:2]
    scores = [(np.array([score], np.float32),) for score in (0.5, 0.5 + 3e-7)]
    of_one = [one_round(cold=run(8), busy=busy(1000), scores=scores[0])] * 3
    of_arms = {first: of_one, second: [replace(each, scores=scores[1]) for each in of_two]}
    return Measurements(of_arms, {first: 450.0, second: 400.0})


def comparison_of(*of_two: ArmRound, config: CompareConfig = CONFIG) -> Comparison:
    return compared(config, LOAD, rounds(*of_two, config=config))


def test_a_measure_is_the_ratio_to_one_card_round_by_round():
    found = comparison_of(
        *[one_round(cold=run(4), warm=run(times), alone=busy(10, p50_ms=1.5), shares=(run(3),), busy=busy(2000))
          for times in (0.5, 0.5, 4)]
    )  # fmt: skip
    measures = {measure.name: measure for measure in found.measures}
    for name, base in (("p50", 1), ("p99", 2), ("p99.9", 4)):
        warm = measures[f"{name}, warm"]
        assert warm.values == ((base,) * 3, (base * 0.5, base * 0.5, base * 4))
        # The geometric mean of 1/2, 1/2 and 4 is 1.
        assert (warm.ratios[1].value, warm.ratios[1].low, warm.ratios[1].high) == pytest.approx((1, 0.5, 4))
        assert measures[f"{name}, cold"].values == ((8 * base,) * 3, (4 * base,) * 3)
    middle = {name: measure.middle for name, measure in measures.items()}
    assert middle["p50, 1 in flight"] == (1, 1.5)
    assert middle["p99, 1 in flight"] == (2, 3)
    assert middle["p50 at 50% of capacity"] == (1, 3)
    assert middle["p99 at 50% of capacity"] == (2, 6)
    assert middle["throughput, 32 in flight"] == (500, 1000)
    assert middle["CPU of a request, 32 in flight"] == (3, 1.5)
    assert middle["throughput at 200/s, warm"] == (100, 100)
    assert measures["throughput, 32 in flight"].better == "higher"
    assert found.valid
    assert [run.latency_of_due.p50_ms for run in found.arms[1].runs] == [0.5, 0.5, 4]
    assert [run.latency_of_due.p50_ms for run in found.arms[1].cold_runs] == [4, 4, 4]


def test_shards_have_rows_of_cpu_by_role_and_bytes_by_form():
    cpu: dict[Role, CpuTime] = {"serve": CpuTime(2.0, 1.0), "nodes": CpuTime(0.5, 0.25)}
    sharded = one_round(busy=busy(1000, cpu=cpu), wire={"float16": 800.0, "stored": 50.0, TO_SHARDS: 400.0})
    found = comparison_of(*[sharded] * 3, config=SHARDED)
    middle = {measure.name: measure.middle for measure in found.measures}
    assert middle["CPU of a request, 32 in flight"] == (3, 3.75)
    assert list(middle.items())[-8:] == [
        ("CPU of a request, serve", (3, 3)),
        ("CPU of a request, serve, kernel", (0.5, 1)),
        ("CPU of a request, nodes", (0, 0.75)),
        ("CPU of a request, nodes, kernel", (0, 0.25)),
        ("bytes of a request, back", (0, 850)),
        ("bytes of a request, back as float16", (0, 800)),
        ("bytes of a request, back as stored", (0, 50)),
        ("bytes of a request, to shards", (0, 400)),
    ]
    ratios = {measure.name: measure.ratios for measure in found.measures}
    assert ratios["CPU of a request, serve, kernel"][1].value == pytest.approx(2)
    # To nothing, there is no ratio.
    assert ratios["CPU of a request, nodes"] == ratios["bytes of a request, back"] == ()
    assert found.valid
    without = [measure.name for measure in comparison_of(*[one_round()] * 3, config=SHARDED).measures]
    assert not [name for name in without if name.startswith("bytes") or "nodes" in name]


def test_arms_are_offered_shares_of_the_smallest_capacity():
    first, second = SHARDED.arms
    assert Measurements(capacity={first: 1000.0, second: 412.3}).rates((30, 60)) == (124.0, 247.0)
    assert Measurements(capacity={first: 1.0}).rates(()) == ()


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


def test_bytes_are_the_growth_of_counters_for_each_answer():
    before = METRICS.format(ok=100, late=3, half=1000, asked=500.0)
    after = METRICS.format(ok=110, late=9, half=6000, asked=3500.0)
    assert wire_bytes(before, after) == {"float16": 1000.0, TO_SHARDS: 300.0}
    # The server's first requests, and those of one that does not count.
    assert wire_bytes("", after)["float32"] == pytest.approx(70 / 115)
    assert wire_bytes("", "") == wire_bytes(after, after) == {}


def test_the_setup_has_the_settings_and_the_agreement():
    changes = {"cards": (1,), "shards": (2,), "sharding": "table", "workers": 2, "transports": ("tcp",), "hot_gb": 0.5}
    config = CompareConfig.model_validate(CONFIG.model_dump() | changes)
    setup = comparison_of(*[one_round()] * 3, config=config).setup
    expected = {
        "sharding": "table",
        "serving processes": "2",
        "dense model in": "float32 (auto)",
        "same scores": "of 1 requests, to 3e-07; allowed is 1e-05",
        "rows": "in each serving process; or in shard processes on this machine, asked over TCP",
        "hot rows of each card": "0.5 GB",
        "replicated tables": "up to 0 bytes",
        "shares of capacity": "50% of the 400/s that 2 shards, TCP answered in the rehearsal, the least of all arms: "
        "200/s, open loop",
    }
    assert {name: setup[name] for name in expected} == expected
    assert "memory of each card" not in setup


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (one_round(cold=run(1, why=("it was late.",))), "cold: it was late."),
        (one_round(shares=(run(1, why=("it was late.",)),)), "50% of capacity: it was late."),
        (
            one_round(busy=busy(10, client_cpu_s=1.9)),
            "throughput: the client used 95% of a core; at most 90% is allowed",
        ),
        (
            one_round(warm=failing({"timeout": 90, "http_504": 5})),
            "warm: 95 of 400 requests failed (timeout 90, http_504 5): not answered within 250 ms. "
            "Offer less (--rate, --shares), give requests longer (--timeout-ms), or make them smaller (--candidates)",
        ),
        (one_round(warm=failing({"connection": 5})), "warm: 5 of 400 requests failed (connection 5)"),
    ],
)
def test_an_invalid_run_makes_the_comparison_invalid(failed, reason):
    found = comparison_of(one_round(), failed, one_round())
    assert not found.valid
    assert found.invalid_because[0] == f"2 cards, round 2, {reason}"


@pytest.mark.parametrize(
    ("config", "dtype", "scores", "message"),
    [
        (CONFIG, "float32", [[0.5, 0.25 + 6e-7], [0.125, 0.75 - 2e-7, 0.5]], None),
        (CONFIG, "float32", [[0.5, 0.25], [0.125, 0.75, 0.501]],
         r"2 cards against 1 card in float32, request 1, candidate 2: its score is 0\.501000, expected 0\.500000; "
         r"they differ by 0\.001, allowed is 1e-05"),
        (CONFIG, "float32", [[0.5, 0.25], [0.125, 0.75, np.nan]], "request 1, candidate 2: its score is nan"),
        (CONFIG, "float32", [[0.5, 0.25], [0.125, 0.75]], "2 cards against 1 card in float32, request 1: 2 scores, 3"),
        (CONFIG, "bfloat16", [[0.5035, 0.25], [0.125, 0.75, 0.5]], None),
        (CONFIG, "bfloat16", [[0.52, 0.25], [0.125, 0.75, 0.5]], r"in bfloat16, .*allowed is 0\.01"),
        (SHARDED, "float32", [[0.5004, 0.25], [0.125, 0.75, 0.5]], r"allowed is 1e-05"),
        (SHARDED.model_copy(update={"wire_dtype": "float16"}), "float32", [[0.5004, 0.25], [0.125, 0.75, 0.5]], None),
    ],
)  # fmt: skip
def test_scores_agree_within_the_rounding_of_their_formats(config, dtype, scores, message):
    first, second = config.arms
    expected = answered([0.5, 0.25], [0.125, 0.75, 0.5], dtype=dtype)
    measurements = Measurements({first: [expected], second: [answered(*scores, dtype=dtype)]})
    with contextlib.nullcontext() if message is None else pytest.raises(LoadError, match=message):
        measurements.check_agreement(second, config)
    measurements.rounds[second] = [answered([0.5], dtype="float32" if dtype == "bfloat16" else "bfloat16")]
    with pytest.raises(LoadError, match=f"{second.name}: its dense model is computed in .*, that of 1 card in"):
        measurements.check_agreement(second, config)
