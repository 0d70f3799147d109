"""Queues: of requests of one model version for a ranking replica, and of lookups for room for their answers.

A request goes at once to an idle replica. While all are busy requests wait, and the next free replica pops as many as
fit a batch; so batches grow with the load, and no request waits for others to join it. By recent batch times
(`BatchTimeEstimate`) a request is refused at once if it would be too late, and dropped as soon as its deadline can't
be met. No estimate keeps a replica idle: an empty queue accepts anything, and the last request of a queue is tried.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving.errors import InvalidRequestError
from serving.formats.requests import Encoded, LookupRequest, RankRequest, Request, Response
from serving.limits import RequestLimits
from serving.observe.calls import Call
from shard_node.generation import Lease

KEPT, SLOWEST = 8, 2
"""Recent batches that count, and how many of them are left out: a process may have been stopped meanwhile."""
logger = logging.getLogger(__name__)
Wake: TypeAlias = Callable[[], None]
PRUDENCE = 2
"""An answer must be due within 1/PRUDENCE of the time left: a request waits unseen in its socket while a batch is
ranked, and batches may take longer than those before."""
LOOK_AGAIN_S = 0.001
REMEMBERED_S = 2.0
"""The longest time given to a request is kept for so long, up to twice."""
CANT_BE_MET = "the deadline could not be met any more; nothing was begun"
SHARE_OF_AN_OWNER = 4
"""An owner may have 1/SHARE_OF_AN_OWNER of the floats."""
MAX_WAITING_OF_AN_OWNER = 64


def share_of(request: Request, longest_sequence: int, limits: RequestLimits) -> float:
    """Return a request's share of a full batch, by the limit that it fills most; more than 1 if it is larger."""
    if isinstance(request, LookupRequest):
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


class BatchTimeEstimate:
    """The time of a full batch, by the last batches but the slowest, and those in flight. Not thread-safe.

    Attributes:
        full_s: seconds that a full batch takes; 0 until more than SLOWEST batches ended.
        at_once: how many were in flight at a time.
        free_since: when the last batch ended if others waited then, else None.
    """

    def __init__(self) -> None:
        self.full_s, self.at_once = 0.0, 1.0
        self._out: dict[int, tuple[float, float]] = {}
        self.free_since: float | None = None
        self._ended: deque[_Batch] = deque(maxlen=KEPT)

    def begin(self, number: int, share: float, now: float) -> None:
        """Count a batch in; `number` identifies it among those in flight.

        It counts from when the one before was answered, if it waited then: reading and refusing delay it too.
        """
        self._out[number] = (now if self.free_since is None else self.free_since, share)
        self.free_since = None

    def end(self, number: int, now: float, waits: bool = False) -> None:
        """Count a batch out that was answered; `waits`: other requests do."""
        at_once = len(self._out)
        began, share = self._out.pop(number)
        self.free_since = now if waits and not self._out else None
        self._ended.append(_Batch((now - began) / share, now - began, share, at_once))
        if counted := sorted(self._ended)[:-SLOWEST]:
            shares = sum(one.share for one in counted)
            self.full_s = sum(one.seconds for one in counted) / shares
            self.at_once = sum(one.at_once * one.share for one in counted) / shares

    def batch_s(self, share: float) -> float:
        """Return how long a batch of such a share takes, at most a full one."""
        return self.full_s * min(1.0, share)

    def wait_s(self, share: float, now: float) -> float:
        """Return how long the batches in flight, and then such a share of waiting requests, will take."""
        out_s = sum(max(0.0, began + self.full_s * own - now) for began, own in self._out.values())
        return (out_s + self.full_s * share) / self.at_once


