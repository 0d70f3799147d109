"""A shard served by several nodes, which come and go: which replica is asked, and who is asked next if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from router.errors import UnfitReplicaError
from router.outliers import Outliers, ReplicaEvents, ReplicaHealth, ReplicaPolicy, RetryBudget
from router.plan import Plan
from shard_node.answer import EXACT, FLOAT32_SUMS, UNKNOWN_SEQUENCE, Answer, ReplyEncoding
from shard_node.bags import KeyedBags
from shard_node.errors import CardError, GenerationNotFoundError, NodeUnavailableError, RemoteError
from shard_node.node import NodeInfo, ServedVersion
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 2.0
# A replica's own deadline ends its call first; this is only for one that overlooks it.
GRACE_S = 0.1
# A loop that counts in milliseconds may end an attempt so long before its deadline.
TIMER_SLACK_S = 0.001
# A lookup changes nothing, so after any of these it may be asked again elsewhere.
_ASK_ANOTHER = (
    NodeUnavailableError,
    OverloadedError,
    GenerationNotFoundError,
    RemoteError,
    CardError,
    UnfitReplicaError,
    DeadlineExceededError,
)
_RECONNECTED = "it reconnected while it was asked, so whoever answered was not checked"
# After these it will not have it in a moment either.
_UNFIT = (GenerationNotFoundError, UnfitReplicaError, CardError)


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """Replicas that come and go.

    Attributes:
        current: an epoch, and where the nodes are; called for every lookup. Addresses change only with the epoch.
        connect: makes a client of one node; it connects when it is first asked.
    """

    current: Callable[[], tuple[int, Sequence[Address]]]
    connect: Callable[[Address], ShardClient]


@dataclass(slots=True, eq=False)
class _Member:
    replica: ShardClient
    health: ReplicaHealth
    # Connections of its client when it was last found to hold the right thing; -1 for never.
    checked: int = -1
    calls: int = 0
    # Closed when its calls have ended.
    leaves: bool = False

    @property
    def is_checked(self) -> bool:
        return self.checked == self.replica.connections


@dataclass(frozen=True, slots=True)
class _Asked:
    member: _Member
    at: float
    # There was a connection, or none was needed so far.
    was_up: bool
    connections: int

    def was_sent_nothing(self, error: ShardrankError) -> bool:
        connections = self.member.replica.connections
        stayed_down = connections == self.connections and not (self.was_up and connections)
        return isinstance(error, NodeUnavailableError) and stayed_down


class ReplicatedShard:
    """One shard of one model version and the nodes that serve it. Implements `Shard`; belongs to one event loop.

    The available replica with the fewest calls in flight is asked; if it fails, the others are, each once. If it has
    not answered after a while, or half of the time that is left, another is asked beside it and the first answer
    counts. Such hedges and retries have one budget; when it is spent, a late answer is waited for and a failure is
    final. A retry after which nothing had been sent is free. Ejected replicas (`router.outliers`) are asked last.

    A node is asked what it holds before its first answer is used and after every reconnect: a node of another shard,
    plan or snapshot is refused. Where replicas come and go this is done beside the requests; one that leaves ends its
    calls first.

    Args:
        manifest_identity: of the snapshot that the router serves.
        replicas: at least one, or where to find out who there is.
        clock: monotonic seconds; deadlines are on it.

    Attributes:
        min_sequence: the delta that rows must be of, or a later one. A replica that is not so far counts as one that
            failed; where all of them are behind, one of their answers is given all the same.
    """

    def __init__(
        self,
        plan: Plan,
        shard_index: int,
        manifest_identity: str,
        replicas: Sequence[ShardClient] | ReplicaSource,
        events: ReplicaEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        policy: ReplicaPolicy | None = None,
    ) -> None:
        policy = policy or ReplicaPolicy()
        self._events = events or ReplicaEvents()
        self._outliers = Outliers(policy, shard_index, clock, self._events)
        self._budget = RetryBudget(policy, clock)
        self._source = replicas if isinstance(replicas, ReplicaSource) else None
        self._members = [] if isinstance(replicas, ReplicaSource) else [self._join(replica) for replica in replicas]
        if self._source is None and not self._members:
            raise UnavailableError(f"shard {shard_index} has no replica", kind="shard_unavailable")
        self._identity = plan.identity(shard_index)
        self._plan_digest = plan.digest
        self._manifest_identity = manifest_identity
        self._epoch = -1
        self._turn = itertools.count()
        self._introductions: dict[_Member, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._clock = clock
        self.min_sequence = UNKNOWN_SEQUENCE
        self._layout = plan.layout

    async def pool(
        self, model: str, version: int, bags: KeyedBags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> Answer:
        """Pool as `Shard.pool`.

        Raises:
            UnavailableError: if every replica failed; the message says what each one said.
            ShardrankError: if a replica refused the request itself, or the deadline passed.
        """
        if self._source is not None:
            self._follow()
            self._introduce_newcomers(model, version)

        behind: list[Answer] = []

        async def attempt(member: _Member) -> Answer:
            with self._use(member) as replica:
                await self._check(member, model, version, deadline)
                began = self._clock()
                try:
                    answer = await replica.pool(model, version, bags, deadline, forms)
                except GenerationNotFoundError:
                    # What comes back under this number may be another snapshot.
                    member.checked = -1
                    raise
                if not member.is_checked:
                    raise NodeUnavailableError(_RECONNECTED)
                answer.check(self._layout, bags)
                self._outliers.answered(member.health, self._clock() - began)
            if answer.sequence < self.min_sequence:
                behind.append(answer)
                raise UnfitReplicaError(
                    f"{member.replica.address} has applied delta {answer.sequence}, wanted is {self.min_sequence}",
                    kind="replica_lags",
                )
            return answer

        try:
            return await self._first_answer(attempt, deadline)
        except UnavailableError:
            if not behind:
                raise
            return max(behind, key=lambda answer: answer.sequence)

    async def pool_at(
        self, model: str, version: int, bags: KeyedBags, deadline: float, sequence: int
    ) -> tuple[Answer, int]:
        """Pool as `pool`, in exact forms, on a node that has applied its deltas up to `sequence`.

        Returns the answer, and the last delta that the node had applied when it was there; no row is older than
        `sequence`. Raises UnavailableError if no replica can, or none is so far.
        """
        self._follow()
        failures: list[str] = []
        for member in self._order():
            try:
                with self._use(member) as replica:
                    await self._check(member, model, version, deadline)
                    before = _served(await replica.info(), model, version).delta_sequence
                    if before < sequence:
                        failures.append(f"{replica.address} has applied delta {before}, wanted is {sequence}")
                        continue
                    answer = await replica.pool(model, version, bags, deadline, EXACT)
                    after = _served(await replica.info(), model, version).delta_sequence
                if not member.is_checked:
                    raise NodeUnavailableError(_RECONNECTED)
                answer.check(self._layout, bags)
            except _ASK_ANOTHER as error:
                failures.append(self._noted(member, error))
            else:
                return answer, after
        raise self._unavailable(failures)

    async def connect(self, model: str, version: int, deadline: float) -> None:
        """Connect to every replica there is and ask it what it holds, so that no request has to.

        Raises UnavailableError if none can be used; the message says what each one said.
        """
        self._follow()
        members = list(self._members)
        checks = (self._check(member, model, version, deadline) for member in members)
        outcomes = await asyncio.gather(*checks, return_exceptions=True)
        failures: list[str] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, _ASK_ANOTHER):
                failures.append(self._noted(member, outcome))
            elif outcome is not None:
                raise outcome
        if len(failures) == len(members):
            raise self._unavailable(failures)
        for failure in failures:
            logger.warning("shard %d of %s %d: %s", self._identity.shard_index, model, version, failure)

    async def info(self) -> NodeInfo:
        """Return what the first replica that answers serves. Raises UnavailableError if none does."""
        return (await self.infos())[0][1]

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """Return what every replica that answers serves, by its address; all are asked at once.

        Raises UnavailableError if none answers.
        """
        self._follow()

        async def ask(member: _Member) -> NodeInfo:
            with self._use(member) as replica:
                return await replica.info()

        asked = {asyncio.create_task(ask(member)): str(member.replica.address) for member in self._members}
        failures: list[str] = []
        found: list[tuple[str, NodeInfo]] = []
        try:
            if asked:
                await asyncio.wait(asked, timeout=INFO_TIMEOUT_S)
            for task, address in asked.items():
                if not task.done():
                    failures.append(f"{address}: no answer within {INFO_TIMEOUT_S} s")
                    continue
                try:
                    found.append((address, task.result()))
                except ShardrankError as error:
                    failures.append(f"{error.kind}: {error}")
        finally:
            for task in asked:
                task.cancel()
        if not found:
            raise self._unavailable(failures)
        return found

    async def close(self) -> None:
        """Close the connections to all replicas, to those that were leaving as well."""
        if introductions := list(self._introductions.values()):
            for task in introductions:
                task.cancel()
            # A newcomer that has left meanwhile is closed by the last one who uses it.
            await asyncio.wait(introductions)
        self._source = None
        self._outliers.close()
        for member in self._members:
            await member.replica.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _follow(self) -> None:
        if self._source is None:
            return
        epoch, addresses = self._source.current()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for gone in [member for member in self._members if member.replica.address not in addresses]:
            self._members.remove(gone)
            self._outliers.leave(gone.health)
            gone.leaves = True
            self._close_if_left(gone)
        here = {member.replica.address for member in self._members}
        joined = [address for address in dict.fromkeys(addresses) if address not in here]
        self._members += [self._join(self._source.connect(address)) for address in joined]

    def _join(self, replica: ShardClient) -> _Member:
        return _Member(replica, self._outliers.join())

    def _order(self) -> list[_Member]:
        """Return the replicas in the order in which they are asked."""
        count = len(self._members)
        # Rotating the start spreads calls over replicas that are equally busy.
        start = next(self._turn) % max(1, count)
        rotated = self._members[start:] + self._members[:start]
        if count < 2:
            return rotated

        def rank(member: _Member) -> tuple[bool, bool, bool, int]:
            replica, comes_last = member.replica, self._outliers.comes_last(member.health, member.calls)
            # One that nobody has asked yet comes after those that are known; of a fixed list all are asked in turn.
            is_new = self._source is not None and not member.is_checked
            return not replica.available, comes_last, is_new, replica.in_flight

        return sorted(rotated, key=rank)

    @contextlib.contextmanager
    def _use(self, member: _Member) -> Iterator[ShardClient]:
        """Keep a replica open while the block runs, even if it leaves meanwhile."""
        member.calls += 1
        try:
            yield member.replica
        finally:
            self._release(member)

    def _release(self, member: _Member, _: object = None) -> None:
        member.calls -= 1
        self._close_if_left(member)

    def _close_if_left(self, member: _Member) -> None:
        if member.leaves and not member.calls:
            task = asyncio.get_running_loop().create_task(member.replica.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _first_answer(
        self, attempt: Callable[[_Member], Coroutine[None, None, Answer]], deadline: float
    ) -> Answer:
        self._budget.earn()
        waiting, failures = self._order(), list[str]()
        if not waiting:
            raise self._unavailable([])
        if len(waiting) == 1:
            # The only replica needs no watching: its own deadline ends it.
            try:
                return await attempt(waiting[0])
            except DeadlineExceededError:
                raise
            except _ASK_ANOTHER as failed:
                raise self._unavailable([self._noted(waiting[0], failed)]) from failed
        asked: dict[asyncio.Task[Answer], _Asked] = {}
        error: ShardrankError | None = None
        is_denied = False

        def ask_next() -> None:
            member = waiting.pop(0)
            now = _Asked(member, self._clock(), member.replica.available, member.replica.connections)
            # It counts from now on, not from when the task begins: others may choose in the same turn of the loop.
            member.calls += 1
            task = asyncio.create_task(attempt(member))
            task.add_done_callback(partial(self._release, member))
            asked[task] = now

        ask_next()
        try:
            while asked:
                left_s = max(0.0, deadline - self._clock())
                may_hedge = bool(waiting) and not is_denied
                patience_s = min(self._outliers.patience_s, left_s / 2) if may_hedge else left_s + GRACE_S
                done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                wish, is_free = "" if done else "late", False
                for task in done:
                    one = asked.pop(task)
                    try:
                        answer = task.result()
                    except _ASK_ANOTHER as failed:
                        error, wish, is_free = failed, failed.kind, one.was_sent_nothing(failed)
                        self._failed(one, failed, failures)
                    else:
                        now = self._clock()
                        for late in asked.values():
                            if late.at < one.at:
                                self._outliers.overtaken(late.member.health, now - late.at)
                        return answer
                if self._clock() >= deadline - TIMER_SLACK_S:
                    raise DeadlineExceededError(f"no replica answered before the deadline ({'; '.join(failures)})")
                if not waiting:
                    continue
                if is_free or self._budget.take():
                    # Whoever keeps us waiting goes on, but another one is asked beside it.
                    self._events.retried(wish)
                    ask_next()
                else:
                    is_denied = True
                    self._events.denied(wish)
                    failures += [] if asked else ["others are not asked: the budget of hedges and retries is spent"]
            raise self._unavailable(failures) from error
        finally:
            for task in asked:
                if not task.done():
                    task.cancel()
                elif not task.cancelled():
                    # Looked at, so that asyncio does not report it as forgotten.
                    task.exception()

    def _noted(self, member: _Member, error: ShardrankError) -> str:
        """Eject a replica that has not what is asked of it; return what it said."""
        if isinstance(error, _UNFIT):
            self._outliers.unfit(member.health)
        return f"{error.kind}: {error}"

    def _failed(self, asked: _Asked, error: ShardrankError, failures: list[str]) -> None:
        failures.append(self._noted(asked.member, error))
        if isinstance(error, (*_UNFIT, OverloadedError)) or asked.was_sent_nothing(error):
            # To eject who has too much to do would give it to the others.
            return
        if isinstance(error, DeadlineExceededError) and self._clock() - asked.at < self._outliers.patience_s:
            # It had no time: that is not its fault.
            return
        self._outliers.failed(asked.member.health)

    def _unavailable(self, failures: list[str]) -> UnavailableError:
        index, count = self._identity.shard_index, self._identity.num_shards
        said = "; ".join(failures) or "no node has told that this version is ready there"
        return UnavailableError(f"shard {index} of {count}: no replica answered ({said})", kind="shard_unavailable")

    def _introduce_newcomers(self, model: str, version: int) -> None:
        for member in self._members:
            if member.is_checked or member in self._introductions:
                continue
            if self._outliers.is_ejected(member.health) or not member.replica.available:
                continue
            task = asyncio.get_running_loop().create_task(self._introduce(member, model, version))
            self._introductions[member] = task
            task.add_done_callback(lambda _, member=member: self._introductions.pop(member))  # type: ignore[misc]

    async def _introduce(self, member: _Member, model: str, version: int) -> None:
        try:
            with self._use(member):
                await self._check(member, model, version, self._clock() + CHECK_TIMEOUT_S)
        except _ASK_ANOTHER as error:
            # It is tried again later, or by a request that finds nobody else.
            self._outliers.unfit(member.health)
            logger.info("%s can't be asked yet: %s", member.replica.address, error)

    async def _check(self, member: _Member, model: str, version: int, deadline: float) -> None:
        """Make sure, once a connection, that a node holds what this shard is."""
        replica = member.replica
        if member.is_checked:
            return
        connections = -1
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                # Asked again if a connection was made meanwhile, so that the answer surely came over the one counted.
                while connections != replica.connections:
                    connections = replica.connections
                    info = await replica.info()
        except TimeoutError:
            raise DeadlineExceededError("deadline passed while asking the node what it serves") from None
        mine = (self._identity.shard_index, self._identity.num_shards, self._identity.sharding)
        theirs = (info.identity.shard_index, info.identity.num_shards, info.identity.sharding)
        if theirs != mine:
            raise UnfitReplicaError(
                f"the node is shard {theirs[0]} of {theirs[1]} ({theirs[2]}), "
                f"wanted is {mine[0]} of {mine[1]} ({mine[2]})",
                kind="plan_mismatch",
            )
        served = _served(info, model, version)
        if served.manifest_identity != self._manifest_identity:
            raise UnfitReplicaError(
                f"the node's version {version} of model {model!r} is another snapshot: its manifest has SHA-256 "
                f"{served.manifest_identity[:12]}…, wanted is {self._manifest_identity[:12]}…",
                kind="plan_mismatch",
            )
        if served.plan_digest != self._plan_digest:
            raise UnfitReplicaError(
                f"the node divides model {model!r} by another plan: {served.plan_digest[:12]}…, wanted is "
                f"{self._plan_digest[:12]}…",
                kind="plan_mismatch",
            )
        member.checked = connections


def _served(info: NodeInfo, model: str, version: int) -> ServedVersion:
    served = next((one for one in info.versions if (one.model, one.version) == (model, version)), None)
    if served is None:
        here = [f"{one.model} {one.version}" for one in info.versions]
        raise GenerationNotFoundError(f"the node has no version {version} of model {model!r}; it has {here}")
    return served
