"""Long work runs in the background, rests, and can be called off."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.progress import (
    BACKGROUND_NICENESS,
    PIECE_BYTES,
    CalledOffError,
    Pace,
    Wish,
    in_background,
    lower_own_priority,
)


def test_work_runs_in_a_thread_of_its_own_and_its_result_comes_back():
    async def main():
        thread = await in_background(lambda wish: threading.current_thread().name, "staging", lambda result: None)
        assert thread == "staging"
        with pytest.raises(ZeroDivisionError):
            await in_background(lambda wish: 1 // 0, "staging", lambda result: None)

    asyncio.run(main())


def test_work_that_is_cancelled_is_called_off_and_has_ended_when_the_caller_goes_on():
    begun, ended = threading.Event(), threading.Event()

    def work(wish: Wish) -> None:
        begun.set()
        try:
            while True:
                wish.rest(60.0)
        finally:
            ended.set()

    async def main():
        task = asyncio.create_task(in_background(work, "staging", lambda result: None))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


def test_a_result_that_came_although_nobody_waits_is_freed():
    begun, go_on = threading.Event(), threading.Event()
    freed: list[str] = []

    def work(wish: Wish) -> str:
        begun.set()
        go_on.wait()
        return "rows"

    async def main():
        task = asyncio.create_task(in_background(work, "staging", freed.append))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        # Cancelled again while it waits for the thread: that changes nothing.
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert freed == ["rows"]

    asyncio.run(main())


def test_progress_ends_work_that_is_not_wanted_any_more():
    wish, seen = Wish(), []
    progress = wish.over(lambda *step: seen.append(step))
    progress("load", 1, 2)
    wish.call_off()
    with pytest.raises(CalledOffError):
        progress("load", 2, 2)
    assert seen == [("load", 1, 2)]


class Worked:
    """A clock that passes while work is done and while it rests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rested = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s
        self.rested += duration_s


@given(st.floats(0.05, 1.0), st.lists(st.floats(1e-6, 0.2), min_size=1, max_size=50))
def test_work_takes_no_more_than_its_share_of_the_time(share, pieces):
    time = Worked()
    paced = Pace(share, None, time.clock, time.sleep).over()
    for number, duration_s in enumerate(pieces):
        time.now += duration_s
        paced("load", number + 1, len(pieces))
    worked_s = sum(pieces)
    assert worked_s + time.rested == pytest.approx(worked_s / share, rel=1e-6, abs=1e-9)


@given(st.floats(1e6, 1e9), st.lists(st.floats(1e-6, 0.2), min_size=1, max_size=50))
def test_no_more_is_read_than_the_rate_allows_over_the_whole(rate, pieces):
    time = Worked()
    paced = Pace(1.0, rate, time.clock, time.sleep).over()
    total = PIECE_BYTES * len(pieces)
    for number, duration_s in enumerate(pieces):
        time.now += duration_s
        paced("load", PIECE_BYTES * (number + 1), total)
    # A single rest is bounded, so that work can be called off.
    least_s = min(total / rate, 5.0)
    assert time.now >= least_s * (1 - 1e-6)


def test_progress_is_passed_on_and_each_kind_of_work_counts_its_own_bytes():
    time, seen = Worked(), []
    paced = Pace(1.0, 1000.0, time.clock, time.sleep).over(lambda *step: seen.append(step))
    paced("checking SHA-256", 100, 100)
    paced("load", 50, 50)
    assert seen == [("checking SHA-256", 100, 100), ("load", 50, 50)]
    assert time.rested == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("share", "rate", "name"), [(0.0, None, "cpu_share"), (1.1, None, "cpu_share"), (1, 0, "bytes")]
)
def test_a_pace_that_is_none_is_refused_by_name(share, rate, name):
    with pytest.raises(ValueError, match=name):
        Pace(share, rate)


def test_a_thread_lowers_its_own_priority_and_nobody_elses():
    seen: list[int] = []

    def work() -> None:
        lower_own_priority()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [BACKGROUND_NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
