from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.lazy_timer import LazyTimer


@dataclass
class HandledTimer:
    """What a loop gives for a call later."""

    when: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class HandDrivenLoop:
    """An event loop's clock and timers, moved by hand."""

    now: float = 100.0
    timers: list[HandledTimer] = field(default_factory=list)
    made: int = 0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> HandledTimer:
        self.made += 1
        self.timers.append(HandledTimer(self.now + delay, callback))
        return self.timers[-1]

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [one for one in self.timers if not one.cancelled and one.when <= end]:
            first = min(due, key=lambda one: one.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            first.callback()
        self.now = end


@pytest.fixture
def loop():
    return HandDrivenLoop()


def test_it_calls_back_once_when_its_time_has_passed(loop):
    calls = []
    timer = LazyTimer(loop)
    timer.start(4.0, lambda: calls.append(loop.now))
    assert timer.is_running
    loop.pass_time(3.9)
    assert calls == []
    loop.pass_time(20)
    assert calls == [pytest.approx(104)]
    assert not timer.is_running


def test_many_starts_and_stops_cost_the_loop_one_timer(loop):
    timer = LazyTimer(loop)
    for _ in range(1000):
        timer.start(4.0, lambda: pytest.fail("it was stopped"))
        loop.pass_time(0.001)
        timer.stop()
    assert loop.made == 1
    loop.pass_time(100)
    assert loop.made == 1


def test_a_shorter_time_is_kept_even_if_a_longer_one_was_asked_for_before(loop):
    calls = []
    timer = LazyTimer(loop)
    timer.start(60, lambda: calls.append("long"))
    timer.start(1, lambda: calls.append("short"))
    loop.pass_time(1)
    assert calls == ["short"]
    loop.pass_time(100)
    assert calls == ["short"]


def test_a_closed_one_leaves_nothing_in_the_loop(loop):
    timer = LazyTimer(loop)
    timer.start(1, lambda: pytest.fail("it was closed"))
    timer.close()
    assert all(one.cancelled for one in loop.timers)
    loop.pass_time(10)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(1, 20)),
        st.tuples(st.just("stop"), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 15)),
    ),
    max_size=40,
)


@given(STEPS)
def test_it_fires_when_a_plain_timer_would(steps):
    loop, fired, expected = HandDrivenLoop(), [], []
    timer, due = LazyTimer(loop), None
    for what, number in steps:
        if what == "start":
            timer.start(number, lambda: fired.append(loop.now))
            due = loop.now + number
        elif what == "stop":
            timer.stop()
            due = None
        else:
            if due is not None and due <= loop.now + number:
                expected.append(due)
                due = None
            loop.pass_time(number)
    assert fired == pytest.approx(expected)
