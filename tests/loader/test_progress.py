"""Long work runs in the background, rests, and can be called off."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.progress import CalledOffError, CancelToken, in_background, no_progress, throttled
from shardrank_testing.rollout_fleet import Clock


async def test_work_runs_in_a_thread_and_its_result_comes_back():
    thread = await in_background(lambda wish: threading.current_thread().name, "staging", lambda result: None)
    assert thread == "staging"
    with pytest.raises(ZeroDivisionError):
        await in_background(lambda wish: 1 // 0, "staging", lambda result: None)


async def test_cancelled_work_has_ended_when_the_caller_goes_on():
    begun, ended = threading.Event(), threading.Event()

    def work(wish: CancelToken) -> None:
        begun.set()
        try:
            while True:
                wish.rest(60.0)
        finally:
            ended.set()

    task = asyncio.create_task(in_background(work, "staging", lambda result: None))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_result_that_nobody_waits_for_is_freed():
    begun, go_on = threading.Event(), threading.Event()
    freed: list[str] = []

    def work(wish: CancelToken) -> str:
        begun.set()
        go_on.wait()
        return "rows"

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


def test_progress_ends_work_that_is_not_wanted_any_more():
    wish, seen = CancelToken(), []
    progress = wish.over(lambda *step: seen.append(step))
    progress("load", 1, 2)
    wish.call_off()
    with pytest.raises(CalledOffError):
        progress("load", 2, 2)
    assert seen == [("load", 1, 2)]


@given(st.floats(0.05, 1.0), st.lists(st.floats(1e-6, 0.2), min_size=1, max_size=50))
def test_work_takes_no_more_than_its_share_of_the_time(share, pieces):
    clock, rests = Clock(0.0), []

    def sleep(duration_s: float) -> None:
        clock.now += duration_s
        rests.append(duration_s)

    paced = throttled(no_progress, share, sleep, clock)
    for number, duration_s in enumerate(pieces):
        clock.now += duration_s
        paced("load", number + 1, len(pieces))
    assert sum(pieces) + sum(rests) == pytest.approx(sum(pieces) / share, rel=1e-6, abs=1e-9)
