"""What can't be answered in time is refused at once or dropped, by a clock of the test's."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import OverloadedError
from serving.limits import RequestLimits
from serving.observe.calls import Call
from serving.rank.batcher import KEPT, REMEMBERED_S, SLOWEST, Batcher
from shardrank_testing.waiting import Clock, Model

LIMITS = RequestLimits(max_batch_candidates=100)


@pytest.fixture
def model() -> Model:
    return Model()


def one_batch(batcher: Batcher, clock: Clock, seconds: float) -> list[Call]:
    batch = batcher.pop(lambda: None)
    assert batch
    clock.now += seconds
    batcher.ended(batch)
    return batch


def warmed(model: Model, full_s: float) -> tuple[Batcher, Clock]:
    """A batcher that has seen full batches, which took so long: as many as it takes to know."""
    clock = Clock()
    batcher = Batcher(LIMITS, clock)
    for _ in range(SLOWEST + 1):
        batcher.submit(model.rank(100))
        for one in one_batch(batcher, clock, full_s):
            one.lease.release()
    return batcher, clock


def test_a_request_that_would_be_late_is_refused_at_once(model):
    batcher, _ = warmed(model, 1.0)
    batcher.submit(model.rank(100))
    # 1 s for what waits, 1 s for a batch of its own: within half of what it has.
    refusal = batcher.overload(3.9)
    says = "1 requests queued; expected latency 2000 ms, the limit is 1/2 of the 3900 ms left until the deadline"
    assert str(refusal) == says
    assert batcher.overload(4.0) is None


def test_batches_in_flight_count_for_their_expected_time(model):
    batcher, clock = warmed(model, 1.0)
    batcher.submit(model.rank(100))
    assert batcher.pop(lambda: None)
    batcher.submit(model.rank(50))
    # 1 s in flight, half a second that waits, and a batch of 1 s.
    assert "expected latency 2500 ms" in str(batcher.overload(4.0))
    clock.now += 0.8
    assert batcher.overload(4.0) is None


def test_overload_is_known_before_a_request_is_read(model):
    batcher, clock = warmed(model, 1.0)
    clock.now += 2 * REMEMBERED_S
    assert batcher.overload(0.0) is None
    batcher.submit(model.rank(100, deadline=clock.now + 3.0, began=clock.now))
    # It would be the second full batch.
    assert isinstance(batcher.overload(None), OverloadedError)
    assert isinstance(batcher.overload(60.0), OverloadedError)
    assert batcher.num_waiting == 1
    batcher.submit(model.rank(100, deadline=clock.now + 60.0, began=clock.now))
    assert batcher.overload(None) is None
    assert batcher.overload(6.1) is None
    assert isinstance(batcher.overload(5.9), OverloadedError)
    assert one_batch(batcher, clock, 1.0)
    assert one_batch(batcher, clock, 1.0)
    assert batcher.overload(0.0) is None


def test_what_can_not_be_met_any_more_is_dropped(model):
    batcher, clock = warmed(model, 1.0)
    late, good = (model.rank(80, deadline=clock.now + seconds) for seconds in (3.5, 8.0))
    batcher.submit(late)
    batcher.submit(good)
    # There would be 0.7 s, and it takes 0.8 s.
    clock.now += 2.8
    assert batcher.pop(lambda: None) == [good]
    with pytest.raises(OverloadedError, match="could not be met"):
        late.future.result(0)
    assert model.leases == 1


def test_a_batch_grows_as_far_as_its_earliest_deadline_allows(model):
    batcher, clock = warmed(model, 1.0)
    waiting = [model.rank(30, deadline=clock.now + seconds) for seconds in (10.0, 5.0, 10.0)]
    for one in waiting:
        batcher.submit(one)
    # The second has 0.7 s: enough for two of them, and not for three.
    clock.now += 4.3
    assert batcher.pop(lambda: None) == waiting[:2]
    assert batcher.pop(lambda: None) == waiting[2:]


def test_after_stalls_replicas_are_never_idle(model):
    batcher, clock = warmed(model, 0.1)
    for _ in range(KEPT):
        batcher.submit(model.rank(1))
        one_batch(batcher, clock, 100.0)
    began, batches = clock.now, 0
    while True:
        # An empty queue takes what comes, however late it seems, and the last one is tried.
        first = model.rank(1, deadline=clock.now + 0.5)
        batcher.submit(first)
        if batcher.overload(0.5) is None:
            break
        assert one_batch(batcher, clock, 0.001) == [first]
        batches += 1
    assert batches == KEPT - SLOWEST
    assert clock.now - began < 0.01


def test_one_stall_lets_nobody_be_refused(model):
    batcher, clock = warmed(model, 0.1)
    batcher.submit(model.rank(1))
    one_batch(batcher, clock, 1.0)
    for _ in range(20):
        batcher.submit(model.rank(10, deadline=clock.now + 0.9))
    assert batcher.num_waiting == 20


REFUSED_S, PARSED_S, BATCH_S, CANDIDATE_S = 80e-6, 300e-6, 500e-6, 10e-6


@pytest.mark.parametrize(("deadline_s", "noise"), [(1.0, 0.1), (0.2, 0.1), (0.2, 0.3), (0.05, 0.1)])
def test_of_three_times_the_capacity_one_is_answered_in_time(model, deadline_s, noise):
    """One core that does everything, by turns: it reads what has come, refuses or parses it, and ranks a batch."""
    rng, clock = np.random.default_rng(1), Clock()
    batcher, seconds = Batcher(RequestLimits(), clock), 6.0
    per_batch = 2048 // 300
    capacity = per_batch / (BATCH_S + per_batch * (300 * CANDIDATE_S + PARSED_S))
    came = np.cumsum(rng.exponential(1 / (3 * capacity), int(3 * capacity * seconds))).tolist()
    arrived: dict[int, float] = {}
    in_time, late, refused_s, batches_s = 0, 0, list[float](), list[float]()
    number = 0
    while number < len(came):
        has_come = clock.now
        while number < len(came) and came[number] <= has_come:
            is_refused = batcher.overload(None) is not None
            if not is_refused:
                clock.now += PARSED_S
                pending = model.rank(int(rng.integers(200, 401)), clock.now + deadline_s, began=clock.now)
                arrived[id(pending)] = came[number]
                batcher.submit(pending)
            else:
                clock.now += REFUSED_S
                refused_s.append(clock.now - came[number])
            number += 1
        if not batcher.num_waiting:
            clock.now = max(clock.now, came[number]) if number < len(came) else clock.now
            continue
        batch, began = batcher.pop(lambda: None), clock.now
        assert batch
        took_s = BATCH_S + CANDIDATE_S * sum(one.request.num_candidates for one in batch)
        clock.now += took_s * float(np.exp(rng.normal(-(noise**2) / 2, noise)))
        batches_s.append(clock.now - began)
        for one in batch:
            is_in_time = clock.now - arrived[id(one)] <= deadline_s
            in_time += is_in_time
            late += not is_in_time
        batcher.ended(batch)
    assert in_time >= 0.9 * capacity * clock.now
    assert late <= 0.01 * in_time
    assert len(refused_s) > 1.5 * in_time
    assert np.percentile(refused_s, 99) <= np.percentile(batches_s, 99) + 0.005
