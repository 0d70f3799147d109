"""Clocks of workers: what is taken, what is withheld, and who is waited for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.training.clocks import Clocks, Consistency
from shardrank_testing.errors import raises_kind


def clocks(consistency: str, steps: list[int]) -> Clocks:
    made = Clocks(len(steps), Consistency.parse(consistency), 10.0, 0.0)
    for worker, step in enumerate(steps):
        for one in range(1, step + 1):
            made.push(worker, one)
    return made


@pytest.mark.parametrize(
    ("consistency", "released"),
    [("bsp", [True, False, False]), ("ssp:1", [True, True, False]), ("ssp:4", [True] * 3), ("asp", [True] * 3)],
)
def test_answers_wait_for_the_slowest_as_far_as_is_allowed(consistency, released):
    """Clocks are at 5, 3 and 6; answers are due to pushes of 3, 4 and 7 at most."""
    made = clocks(consistency, [5, 3, 6])
    assert [made.is_released(step) for step in (3, 4, 7)] == released


@pytest.mark.parametrize("text", ["", "BSP", "ssp", "ssp:0", "ssp:-1", "ssp:1.5", "asp:2", "bsp:1"])
def test_another_consistency_is_refused(text):
    with pytest.raises(ValueError, match="none of bsp, ssp:N"):
        Consistency.parse(text)


def test_a_step_is_taken_once_and_none_is_left_out():
    made = clocks("asp", [4, 2])
    assert [made.check(0, step) for step in (1, 4, 5)] == ["again", "again", "new"]
    for step in (0, -1, 6, 2**60):
        with raises_kind("push_step", match=f"pushes step 5 next, not {step}"):
            made.check(0, step)
    with raises_kind("push_refused", match="worker 2 is none of 0..1"):
        made.check(2, 1)


def test_who_others_wait_for_leaves_and_comes_back_behind_the_slowest():
    made = clocks("bsp", [4, 4, 3])
    for worker in (0, 1, 2):
        made.answered(worker, 100.0)
    # Nobody waits: nobody is missed.
    assert made.silent(1000.0) == []
    made.waits(0, 1000.0)
    made.waits(1, 1005.0)
    made.waits(0, 1009.0)
    assert (made.silent(1009.9), made.silent(1010.0)) == ([], [2])
    # Its own answer came later than that: it is computing.
    made.answered(2, 1006.0)
    assert (made.silent(1015.9), made.silent(1016.0)) == ([], [2])
    made.leave(2)
    assert made.slowest == 4
    assert made.is_released(4)
    with raises_kind("push_step", match="worker 2 has left: it pushes step 5 next, not 4"):
        made.check(2, 4)
    assert made.check(2, 3) == "again"
    made.push(2, made.resume_step(2))
    assert (made.is_active[2], made.slowest) == (True, 4)


def test_a_step_that_is_not_answered_yet_is_the_next_one():
    """A worker that was killed pushes it again, and none after it: the gradients of that one wait to be added up."""
    made = clocks("bsp", [1, 0])
    assert (made.resume_step(0), made.check(0, 1)) == (1, "again")
    with raises_kind("push_step", match="worker 0 is at step 1: it pushes step 1 next, not 2"):
        made.check(0, 2)
    made.push(1, 1)
    assert (made.resume_step(0), made.check(0, 2)) == (2, "new")


@given(
    st.sampled_from([("bsp", 0), ("ssp:1", 1), ("ssp:3", 3)]),
    st.lists(st.integers(0, 3), max_size=80),
)
def test_no_worker_is_further_ahead_than_is_allowed(consistency, turns):
    """Workers push in any order, each once its last push was answered; whoever may go on never waits for nothing."""
    text, bound = consistency
    made, waiting = clocks(text, [0] * 4), set[int]()
    for worker in turns:
        if worker not in waiting:
            made.push(worker, made.resume_step(worker))
            waiting.add(worker)
        waiting -= {one for one in waiting if made.is_released(made.steps[one])}
        assert max(made.steps) - min(made.steps) <= bound + 1
        assert len(waiting) < 4


@pytest.mark.parametrize(("consistency", "last"), [("bsp", 5), ("ssp:2", 7), ("ssp:9", 14)])
def test_one_that_left_may_come_back_further_ahead_where_that_is_allowed(consistency, last):
    made = clocks(consistency, [9, 4, 2])
    made.leave(2)
    assert [made.check(2, step) for step in range(made.resume_step(2), last + 1)] == ["new"] * (last - 4)
    for step in (3, 4, last + 1):
        with raises_kind("push_step", match="worker 2 has left: it pushes step 5 next"):
            made.check(2, step)
