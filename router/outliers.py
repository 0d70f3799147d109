"""Which replicas of a shard come after the others, for how long, and how many lookups may be sent twice.

The idea is that of Envoy's outlier detection: a replica that fails several times in a row, or answers far more slowly
than its peers, is ejected for a time that grows with repeats, within a limit, and let in again by a few probes. Hedges
and retries have one budget, a token bucket like that of Finagle's `RetryBudget` and gRPC's retry throttling.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from pydantic import Field, model_validator

from loader.snapshot.tables import Frozen

logger = logging.getLogger(__name__)

Reason: TypeAlias = Literal["failures", "slow", "unfit"]
"""Why a replica is ejected; `unfit` has not what is asked of it, such as the version or rows that are new enough."""

MAX_WINDOW: Final = 64
CHECK_S: Final = 1.0
# 2 to this power times any base is more than any longest ejection.
MAX_DOUBLINGS: Final = 30


class ReplicaPolicy(Frozen):
    """When another replica is asked too, and when one is ejected.

    Attributes:
        hedge_after_ms: a replica is waited for alone for so long, or `slow_factor` times what an answer of this shard
            usually takes, whichever is longer.
        budget_share: hedges and retries that each lookup earns.
        budget_per_s: further ones that each second does, so that a shard that is seldom asked is asked again too.
        budget_reserve: how many may come at once after a time without any: the bucket's size. 0 for none, ever.
        failures: so many in a row eject. One that was overtaken by a replica that was asked later failed too.
        slow_factor, slow_excess_ms: a replica is slow if the median of its answers takes longer than so many times the
            median of its peers' medians, and so much more.
        window_s: answers older than this say nothing any more.
        min_answers: a replica with fewer in that time is not compared.
        max_ejected_share: of a shard's replicas, rounded up; one always stays. 0 ejects none. Does not apply to those
            that have not what is asked of them.
        base_ejection_s, max_ejection_s: the first ejection, doubled with each further one; after `max_ejection_s` in
            service it begins anew.
        probes: answers, one at a time, by which a replica is let in again.
    """

    hedge_after_ms: float = Field(default=100.0, gt=0, le=600_000)
    budget_share: float = Field(default=0.1, ge=0, le=1)
    budget_per_s: float = Field(default=1.0, ge=0, le=1000)
    budget_reserve: float = Field(default=32.0, ge=0, le=10_000)
    failures: int = Field(default=3, ge=1, le=1_000_000)
    slow_factor: float = Field(default=3.0, gt=1, le=1000)
    slow_excess_ms: float = Field(default=5.0, ge=0, le=600_000)
    window_s: float = Field(default=10.0, gt=0, le=600)
    min_answers: int = Field(default=16, ge=1, le=MAX_WINDOW)
    max_ejected_share: float = Field(default=0.5, ge=0, le=1)
    base_ejection_s: float = Field(default=1.0, gt=0, le=3600)
    max_ejection_s: float = Field(default=30.0, gt=0, le=3600)
    probes: int = Field(default=3, ge=1, le=MAX_WINDOW)

    @model_validator(mode="after")
    def _check(self) -> ReplicaPolicy:
        if self.max_ejection_s < self.base_ejection_s:
            raise ValueError(
                f"max_ejection_s {self.max_ejection_s:g} is shorter than base_ejection_s {self.base_ejection_s:g}"
            )
        return self


@dataclass(frozen=True, slots=True)
class ReplicaEvents:
    """Called with what happens to a shard's replicas.

    Attributes:
        retried: a lookup goes to another replica: the kind of the error before, or `late` for a hedge.
        denied: likewise, and it does not, because the budget is spent.
        ejected: a replica of that shard was, and why.
        ejected_change: so many more replicas of that shard, or fewer if negative, are ejected or not yet let in.
    """

    retried: Callable[[str], None] = lambda kind: None
    denied: Callable[[str], None] = lambda kind: None
    ejected: Callable[[int, Reason], None] = lambda shard, reason: None
    ejected_change: Callable[[int, int], None] = lambda shard, change: None


class RetryBudget:
    """How many hedges and retries there may be: a token bucket, full at first.

    In any time of t seconds with n lookups at most reserve + share n + per_s t are allowed.
    """

    def __init__(self, policy: ReplicaPolicy, clock: Callable[[], float]) -> None:
        self._policy, self._clock = policy, clock
        self._tokens, self._filled_at = policy.budget_reserve, clock()

    def earn(self) -> None:
        """Count a lookup."""
        self._tokens = min(self._policy.budget_reserve, self._tokens + self._policy.budget_share)

    def spend(self) -> bool:
        """Return whether a hedge or retry is allowed, and count it."""
        now = self._clock()
        earned = self._policy.budget_per_s * max(0.0, now - self._filled_at)
        self._tokens, self._filled_at = min(self._policy.budget_reserve, self._tokens + earned), now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(slots=True, eq=False)
class ReplicaHealth:
    """The record of one replica. `Outliers` alone changes it.

    Attributes:
        name: of the replica, in the log.
        answers: when each of the last answers came, and how many seconds it took.
        failures: in a row.
        reason: why it is ejected, or let in for probes; None in service.
        ejected_until: in seconds of the clock, of the last ejection.
        ejections: without a long time in service between them.
        probes: seconds that each answer has taken since it was let in.
    """

    name: str = ""
    answers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_WINDOW))
    failures: int = 0
    reason: Reason | None = None
    ejected_until: float = -math.inf
    ejections: int = 0
    probes: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Outliers:
    """The replicas of one shard, of that number for `events`, and which of them are ejected. Belongs to one event loop.

    `clock` is monotonic seconds.
    """

    _policy: ReplicaPolicy
    _shard: int
    _clock: Callable[[], float]
    _events: ReplicaEvents
    _members: list[ReplicaHealth] = field(default_factory=list)
    _next_check: float = -math.inf
    _typical_s: float = 0.0

    @property
    def patience_s(self) -> float:
        """How long a replica is waited for alone."""
        return max(self._policy.hedge_after_ms / 1e3, self._policy.slow_factor * self._typical_s)

    def join(self, name: str = "") -> ReplicaHealth:
        """Add a replica."""
        self._members.append(health := ReplicaHealth(name))
        return health

    def leave(self, health: ReplicaHealth) -> None:
        """Forget a replica. If then too many of the others are ejected, some are let in before their time."""
        self._members.remove(health)
        if health.reason is not None:
            health.reason = None
            self._events.ejected_change(self._shard, -1)
        now = self._clock()
        for member in sorted(self._ejected(now), key=lambda member: member.ejected_until):
            if member.reason != "unfit" and len(self._ejected(now)) > self._max_ejected():
                member.ejected_until = now

    def is_ejected(self, health: ReplicaHealth) -> bool:
        """Return whether a replica's time is not over yet."""
        return health.reason is not None and health.ejected_until > self._clock()

    def comes_last(self, health: ReplicaHealth, calls: int) -> bool:
        """Return whether a replica comes last: ejected, or let in again and answering a probe already."""
        return health.reason is not None and (calls > 0 or self.is_ejected(health))

    def answered(self, health: ReplicaHealth, seconds: float) -> None:
        """Note an answer and how long it took."""
        now = self._clock()
        if health.reason is None:
            health.failures = 0
            health.answers.append((now, seconds))
            if now >= self._next_check:
                self._next_check = now + CHECK_S
                self._eject_slow(now)
        elif health.ejected_until <= now:
            health.probes.append(seconds)
            if len(health.probes) < self._policy.probes:
                return
            if self._is_slow(statistics.median(health.probes), list(self._medians(now).values())):
                self._eject(health, "slow")
                return
            health.reason, health.failures = None, 0
            health.probes.clear()
            self._events.ejected_change(self._shard, -1)
            logger.info("%s is in service again", health.name)

    def failed(self, health: ReplicaHealth) -> None:
        """Note that a replica did not answer though it should have."""
        if self.is_ejected(health):
            return
        health.failures += 1
        if health.reason is not None or health.failures >= self._policy.failures:
            self._eject(health, "failures")

    def overtaken(self, health: ReplicaHealth, seconds: float) -> None:
        """Note that a replica had not answered after so many seconds when another, which was sent to later, had."""
        if health.reason is None:
            health.answers.append((self._clock(), seconds))
        self.failed(health)

    def unfit(self, health: ReplicaHealth) -> None:
        """Note that a replica has not what was needed: it comes last at once, whatever the limits."""
        if not self.is_ejected(health):
            self._eject(health, "unfit")

    def close(self) -> None:
        """Forget all replicas."""
        for health in tuple(self._members):
            self.leave(health)

    def _ejected(self, now: float) -> list[ReplicaHealth]:
        return [member for member in self._members if member.reason is not None and member.ejected_until > now]

    def _max_ejected(self) -> int:
        count = len(self._members)
        return min(count - 1, math.ceil(self._policy.max_ejected_share * count))

    def _eject(self, health: ReplicaHealth, reason: Reason) -> None:
        now, policy = self._clock(), self._policy
        health.probes.clear()
        is_full = reason != "unfit" and len(self._ejected(now)) >= self._max_ejected()
        # A replica that has left may still answer earlier requests.
        if is_full or health not in self._members:
            return
        if now - health.ejected_until > policy.max_ejection_s:
            health.ejections = 0
        seconds = policy.base_ejection_s
        if reason != "unfit":
            # That a node lacks something is certain, and checking it again is cheap; a judgement may be wrong.
            seconds = min(policy.max_ejection_s, seconds * 2.0 ** min(health.ejections, MAX_DOUBLINGS))
            health.ejections += 1
        if health.reason is None:
            self._events.ejected_change(self._shard, 1)
            logger.warning("%s is ejected: %s", health.name, reason)
        self._events.ejected(self._shard, reason)
        health.reason, health.ejected_until = reason, now + seconds
        health.failures = 0
        health.answers.clear()

    def _eject_slow(self, now: float) -> None:
        medians = self._medians(now)
        # Of two the faster one: it is the slower one that must not be waited for any longer.
        self._typical_s = statistics.median_low(medians.values()) if medians else 0.0
        for slowest, median_s in sorted(medians.items(), key=lambda item: -item[1]):
            if self._is_slow(median_s, [peer_s for peer, peer_s in medians.items() if peer is not slowest]):
                self._eject(slowest, "slow")
                if slowest.reason is not None:
                    del medians[slowest]

    def _is_slow(self, seconds: float, peers: list[float]) -> bool:
        policy = self._policy
        return bool(peers) and seconds > policy.slow_factor * statistics.median(peers) + policy.slow_excess_ms / 1e3

    def _medians(self, now: float) -> dict[ReplicaHealth, float]:
        medians = {}
        for health in self._members:
            recent = [seconds for when, seconds in health.answers if now - when <= self._policy.window_s]
            if health.reason is None and len(recent) >= self._policy.min_answers:
                medians[health] = statistics.median(recent)
        return medians
