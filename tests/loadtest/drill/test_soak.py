"""What a soak says of processes that grow, and of those that do not."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drill.load import TimeSpan
from loadtest.drill.oracle import OracleShape
from loadtest.drill.soak import (
    MIN_BLOCKS,
    Sample,
    SoakCourse,
    SoakDrillConfig,
    SoakReport,
    blocks_of,
    make_soak_report,
    run_soak_drill,
    slope_of,
)

FACTS: dict[str, Any] = {
    "registry": "directory",
    "shards": 1,
    "replicas": 1,
    "cards": 2,
    "workers": 1,
    "rate": 10.0,
    "details": (),
    "answers": 100,
}
NOISE_MB = 2.0


def test_the_slope_of_a_line_is_exact_and_its_interval_is_that_slope():
    minutes = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 7.0])
    assert slope_of(minutes, 100 + 0.25 * minutes) == pytest.approx((0.25, 0.25, 0.25))
    assert slope_of(minutes, np.full(6, 3.0)) == (0.0, 0.0, 0.0)
    assert slope_of(minutes[: MIN_BLOCKS - 1], minutes[: MIN_BLOCKS - 1]) is None


@given(st.lists(st.integers(-1000, 1000), min_size=MIN_BLOCKS, max_size=12))
def test_the_slope_is_the_median_of_those_between_all_pairs_and_lies_in_its_interval(values):
    minutes = np.arange(len(values), dtype=float)
    found = slope_of(minutes, np.array(values, float))
    assert found is not None
    pairs = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(values), 2)]
    assert found.per_min == pytest.approx(float(np.median(pairs)))
    assert min(pairs) <= found.low <= found.per_min <= found.high <= max(pairs)


def test_the_interval_of_a_leak_in_noise_has_the_leak_in_it_about_as_often_as_it_says():
    minutes, rng = np.linspace(0, 10, 30), np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        found = slope_of(minutes, 0.4 * minutes + rng.normal(0, NOISE_MB, 30))
        assert found is not None
        hits += found.low <= 0.4 <= found.high
    assert 0.92 <= hits / 300 <= 0.98


def test_blocks_are_medians_of_equal_times_and_leave_out_those_without_a_sample():
    times = np.concatenate([np.arange(0, 30), np.arange(60, 90)]).astype(float)
    values = np.stack([times, np.where(times % 3 == 0, 1000.0, 5.0)], axis=1)
    at, medians = blocks_of(times, values)
    assert len(at) == 20
    np.testing.assert_array_equal(medians[:, 0], at)
    assert set(medians[:, 1].tolist()) == {5.0}
    assert len(blocks_of(times[:0], values[:0])[0]) == 0


def report_of(
    leak_mb_per_min: float = 0.0, descriptors: tuple[int, ...] = (30,), threads: int = 6, minutes: int = 20
) -> SoakReport:
    """A process that is read once a second: it warms up by 100 MB, and has twice its memory in rollouts."""
    rng, course = np.random.default_rng(1), SoakCourse(rollouts=3, updates=90)
    course.times = [1000.0 + second for second in range(60 * minutes)]
    course.apart = [TimeSpan(begin, begin + 8.0) for begin in range(1045, 1000 + 60 * minutes, 53)]
    own = []
    for now in course.times:
        second = now - 1000
        memory = 300 - 100 * np.exp(-second / 60) + leak_mb_per_min * second / 60 + rng.normal(0, NOISE_MB)
        if any(span.begin <= now <= span.end for span in course.apart):
            memory *= 2
        count = descriptors[int(second * len(descriptors) / len(course.times))]
        own.append(Sample(memory + 50, memory, count + int(rng.random() < 0.2), threads))
    course.samples, course.process_ids = {"serve-0": own}, {"serve-0": {7}}
    return make_soak_report(SoakDrillConfig(minutes=minutes), course, FACTS)


def test_a_process_that_does_not_grow_after_it_has_warmed_up_passes():
    report = report_of()
    assert report.problems == ()
    assert [(one.process, one.what) for one in report.trends] == [("serve-0", what) for what in Sample._fields]
    assert report.measured_min == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("leak", [0.4, 1.0])
def test_a_leak_of_a_known_size_is_found_and_told(leak):
    report = report_of(leak)
    rss, memory, descriptors, threads = report.trends
    assert rss.per_min == pytest.approx(memory.per_min)
    assert memory.low <= leak <= memory.high
    assert memory.per_min == pytest.approx(leak, abs=0.1)
    assert len(report.problems) == 2
    assert report.problems[1].startswith(f"serve-0 anonymous_mb grows by {memory.per_min:.3f} MB a minute (")
    assert (descriptors.per_min, threads.per_min) == (0.0, 0.0)


def test_a_descriptor_that_each_rollout_leaves_open_is_found_and_ones_that_come_and_go_are_not():
    leaking = report_of(descriptors=tuple(range(30, 54)))
    assert leaking.problems == ("serve-0 descriptors grow from 42 to 53",)
    assert report_of(descriptors=(30, 33, 30, 33, 30, 33, 30, 33)).problems == ()
    assert report_of(descriptors=tuple(np.random.default_rng(3).integers(30, 60, 200).tolist())).problems == ()


def test_a_soak_that_is_too_short_or_whose_processes_are_started_again_does_not_pass():
    short = make_soak_report(SoakDrillConfig(), SoakCourse(updates=9), FACTS)
    assert short.problems == (
        "0 rollouts and 9 row updates came in this time; soak for longer",
        "0 samples are too few to tell what grows; soak for longer",
    )
    course = SoakCourse()
    for process_id in (os.getpid(), os.getppid()):
        course.sample({"serve-0": process_id})
    own = course.samples["serve-0"][0]
    assert own.rss_mb > own.anonymous_mb > 10
    assert (own.descriptors > 2, own.threads >= 1) == (True, True)
    again = make_soak_report(SoakDrillConfig(), course, {**FACTS, "failed": 3})
    assert "3 answers failed" in again.problems
    assert "serve-0 was started again, so what it held can't be compared" in again.problems


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_short_soak_rolls_out_updates_is_asked_badly_and_reads_every_process(tmp_path: Path):
    config = SoakDrillConfig(
        shape=OracleShape(items=6000, users=2000, tags=100),
        shards=1,
        replicas=1,
        cards=1,
        minutes=0.1,
        rate=20,
        rollout_every_s=0.5,
        updates=10,
        strangers=20,
        sample_s=0.1,
        settle_s=0,
        # So short a time tells nothing of memory.
        max_mb_per_min=1000,
    )
    report = asyncio.run(run_soak_drill(config, tmp_path))
    assert (report.failed, report.mixed, report.wrong, report.restarted) == (0, 0, 0, ())
    assert report.rollouts >= 1
    assert min(report.answers, report.bad_requests, report.fresh_requests) > 10
    assert report.updates > 0
    assert {one.process for one in report.trends} == {"coordinator", "shard-0-0", "serve-0"}
    assert not [one for one in report.problems if "request" in one]
