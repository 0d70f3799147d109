"""What is recorded of requests, and the percentiles and seconds that follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.result import (
    EXAMPLES_OF_A_KIND,
    Done,
    GeneratorProcess,
    LoadResult,
    Ready,
    Recorder,
    invalid_because,
    make_result,
    percentiles,
)
from loadtest.load.senders import NEVER, Failure, Outgoing
from shardrank_testing.load_results import example_run

BEGIN = 100.0
TIMES_US = st.lists(st.one_of(st.integers(1, 5000), st.integers(1, 600_000_000)), min_size=1, max_size=300)


def recorded(*requests: tuple[float, float, float, float, Failure | None]) -> Recorder:
    """Record requests by due, turn, sent and ended, in seconds of the run, and failure."""
    recorder = Recorder(BEGIN)
    for due, turn, sent, ended, failure in requests:
        request = Outgoing(0, due, BEGIN + due, BEGIN + 9.0, BEGIN + turn, finished_at=BEGIN + ended)
        request.sent = NEVER if sent == NEVER else BEGIN + sent
        recorder.add(request, failure)
    return recorder


def result_of(*processes: Recorder, warmup_s: float = 0.0, duration_s: float = 2.0) -> LoadResult:
    load = OfferedLoad(target="http://a", slo_ms=20)
    run = RunConfig(rate=1, warmup_s=warmup_s, duration_s=duration_s)
    ready = [Ready(requests=1, model="m", workload="w")] * len(processes)
    done = [Done(process.records(), cpu_s=0.1, connections=1) for process in processes]
    return make_result(load, run, ready, 0.0, done)


@given(times_us=TIMES_US, missing=st.integers(0, 20))
def test_percentiles_are_values_by_rank(times_us, missing):
    found = percentiles(np.array(times_us) / 1e6, len(times_us) + missing)
    in_order, total = sorted(times_us), len(times_us) + missing
    for share, value in ((500, found.p50_ms), (900, found.p90_ms), (990, found.p99_ms), (999, found.p999_ms)):
        rank = max(1, math.ceil(share * total / 1000))
        assert value == (in_order[rank - 1] / 1000 if rank <= len(in_order) else None)
    assert found.min_ms == in_order[0] / 1000
    assert found.max_ms == (None if missing else in_order[-1] / 1000)
    assert found.mean_ms == (None if missing else pytest.approx(np.mean(times_us) / 1000))
    assert set(percentiles([], missing).model_dump().values()) == {None}


def test_warmup_is_in_the_time_line_alone():
    process = recorded(
        (0.9, 0.9, 0.9, 1.9, None),  # due in the warm-up, answered after it
        (1.0, 1.001, 1.005, 1.010, None),
        (2.5, 2.5, 2.5, 2.530, None),  # too late for the deadline
    )
    result = result_of(process, warmup_s=1.0)
    assert (result.due, result.sent, result.answered, result.within_slo) == (2, 2, 2, 1)
    seconds = [(second.due, second.ok, second.in_flight) for second in result.time_line]
    assert seconds == [(1, 1, 1), (1, 1, 0), (1, 1, 0)]
    assert (result.latency.min_ms, result.latency.max_ms, result.service.min_ms) == (10, 30, 5)
    assert result.time_line[0].p99_ms == 1000
    assert result.generator.processes[0].lag_max_ms == 1


def test_failures_are_counted_by_kind_over_all_processes():
    timeout, refused = Failure("timeout"), Failure("connect", "refused")
    first = recorded((0.1, 0.1, 0.1, 1.1, timeout), (0.2, 0.2, NEVER, 0.3, refused))
    second = recorded((1.2, 1.2, NEVER, 1.3, refused), (1.5, 1.5, 1.5, 1.6, None), (1.9, 1.9, 1.9, 2.6, None))
    result = result_of(first, second)
    assert (result.errors, result.due, result.sent, result.answered) == ({"connect": 2, "timeout": 1}, 5, 3, 2)
    assert result.error_examples == ("connect: refused",) * 2
    # 2 of 5 were answered: half of all that were due has no time.
    assert result.latency_of_due.p50_ms is None
    assert [(one.due, one.ok, one.errors, one.in_flight) for one in result.time_line] == [(2, 0, 2, 1), (3, 2, 1, 1)]


def test_examples_of_a_kind_are_few_and_short():
    failure = Failure("http_503", "x" * 1000)
    examples = recorded(*[(0.5, 0.5, 0.5, 0.6, failure)] * 10).records().examples
    assert len(examples) == EXAMPLES_OF_A_KIND
    assert max(map(len, examples)) < 400


@pytest.mark.parametrize(
    ("shares", "lag_ms", "due", "reason"),
    [
        ((0.2, 0.9), 0.5, 20, None),
        ((0.2, 0.95), 0.5, 20, "process 1 that sends used 95% of a core"),
        ((0.1,), 1.1, 20, "late"),
        ((0.1,), 0.5, 0, "no request was due"),
    ],
)
def test_reasons_why_a_run_is_not_valid(shares, lag_ms, due, reason):
    processes = tuple(
        GeneratorProcess(cpu_share=share, due=10, connections=1, lag_p99_ms=0.1, lag_max_ms=0.2) for share in shares
    )
    changed = {"processes": processes, "lag_p99_ms": lag_ms, "max_lag_p99_ms": 1.0}
    reasons = invalid_because(example_run().generator.model_copy(update=changed), due)
    assert len(reasons) == (reason is not None)
    assert all(reason in text for text in reasons)
