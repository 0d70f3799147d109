from __future__ import annotations

import pytest

from loadtest.load.recorder import MAX_KINDS, NEVER, OK, RECORDS_PER_FLUSH, Recorder


def test_what_was_due_in_the_warm_up_is_in_the_seconds_alone():
    recorder = Recorder(warmup_s=1.0, until_s=3.0, slo_s=0.02)
    recorder.add(0.9, 0.9, 0.9, 1.9, OK)  # due in the warm-up, answered after it
    recorder.add(1.0, 1.001, 1.005, 1.010, OK)
    recorder.add(2.5, 2.5, 2.5, 2.530, OK)  # too late for the deadline
    records = recorder.records()
    assert records.latency.count == records.sent == 2
    assert records.within_slo == 1
    assert records.by_second[:2] == [[1, 1, 1], [1, 1, 1]]
    assert records.latency.min_us == 10_000
    assert records.latency.max_us == 30_000
    assert records.service.min_us == 5_000
    assert records.lag.max_us == 1_000
    assert records.latency_by_second[0].max_us == 1_000_000


def test_failures_are_counted_by_kind_and_are_in_no_latency():
    recorder = Recorder(0.0, 2.0, 1.0)
    timeout, refused = recorder.failure("timeout"), recorder.failure("connect", "refused")
    recorder.add(0.1, 0.1, 0.1, 1.1, timeout)
    recorder.add(0.2, 0.2, NEVER, 0.3, refused)
    recorder.add(1.2, 1.2, NEVER, 1.3, refused)
    recorder.add(1.5, 1.5, 1.5, 1.6, OK)
    records = recorder.records()
    assert records.errors == {"timeout": 1, "connect": 2}
    assert records.sent == 2
    assert records.examples == ("connect: refused",)
    assert records.latency.count == records.service.count == 1
    assert records.lag.count == 4
    due, ok, turns, ends = records.by_second
    assert (due, ok) == ([2, 2], [0, 1])
    assert (turns, ends) == ([2, 2], [1, 3])


def test_what_ends_after_the_run_is_out_at_its_end():
    recorder = Recorder(0.0, 1.5, 1.0)
    recorder.add(1.4, 1.4, 1.4, 2.6, OK)
    records = recorder.records()
    due, _, turns, ends = records.by_second
    assert (turns, ends) == ([0, 1], [0, 0])
    assert due == [0, 1]


def test_many_records_are_sorted_in_as_they_come():
    recorder = Recorder(0.0, 10.0, 1.0)
    count = 2 * RECORDS_PER_FLUSH + 5
    for number in range(count):
        begin = number * 10.0 / count
        recorder.add(begin, begin, begin, begin + 0.001, OK)
    assert recorder.ok == 2 * RECORDS_PER_FLUSH
    records = recorder.records()
    assert records.latency.count == sum(records.by_second[1]) == count
    assert records.latency.sum_us == pytest.approx(1000 * count, rel=1e-3)


def test_the_recent_latency_is_that_since_it_was_last_taken():
    recorder = Recorder(0.0, 10.0, 1.0)
    recorder.add(0.0, 0.0, 0.0, 0.005, OK)
    assert recorder.take_recent().max_us == 5000
    recorder.add(0.1, 0.1, 0.1, 0.102, OK)
    assert recorder.take_recent().max_us == 2000
    assert recorder.take_recent().count == 0


def test_kinds_and_examples_are_limited():
    recorder = Recorder(0.0, 1.0, 1.0)
    for number in range(2 * MAX_KINDS):
        for _ in range(10):
            recorder.add(0.5, 0.5, 0.5, 0.6, recorder.failure(f"kind_{number}", "x" * 1000))
    records = recorder.records()
    assert len(records.errors) <= MAX_KINDS + 1
    assert sum(records.errors.values()) == 20 * MAX_KINDS
    assert len(records.examples) <= 3 * (MAX_KINDS + 1)
    assert max(map(len, records.examples)) < 400
