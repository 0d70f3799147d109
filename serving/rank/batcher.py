"""Queues: of requests of one model version for a ranking replica, and of lookups for room for their answers.

A request goes at once to an idle replica. While all are busy requests wait, and the next free replica pops as many as
fit a batch; so batches grow with the load, and no request waits for others to join it. By recent batch times
(`BatchTimeEstimate`) a request is refused at once if it would be too late, and dropped as soon as its deadline can't
be met. No estimate keeps a replica idle: an empty queue accepts anything, and the last request of a queue is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving.errors import InternalError
from serving.formats.requests import Encoded, LookupRequest, RankRequest, Request, Response
from serving.limits import RequestLimits
from serving.observe.calls import Call

KEPT, SLOWEST = 8, 2
"""Recent batches that count, and how many of them are left out: a process may have been stopped meanwhile."""
logger = logging.getLogger(__name__)
Wake: TypeAlias = Callable[[], None]
RankBatch: TypeAlias = Callable[[Sequence[Call]], Awaitable["Sequence[Response | Exception]"]]
PRUDENCE = 2
"""An answer must be due within 1/PRUDENCE of the time left: a request waits unseen in its socket while a batch is
ranked, and batches may take longer than those before."""
CLEAR_AGAIN_S = 0.001
REMEMBERED_S = 2.0
"""The longest time given to a request is kept for so long, up to twice."""
CANT_BE_MET = "the deadline could not be met any more; nothing was begun"
SHARE_OF_AN_OWNER = 4
"""An owner may have 1/SHARE_OF_AN_OWNER of the floats."""
MAX_WAITING_OF_AN_OWNER = 64


def fraction_of_batch(request: Request, longest_sequence: int, limits: RequestLimits) -> float:
    """Return a request's fraction of a full batch, by the limit that it fills most; more than 1 if it is larger."""
    if isinstance(request, LookupRequest):
        return max(1 / limits.max_batch_requests, request.num_floats / limits.max_lookup_floats)
    return max(
        1 / limits.max_batch_requests,
        request.num_candidates / limits.max_batch_candidates,
        request.bags.values.size / limits.max_batch_ids,
        request.num_candidates * longest_sequence / limits.max_batch_pairs,
    )


class BatchTimeEstimate:
    """The time of a full batch, by the last batches but the slowest, and those in flight. Not thread-safe.

    A batch is counted by its fraction of a full one, as of `fraction_of_batch`.

    Attributes:
        full_s: seconds that a full batch takes; 0 until more than SLOWEST batches ended.
        at_once: how many were in flight at a time.
        in_flight: when each batch in flight was begun, and its fraction, by a number of the caller's.
        idle_since: when the last batch ended if others waited then, else None.
    """

    def __init__(self) -> None:
        self.full_s, self.at_once = 0.0, 1.0
        self.in_flight: dict[int, tuple[float, float]] = {}
        self.idle_since: float | None = None
        # Seconds of a full batch at its pace, its own seconds, its fraction, how many were in flight.
        self._recent: deque[tuple[float, float, float, int]] = deque(maxlen=KEPT)

    def begin(self, number: int, fraction: float, now: float) -> None:
        """Count a batch in.

        It counts from when the one before was answered, if it waited then: reading and refusing delay it too.
        """
        self.in_flight[number] = (now if self.idle_since is None else self.idle_since, fraction)
        self.idle_since = None

    def end(self, number: int, now: float, is_awaited: bool) -> None:
        """Count a batch out that was answered; `is_awaited`: other requests wait for a replica."""
        at_once = len(self.in_flight)
        started_at, fraction = self.in_flight.pop(number)
        self.idle_since = now if is_awaited and not self.in_flight else None
        taken_s = now - started_at
        self._recent.append((taken_s / fraction, taken_s, fraction, at_once))
        counted_s = counted = weighted = 0.0
        for _, seconds, part, number_at_once in sorted(self._recent)[:-SLOWEST]:
            counted_s += seconds
            counted += part
            weighted += number_at_once * part
        if counted:
            self.full_s, self.at_once = counted_s / counted, weighted / counted

    def wait_s(self, fraction: float, now: float) -> float:
        """Return how long the batches in flight, and then such a fraction of waiting requests, will take."""
        seconds = self.full_s * fraction
        for started_at, part in self.in_flight.values():
            seconds += max(0.0, started_at + self.full_s * part - now)
        return seconds / self.at_once


