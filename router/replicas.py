"""A shard served by several nodes: which replica is asked, and who is asked next if it fails."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from loader.errors import ShardrankError
from router.errors import PlanMismatchError, ShardUnavailableError
from router.pieces import Cutter, join
from router.plan import Plan
from shard_node.address import Address
from shard_node.bags import Float32Array, KeyedBags
from shard_node.errors import (
    DeadlineExceededError,
    GenerationNotFoundError,
    NodeOverloadedError,
    NodeUnavailableError,
    RemoteError,
    ShardNodeError,
)
from shard_node.node import NodeInfo
from shard_node.shard import Shard

# A lookup changes nothing, so after any of these it may be asked again elsewhere.
_ASK_ANOTHER = (
    NodeUnavailableError,
    NodeOverloadedError,
    GenerationNotFoundError,
    RemoteError,
    PlanMismatchError,
    DeadlineExceededError,
)
_RESTS = (GenerationNotFoundError, PlanMismatchError, DeadlineExceededError)
REST_S = 1.0
# Longer than any healthy lookup of a batch, shorter than a user's patience.
HEDGE_AFTER_S = 0.1
INFO_TIMEOUT_S = 1.0
# A replica's own deadline ends its call first; this is only for one that overlooks it.
GRACE_S = 0.1


class Replica(Shard, Protocol):
    """A connection to one node, as `ShardClient`."""

    @property
    def address(self) -> Address:
        """Where the node is."""
        ...

    @property
    def in_flight(self) -> int:
        """Calls that have not returned."""
        ...

    @property
    def available(self) -> bool:
        """Whether a call now would be sent, or at least try to connect."""
        ...

    @property
    def connections(self) -> int:
        """How many connections were made so far; a change means that another process may answer now."""
        ...


class ReplicatedShard:
    """One shard of one model version and the nodes that serve it. Implements `Shard`; belongs to one event loop.

    The available replica with the fewest calls in flight is asked; if it fails, the others are, each once. If it has
    not answered after `hedge_after_s`, or half of the time that is left, another is asked beside it and the first
    answer counts, so that a node that hangs does not cost the deadline. A replica that kept us waiting or held the
    wrong thing rests for a second: it is asked after the others.

    A node is asked what it holds before its first answer is used and after every reconnect: a node of another shard,
    plan or snapshot is refused, since its sums would be wrong without being an error.

    Args:
        plan: who owns what.
        shard_index: which shard this is.
        manifest_identity: of the snapshot that the router serves.
        replicas: at least one.
        on_retry: told the kind of the error after which another replica is asked.
        clock: monotonic seconds; deadlines are on it.
        hedge_after_s: how long one replica is waited for alone.
    """

    def __init__(
        self,
        plan: Plan,
        shard_index: int,
        manifest_identity: str,
        replicas: Sequence[Replica],
        on_retry: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
        hedge_after_s: float = HEDGE_AFTER_S,
    ) -> None:
        if not replicas:
            raise ShardUnavailableError(f"shard {shard_index} has no replica")
        self._identity = plan.identity(shard_index)
        self._plan_digest = plan.digest
        self._manifest_identity = manifest_identity
        self._replicas = list(replicas)
        self._checked: dict[int, int] = {}
        self._rests_until = [float("-inf")] * len(self._replicas)
        self._turn = itertools.count()
        self._on_retry = on_retry
        self._clock = clock
        self._hedge_after_s = hedge_after_s
        self._cutter = Cutter(plan.layout)

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        """As `Shard.pool`. What is too large for a frame travels in pieces.

        Raises:
            ShardUnavailableError: if every replica failed; the message says what each one said.
            ShardNodeError: if a replica refused the request itself, or the deadline passed.
        """
        pieces = [await self._pool(model, version, piece, deadline) for piece in self._cutter.cut(bags)]
        return join(pieces)

    async def _pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        waiting = self._order()
        asked: dict[asyncio.Task[list[Float32Array]], int] = {}
        failures: list[str] = []
        try:
            while True:
                if waiting:
                    number = waiting.pop(0)
                    attempt = self._ask(number, model, version, bags, deadline)
                    if not waiting and not asked:
                        # The only one left needs no watching: its own deadline ends it.
                        return await self._last(attempt, failures)
                    asked[asyncio.create_task(attempt)] = number
                left_s = max(0.0, deadline - self._clock())
                patience_s = min(self._hedge_after_s, left_s / 2) if waiting else left_s + GRACE_S
                done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                answer = self._first_answer(done, asked, failures)
                if answer is not None:
                    return answer
                if not waiting and self._clock() >= deadline:
                    raise DeadlineExceededError(f"no replica answered before the deadline ({'; '.join(failures)})")
                if not done:
                    # Whoever keeps us waiting goes on, but another one is asked beside it, and it comes last for now.
                    for late in asked.values():
                        self._rest(late)
                    self._on_retry("late")
                if not asked and not waiting:
                    raise self._unavailable(failures)
        finally:
            for task in asked:
                _drop(task)

    def _first_answer(
        self,
        done: set[asyncio.Task[list[Float32Array]]],
        asked: dict[asyncio.Task[list[Float32Array]], int],
        failures: list[str],
    ) -> list[Float32Array] | None:
        """The answer of a replica that is done, if one has it; what failed is put on record and forgotten."""
        for task in done:
            number = asked.pop(task)
            try:
                return task.result()
            except _ASK_ANOTHER as error:
                self._failed(number, error, failures)
        return None

    async def _last(
        self, attempt: Coroutine[None, None, list[Float32Array]], failures: list[str]
    ) -> list[Float32Array]:
        try:
            return await attempt
        except DeadlineExceededError:
            raise
        except _ASK_ANOTHER as error:
            failures.append(f"{error.kind}: {error}")
            self._on_retry(error.kind)
            raise self._unavailable(failures) from error

    def _failed(self, number: int, error: ShardrankError, failures: list[str]) -> None:
        if isinstance(error, _RESTS):
            self._rest(number)
        failures.append(f"{error.kind}: {error}")
        self._on_retry(error.kind)

    def _unavailable(self, failures: list[str]) -> ShardUnavailableError:
        index, count = self._identity.shard_index, self._identity.num_shards
        return ShardUnavailableError(f"shard {index} of {count}: no replica answered ({'; '.join(failures)})")

    async def _ask(self, number: int, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        replica = self._replicas[number]
        await self._check(number, model, version, deadline)
        blocks = await replica.pool(model, version, bags, deadline)
        if self._checked[number] != replica.connections:
            raise NodeUnavailableError("it reconnected while it was asked, so whoever answered was not checked")
        return blocks

    async def info(self) -> NodeInfo:
        """What the first replica that answers serves. Raises ShardUnavailableError if none does."""
        return (await self.infos())[0][1]

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """What every replica that answers serves, by its address; all are asked at once.

        Raises:
            ShardUnavailableError: if none answers.
        """
        asked = {asyncio.create_task(replica.info()): str(replica.address) for replica in self._replicas}
        failures: list[str] = []
        found: list[tuple[str, NodeInfo]] = []
        try:
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
        """Closes the connections to all replicas."""
        for replica in self._replicas:
            await replica.close()

    def _order(self) -> list[int]:
        # Rotating the start spreads calls over replicas that are equally busy.
        count = len(self._replicas)
        start = next(self._turn) % count
        rotated = [(start + step) % count for step in range(count)]
        now = self._clock()

        def rank(number: int) -> tuple[bool, bool, int]:
            replica = self._replicas[number]
            return self._rests_until[number] > now, not replica.available, replica.in_flight

        return sorted(rotated, key=rank)

    def _rest(self, number: int) -> None:
        self._rests_until[number] = self._clock() + REST_S

    async def _check(self, number: int, model: str, version: int, deadline: float) -> None:
        replica = self._replicas[number]
        if self._checked.get(number) == replica.connections:
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
        self._checked[number] = connections

    def _compare(self, info: NodeInfo, model: str, version: int) -> None:
        mine = (self._identity.shard_index, self._identity.num_shards, self._identity.sharding)
        theirs = (info.identity.shard_index, info.identity.num_shards, info.identity.sharding)
        if theirs != mine:
            raise PlanMismatchError(
                f"the node is shard {theirs[0]} of {theirs[1]} ({theirs[2]}), "
                f"wanted is {mine[0]} of {mine[1]} ({mine[2]})"
            )
        served = next((one for one in info.versions if (one.model, one.version) == (model, version)), None)
        if served is None:
            here = [f"{one.model} {one.version}" for one in info.versions]
            raise GenerationNotFoundError(f"the node has no version {version} of model {model!r}; it has {here}")
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


def _drop(task: asyncio.Task[list[Float32Array]]) -> None:
    """Ends a call whose answer is not needed any more."""
    if not task.done():
        task.cancel()
    elif not task.cancelled():
        # Looked at, so that asyncio does not report it as forgotten.
        task.exception()
