"""Requests that wait: of any size and deadline, with leases that can be counted, on a clock that stands still."""

from __future__ import annotations

import concurrent.futures

import numpy as np

from serving.formats.requests import LookupRequest, RankRequest
from serving.observe.calls import Call
from shard_node.bags import Bags
from shard_node.generation import Generations

EMPTY = Bags.from_lengths(*(np.zeros(0, dtype) for dtype in (np.int32, np.int64, np.int64, np.int64)))
FAR = 1e9


def rank_request(num_candidates: int, bags: Bags) -> RankRequest:
    """A request without dense inputs."""
    dense = np.zeros((num_candidates, 0), np.float32)
    return RankRequest(bags, num_candidates, np.zeros(0, np.float32), dense, timeout_s=1.0)


class Clock:
    """Stands still until somebody moves it, but for `step` seconds each time that it is read."""

    def __init__(self, now: float = 0.0, step: float = 0.0) -> None:
        self.now, self.step = now, step

    def __call__(self) -> float:
        self.now += self.step
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

    def rank(self, num_candidates: int = 1, deadline: float = FAR, began: float = 0.0) -> Call:
        return self.pending(rank_request(num_candidates, EMPTY), deadline, began)

    def sized(self, num_candidates: int, num_ids: int, longest: int) -> Call:
        """A rank request of some cost."""
        bags = Bags.from_lengths(
            *(np.array([one], dtype) for one, dtype in ((0, np.int32), (1, np.int64), (num_ids, np.int64))),
            np.zeros(num_ids, np.int64),
        )
        pending = self.pending(rank_request(num_candidates, bags), FAR)
        pending.longest_sequence = longest
        return pending

    def lookup(self) -> Call:
        return self.pending(LookupRequest(EMPTY, timeout_s=1.0, num_floats=0), FAR)

    def pending(self, request: RankRequest | LookupRequest, deadline: float, began: float = 0.0) -> Call:
        call = Call("embedded", "rank", began, deadline=deadline, future=concurrent.futures.Future())
        call.request, call.lease = request, self.generations.lease("films")
        return call
