from __future__ import annotations

import concurrent.futures
import threading

import numpy as np
import pytest

from serving.errors import OverloadedError, ShuttingDownError
from serving.formats.requests import LookupRequest, RankRequest
from serving.limits import RequestLimits
from serving.observe.calls import Call
from serving.rank.batcher import Batcher, Pending, finish
from shard_node.bags import KeyedBags
from shard_node.errors import DeadlineExceededError
from shard_node.generation import Generations

EMPTY = KeyedBags.from_lengths(*(np.zeros(0, dtype) for dtype in (np.int32, np.int64, np.int64, np.int64)))
FAR = 1e9


def rank_request(num_candidates: int, bags: KeyedBags) -> RankRequest:
    dense = np.zeros((num_candidates, 0), np.float32)
    return RankRequest(bags, num_candidates, np.zeros(0, np.float32), dense, timeout_s=1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Model:
    """A version with leases that can be counted."""

    def __init__(self) -> None:
        self.generations: Generations[None] = Generations(lambda payload: None)
        self.generations.stage("films", 1, None)
        self.generations.flip("films", 1)

    @property
    def leases(self) -> int:
        return self.generations.all()[0].leases

    def rank(self, num_candidates: int = 1, deadline: float = FAR) -> Pending:
        return self.pending(rank_request(num_candidates, EMPTY), deadline)

    def sized(self, num_candidates: int, num_ids: int, longest: int) -> Pending:
        """A rank request of some cost."""
        bags = KeyedBags.from_lengths(
            *(np.array([one], dtype) for one, dtype in ((0, np.int32), (1, np.int64), (num_ids, np.int64))),
            np.zeros(num_ids, np.int64),
        )
        pending = self.pending(rank_request(num_candidates, bags), FAR)
        pending.longest_sequence = longest
        return pending

    def lookup(self) -> Pending:
        return self.pending(LookupRequest(EMPTY, timeout_s=1.0, num_floats=0), FAR)

    def pending(self, request: RankRequest | LookupRequest, deadline: float) -> Pending:
        call, lease = Call("embedded", "rank", 0.0), self.generations.lease("films")
        return Pending(request, lease, deadline, call, concurrent.futures.Future(), None)


@pytest.fixture
def model() -> Model:
    return Model()


def wake_counter() -> tuple[list[int], object]:
    calls: list[int] = []
    return calls, lambda: calls.append(1)


def test_an_idle_replica_is_woken_by_the_first_request_and_only_once(model):
    batcher, (calls, wake) = Batcher(RequestLimits()), wake_counter()
    assert batcher.take(wake) == []
    first, second = model.rank(), model.rank()
    batcher.submit(first)
    batcher.submit(second)
    assert calls == [1]
    assert batcher.take(wake) == [first, second]


def test_requests_are_joined_up_to_the_limit_of_candidates_in_order(model):
    batcher, (_, wake) = Batcher(RequestLimits(max_batch_candidates=10)), wake_counter()
    waiting = [model.rank(count) for count in (4, 6, 1, 30, 2)]
    for one in waiting:
        batcher.submit(one)
    assert batcher.take(wake) == waiting[:2]
    assert batcher.take(wake) == waiting[2:3]
    # More than a batch's limit by itself: it goes alone.
    assert batcher.take(wake) == waiting[3:4]
    assert batcher.take(wake) == waiting[4:]


def test_requests_are_joined_up_to_the_limit_of_requests(model):
    batcher, (_, wake) = Batcher(RequestLimits(max_batch_requests=2)), wake_counter()
    waiting = [model.rank() for _ in range(3)]
    for one in waiting:
        batcher.submit(one)
    assert batcher.take(wake) == waiting[:2]
    assert batcher.take(wake) == waiting[2:]


def test_a_lookup_goes_alone(model):
    batcher, (_, wake) = Batcher(RequestLimits()), wake_counter()
    waiting = [model.rank(), model.lookup(), model.lookup(), model.rank()]
    for one in waiting:
        batcher.submit(one)
    assert [batcher.take(wake) for _ in waiting] == [[one] for one in waiting]


def test_a_full_queue_refuses_at_once_and_gives_the_lease_back(model):
    batcher = Batcher(RequestLimits(max_queue=2))
    batcher.submit(model.rank())
    batcher.submit(model.rank())
    third = model.rank()
    with pytest.raises(OverloadedError, match="max_queue = 2"):
        batcher.submit(third)
    assert batcher.num_waiting == 2
    assert model.leases == 2


def test_what_expired_or_was_abandoned_is_dropped_before_it_is_run(model):
    clock = Clock()
    batcher, (_, wake) = Batcher(RequestLimits(), clock), wake_counter()
    expired, abandoned, alive = model.rank(deadline=5.0), model.rank(), model.rank()
    for one in (expired, abandoned, alive):
        batcher.submit(one)
    abandoned.abandoned = True
    clock.now = 6.0
    assert batcher.take(wake) == [alive]
    with pytest.raises(DeadlineExceededError):
        expired.future.result(0)
    assert model.leases == 1


def test_requests_are_joined_up_to_the_limit_of_ids(model):
    batcher, (_, wake) = Batcher(RequestLimits(max_batch_ids=100)), wake_counter()
    waiting = [model.sized(1, num_ids, 0) for num_ids in (60, 40, 1, 500, 2)]
    for one in waiting:
        batcher.submit(one)
    assert [batcher.take(wake) for _ in range(4)] == [waiting[:2], waiting[2:3], waiting[3:4], waiting[4:]]


def test_a_long_history_is_not_joined_with_many_candidates_of_others(model):
    batcher, (_, wake) = Batcher(RequestLimits(max_batch_pairs=1000)), wake_counter()
    # candidates x the longest sequence of the batch, to which all others are padded
    waiting = [model.sized(count, 1, longest) for count, longest in ((10, 50), (10, 20), (1, 200), (4, 10), (50, 50))]
    for one in waiting:
        batcher.submit(one)
    assert [batcher.take(wake) for _ in range(3)] == [waiting[:2], waiting[2:4], waiting[4:]]


def test_a_full_queue_drops_what_nobody_waits_for_before_it_refuses(model):
    clock = Clock()
    batcher = Batcher(RequestLimits(max_queue=3), clock)
    expired, abandoned, alive = model.rank(deadline=5.0), model.rank(), model.rank()
    for one in (expired, abandoned, alive):
        batcher.submit(one)
    abandoned.abandoned = True
    clock.now = 6.0
    newest = [model.rank(), model.rank()]
    for one in newest:
        batcher.submit(one)
    with pytest.raises(DeadlineExceededError):
        expired.future.result(0)
    with pytest.raises(OverloadedError, match="max_queue = 3"):
        batcher.submit(model.rank())
    assert batcher.take(lambda: None) == [alive, *newest]


def test_a_replica_whose_loop_has_ended_is_passed_over_and_the_next_idle_one_is_woken(model):
    batcher, (calls, wake) = Batcher(RequestLimits()), wake_counter()

    def ended() -> None:
        raise RuntimeError("Event loop is closed")

    assert batcher.take(wake) == []
    assert batcher.take(ended) == []
    waiting = model.rank()
    batcher.submit(waiting)
    assert calls == [1]
    # Nobody is left to be woken: the request is queued all the same, and its lease is not the caller's any more.
    assert batcher.take(wake) == [waiting]
    assert batcher.take(ended) == []
    batcher.submit(model.rank())
    assert (batcher.num_waiting, model.leases) == (1, 2)
    assert len(batcher.take(wake)) == 1
    assert batcher.take(ended) == []
    batcher.close()


def test_the_longest_sequence_is_that_of_the_features_that_are_not_pooled(model):
    bags = KeyedBags.from_lengths(
        np.arange(3, dtype=np.int32), np.array([1, 1, 2]), np.array([9, 3, 8, 2]), np.zeros(22, np.int64)
    )
    for is_none, longest in (([True, True, False], 9), ([False, True, False], 3), ([False, False, False], 0)):
        waiting = model.pending(rank_request(2, bags), FAR)
        Batcher(RequestLimits(), is_none=np.array(is_none)).submit(waiting)
        assert waiting.longest_sequence == longest


def test_closing_fails_what_waits_and_wakes_the_idle(model):
    batcher, (calls, wake) = Batcher(RequestLimits()), wake_counter()
    assert batcher.take(wake) == []
    batcher.close()
    assert calls == [1]
    assert batcher.take(wake) is None
    with pytest.raises(ShuttingDownError):
        batcher.submit(model.rank())
    other, waiting = Batcher(RequestLimits()), model.rank()
    other.submit(waiting)
    other.close()
    with pytest.raises(ShuttingDownError):
        waiting.future.result(0)
    assert model.leases == 0


def test_every_request_of_many_threads_is_taken_exactly_once(model):
    batcher = Batcher(RequestLimits(max_queue=1000, max_batch_requests=7))
    requests = [model.rank() for _ in range(300)]
    taken: list[Pending] = []
    lock = threading.Lock()

    def replica() -> None:
        woken = threading.Event()
        while (batch := batcher.take(woken.set)) is not None:
            if not batch:
                woken.wait()
                woken.clear()
            with lock:
                taken.extend(batch)
            finish([(one, RuntimeError("done")) for one in batch])

    replicas = [threading.Thread(target=replica) for _ in range(3)]
    submitters = [
        threading.Thread(target=lambda own=own: [batcher.submit(one) for one in own])
        for own in (requests[:150], requests[150:])
    ]
    for thread in replicas + submitters:
        thread.start()
    for one in requests:
        assert isinstance(one.future.exception(10), RuntimeError)
    batcher.close()
    for thread in replicas + submitters:
        thread.join()
    assert sorted(map(id, taken)) == sorted(map(id, requests))
    assert model.leases == 0
