"""A shard served by several nodes: which replica is asked, and who is asked next if it fails."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from router.errors import PlanMismatchError, ShardUnavailableError
from router.plan import Plan
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
_ASK_ANOTHER = (NodeUnavailableError, NodeOverloadedError, GenerationNotFoundError, RemoteError, PlanMismatchError)
_HOLDS_THE_WRONG_THING = (GenerationNotFoundError, PlanMismatchError)
REST_S = 1.0


class Replica(Shard, Protocol):
    """A connection to one node, as `ShardClient`."""

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

    The available replica with the fewest calls in flight is asked; if it fails, the others are, each once. While
    another could still be asked, an attempt gets only half of the time that is left, so that a node that hangs does not
    cost the deadline. A replica that hung or held the wrong thing rests for a second: it is asked after the others.

    A node is asked what it holds before its first answer is used and after every reconnect: a node of another shard,
    plan or snapshot is refused, since its sums would be wrong without being an error.

    Args:
        plan: who owns what.
        shard_index: which shard this is.
        manifest_identity: of the snapshot that the router serves.
        replicas: at least one.
        on_retry: told the kind of the error after which another replica is asked.
        clock: monotonic seconds; deadlines are on it.
    """

    def __init__(
        self,
        plan: Plan,
        shard_index: int,
        manifest_identity: str,
        replicas: Sequence[Replica],
        on_retry: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
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

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        """As `Shard.pool`.

        Raises:
            ShardUnavailableError: if every replica failed; the message says what each one said.
            ShardNodeError: if a replica refused the request itself, or the deadline passed.
        """
        failures: list[str] = []
        order = self._order()
        for attempt, number in enumerate(order, start=1):
            replica = self._replicas[number]
            left_s = deadline - self._clock()
            attempt_deadline = deadline if attempt == len(order) else deadline - left_s / 2
            try:
                await self._check(number, model, version, attempt_deadline)
                blocks = await replica.pool(model, version, bags, attempt_deadline)
                if self._checked[number] == replica.connections:
                    return blocks
                # It reconnected in between: whoever answered was not checked.
                failures.append("it reconnected while it was asked")
            except DeadlineExceededError as error:
                self._rest(number)
                if attempt == len(order):
                    raise
                failures.append(f"{error.kind}: {error}")
                self._on_retry(error.kind)
            except _ASK_ANOTHER as error:
                if isinstance(error, _HOLDS_THE_WRONG_THING):
                    self._rest(number)
                failures.append(f"{error.kind}: {error}")
                self._on_retry(error.kind)
        index, count = self._identity.shard_index, self._identity.num_shards
        raise ShardUnavailableError(f"shard {index} of {count}: no replica answered ({'; '.join(failures)})")

    async def info(self) -> NodeInfo:
        """What the first replica that answers serves. Raises ShardUnavailableError if none does."""
        failures: list[str] = []
        for number in self._order():
            try:
                return await self._replicas[number].info()
            except ShardNodeError as error:
                failures.append(f"{error.kind}: {error}")
        raise ShardUnavailableError(f"shard {self._identity.shard_index}: no replica answered ({'; '.join(failures)})")

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