@dataclass(slots=True, eq=False)
class Pending:
    """One admitted request, until `deadline` (monotonic seconds).

    Attributes:
        lease: on the version that answers; `finish` releases it.
        future: gets the answer or the error; None once no client waits, to break the cycle with an error's traceback.
        loop: of the future; None for a `concurrent.futures.Future`.
        longest_sequence: ids in the longest bag of a feature that is not pooled.
        share: of a full batch.
        abandoned: set when no client waits any more; if it has not begun, it is dropped.
    """

    request: Request
    lease: Lease[Any]
    deadline: float
    call: Call
    future: asyncio.Future[Any] | concurrent.futures.Future[Any] | None
    loop: asyncio.AbstractEventLoop | None
    longest_sequence: int = 0
    share: float = 0.0
    abandoned: bool = False

    def expire(self) -> None:
        """Fail it for its deadline. As `leave`, only on the loop of its future."""
        _settle([(self.future, DeadlineExceededError("the deadline passed before the answer was complete"))])

    def leave(self) -> None:
        """Fail it, as its client has gone."""
        _settle([(self.future, InvalidRequestError("", "the client closed the connection", kind="client_gone"))])


class Batcher:
    """A bounded queue of one version's requests, with batching. Thread-safe.

    `is_none`, bool [F], are the context features that are not pooled, padded to a batch's longest; None without any.
    """

    def __init__(
        self,
        limits: RequestLimits,
        clock: Callable[[], float] = time.monotonic,
        is_none: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._limits = limits
        self._is_none = is_none
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[Pending] = deque()
        self._share = 0.0
        # The longest time that a request was given since some moment, and in the `REMEMBERED_S` before that.
        self._since, self._longest_s, self._longest_before_s = -inf, 0.0, 0.0
        # When a full queue was last looked through for what nobody waits for.
        self._looked = -inf
        self._pace = BatchTimeEstimate()
        self._idle: list[Wake] = []
        self._closed_because = ""

    @property
    def num_waiting(self) -> int:
        """Count the requests in the queue."""
        return len(self._queue)

    def submit(self, pending: Pending) -> None:
        """Queue a request and wake an idle replica. Its lease will be released, also if it is refused.

        Raises OverloadedError if the queue is full or it would be too late, UnavailableError after `close`.
        """
        if self._is_none is not None and isinstance(pending.request, RankRequest):
            pending.longest_sequence = int(pending.request.bags.values_per_key()[self._is_none].max(initial=0))
        pending.share = share_of(pending.request, pending.longest_sequence, self._limits)
        dropped: list[Pending] = []
        wake = None
        with self._lock:
            # Known also of one that is refused.
            self._forget_times()
            self._longest_s = max(self._longest_s, pending.deadline - pending.call.began)
            refusal: ShardrankError | None = self._refusal() if self._closed_because else None
            refusal = refusal or self._overload(pending.deadline - self._clock(), pending.share, dropped)
            if refusal is None:
                self._queue.append(pending)
                self._share += pending.share
                wake = self._idle.pop() if self._idle else None
        _expire(dropped)
        if refusal is not None:
            pending.lease.release()
            try:
                raise refusal
            finally:
                del refusal
        while wake is not None and not _wake(wake):
            with self._lock:
                wake = self._idle.pop() if self._idle else None

    def overload(self, remaining_s: float | None, ahead: int = 0) -> OverloadedError | None:
        """Return why a request with at most `remaining_s` would wait in vain; None if it would not.

        It is assumed to have the longest time of recent ones, and, as the `ahead` others that are not queued yet, the
        average share of those that wait.
        """
        if not self._queue:
            return None
        dropped: list[Pending] = []
        with self._lock:
            self._forget_times()
            longest_s = max(self._longest_s, self._longest_before_s)
            has_s = longest_s if remaining_s is None else min(remaining_s, longest_s)
            refusal = self._overload(has_s, self._share / max(1, len(self._queue)), dropped, ahead)
        _expire(dropped)
        return refusal

    def take(self, wake: Wake) -> list[Pending] | None:
        """Pop the next batch for a free replica: rank requests that fit one, or a lookup. Never blocks.

        If it is empty, `wake` will be called once, from any thread, when there may be one. None after `close`. `ended`
        must follow each other batch.
        """
        dropped: list[Pending] = []
        hopeless: list[Pending] = []
        with self._lock:
            batch = self._take_batch(dropped, hopeless) if self._queue else []
            if not batch:
                if self._closed_because:
                    return None
                self._pace.free_since = None
                self._idle.append(wake)
        _expire(dropped)
        if hopeless:
            finish((pending, OverloadedError(CANT_BE_MET)) for pending in hopeless)
        return batch

    def ended(self, batch: list[Pending]) -> None:
        """Count out a batch that was answered."""
        with self._lock:
            self._pace.end(id(batch), self._clock(), waits=bool(self._queue))

    def close(self, reason: str = "it is being unloaded") -> None:
        """Refuse all requests with a reason, and let the replicas end."""
        with self._lock:
            self._closed_because = reason
            left, self._queue, self._share = self._queue, deque(), 0.0
            idle, self._idle = self._idle, []
        finish((pending, self._refusal()) for pending in left)
        for wake in idle:
            _wake(wake)

    def _refusal(self) -> UnavailableError:
        return UnavailableError(
            f"this model version does not answer any more: {self._closed_because}", kind="shutting_down"
        )

    def _overload(self, has_s: float, share: float, dropped: list[Pending], ahead: int = 0) -> OverloadedError | None:
        """Return why a request with so many seconds would wait in vain, behind `ahead` others not queued yet."""
        limit = self._limits.max_queue
        if len(self._queue) + ahead >= limit:
            if self._clock() - self._looked >= LOOK_AGAIN_S:
                # `abandoned` is read once per request: another thread may set it, and it must land in one of the two.
                now, waiting = self._clock(), self._queue
                self._looked, self._queue = now, deque()
                for pending in waiting:
                    (dropped if pending.abandoned or pending.deadline <= now else self._queue).append(pending)
                self._count()
            if len(self._queue) + ahead >= limit:
                return OverloadedError(f"{len(self._queue) + ahead} requests wait, the limit max_queue = {limit}")
        if not self._queue:
            return None
        before = self._share + ahead * share
        due_s = self._pace.wait_s(before, self._clock()) + self._pace.batch_s(before + share)
        if PRUDENCE * due_s <= has_s:
            return None
        waits = f"{len(self._queue) + ahead} requests wait, and an answer is due in about {1000 * due_s:.0f} ms"
        return OverloadedError(f"{waits}; it may be 1/{PRUDENCE} of the {1000 * has_s:.0f} ms that there are")

    def _count(self) -> None:
        # Summed each time: rounding errors of differences would add up.
        self._share = sum(pending.share for pending in self._queue)

    def _forget_times(self) -> None:
        """Forget the times that requests were given long ago, but for those that wait."""
        now = self._clock()
        if now - self._since >= REMEMBERED_S:
            self._longest_before_s = self._longest_s if now - self._since < 2 * REMEMBERED_S else 0.0
            self._since = now
            self._longest_s = max((one.deadline - one.call.began for one in self._queue), default=0.0)

    def _take_batch(self, dropped: list[Pending], hopeless: list[Pending]) -> list[Pending]:
        queue, now, pace = self._queue, self._clock(), self._pace
        limits, batch = self._limits, list[Pending]()
        num_candidates = num_ids = longest_sequence = 0
        share, earliest = 0.0, inf
        while queue and len(batch) < limits.max_batch_requests:
            head = queue[0]
            if head.abandoned or head.deadline <= now:
                dropped.append(queue.popleft())
                continue
            # The last one is tried, to learn what batches take by now.
            if now + pace.batch_s(head.share) > head.deadline and (batch or len(queue) > 1):
                hopeless.append(queue.popleft())
                continue
            request = head.request
            if isinstance(request, LookupRequest):
                if not batch:
                    batch.append(queue.popleft())
                    share = head.share
                break
            num_candidates += request.num_candidates
            num_ids += request.bags.values.size
            longest_sequence = max(longest_sequence, head.longest_sequence)
            earliest = min(earliest, head.deadline)
            fits = (
                num_candidates <= limits.max_batch_candidates
                and num_ids <= limits.max_batch_ids
                and num_candidates * longest_sequence <= limits.max_batch_pairs
                and now + pace.batch_s(share + head.share) <= earliest
            )
            if batch and not fits:
                break
            batch.append(queue.popleft())
            share += head.share
        self._count()
        if batch:
            pace.begin(id(batch), share, now)
        return batch


def _wake(wake: Wake) -> bool:
    """Wake a replica, unless it has ended: then its loop is closed, and readiness tells of it."""
    try:
        wake()
    except RuntimeError as error:
        logger.warning("a ranking replica can't be woken: %s", error)
        return False
    return True


def _expire(dropped: list[Pending]) -> None:
    if not dropped:
        return
    late = "the deadline passed while the request waited for a ranking replica"
    finish((pending, DeadlineExceededError(late)) for pending in dropped)


def finish(outcomes: Iterable[tuple[Pending, Response | BaseException]]) -> None:
    """Release leases and resolve futures, on each event loop in one call; once a request, from any thread."""
    here = asyncio._get_running_loop()
    by_loop: defaultdict[asyncio.AbstractEventLoop | None, list[tuple[Any, Response | BaseException]]] = defaultdict(
        list
    )
    for pending, outcome in outcomes:
        pending.lease.release()
        by_loop[pending.loop].append((pending.future, outcome))
    for loop, settled in by_loop.items():
        if loop is None or loop is here:
            _settle(settled)
            continue
        # If the loop was closed, no client waits on it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: Iterable[tuple[Any, Response | BaseException]]) -> None:
    for future, outcome in settled:
        if future is None or future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class _WaitingLookup(NamedTuple):
    owner: Hashable
    num_floats: int
    future: asyncio.Future[None]


class LookupMemoryLimit:
    """Bounds the floats of lookups until their clients have read them. Belongs to one event loop.

    A lookup without room waits: after others of its owner, a connection, and after all once the bound is reached. One
    that is larger than the bound runs alone.
    """

    def __init__(self, max_floats: int) -> None:
        self._max_floats = max_floats
        self._held: Counter[Hashable] = Counter()
        self._waiting: deque[_WaitingLookup] = deque()
        self._waits: Counter[Hashable] = Counter()
        self._writing = asyncio.Lock()

    async def acquire(self, owner: Hashable, num_floats: int, timeout_s: float) -> None:
        """Wait until there is room for an owner's answer; `release` must follow.

        Raises OverloadedError at once if too many of the owner wait, DeadlineExceededError without room in time.
        """
        if self._waits[owner] >= MAX_WAITING_OF_AN_OWNER:
            problem = f"{MAX_WAITING_OF_AN_OWNER} lookups of this client wait for earlier answers to be taken"
            raise OverloadedError(problem)
        waiting = _WaitingLookup(owner, num_floats, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._waits[owner] += 1
        self._let_in()
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.future
        except BaseException as error:
            if not waiting.future.cancelled():
                # It was admitted at the same moment.
                self.release(owner, num_floats)
            else:
                # It may have been first in line.
                self._let_in()
            if not isinstance(error, TimeoutError):
                raise
            says = f"earlier answers were not taken in time; the limit is max_untaken_floats = {self._max_floats}"
            raise DeadlineExceededError(says) from None

    def release(self, owner: Hashable, num_floats: int) -> None:
        """Make room: an answer was taken, or is given up."""
        self._uncount(self._held, owner, num_floats)
        self._let_in()

    async def write(self, encoded: Encoded) -> Encoded:
        """Write what an answer lacks, one answer at a time; others have their turn after each piece."""
        written = [encoded.body]
        async with self._writing:
            for piece in encoded.more:
                written.append(piece)
                await asyncio.sleep(0)
        return encoded._replace(body=b"".join(written), more=())

    def _let_in(self) -> None:
        free, kept = self._max_floats - self._held.total(), deque[_WaitingLookup]()
        while self._waiting:
            waiting = self._waiting.popleft()
            owner, num_floats, future = waiting
            held = self._held[owner]
            if future.cancelled():
                self._uncount(self._waits, owner, 1)
                continue
            if held and held + num_floats > self._max_floats // SHARE_OF_AN_OWNER:
                kept.append(waiting)
                continue
            if num_floats > free and self._held.total():
                kept.append(waiting)
                break
            free -= num_floats
            self._held[owner] += num_floats
            self._uncount(self._waits, owner, 1)
            future.set_result(None)
        kept.extend(self._waiting)
        self._waiting = kept

    @staticmethod
    def _uncount(counts: Counter[Hashable], owner: Hashable, number: int) -> None:
        counts[owner] -= number
        if not counts[owner]:
            del counts[owner]
