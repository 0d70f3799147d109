"""Who is ejected and let in again, and how many hedges and retries there may be, by a clock of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.outliers import Outliers, ReplicaEvents, ReplicaHealth, ReplicaPolicy, RetryBudget

MS = 1e-3


class Shard:
    """Replicas whose answers a test makes up."""

    def __init__(self, count: int, **policy: float) -> None:
        self.now = 1000.0
        self.ejections: list[str] = []
        self.out = 0
        self.policy = ReplicaPolicy.model_validate(policy)
        events = ReplicaEvents(ejected=lambda shard, reason: self.ejections.append(reason), ejected_change=self._count)
        self.outliers = Outliers(self.policy, 0, lambda: self.now, events)
        self.replicas = [self.outliers.join() for _ in range(count)]

    def _count(self, shard: int, more: int) -> None:
        self.out += more

    @property
    def ejected(self) -> list[int]:
        return [number for number, one in enumerate(self.replicas) if self.outliers.is_ejected(one)]

    def answer(self, *answer_ms: float, times: int = 40) -> None:
        """Each replica that is not asked last answers, in its own time, again and again over two seconds."""
        for _ in range(times):
            self.now += 2.0 / times
            for health, taken in zip(self.replicas, answer_ms, strict=True):
                if not self.outliers.comes_last(health, 0):
                    self.outliers.answered(health, taken * MS)


def fail(shard: Shard, health: ReplicaHealth, times: int = 3) -> None:
    for _ in range(times):
        shard.outliers.failed(health)


def test_only_a_much_slower_replica_is_ejected():
    shard = Shard(3, base_ejection_s=100, max_ejection_s=100)
    assert shard.outliers.patience_s == pytest.approx(0.1)
    shard.answer(2, 5, 10)
    # 10 ms are less than three times the median of 2 and 5 ms, and 5 ms more.
    assert shard.ejected == []
    shard.answer(2, 5, 20, times=80)
    assert shard.ejected == [2]
    assert shard.ejections == ["slow"]
    assert shard.outliers.comes_last(shard.replicas[2], 0)
    slow = Shard(2)
    slow.answer(200, 220, times=80)
    # A hedge is sent after three times the faster one's median.
    assert slow.outliers.patience_s == pytest.approx(0.6)


def test_an_ejection_and_its_end_are_logged_once_each(caplog):
    caplog.set_level("INFO", "router")
    shard = Shard(2)
    fail(shard, shard.replicas[1])
    shard.now += 2
    fail(shard, shard.replicas[1])
    shard.now += 5
    shard.answer(2, 2)
    assert [line.strip() for line in caplog.messages] == ["is ejected: failures", "is in service again"]


def test_few_slow_answers_eject_nobody():
    shard = Shard(2)
    for _ in range(20):
        shard.answer(2, 2, times=20)
        # A stall of a replica, such as a pause for collecting garbage.
        for _ in range(8):
            shard.outliers.answered(shard.replicas[1], 400 * MS)
    shard.answer(200, 210)
    assert shard.ejected == []
    seldom = Shard(2)
    for _ in range(20):
        seldom.answer(2, 500, times=2)
    assert seldom.ejected == []


def test_failures_in_a_row_eject():
    shard = Shard(2)
    fail(shard, shard.replicas[0], 2)
    shard.outliers.answered(shard.replicas[0], 2 * MS)
    fail(shard, shard.replicas[0], 2)
    assert shard.ejected == []
    shard.outliers.overtaken(shard.replicas[0], 150 * MS)
    assert shard.ejected == [0]
    assert shard.ejections == ["failures"]


def test_ejections_double_up_to_a_limit_until_good_service():
    shard = Shard(2, base_ejection_s=1, max_ejection_s=8, probes=1)
    bad = shard.replicas[0]

    def ejection_s() -> float:
        fail(shard, bad)
        assert shard.ejected == [0]
        duration_s = bad.ejected_until - shard.now
        shard.now = bad.ejected_until
        assert shard.ejected == []
        shard.outliers.answered(bad, 2 * MS)
        return duration_s

    assert [ejection_s() for _ in range(6)] == pytest.approx([1, 2, 4, 8, 8, 8])
    shard.now += 8.1
    assert ejection_s() == pytest.approx(1)
    with pytest.raises(ValidationError, match="max_ejection_s 1 is shorter than base_ejection_s 2"):
        ReplicaPolicy(base_ejection_s=2, max_ejection_s=1)


def test_probes_let_a_replica_in_or_eject_it_again():
    shard = Shard(2, probes=3)
    back, outliers = shard.replicas[0], shard.outliers
    fail(shard, back)
    assert outliers.comes_last(back, 0)
    assert shard.out == 1
    shard.now += 1.0
    assert not outliers.comes_last(back, 0)
    assert outliers.comes_last(back, 1)
    outliers.answered(back, 2 * MS)
    outliers.failed(back)
    assert shard.ejected == [0]
    shard.now += 2.0
    for _ in range(3):
        assert outliers.comes_last(back, 1)
        outliers.answered(back, 2 * MS)
    assert not outliers.comes_last(back, 5)
    assert shard.out == 0
    assert shard.ejections == ["failures", "failures"]


def test_slow_probes_do_not_let_a_replica_in():
    shard = Shard(2)
    shard.answer(2, 50)
    for probe_ms, ejected in ((50, [1]), (3, [])):
        assert shard.ejected == [1]
        shard.now = shard.replicas[1].ejected_until
        for _ in range(3):
            shard.outliers.answered(shard.replicas[0], 2 * MS)
            shard.outliers.answered(shard.replicas[1], probe_ms * MS)
        assert shard.ejected == ejected
    assert not shard.outliers.comes_last(shard.replicas[1], 9)


def test_unfit_ejection_ignores_share_limit_and_never_doubles():
    """An unfit replica lacks the version or the deltas that were requested."""
    shard = Shard(2, max_ejected_share=0)
    for _ in range(3):
        for health in shard.replicas:
            shard.outliers.unfit(health)
        assert shard.ejected == [0, 1]
        shard.now += 1.0
        assert shard.ejected == []
    assert shard.out == 2
    shard.outliers.close()
    assert shard.out == 0
    # One that leaves and answers later is not counted.
    shard = Shard(2)
    gone = shard.replicas.pop()
    shard.outliers.leave(gone)
    fail(shard, gone)
    shard.outliers.unfit(gone)
    shard.outliers.answered(gone, 2 * MS)
    assert (shard.ejections, shard.out) == ([], 0)


events = st.lists(
    st.tuples(
        st.sampled_from(["failed", "overtaken", "answered", "leave", "join"]), st.integers(0, 7), st.floats(0, 3)
    ),
    max_size=60,
)


@given(st.integers(1, 8), st.floats(0, 1), events)
def test_never_more_than_the_share_is_ejected(count, share, course):
    shard = Shard(count, max_ejected_share=share, failures=1, min_answers=1, slow_excess_ms=0)
    outliers, replicas = shard.outliers, shard.replicas
    for what, number, seconds in course:
        shard.now += seconds
        if what == "join":
            replicas.append(outliers.join())
        elif replicas:
            health = replicas[number % len(replicas)]
            if what == "failed":
                outliers.failed(health)
            elif what == "overtaken":
                outliers.overtaken(health, seconds)
            elif what == "answered":
                outliers.answered(health, seconds)
            else:
                replicas.remove(health)
                outliers.leave(health)
        assert len(shard.ejected) <= math.ceil(share * len(replicas))
        assert len(shard.ejected) < max(1, len(replicas))
        assert shard.out == sum(one.reason is not None for one in replicas)


asked = st.lists(st.tuples(st.sampled_from(["lookup", "again"]), st.floats(0, 0.5)), max_size=300)


@given(st.floats(0, 0.5), st.floats(0, 5), st.floats(0, 20), asked)
def test_retries_stay_within_their_budget(share, per_s, reserve, course):
    now = 50.0
    policy = ReplicaPolicy(budget_share=share, budget_per_s=per_s, budget_reserve=reserve)
    budget = RetryBudget(policy, lambda: now)
    lookups = taken = 0
    for what, seconds in course:
        now += seconds
        if what == "lookup":
            budget.earn()
            lookups += 1
        else:
            taken += budget.spend()
        assert taken <= reserve + share * lookups + per_s * (now - 50.0) + 1e-6


def test_a_busy_shard_may_retry_a_tenth_of_its_lookups():
    budget = RetryBudget(ReplicaPolicy(budget_per_s=0, budget_reserve=5), lambda: 0.0)
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    taken = 0
    for _ in range(1000):
        budget.earn()
        taken += budget.spend()
    assert taken in (99, 100)
    idle = RetryBudget(ReplicaPolicy(budget_reserve=0), lambda: 0.0)
    idle.earn()
    assert not idle.spend()