@dataclass(eq=False, repr=False)
class Batcher:
    """A bounded queue of one version's requests, with batching. Thread-safe.

    `is_none`, bool [F], are the context features that are not pooled, padded to a batch's longest; None without any.

    Attributes:
        rank_on_loop: ranks a batch on this event loop, which is that of the APIs; None if replicas have threads.
    """

    limits: RequestLimits
    clock: Callable[[], float] = time.monotonic
    is_none: npt.NDArray[np.bool_] | None = None
    rank_on_loop: tuple[asyncio.AbstractEventLoop, RankBatch] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Call] = deque()
        self._fraction = 0.0
        # The longest time that a request was given since some moment, and in the `REMEMBERED_S` before that.
        self._since, self._longest_s, self._longest_before_s = -inf, 0.0, 0.0
        # When a full queue was last searched for requests that no client waits for.
        self._cleared_at = -inf
        self._estimate = BatchTimeEstimate()
        self._idle: list[Wake] = []
        self._closed_because = ""

    @property
    def num_waiting(self) -> int:
        """Count the requests in the queue."""
        return len(self._queue)

    async def rank_alone(self, call: Call) -> Response | None:
        """Rank a request in the caller's task, with neither queue nor future; None if others wait or are ranked.

        Its lease is released, unless the result is None. Raises as a future of `submit` would.
        """
        if self.rank_on_loop is None or self._queue:
            return None
        loop, rank = self.rank_on_loop
        self._measure(call)
        with self._lock:
            if self._estimate.in_flight or self._closed_because or loop is not call.loop:
                return None
            self._estimate.begin(id(call), call.fraction, self.clock())
        try:
            (outcome,) = await rank([call])
        except ShardrankError:
            raise
        except Exception as error:
            raise ranking_failed(error, 1) from error
        finally:
            call.lease.release()
            self.ended(call)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def submit(self, call: Call) -> None:
        """Queue a request and wake an idle replica. Its lease will be released, also if it is refused.

        Raises OverloadedError if the queue is full, UnavailableError after `close`.
        """
        self._measure(call)
        expired: list[Call] = []
        wake = None
        with self._lock:
            self._forget_times()
            self._longest_s = max(self._longest_s, call.deadline - call.started_at)
            refusal: ShardrankError | None = self._refusal() if self._closed_because else self._full(expired)
            if refusal is None:
                self._queue.append(call)
                self._fraction += call.fraction
                wake = self._idle.pop() if self._idle else None
        if expired:
            _expire(expired)
        if refusal is not None:
            call.lease.release()
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
        average fraction of those that wait.
        """
        if not self._queue:
            return None
        expired: list[Call] = []
        with self._lock:
            self._forget_times()
            longest_s = max(self._longest_s, self._longest_before_s)
            has_s = longest_s if remaining_s is None else min(remaining_s, longest_s)
            refusal = self._full(expired, ahead)
            if refusal is None and self._queue:
                fraction = self._fraction / len(self._queue)
                before = self._fraction + ahead * fraction
                full_s = self._estimate.full_s
                due_s = self._estimate.wait_s(before, self.clock()) + full_s * min(1.0, before + fraction)
                if due_s * PRUDENCE > has_s:
                    queued = f"{len(self._queue) + ahead} requests queued; expected latency {1000 * due_s:.0f} ms"
                    limit = f"the limit is 1/{PRUDENCE} of the {1000 * has_s:.0f} ms left until the deadline"
                    refusal = OverloadedError(f"{queued}, {limit}")
        if expired:
            _expire(expired)
        return refusal

    def pop(self, wake: Wake) -> list[Call] | None:
        """Pop the next batch for a free replica: rank requests that fit one, or a lookup. Never blocks.

        If it is empty, `wake` will be called once, from any thread, when there may be one. None after `close`. `ended`
        must follow each other batch.
        """
        expired: list[Call] = []
        hopeless: list[Call] = []
        with self._lock:
            batch = self._pop_batch(expired, hopeless) if self._queue else []
            if not batch:
                if self._closed_because:
                    return None
                self._estimate.idle_since = None
                self._idle.append(wake)
        if expired:
            _expire(expired)
        if hopeless:
            finish((call, OverloadedError(CANT_BE_MET)) for call in hopeless)
        return batch

    def ended(self, batch: list[Call] | Call) -> None:
        """Count out a batch that was answered."""
        with self._lock:
            self._estimate.end(id(batch), self.clock(), bool(self._queue))

    def close(self, reason: str = "it is being unloaded") -> None:
        """Refuse all requests with a reason, and let the replicas end."""
        with self._lock:
            self._closed_because = reason
            left, self._queue, self._fraction = self._queue, deque(), 0.0
            idle, self._idle = self._idle, []
        finish((call, self._refusal()) for call in left)
        for wake in idle:
            _wake(wake)

    def _measure(self, call: Call) -> None:
        if self.is_none is not None and isinstance(call.request, RankRequest):
            call.longest_sequence = int(call.request.bags.values_per_key()[self.is_none].max(initial=0))
        call.fraction = fraction_of_batch(call.request, call.longest_sequence, self.limits)

    def _refusal(self) -> UnavailableError:
        return UnavailableError(
            f"this model version does not answer any more: {self._closed_because}", kind="shutting_down"
        )

    def _full(self, expired: list[Call], ahead: int = 0) -> OverloadedError | None:
        """Return the error of a full queue, from which requests that no client waits for were dropped before."""
        limit = self.limits.max_queue
        if len(self._queue) + ahead < limit:
            return None
        if self.clock() - self._cleared_at >= CLEAR_AGAIN_S:
            now, waiting = self.clock(), self._queue
            self._cleared_at, self._queue = now, deque()
            for call in waiting:
                # Read `is_abandoned` once per request: another thread may set it, and it must land in one of the two.
                (expired if call.is_abandoned or call.deadline <= now else self._queue).append(call)
            self._count()
        if len(self._queue) + ahead < limit:
            return None
        return OverloadedError(f"{len(self._queue) + ahead} requests queued, the limit is max_queue = {limit}")

    def _count(self) -> None:
        # Summed each time: rounding errors of differences would add up.
        self._fraction = sum([call.fraction for call in self._queue])

    def _forget_times(self) -> None:
        """Forget the times that requests were given long ago, but for those that wait."""
        now = self.clock()
        if now - self._since >= REMEMBERED_S:
            self._longest_before_s = self._longest_s if now - self._since < 2 * REMEMBERED_S else 0.0
            self._since = now
            self._longest_s = max((call.deadline - call.started_at for call in self._queue), default=0.0)

    def _pop_batch(self, expired: list[Call], hopeless: list[Call]) -> list[Call]:
        queue, now, full_s = self._queue, self.clock(), self._estimate.full_s
        limits, batch = self.limits, list[Call]()
        num_candidates = num_ids = longest_sequence = 0
        fraction, earliest = 0.0, inf
        while queue and len(batch) < limits.max_batch_requests:
            head = queue[0]
            if head.is_abandoned or head.deadline <= now:
                expired.append(queue.popleft())
                continue
            # The last request is tried, to learn what batches cost by now.
            if now + full_s * min(1.0, head.fraction) > head.deadline and (batch or len(queue) > 1):
                hopeless.append(queue.popleft())
                continue
            request = head.request
            if isinstance(request, LookupRequest):
                if not batch:
                    batch.append(queue.popleft())
                    fraction = head.fraction
                break
            num_candidates += request.num_candidates
            num_ids += request.bags.values.size
            longest_sequence = max(longest_sequence, head.longest_sequence)
            earliest = min(earliest, head.deadline)
            fits = (
                num_candidates <= limits.max_batch_candidates
                and num_ids <= limits.max_batch_ids
                and num_candidates * longest_sequence <= limits.max_batch_pairs
                and now + full_s * min(1.0, fraction + head.fraction) <= earliest
            )
            if batch and not fits:
                break
            batch.append(queue.popleft())
            fraction += head.fraction
        self._count()
        if batch:
            self._estimate.begin(id(batch), fraction, now)
        return batch


def ranking_failed(error: Exception, num_requests: int) -> InternalError:
    """Log a bug in the ranking of a batch, and return what its client gets."""
    logger.error("a batch of %d requests failed", num_requests, exc_info=error)
    return InternalError(f"ranking failed: {type(error).__name__}")


def _wake(wake: Wake) -> bool:
    """Wake a replica, unless it has ended: then its loop is closed, and readiness tells of it."""
    try:
        wake()
    except RuntimeError as error:
        logger.warning("a ranking replica can't be woken: %s", error)
        return False
    return True


def _expire(dropped: list[Call]) -> None:
    error = "the deadline passed while the request waited for a ranking replica"
    finish((call, DeadlineExceededError(error)) for call in dropped)


def finish(outcomes: Iterable[tuple[Call, Response | BaseException]]) -> None:
    """Release leases and resolve futures, on each event loop in one call; once a request, from any thread."""
    running = asyncio._get_running_loop()
    by_loop = defaultdict[asyncio.AbstractEventLoop | None, list[tuple[Any, Response | BaseException]]](list)
    for call, outcome in outcomes:
        call.lease.release()
        by_loop[call.loop].append((call.future, outcome))
    for loop, resolved in by_loop.items():
        if loop is None or loop is running:
            resolve(resolved)
            continue
        # If the loop was closed, no client waits on it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, resolved)


def resolve(outcomes: Iterable[tuple[Any, Response | BaseException]]) -> None:
    """Give futures their outcomes, unless they have one. Only on their loop."""
    for future, outcome in outcomes:
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
