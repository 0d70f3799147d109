"""A shard on shard nodes: which replica gets a lookup, and which one is next if it fails or hesitates."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from loader.snapshot.reader import Snapshot
from router.errors import UnfitReplicaError
from router.outliers import Outliers, ReplicaEvents, ReplicaHealth, ReplicaPolicy, RetryBudget
from router.plan import Plan
from router.shard_client import Reply, ShardClient, ShardConnection, within
from shard_node.answer import EXACT, FLOAT32_SUMS, UNKNOWN_SEQUENCE, Answer, ReplyEncoding
from shard_node.bags import Bags
from shard_node.errors import CardError, GenerationNotFoundError, NodeUnavailableError, RemoteError, RowReadError
from shard_node.freshness import FORKED_AGE_MS, FreshnessBound
from shard_node.node import NodeInfo
from shard_node.tracing import TRACED_LOOKUP, Span, SpanContext, TracedLookup, error_text
from shard_node.wire.address import Address
from shard_node.wire.frame import MAX_BUDGET_US, FrameType
from shard_node.wire.messages import decode_answer, encode_pool

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

INFO_TIMEOUT_S = 1.0
STALE_S = 1.0  # for so long a replica whose rows were too old for a bound comes after the others, for such lookups
# After these a replica will not have what is needed in a moment either.
_UNFIT = (GenerationNotFoundError, UnfitReplicaError, CardError)
# A lookup changes nothing, so after any of these it may be sent to another replica.
_RETRIABLE = (*_UNFIT, NodeUnavailableError, OverloadedError, RemoteError, RowReadError, DeadlineExceededError)
_SUMS, _SUMS_OR_ROWS = (FrameType.POOLED,), (FrameType.POOLED, FrameType.STORED)


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """Where the replicas of a shard are.

    Attributes:
        current: returns an epoch and the nodes' addresses; called for every lookup. Addresses change only with the
            epoch.
        connect: makes a client of a node.
    """

    current: Callable[[], tuple[int, Sequence[Address]]]
    connect: Callable[[Address], ShardClient] = ShardClient

    @classmethod
    def fixed(
        cls, addresses: Sequence[Address], connect: Callable[[Address], ShardClient] = ShardClient
    ) -> ReplicaSource:
        """Make a source that never changes."""
        return cls(lambda: (0, addresses), connect)


@dataclass(slots=True, eq=False)
class _Replica:
    """A node; its client is closed when it has left and its calls have ended. `rows` are the last delta and age."""

    client: ShardClient
    health: ReplicaHealth
    calls: int = 0
    has_left: bool = False
    rows: tuple[int, int] = (0, 0)
    old_until: float = 0.0

    def lacks(self, bound: FreshnessBound, now: float) -> bool:
        """Return whether its rows were too old for a bound a moment ago."""
        return self.old_until > now and not bound.allows(*self.rows)


@dataclass(slots=True, eq=False)
class _Attempt:
    """A lookup at one replica; `connection` is None until it was sent."""

    replica: _Replica
    started_at: float
    connection: ShardConnection | None = None
    request_id: int = 0
    request_bytes: int = 0
    span: SpanContext | None = None
    span_started_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Lookup:
    """A lookup under way: the replicas that are left to try, attempts in flight, and answers of replicas that lag."""

    model: str
    version: int
    bags: Bags
    deadline: float
    forms: ReplyEncoding
    untried: list[_Replica]
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    trace: TracedLookup | None = field(default_factory=TRACED_LOOKUP.get)
    in_flight: list[_Attempt] = field(default_factory=list)
    lagging: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    may_hedge: bool = True
    timer: asyncio.TimerHandle | None = None

    def end(self, error: Exception) -> None:
        """End with the newest rows of replicas that lag, forked ones only if there are no others; else by an error."""
        if answers := [answer for answer in self.lagging if answer.age_ms < FORKED_AGE_MS] or self.lagging:
            self.answer.set_result(max(answers, key=lambda answer: (answer.sequence, -answer.age_ms)))
        else:
            self.answer.set_exception(error)


class ReplicatedShard:
    """One shard of one model version and the nodes that serve it. Implements `Shard`; belongs to one event loop.

    A lookup goes to the available replica with the fewest calls in flight; if that fails, to the others, each once. If
    there is no reply after a while, or half of the time that is left, it goes to another one as well, and the first
    reply counts. Such hedges and retries have one budget; when it is spent, a reply is waited for and a failure is
    final. A retry after which nothing had been sent is free. Ejected replicas (`router.outliers`) come last.

    A node reports what it serves when a connection is made: one of another shard, plan or snapshot is refused.
    Newcomers connect alongside the lookups, which go to them when they are ready.

    Args:
        clock: monotonic seconds; deadlines are on it.

    Attributes:
        min_sequence: the delta that rows must have, or a later one. A replica that lags behind it, or is forked, counts
            as failed, and one beyond a lookup's bound is no answer to that; if all are, or hang, the newest answers.
    """

    def __init__(
        self,
        plan: Plan,
        shard_index: int,
        snapshot: Snapshot,
        source: ReplicaSource,
        events: ReplicaEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        policy: ReplicaPolicy | None = None,
    ) -> None:
        policy = policy or ReplicaPolicy()
        self._events = events or ReplicaEvents()
        self._outliers = Outliers(policy, shard_index, clock, self._events)
        self._budget = RetryBudget(policy, clock)
        self._source = source
        self._replicas: list[_Replica] = []
        self._epoch = -1
        self._identity = plan.identity(shard_index)
        self._name = f"shard {shard_index} of {plan.num_shards}"
        self._plan_digest = plan.digest
        self._layout = plan.layout
        self._model, self._version, self._snapshot = snapshot.spec.model, snapshot.version, snapshot.identity
        self._round = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._clock = clock
        self.min_sequence = UNKNOWN_SEQUENCE

    def pool(
        self, model: str, version: int, bags: Bags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> asyncio.Future[Answer]:
        """Pool as `Shard.pool`. The arrays of `bags` must not be changed afterwards: they may not be sent yet.

        Raises, when awaited:
            UnavailableError: if every replica failed; the message has each failure.
            DeadlineExceededError: if the deadline passed.
            ShardrankError: if a replica refused the request itself; WireError if it is longer than a frame may be.
        """
        self._follow()
        self._budget.earn()
        return self._start(_Lookup(model, version, bags, deadline, forms, self._ordered(forms.bound)))

    async def pool_at(self, model: str, version: int, bags: Bags, deadline: float, sequence: int) -> tuple[Answer, int]:
        """Pool as `pool`, in exact forms, on a node that has applied its deltas up to `sequence`.

        Returns the answer, and the last delta that the node had applied after it; no row is older than `sequence`.
        Raises UnavailableError if no replica answers, or none has these deltas.
        """
        self._follow()
        failures: list[str] = []
        for replica in self._ordered():
            address = replica.client.address
            try:
                async with within(deadline - self._clock(), f"{address}: no answer"):
                    connection = await replica.client.ready()
                    answer = await self._start(_Lookup(model, version, bags, deadline, EXACT, [replica]))
                    served = (await connection.info()).served(model, version)
                is_new = answer.sequence >= sequence and answer.age_ms < FORKED_AGE_MS
                if is_new and replica.client.connection is connection:
                    return answer, served.delta_sequence
                failures.append(f"{address} has applied delta {answer.sequence}, needed is {sequence}")
            except (*_RETRIABLE, UnavailableError) as error:
                failures.append(f"{error.kind}: {error}")
        raise self._unavailable(failures)

    async def connect(self, deadline: float) -> None:
        """Connect to every replica, so that no lookup has to wait for that.

        Raises UnavailableError if none can be used; the message has each failure.
        """
        _, failures = await self._each(ShardClient.ready, deadline - self._clock())
        for failure in failures:
            logger.warning("%s of %s %d: %s", self._name, self._model, self._version, failure)

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """Return what every replica that replies serves, by its address. Raises UnavailableError if none replies."""
        return (await self._each(ShardClient.info, INFO_TIMEOUT_S))[0]

    async def close(self) -> None:
        """Close the connections to all replicas, to those that are leaving as well."""
        self._is_closed = True
        self._outliers.close()
        for replica in self._replicas:
            await replica.client.close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _each(
        self, call: Callable[[ShardClient], Awaitable[Result]], timeout_s: float
    ) -> tuple[list[tuple[str, Result]], list[str]]:
        """Call all replicas at once. Return the results by address, and the failures; raise if there is no result."""
        self._follow()
        results: list[tuple[str, Result]] = []
        failures: list[str] = []

        async def limited(client: ShardClient) -> None:
            try:
                async with within(timeout_s, f"{client.address}: no reply"):
                    results.append((str(client.address), await call(client)))
            except ShardrankError as error:
                failures.append(f"{error.kind}: {error}")

        await asyncio.gather(*(limited(replica.client) for replica in self._replicas))
        if not results:
            raise self._unavailable(failures)
        return sorted(results, key=lambda result: result[0]), failures

    def _follow(self) -> None:
        epoch, addresses = self._source.current()
        if epoch == self._epoch or self._is_closed:
            return
        self._epoch = epoch
        for replica in [replica for replica in self._replicas if replica.client.address not in addresses]:
            self._replicas.remove(replica)
            self._outliers.leave(replica.health)
            replica.has_left = True
            self._close_unused(replica)
        known = {replica.client.address for replica in self._replicas}
        for address in dict.fromkeys(addresses):
            if address not in known:
                replica = _Replica(self._source.connect(address), self._outliers.join(f"{self._name} at {address}"))
                self._replicas.append(replica)
                replica.client.check = partial(self._check, replica)
                replica.client.connect()

    def _ordered(self, bound: FreshnessBound | None = None) -> list[_Replica]:
        replicas, now = self._replicas, 0.0 if bound is None else self._clock()
        if len(replicas) < 2:
            return replicas.copy()

        def rank(replica: _Replica) -> tuple[bool, bool, tuple[float, float], bool, int]:
            health = replica.health
            comes_last = health.reason is not None and self._outliers.comes_last(health, replica.calls)
            is_new = replica.client.connection is None
            lag = (-replica.rows[0], replica.rows[1]) if bound and replica.lacks(bound, now) else (-math.inf, 0)
            return is_new and not replica.client.is_available, comes_last, lag, is_new, replica.calls

        # Rotating the start spreads lookups over replicas that are equally busy.
        start = next(self._round) % len(replicas)
        return sorted(replicas[start:] + replicas[:start], key=rank)

    def _start(self, lookup: _Lookup) -> asyncio.Future[Answer]:
        lookup.answer.add_done_callback(partial(self._end, lookup))
        if lookup.untried:
            self._try_next(lookup)
        else:
            lookup.answer.set_exception(self._unavailable([]))
        return lookup.answer

    def _try_next(self, lookup: _Lookup) -> None:
        """Send a lookup to the next replica, and wait for that one alone for a while."""
        attempt = _Attempt(lookup.untried.pop(0), self._clock())
        if lookup.trace is not None:
            attempt.span, attempt.span_started_at = lookup.trace.context.child(), time.monotonic()
        attempt.replica.calls += 1
        lookup.in_flight.append(attempt)
        self._send(lookup, attempt)
        if not lookup.answer.done():
            self._set_timer(lookup)

    def _send(self, lookup: _Lookup, attempt: _Attempt, _: object = None) -> None:
        """Send a lookup to a replica, now or when it is ready."""
        if lookup.answer.done():
            return
        client = attempt.replica.client
        try:
            event = client.pending()
            connection = client.connection
            if event is not None:
                if attempt.replica.calls > (limit := client.limits.max_in_flight):
                    error = f"{client.address}: {limit} lookups wait for the node, which is the limit"
                    raise OverloadedError(error, kind="node_overloaded")
                event.add_done_callback(partial(self._send, lookup, attempt))
                return
            attempt.started_at = self._clock()
            left_us = min((lookup.deadline - attempt.started_at) * 1e6, MAX_BUDGET_US)
            if left_us <= 0:
                raise DeadlineExceededError(f"deadline passed {-left_us / 1e3:.1f} ms before the request was sent")
            assert connection is not None
            trace = attempt.span if connection.takes_traces else None
            request = max(int(left_us), 1), lookup.model, lookup.version, lookup.bags, lookup.forms, trace
            receive = partial(self._receive, lookup, attempt)
            attempt.request_id, attempt.request_bytes = connection.start(receive, encode_pool, *request)
            attempt.connection = connection
        except Exception as error:
            self._fail(lookup, attempt, error)

    def _receive(self, lookup: _Lookup, attempt: _Attempt, reply: Reply) -> None:
        if lookup.answer.done():
            return
        try:
            assert attempt.connection is not None
            expected = _SUMS_OR_ROWS if lookup.forms.stored else _SUMS
            answer = attempt.connection.decoded(reply, expected, decode_answer, attempt.request_bytes)
            answer.check(self._layout, lookup.bags)
            now = self._clock()
            self._outliers.answered(attempt.replica.health, now - attempt.started_at)
            sequence, age_ms, bound = answer.sequence, answer.age_ms, lookup.forms.bound
            attempt.replica.rows = sequence, age_ms
            lags = sequence < self.min_sequence or age_ms >= FORKED_AGE_MS
            if lags or (bound is not None and not bound.allows(sequence, age_ms)):
                lookup.lagging.append(answer)
                attempt.replica.old_until = now + STALE_S
                needed = f"needed are delta {self.min_sequence} and {bound}"
                problem = f"{attempt.replica.client.address} has applied delta {sequence}, {age_ms} ms old; {needed}"
                raise UnfitReplicaError(problem, kind="replica_lags" if lags else "rows_stale")
        except Exception as error:
            self._fail(lookup, attempt, error)
            return
        self._release(lookup, attempt, "")
        lookup.answer.set_result(answer)
        for other in lookup.in_flight:
            if other.started_at < attempt.started_at:
                self._outliers.overtaken(other.replica.health, now - other.started_at)

    def _fail(self, lookup: _Lookup, attempt: _Attempt, error: Exception) -> None:
        self._release(lookup, attempt, error_text(error))
        if not isinstance(error, _RETRIABLE):
            lookup.answer.set_exception(error)
            return
        lookup.failures.append(f"{error.kind}: {error}")
        connection, health = attempt.connection, attempt.replica.health
        if connection is not None and isinstance(error, GenerationNotFoundError):
            # What comes back under this number may be another snapshot.
            connection.leave("the node has to report again what it serves")
        if (bound := lookup.forms.bound) is not None and error.kind == "rows_stale":
            # A client's bound ejects no replica, and spends no budget on others that had no later delta.
            newest, now = attempt.replica.rows[0], self._clock()
            lookup.untried = [each for each in lookup.untried if not each.lacks(bound, now) or each.rows[0] > newest]
        elif isinstance(error, _UNFIT):
            self._outliers.unfit(health)
        elif connection is not None and not isinstance(error, OverloadedError):
            # Ejecting an overloaded replica would give its load to the others; a deadline may have been too short.
            waited_s = self._clock() - attempt.started_at
            if not isinstance(error, DeadlineExceededError) or waited_s >= self._outliers.patience_s:
                self._outliers.failed(health)
        if lookup.untried:
            self._retry(lookup, error.kind, is_free=connection is None)
        elif lookup.in_flight and lookup.lagging:
            self._set_timer(lookup)
        if lookup.in_flight or lookup.answer.done():
            return
        if not isinstance(error, DeadlineExceededError):
            unavailable = self._unavailable(lookup.failures)
            unavailable.__cause__, error = error, unavailable
        lookup.end(error)

    def _retry(self, lookup: _Lookup, reason: str, *, is_free: bool = False) -> None:
        if is_free or self._budget.spend():
            self._events.retried(reason)
            self._try_next(lookup)
            return
        self._events.denied(reason)
        lookup.may_hedge = False
        if lookup.in_flight:
            self._set_timer(lookup)
        else:
            lookup.failures.append("no other replica was tried: the budget of hedges and retries is spent")

    def _set_timer(self, lookup: _Lookup) -> None:
        """Set the lookup's timer to the next hedge, to when rows that lag are to answer, or to the deadline."""
        if lookup.timer is not None:
            lookup.timer.cancel()
        left_s = min(max(0.0, lookup.deadline - self._clock()), MAX_BUDGET_US / 1e6)
        may_hedge = bool(lookup.untried) and lookup.may_hedge
        if may_hedge or lookup.lagging:
            left_s = min(self._outliers.patience_s, left_s / 2)
        lookup.timer = lookup.answer.get_loop().call_later(left_s, self._on_timer, lookup, may_hedge)

    def _on_timer(self, lookup: _Lookup, may_hedge: bool) -> None:
        if lookup.answer.done():
            return
        if may_hedge:
            self._retry(lookup, "late")
            return
        now, patience_s = self._clock(), self._outliers.patience_s
        for attempt in lookup.in_flight:
            waited_s, address = now - attempt.started_at, attempt.replica.client.address
            if waited_s >= patience_s:
                self._outliers.failed(attempt.replica.health)
            state = "not connected" if attempt.connection is None else "no reply"
            lookup.failures.append(f"{address}: {state} after {waited_s:.3f} s")
        problem = f"{self._name}: deadline passed before the answer ({'; '.join(lookup.failures)})"
        lookup.end(DeadlineExceededError(problem))

    def _end(self, lookup: _Lookup, answer: asyncio.Future[Answer]) -> None:
        """Drop the attempts that are left when a lookup was answered, failed or was cancelled."""
        if lookup.timer is not None:
            lookup.timer.cancel()
        if lookup.in_flight:
            error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
            text = "another replica replied first" if error is None else error_text(error)
            for attempt in tuple(lookup.in_flight):
                self._release(lookup, attempt, text)

    def _release(self, lookup: _Lookup, attempt: _Attempt, error: str) -> None:
        """End an attempt; `error` is for its span, "" if it was answered."""
        lookup.in_flight.remove(attempt)
        replica = attempt.replica
        if attempt.connection is not None:
            attempt.connection.forget(attempt.request_id)
        if lookup.trace is not None and attempt.span is not None:
            address, shard = str(replica.client.address), self._identity.shard_index
            attributes: dict[str, str | int] = {"server.address": address, "shardrank.shard": shard}
            parent, times = lookup.trace.context, (attempt.span_started_at, time.monotonic())
            lookup.trace.sink.put(Span("shardrank.ask", "client", attempt.span, parent, *times, attributes, (), error))
        replica.calls -= 1
        if replica.has_left:
            self._close_unused(replica)

    def _close_unused(self, replica: _Replica) -> None:
        if not replica.calls:
            task = asyncio.get_running_loop().create_task(replica.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _check(self, replica: _Replica, info: NodeInfo) -> None:
        """Raise UnfitReplicaError if a node is of another shard, plan or snapshot; GenerationNotFoundError."""
        node, needed = (
            f"shard {i.shard_index} of {i.num_shards} ({i.sharding})" for i in (info.identity, self._identity)
        )
        try:
            if node != needed:
                raise UnfitReplicaError(f"the node is {node}, needed is {needed}", kind="plan_mismatch")
            served = info.served(self._model, self._version)
            snapshots, plans = (served.manifest_identity, self._snapshot), (served.plan_digest, self._plan_digest)
            for what, (actual, expected) in (("snapshot", snapshots), ("plan", plans)):
                if actual != expected:
                    raise UnfitReplicaError(
                        f"the node serves version {self._version} of model {self._model!r} by another {what}: "
                        f"{actual[:12]}…, needed is {expected[:12]}…",
                        kind="plan_mismatch",
                    )
        except ShardrankError as error:
            if replica.health.reason is None:
                logger.info("%s can't be used yet: %s", replica.client.address, error)
            self._outliers.unfit(replica.health)
            raise

    def _unavailable(self, failures: Sequence[str]) -> UnavailableError:
        reasons = "; ".join(failures) or "no node reports that this version is ready"
        return UnavailableError(f"{self._name}: no replica answered ({reasons})", kind="shard_unavailable")
