"""The replicas of one shard: who there is now, in which order they are asked, and how one joins or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shard_node.node import Shard
from shard_node.wire.address import Address

REST_S = 1.0


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


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """Replicas that come and go.

    Attributes:
        current: an epoch, and where the nodes are now. As long as the epoch is the same, so are the addresses. Called
            for every lookup: it must be cheap.
        connect: makes a client of one node; it connects when it is first asked.
    """

    current: Callable[[], tuple[int, Sequence[Address]]]
    connect: Callable[[Address], Replica]


@dataclass(slots=True, eq=False)
class Member:
    """A replica with what is known of it.

    Attributes:
        replica: its client.
        checked: the number of connections when it was last found to hold the right thing; -1 for never.
        rests_until: it is asked after the others until then, in monotonic seconds.
        calls: how many of this set's calls use it now.
        leaves: whether it is closed when they have ended.
    """

    replica: Replica
    checked: int = -1
    rests_until: float = float("-inf")
    calls: int = 0
    leaves: bool = False

    @property
    def is_checked(self) -> bool:
        """Whether whoever answers on the present connection was found to hold the right thing."""
        return self.checked == self.replica.connections


class ReplicaSet:
    """Belongs to one event loop. One that leaves ends its calls first; one that joins disturbs nobody.

    Args:
        replicas: a fixed list, or where to find out who there is.
        clock: monotonic seconds.
    """

    def __init__(
        self, replicas: Sequence[Replica] | ReplicaSource, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._turn = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._source = replicas if isinstance(replicas, ReplicaSource) else None
        self._epoch = -1
        self.members = [] if isinstance(replicas, ReplicaSource) else [Member(replica) for replica in replicas]

    def follow(self) -> list[Member]:
        """Takes in who has joined and who has left since the last call. Returns the newcomers."""
        if self._source is None:
            return []
        epoch, addresses = self._source.current()
        if epoch == self._epoch:
            return []
        self._epoch = epoch
        wanted = set(addresses)
        for gone in [member for member in self.members if member.replica.address not in wanted]:
            self.members.remove(gone)
            gone.leaves = True
            self._close_if_idle(gone)
        here = {member.replica.address for member in self.members}
        joined = [Member(self._source.connect(address)) for address in dict.fromkeys(addresses) if address not in here]
        self.members += joined
        return joined

    def order(self) -> list[Member]:
        """Whom to ask first: who does not rest, is connected, was checked, and has the fewest calls in flight."""
        count = len(self.members)
        # Rotating the start spreads calls over replicas that are equally busy.
        start = next(self._turn) % max(1, count)
        rotated = self.members[start:] + self.members[:start]
        if count < 2:
            return rotated
        now = self._clock()

        def rank(member: Member) -> tuple[bool, bool, bool, int]:
            replica = member.replica
            # One that nobody has asked yet comes after those that are known; of a fixed list all are asked in turn.
            is_new = self._source is not None and not member.is_checked
            return member.rests_until > now, not replica.available, is_new, replica.in_flight

        return sorted(rotated, key=rank)

    def is_awake(self, member: Member) -> bool:
        """Whether it neither rests nor waits for a connection."""
        return member.rests_until <= self._clock() and member.replica.available

    def rest(self, member: Member) -> None:
        """Has it asked after the others for a second."""
        member.rests_until = self._clock() + REST_S

    @contextlib.contextmanager
    def use(self, member: Member) -> Iterator[Replica]:
        """Keeps a replica open while the block runs, even if it leaves meanwhile."""
        member.calls += 1
        try:
            yield member.replica
        finally:
            member.calls -= 1
            if member.leaves:
                self._close_if_idle(member)

    async def close(self) -> None:
        """Closes the connections to all replicas, to those that were leaving as well."""
        self._source = None
        for member in self.members:
            await member.replica.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _close_if_idle(self, member: Member) -> None:
        if member.calls:
            return
        task = asyncio.get_running_loop().create_task(member.replica.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
