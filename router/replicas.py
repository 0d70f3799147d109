"""A shard served by several nodes, which come and go: which replica is asked, and who is asked next if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

from loader.errors import ShardrankError
from router.errors import PlanMismatchError, ReplicaLagsError, ShardUnavailableError
from router.plan import Plan
from shard_node.answer import EXACT, FLOAT32_SUMS, UNKNOWN_SEQUENCE, Answer, Forms
from shard_node.bags import KeyedBags
from shard_node.errors import (
    CardError,
    DeadlineExceededError,
    GenerationNotFoundError,
    NodeOverloadedError,
    NodeUnavailableError,
    RemoteError,
    ShardNodeError,
)
from shard_node.node import NodeInfo, ServedVersion
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

logger = logging.getLogger(__name__)

REST_S = 1.0
# Longer than any healthy lookup of a batch, shorter than a user's patience.
HEDGE_AFTER_S = 0.1
INFO_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 2.0
# A replica's own deadline ends its call first; this is only for one that overlooks it.
GRACE_S = 0.1
# A lookup changes nothing, so after any of these it may be asked again elsewhere.
_ASK_ANOTHER = (
    NodeUnavailableError,
    NodeOverloadedError,
    GenerationNotFoundError,
    RemoteError,
    CardError,
    PlanMismatchError,
    ReplicaLagsError,
    DeadlineExceededError,
)
_RESTS = (GenerationNotFoundError, PlanMismatchError, ReplicaLagsError, DeadlineExceededError, CardError)


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """Replicas that come and go.

    Attributes:
        current: an epoch, and where the nodes are now. As long as the epoch is the same, so are the addresses. Called
            for every lookup: it must be cheap.
        connect: makes a client of one node; it connects when it is first asked.
    """

    current: Callable[[], tuple[int, Sequence[Address]]]
    connect: Callable[[Address], ShardClient]


@dataclass(slots=True, eq=False)
class _Member:
    """A replica with what is known of it.

    Attributes:
        replica: its client.
        checked: the number of connections when it was last found to hold the right thing; -1 for never.
        rests_until: it is asked after the others until then, in monotonic seconds.
        calls: how many of this shard's calls use it now.
        leaves: whether it is closed when they have ended.
    """

    replica: ShardClient
    checked: int = -1
    rests_until: float = float("-inf")
    calls: int = 0
    leaves: bool = False

    @property
    def is_checked(self) -> bool:
        """Whether whoever answers on the present connection was found to hold the right thing."""
        return self.checked == self.replica.connections


class ReplicatedShard:
    """One shard of one model version and the nodes that serve it. Implements `Shard`; belongs to one event loop.

    The available replica with the fewest calls in flight is asked; if it fails, the others are, each once. If it has
    not answered after `hedge_after_s`, or half of the time that is left, another is asked beside it and the first
    answer counts, so that a node that hangs does not cost the deadline. A replica that kept us waiting or held the
    wrong thing rests for a second: it is asked after the others.

    A node is asked what it holds before its first answer is used and after every reconnect: a node of another shard,
    plan or snapshot is refused, since its sums would be wrong without being an error. Where replicas come and go this
    is done beside the requests: a newcomer is connected to and asked while the others go on answering. One that leaves
    ends its calls first.

    Args:
        plan: who owns what.
        shard_index: which shard this is.
        manifest_identity: of the snapshot that the router serves.
        replicas: at least one, or where to find out who there is.
        on_retry: told the kind of the error after which another replica is asked.
        clock: monotonic seconds; deadlines are on it.
        hedge_after_s: how long one replica is waited for alone.

    Attributes:
        min_sequence: the delta that rows must be of, or a later one, to be of use. A replica that is not so far counts
            as one that failed; where all of them are behind, one of their answers is given all the same.
    """

    def __init__(
        self,
        plan: Plan,
        shard_index: int,
        manifest_identity: str,
        replicas: Sequence[ShardClient] | ReplicaSource,
        on_retry: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
        hedge_after_s: float = HEDGE_AFTER_S,
    ) -> None:
        self._source = replicas if isinstance(replicas, ReplicaSource) else None
        self._members = [] if isinstance(replicas, ReplicaSource) else [_Member(replica) for replica in replicas]
        if self._source is None and not self._members:
            raise ShardUnavailableError(f"shard {shard_index} has no replica")
        self._identity = plan.identity(shard_index)
        self._plan_digest = plan.digest
        self._manifest_identity = manifest_identity
        self._epoch = -1
        self._turn = itertools.count()
        self._introductions: dict[_Member, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._on_retry = on_retry
        self._clock = clock
        self._hedge_after_s = hedge_after_s
        self.min_sequence = UNKNOWN_SEQUENCE
        self._layout = plan.layout

    async def pool(
        self, model: str, version: int, bags: KeyedBags, deadline: float, forms: Forms = FLOAT32_SUMS
    ) -> Answer:
        """As `Shard.pool`.

        Raises:
            ShardUnavailableError: if every replica failed; the message says what each one said.
            ShardNodeError: if a replica refused the request itself, or the deadline passed.
        """
        if self._source is not None:
            self._follow()
            self._introduce_newcomers(model, version)

        behind: list[Answer] = []

        async def attempt(member: _Member) -> Answer:
            answer = await self._ask(member, model, version, bags, deadline, forms)
            if answer.sequence < self.min_sequence:
                behind.append(answer)
                raise ReplicaLagsError(
                    f"{member.replica.address} has applied delta {answer.sequence}, wanted is {self.min_sequence}"
                )
            return answer

        try:
            return await self._first_answer(attempt, deadline)
        except ShardUnavailableError:
            if not behind:
                raise
            return max(behind, key=lambda answer: answer.sequence)

    async def pool_at(
        self, model: str, version: int, bags: KeyedBags, deadline: float, sequence: int
    ) -> tuple[Answer, int]:
        """Pool as `pool`, in exact forms, on a node that has applied its deltas up to `sequence`.

        Returns the answer, and the last delta that the node had applied when it was there. What the node told before
        and after came from the process that answered, so no row is older than `sequence`.

        Raises:
            ShardUnavailableError: if no replica can, or none is so far; the message says what each one said.
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
                    raise NodeUnavailableError("it reconnected while it was asked, so whoever answered was not checked")
                answer.check(self._layout, bags)
            except _ASK_ANOTHER as error:
                self._failed(member, error, failures)
            else:
                return answer, after
        raise self._unavailable(failures)

    async def connect(self, model: str, version: int, deadline: float) -> None:
        """Connect to every replica there is and ask it what it holds, so that no request has to.

        Raises:
            ShardUnavailableError: if none can be used; the message says what each one said.
        """
        self._follow()
        members = list(self._members)
        checks = (self._check(member, model, version, deadline) for member in members)
        outcomes = await asyncio.gather(*checks, return_exceptions=True)
        failures: list[str] = []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, _ASK_ANOTHER):
                self._failed(member, outcome, failures)
            elif outcome is not None:
                raise outcome
        if len(failures) == len(members):
            raise self._unavailable(failures)
        for failure in failures:
            logger.warning("shard %d of %s %d: %s", self._identity.shard_index, model, version, failure)

    async def info(self) -> NodeInfo:
        """Return what the first replica that answers serves. Raises ShardUnavailableError if none does."""
        return (await self.infos())[0][1]

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """Return what every replica that answers serves, by its address; all are asked at once.

        Raises:
            ShardUnavailableError: if none answers.
        """
        self._follow()
        asked = {asyncio.create_task(self._told(member)): str(member.replica.address) for member in self._members}
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
                except ShardNodeError as error:
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
        for member in self._members:
            await member.replica.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _follow(self) -> None:
        """Take in who has joined and who has left since the last call."""
        if self._source is None:
            return
        epoch, addresses = self._source.current()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for gone in [member for member in self._members if member.replica.address not in addresses]:
            self._members.remove(gone)
            gone.leaves = True
            self._close_if_left(gone)
        here = {member.replica.address for member in self._members}
        joined = [address for address in dict.fromkeys(addresses) if address not in here]
        self._members += [_Member(self._source.connect(address)) for address in joined]

    def _order(self) -> list[_Member]:
        """Whom to ask first: who does not rest, is connected, was checked, and has the fewest calls in flight."""
        count = len(self._members)
        # Rotating the start spreads calls over replicas that are equally busy.
        start = next(self._turn) % max(1, count)
        rotated = self._members[start:] + self._members[:start]
        if count < 2:
            return rotated
        now = self._clock()

        def rank(member: _Member) -> tuple[bool, bool, bool, int]:
            replica = member.replica
            # One that nobody has asked yet comes after those that are known; of a fixed list all are asked in turn.
            is_new = self._source is not None and not member.is_checked
            return member.rests_until > now, not replica.available, is_new, replica.in_flight

        return sorted(rotated, key=rank)

    def _rest(self, member: _Member) -> None:
        member.rests_until = self._clock() + REST_S

    @contextlib.contextmanager
    def _use(self, member: _Member) -> Iterator[ShardClient]:
        """Keep a replica open while the block runs, even if it leaves meanwhile."""
        member.calls += 1
        try:
            yield member.replica
        finally:
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
        waiting = self._order()
        asked: dict[asyncio.Task[Answer], _Member] = {}
        failures: list[str] = []
        try:
            while True:
                if waiting:
                    member = waiting.pop(0)
                    if not waiting and not asked:
                        # The only one left needs no watching: its own deadline ends it.
                        return await self._last(attempt(member), failures)
                    asked[asyncio.create_task(attempt(member))] = member
                if not asked:
                    raise self._unavailable(failures)
                left_s = max(0.0, deadline - self._clock())
                patience_s = min(self._hedge_after_s, left_s / 2) if waiting else left_s + GRACE_S
                done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    member = asked.pop(task)
                    try:
                        return task.result()
                    except _ASK_ANOTHER as error:
                        self._failed(member, error, failures)
                if not waiting and self._clock() >= deadline:
                    raise DeadlineExceededError(f"no replica answered before the deadline ({'; '.join(failures)})")
                if not done:
                    # Whoever keeps us waiting goes on, but another one is asked beside it, and it comes last for now.
                    for late in asked.values():
                        self._rest(late)
                    self._on_retry("late")
        finally:
            for task in asked:
                if not task.done():
                    task.cancel()
                elif not task.cancelled():
                    # Looked at, so that asyncio does not report it as forgotten.
                    task.exception()

    async def _last(self, attempt: Coroutine[None, None, Answer], failures: list[str]) -> Answer:
        try:
            return await attempt
        except DeadlineExceededError:
            raise
        except _ASK_ANOTHER as error:
            failures.append(f"{error.kind}: {error}")
            self._on_retry(error.kind)
            raise self._unavailable(failures) from error

    def _failed(self, member: _Member, error: ShardrankError, failures: list[str]) -> None:
        if isinstance(error, _RESTS):
            self._rest(member)
        failures.append(f"{error.kind}: {error}")
        self._on_retry(error.kind)

    def _unavailable(self, failures: list[str]) -> ShardUnavailableError:
        index, count = self._identity.shard_index, self._identity.num_shards
        said = "; ".join(failures) or "no node has told that this version is ready there"
        return ShardUnavailableError(f"shard {index} of {count}: no replica answered ({said})")

    async def _ask(
        self, member: _Member, model: str, version: int, bags: KeyedBags, deadline: float, forms: Forms
    ) -> Answer:
        with self._use(member) as replica:
            await self._check(member, model, version, deadline)
            try:
                answer = await replica.pool(model, version, bags, deadline, forms)
            except GenerationNotFoundError:
                # What comes back under this number may be another snapshot.
                member.checked = -1
                raise
            if not member.is_checked:
                raise NodeUnavailableError("it reconnected while it was asked, so whoever answered was not checked")
            answer.check(self._layout, bags)
            return answer

    async def _told(self, member: _Member) -> NodeInfo:
        with self._use(member) as replica:
            return await replica.info()

    def _introduce_newcomers(self, model: str, version: int) -> None:
        """Begins to check whoever has joined or reconnected, so that it can be asked like the others."""
        for member in self._members:
            if member.is_checked or member in self._introductions:
                continue
            if member.rests_until > self._clock() or not member.replica.available:
                continue
            task = asyncio.get_running_loop().create_task(self._introduce(member, model, version))
            self._introductions[member] = task
            task.add_done_callback(lambda _, member=member: self._introductions.pop(member))  # type: ignore[misc]

    async def _introduce(self, member: _Member, model: str, version: int) -> None:
        try:
            with self._use(member):
                await self._check(member, model, version, self._clock() + CHECK_TIMEOUT_S)
        except _ASK_ANOTHER as error:
            # It rests, and is tried again after that, or by a request that finds nobody else.
            self._rest(member)
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
        self._compare(info, model, version)
        member.checked = connections

    def _compare(self, info: NodeInfo, model: str, version: int) -> None:
        mine = (self._identity.shard_index, self._identity.num_shards, self._identity.sharding)
        theirs = (info.identity.shard_index, info.identity.num_shards, info.identity.sharding)
        if theirs != mine:
            raise PlanMismatchError(
                f"the node is shard {theirs[0]} of {theirs[1]} ({theirs[2]}), "
                f"wanted is {mine[0]} of {mine[1]} ({mine[2]})"
            )
        served = _served(info, model, version)
        if served.manifest_identity != self._manifest_identity:
            raise PlanMismatchError(
                f"the node's version {version} of model {model!r} is another snapshot: its manifest has SHA-256 "
                f"{served.manifest_identity[:12]}…, wanted is {self._manifest_identity[:12]}…"
            )
        if served.plan_digest != self._plan_digest:
            raise PlanMismatchError(
                f"the node divides model {model!r} by another plan: {served.plan_digest[:12]}…, wanted is "
                f"{self._plan_digest[:12]}…"
            )


def _served(info: NodeInfo, model: str, version: int) -> ServedVersion:
    """Return what a node tells of a version. Raises GenerationNotFoundError if it does not have it."""
    served = next((one for one in info.versions if (one.model, one.version) == (model, version)), None)
    if served is None:
        here = [f"{one.model} {one.version}" for one in info.versions]
        raise GenerationNotFoundError(f"the node has no version {version} of model {model!r}; it has {here}")
    return served
