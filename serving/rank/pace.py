"""How long batches take, learned from those that were: what can still be answered in time, and what can't."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from serving.formats.requests import LookupRequest, Request
from serving.limits import RequestLimits

KEPT, SLOWEST = 8, 2
"""Batches of late that are looked at, and how many of them are left out: a process may have been stopped meanwhile."""


def share_of(request: Request, longest_sequence: int, limits: RequestLimits) -> float:
    """Tell which part of a full batch a request takes, by the limit that it fills most; more than 1 if it is larger."""
    if isinstance(request, LookupRequest):
        # It goes alone, and is the dearer the more it looks up.
        return max(1 / limits.max_batch_requests, request.num_floats / limits.max_lookup_floats)
    return max(
        1 / limits.max_batch_requests,
        request.num_candidates / limits.max_batch_candidates,
        request.bags.values.size / limits.max_batch_ids,
        request.num_candidates * longest_sequence / limits.max_batch_pairs,
    )


class _Batch(NamedTuple):
    seconds_a_share: float
    seconds: float
    share: float
    at_once: int


class BatchPace:
    """The time of a full batch, by the last batches but the slowest, and those that are out. Not thread-safe.

    Each counts by its share: of what a full one takes, small ones say little but what any batch costs. Before there
    were more than are left out, nothing is expected to take any time.

    Attributes:
        full_s: seconds that a full batch takes.
        at_once: how many were out at a time: with so many replicas busy, as much is done meanwhile.
    """

    def __init__(self) -> None:
        self.full_s, self.at_once = 0.0, 1.0
        self._out: dict[int, tuple[float, float]] = {}
        self._free_since: float | None = None
        self._ended: deque[_Batch] = deque(maxlen=KEPT)

    def begin(self, number: int, share: float, now: float) -> None:
        """Note that a batch was taken; `number` is its own among those that are out.

        It takes from when the one before was answered, if it waited then: what was read and refused meanwhile, under
        overload more than all else, is as much in its way as batches are.
        """
        self._out[number] = (now if self._free_since is None else self._free_since, share)
        self._free_since = None

    def end(self, number: int, now: float, waits: bool = False) -> None:
        """Learn from a batch that was answered; `waits`: others do."""
        at_once = len(self._out)
        began, share = self._out.pop(number)
        self._free_since = now if waits and not self._out else None
        self._ended.append(_Batch((now - began) / share, now - began, share, at_once))
        if counted := sorted(self._ended)[:-SLOWEST]:
            shares = sum(one.share for one in counted)
            self.full_s = sum(one.seconds for one in counted) / shares
            self.at_once = sum(one.at_once * one.share for one in counted) / shares

    def rest(self) -> None:
        """Note that nothing waits any more: a replica is idle until the next batch begins."""
        self._free_since = None

    def batch_s(self, share: float) -> float:
        """Tell how long a batch of so much takes; one of more than a full one is cut."""
        return self.full_s * min(1.0, share)

    def wait_s(self, share: float, now: float) -> float:
        """Tell how long it takes to be done with what is out, and then with so much that waits."""
        out_s = sum(max(0.0, began + self.full_s * own - now) for began, own in self._out.values())
        return (out_s + self.full_s * share) / self.at_once
