"""A shard on shard nodes: which replica gets a lookup, and which one is next if it fails or hesitates."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from router.errors import UnfitReplicaError
from router.outliers import Outliers, ReplicaEvents, ReplicaHealth, ReplicaPolicy, RetryBudget
from router.plan import Plan
from router.shard_client import INFO_TIMEOUT_S, Reply, ShardClient, ShardConnection, within
from shard_node.answer import EXACT, FLOAT32_SUMS, UNKNOWN_SEQUENCE, Answer, ReplyEncoding
from shard_node.bags import KeyedBags
from shard_node.errors import CardError, GenerationNotFoundError, NodeUnavailableError, RemoteError
from shard_node.node import NodeInfo, ServedVersion
from shard_node.tracing import TRACED_LOOKUP, SpanContext, TracedLookup, error_text
from shard_node.wire.address import Address
from shard_node.wire.frame import MAX_BUDGET_US, FrameType
from shard_node.wire.messages import decode_answer, encode_pool

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 1.0
# A lookup changes nothing, so after any of these it may be sent to another replica.
_RETRIABLE = (
    NodeUnavailableError,
    OverloadedError,
    GenerationNotFoundError,
    RemoteError,
    CardError,
    UnfitReplicaError,
    DeadlineExceededError,
)
# After these the replica will not have it in a moment either.
_UNFIT = (GenerationNotFoundError, UnfitReplicaError, CardError)
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
    client: ShardClient
    health: ReplicaHealth
    # The connection by which its node reported that it serves the right rows.
    checked: ShardConnection | None = None
    takes_traces: bool = False
    # Connects and checks, for all lookups that wait for it.
    preparation: asyncio.Task[None] | None = None
    calls: int = 0
    # Closed when its calls have ended.
    is_leaving: bool = False


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
    """A lookup under way: the replicas that are left to try, attempts in flight, and replies of replicas that lag."""

    model: str
    version: int
    bags: KeyedBags
    deadline: float
    forms: ReplyEncoding
    answer: asyncio.Future[Answer]
    untried: list[_Replica]
    trace: TracedLookup | None
    in_flight: list[_Attempt] = field(default_factory=list)
    lagging: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    error: ShardrankError | None = None
    may_hedge: bool = True
    timer: asyncio.TimerHandle | None = None


class ReplicatedShard:
    """One shard of one model version and the nodes that serve it. Implements `Shard`; belongs to one event loop.

    A lookup goes to the available replica with the fewest calls in flight; if that fails, to the others, each once. If
    there is no reply after a while, or half of the time that is left, it goes to another one as well, and the first
    reply counts. Such hedges and retries have one budget; when it is spent, a reply is waited for and a failure is
    final. A retry after which nothing had been sent is free. Ejected replicas (`router.outliers`) come last.

    A node reports what it serves once a connection, before the first lookup is sent: a node of another shard, plan or
    snapshot is refused. Newcomers are prepared alongside the lookups, which go to them when they are ready; a replica
    that leaves is closed when its calls have ended.

    Args:
        manifest_identity: of the snapshot that the router serves.
        clock: monotonic seconds; deadlines are on it.

    Attributes:
        min_sequence: the delta that rows must have, or a later one. A replica that lags behind it counts as failed; if
            all lag, the newest of their answers is returned.
    """

    def __init__(
        self,
        plan: Plan,
        shard_index: int,
        manifest_identity: str,
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
        self._plan_digest = plan.digest
        self._manifest_identity = manifest_identity
        self._layout = plan.layout
        self._round = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._clock = clock
        self.min_sequence = UNKNOWN_SEQUENCE

    def pool(
        self, model: str, version: int, bags: KeyedBags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> asyncio.Future[Answer]:
        """Pool as `Shard.pool`. The arrays of `bags` must not be changed afterwards: they may not be sent yet.

        Raises, when awaited:
            UnavailableError: if every replica failed; the message has each failure.
            DeadlineExceededError: if the deadline passed.
            ShardrankError: if a replica refused the request itself; WireError if it is longer than a frame may be.
        """
        self._follow()
        for replica in self._replicas:
            connection = replica.client.connection
            if connection is not None and connection is replica.checked:
                continue
            if replica.client.is_available and not self._outliers.is_ejected(replica.health):
                self._prepare(replica, model, version)
        self._budget.earn()
        return self._start(self._ordered(), model, version, bags, deadline, forms)

    async def pool_at(
        self, model: str, version: int, bags: KeyedBags, deadline: float, sequence: int
    ) -> tuple[Answer, int]:
        """Pool as `pool`, in exact forms, on a node that has applied its deltas up to `sequence`.

        Returns the answer, and the last delta that the node had applied after it; no row is older than `sequence`.
        Raises UnavailableError if no replica answers, or none has these deltas.
        """
        self._follow()
        failures: list[str] = []
        for replica in self._ordered():
            no_reply = f"{replica.client.address}: no reply to INFO"
            try:
                async with within(min(deadline - self._clock(), INFO_TIMEOUT_S), no_reply):
                    connection = await replica.client.ready()
                    applied = _served(await connection.info(), model, version).delta_sequence
                if applied < sequence:
                    failures.append(f"{replica.client.address} has applied delta {applied}, needed is {sequence}")
                    continue
                answer = await self._start([replica], model, version, bags, deadline, EXACT)
                async with within(min(deadline - self._clock(), INFO_TIMEOUT_S), no_reply):
                    applied = _served(await connection.info(), model, version).delta_sequence
                if replica.checked is connection:
                    return answer, applied
                failures.append(f"{replica.client.address} reconnected meanwhile")
            except (*_RETRIABLE, UnavailableError) as error:
                failures.append(f"{error.kind}: {error}")
        raise self._unavailable(failures)

    async def connect(self, model: str, version: int, deadline: float) -> None:
        """Connect to every replica and check what it serves, so that no lookup has to wait for that.

        Raises UnavailableError if none can be used; the message has each failure.
        """
        self._follow()
        preparations = {self._prepare(replica, model, version): replica for replica in self._replicas}
        if preparations:
            await asyncio.wait(preparations, timeout=max(0.0, deadline - self._clock()))
        failures: list[str] = []
        for task, replica in preparations.items():
            late = DeadlineExceededError(f"{replica.client.address}: not connected before the deadline")
            error = task.exception() if task.done() else late
            if isinstance(error, _RETRIABLE):
                failures.append(f"{error.kind}: {error}")
            elif error is not None:
                raise error
        if len(failures) == len(preparations):
            raise self._unavailable(failures)
        for failure in failures:
            logger.warning("shard %d of %s %d: %s", self._identity.shard_index, model, version, failure)

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """Return what every replica that replies serves, by its address. Raises UnavailableError if none replies."""
        self._follow()
        clients = [replica.client for replica in self._replicas]
        outcomes = await asyncio.gather(*(client.info(POLL_TIMEOUT_S) for client in clients), return_exceptions=True)
        infos: list[tuple[str, NodeInfo]] = []
        failures: list[str] = []
        for client, outcome in zip(clients, outcomes, strict=True):
            if isinstance(outcome, ShardrankError):
                failures.append(f"{outcome.kind}: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                infos.append((str(client.address), outcome))
        if not infos:
            raise self._unavailable(failures)
        return infos

    async def close(self) -> None:
        """Close the connections to all replicas, to those that are leaving as well."""
        self._outliers.close()
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            await _close(replica)
        if self._closing:
            await asyncio.wait(self._closing)

    def _follow(self) -> None:
        """Let replicas join and leave as the source says."""
        epoch, addresses = self._source.current()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for replica in [replica for replica in self._replicas if replica.client.address not in addresses]:
            self._replicas.remove(replica)
            self._outliers.leave(replica.health)
            replica.is_leaving = True
            self._close_if_left(replica)
        known = {replica.client.address for replica in self._replicas}
        for address in dict.fromkeys(addresses):
            if address not in known:
                self._replicas.append(_Replica(self._source.connect(address), self._outliers.join()))

    def _ordered(self) -> list[_Replica]:
        """Return the replicas in the order in which they are tried."""
        replicas = self._replicas
        if len(replicas) < 2:
            return replicas.copy()

        def rank(replica: _Replica) -> tuple[bool, bool, bool, int]:
            health, connection = replica.health, replica.client.connection
            comes_last = health.reason is not None and self._outliers.comes_last(health, replica.calls)
            is_new = connection is None or connection is not replica.checked
            return is_new and not replica.client.is_available, comes_last, is_new, replica.calls

        # Rotating the start spreads lookups over replicas that are equally busy.
        start = next(self._round) % len(replicas)
        return sorted(replicas[start:] + replicas[:start], key=rank)

    def _start(
        self,
        replicas: list[_Replica],
        model: str,
        version: int,
        bags: KeyedBags,
        deadline: float,
        forms: ReplyEncoding,
    ) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        lookup = _Lookup(model, version, bags, deadline, forms, answer, replicas, TRACED_LOOKUP.get())
        answer.add_done_callback(partial(self._end, lookup))
        if replicas:
            self._try_next(lookup)
        else:
            answer.set_exception(self._unavailable([]))
        return answer

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

    def _send(self, lookup: _Lookup, attempt: _Attempt, prepared: asyncio.Task[None] | None = None) -> None:
        """Send a lookup to a replica; if it is not ready, once it is prepared."""
        if lookup.answer.done():
            return
        replica = attempt.replica
        try:
            if prepared is not None and prepared.cancelled():
                raise NodeUnavailableError(f"{replica.client.address}: closed before the request was sent")
            if prepared is not None:
                prepared.result()
            connection = replica.client.connection
            if connection is None or connection is not replica.checked or connection.blocked is not None:
                preparation = self._prepare(replica, lookup.model, lookup.version)
                preparation.add_done_callback(partial(self._send, lookup, attempt))
                return
            attempt.started_at = self._clock()
            left_us = min((lookup.deadline - attempt.started_at) * 1e6, MAX_BUDGET_US)
            if left_us <= 0:
                raise DeadlineExceededError(f"deadline passed {-left_us / 1e3:.1f} ms before the request was sent")
            attempt.request_id, attempt.request_bytes = connection.start(
                partial(self._receive, lookup, attempt),
                encode_pool,
                max(int(left_us), 1),
                lookup.model,
                lookup.version,
                lookup.bags,
                lookup.forms,
                attempt.span if replica.takes_traces else None,
            )
            attempt.connection = connection
        except Exception as error:
            self._fail(lookup, attempt, error)

    def _receive(self, lookup: _Lookup, attempt: _Attempt, reply: Reply) -> None:
        """End a lookup with a reply, or try another replica."""
        if lookup.answer.done():
            return
        connection, health = attempt.connection, attempt.replica.health
        try:
            assert connection is not None
            expected = _SUMS_OR_ROWS if lookup.forms.stored else _SUMS
            answer = connection.decoded(reply, expected, decode_answer, attempt.request_bytes)
            answer.check(self._layout, lookup.bags)
            now = self._clock()
            self._outliers.answered(health, now - attempt.started_at)
            if answer.sequence < self.min_sequence:
                lookup.lagging.append(answer)
                raise UnfitReplicaError(
                    f"{attempt.replica.client.address} has applied delta {answer.sequence}, "
                    f"needed is {self.min_sequence}",
                    kind="replica_lags",
                )
        except Exception as error:
            self._fail(lookup, attempt, error)
            return
        lookup.answer.set_result(answer)
        self._release(lookup, attempt, "")
        for other in lookup.in_flight:
            if other.started_at < attempt.started_at:
                self._outliers.overtaken(other.replica.health, now - other.started_at)

    def _fail(self, lookup: _Lookup, attempt: _Attempt, error: Exception) -> None:
        """Try another replica after an error, or end the lookup with it."""
        self._release(lookup, attempt, error_text(error))
        if not isinstance(error, _RETRIABLE):
            lookup.answer.set_exception(error)
            return
        lookup.error = error
        lookup.failures.append(f"{error.kind}: {error}")
        replica, was_sent = attempt.replica, attempt.connection is not None
        if isinstance(error, GenerationNotFoundError):
            # What comes back under this number may be another snapshot.
            replica.checked = None
        if isinstance(error, _UNFIT):
            self._outliers.unfit(replica.health)
        elif was_sent and not isinstance(error, OverloadedError):
            # Ejecting an overloaded replica would give its load to the others; the time may have been too short.
            is_blameless = isinstance(error, DeadlineExceededError)
            if not is_blameless or self._clock() - attempt.started_at >= self._outliers.patience_s:
                self._outliers.failed(replica.health)
        if lookup.untried:
            self._retry(lookup, error.kind, is_free=not was_sent)
        if lookup.in_flight or lookup.answer.done():
            return
        if lookup.lagging:
            lookup.answer.set_result(max(lookup.lagging, key=lambda answer: answer.sequence))
        elif isinstance(error, DeadlineExceededError):
            lookup.answer.set_exception(error)
        else:
            lookup.answer.set_exception(self._unavailable(lookup.failures, lookup.error))

    def _retry(self, lookup: _Lookup, reason: str, *, is_free: bool = False) -> None:
        """Try another replica, in addition to those in flight, if the budget allows it."""
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
        """Set the lookup's timer to the next hedge, or to the deadline."""
        if lookup.timer is not None:
            lookup.timer.cancel()
        left_s = min(max(0.0, lookup.deadline - self._clock()), MAX_BUDGET_US / 1e6)
        call_later = lookup.answer.get_loop().call_later
        if lookup.untried and lookup.may_hedge:
            lookup.timer = call_later(min(self._outliers.patience_s, left_s / 2), self._hedge, lookup)
        else:
            lookup.timer = call_later(left_s, self._expire, lookup)

    def _hedge(self, lookup: _Lookup) -> None:
        if not lookup.answer.done():
            self._retry(lookup, "late")

    def _expire(self, lookup: _Lookup) -> None:
        if lookup.answer.done():
            return
        now = self._clock()
        for attempt in lookup.in_flight:
            waited_s, address = now - attempt.started_at, attempt.replica.client.address
            if waited_s >= self._outliers.patience_s:
                self._outliers.failed(attempt.replica.health)
            state = "not ready" if attempt.connection is None else "no reply"
            lookup.failures.append(f"{address}: {state} after {waited_s:.3f} s")
        shard = f"shard {self._identity.shard_index} of {self._identity.num_shards}"
        failures = "; ".join(lookup.failures)
        lookup.answer.set_exception(DeadlineExceededError(f"{shard}: deadline passed before the answer ({failures})"))

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
        replica, connection = attempt.replica, attempt.connection
        if connection is not None:
            connection.forget(attempt.request_id)
        if lookup.trace is not None and attempt.span is not None:
            attributes = {
                "server.address": str(replica.client.address),
                "shardrank.shard": self._identity.shard_index,
            }
            lookup.trace.put_call(attempt.span, attempt.span_started_at, attributes, error)
        replica.calls -= 1
        if replica.is_leaving:
            self._close_if_left(replica)

    def _close_if_left(self, replica: _Replica) -> None:
        if not replica.calls:
            task = asyncio.get_running_loop().create_task(_close(replica))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _prepare(self, replica: _Replica, model: str, version: int) -> asyncio.Task[None]:
        """Return the task that connects to a replica and checks, once a connection, what its node serves."""

        async def prepare() -> None:
            while (connection := await replica.client.ready()) is not replica.checked:
                async with within(INFO_TIMEOUT_S, f"{replica.client.address}: no reply to INFO"):
                    info = await connection.info()
                self._check(info, model, version)
                replica.checked, replica.takes_traces = connection, info.takes_traces

        def end(task: asyncio.Task[None]) -> None:
            replica.preparation = None
            error = None if task.cancelled() else task.exception()
            # It is prepared again later. Without a connection the client reports itself that it is not available.
            if error is not None and not isinstance(error, NodeUnavailableError):
                self._outliers.unfit(replica.health)
                logger.info("%s can't be used yet: %s", replica.client.address, error)

        if replica.preparation is None:
            replica.preparation = asyncio.get_running_loop().create_task(prepare())
            replica.preparation.add_done_callback(end)
        return replica.preparation

    def _check(self, info: NodeInfo, model: str, version: int) -> None:
        """Raise UnfitReplicaError if a node is of another shard, plan or snapshot; GenerationNotFoundError."""
        identity = self._identity
        expected = (identity.shard_index, identity.num_shards, identity.sharding)
        actual = (info.identity.shard_index, info.identity.num_shards, info.identity.sharding)
        served = _served(info, model, version) if actual == expected else None
        if served is None:
            error = "the node is shard {} of {} ({}), ".format(*actual) + "needed is {} of {} ({})".format(*expected)
        elif served.manifest_identity != self._manifest_identity:
            error = (
                f"the node's version {version} of model {model!r} is another snapshot: its manifest has SHA-256 "
                f"{served.manifest_identity[:12]}…, needed is {self._manifest_identity[:12]}…"
            )
        elif served.plan_digest != self._plan_digest:
            error = (
                f"the node divides model {model!r} by another plan: {served.plan_digest[:12]}…, needed is "
                f"{self._plan_digest[:12]}…"
            )
        else:
            return
        raise UnfitReplicaError(error, kind="plan_mismatch")

    def _unavailable(self, failures: Sequence[str], cause: Exception | None = None) -> UnavailableError:
        index, count = self._identity.shard_index, self._identity.num_shards
        reasons = "; ".join(failures) or "no node reports that this version is ready"
        error = UnavailableError(f"shard {index} of {count}: no replica answered ({reasons})", kind="shard_unavailable")
        error.__cause__ = cause
        return error


async def _close(replica: _Replica) -> None:
    if replica.preparation is not None:
        replica.preparation.cancel()
    await replica.client.close()


def _served(info: NodeInfo, model: str, version: int) -> ServedVersion:
    """Return what a node reports of a version. Raises GenerationNotFoundError."""
    for served in info.versions:
        if (served.model, served.version) == (model, version):
            return served
    versions = [f"{served.model} {served.version}" for served in info.versions]
    raise GenerationNotFoundError(f"the node has no version {version} of model {model!r}; it has {versions}")
