"""Clocks of workers: whose push is taken, which answers are released, and who has left. No I/O, no time of its own.

The rules. A worker's steps are 1, 2, 3 and so on, and it pushes the next one once the last is answered.

    push of step s by a worker at step c       what it is
    s <= c                                     taken before: answered, not applied again
    s == c + 1                                 new: the worker's clock becomes s
    s > c + 1, or the answer to c is withheld  refused: another step is due

The answer to step s is released once s - (slowest clock of those who take part) <= bound: `bsp` is a bound of 0, with
gradients summed and applied when the last one of the step is there; `ssp:N` a bound of N, and `asp` none, with
gradients applied as they come. Until then s is the worker's next step, whatever it has forgotten: s + 1 is refused.

A worker has left once an answer has been withheld for `timeout_s` because of it, counted from its own last answer if
that came later: nobody waits for it. It comes back behind the slowest one, or, as it has one number for its step on
several nodes and these differ, up to where the consistency lets it be; with its next push it takes part.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator

from shard_node.errors import PushRefusedError


class Consistency(NamedTuple):
    """How far a worker may be ahead of the slowest, in steps, and whether gradients of a step are summed first."""

    bound: float
    is_summed: bool = False

    @classmethod
    def parse(cls, text: str) -> Consistency:
        """Read `bsp`, `ssp:N` or `asp`. Raises ValueError."""
        kind, _, number = text.partition(":")
        if kind == "ssp" and number.isdecimal() and 0 < int(number) < 2**31:
            return cls(int(number))
        if text not in ("bsp", "asp"):
            raise ValueError(f"{text!r} is none of bsp, ssp:N (N from 1 on) and asp")
        return cls(0, is_summed=True) if text == "bsp" else cls(math.inf)


ConsistencyText: TypeAlias = Annotated[str, AfterValidator(lambda text: Consistency.parse(text) and text)]
"""What `Consistency.parse` reads, as a field of settings."""


class Clocks:
    """The clocks of `num_workers` workers, numbered from 0. Times are seconds of a clock that never goes back.

    Attributes:
        steps: the last step that each one has pushed; 0 before the first.
        is_active: which have not left.
    """

    def __init__(self, num_workers: int, consistency: Consistency, timeout_s: float, now: float) -> None:
        self.consistency, self._timeout_s = consistency, timeout_s
        self.steps = [0] * num_workers
        self.is_active = [True] * num_workers
        self._answered_at = [now] * num_workers
        # Since when an answer is withheld; infinity while none is.
        self._waiting_since = [math.inf] * num_workers

    @property
    def slowest(self) -> int:
        """The slowest clock of those who take part; if nobody does, the fastest of all."""
        steps = [step for step, is_active in zip(self.steps, self.is_active, strict=True) if is_active]
        return min(steps, default=max(self.steps))

    def resume_step(self, worker: int) -> int:
        """Return the step at which a worker goes on: its own if that is not answered yet, else the one after it.

        One that has left goes on after the slowest, if that is further.
        """
        if not self.is_released(self.steps[worker]):
            return self.steps[worker]
        return 1 + (self.steps[worker] if self.is_active[worker] else max(self.steps[worker], self.slowest))

    def check(self, worker: int, step: int) -> Literal["new", "again"]:
        """Return what a push is. Raises PushRefusedError for no such worker, or a step that is not its next one."""
        if not 0 <= worker < len(self.steps):
            raise PushRefusedError(f"worker {worker} is none of 0..{len(self.steps) - 1}")
        if 0 < step <= self.steps[worker]:
            return "again"
        due = self.resume_step(worker)
        last = due if self.is_active[worker] else max(due, self.slowest + 1 + self.consistency.bound)
        if not due <= step <= last:
            where = f"is at step {self.steps[worker]}" if self.is_active[worker] else "has left"
            raise PushRefusedError(f"worker {worker} {where}: it pushes step {due} next, not {step}", kind="push_step")
        return "new"

    def push(self, worker: int, step: int) -> None:
        """Take a push that is new."""
        self.steps[worker], self.is_active[worker] = step, True

    def is_released(self, step: int) -> bool:
        """Return whether a push of this step is answered by now."""
        return step - self.slowest <= self.consistency.bound

    def waits(self, worker: int, now: float) -> None:
        """Note that a worker's answer is withheld."""
        self._waiting_since[worker] = min(self._waiting_since[worker], now)

    def answered(self, worker: int, now: float) -> None:
        """Note that a worker was answered."""
        self._answered_at[worker], self._waiting_since[worker] = now, math.inf

    def silent(self, now: float) -> list[int]:
        """Return for whom others have waited for too long."""
        waiting_since, slowest = min(self._waiting_since), self.slowest
        return [
            worker
            for worker, answered_at in enumerate(self._answered_at)
            if self.is_active[worker]
            and self.steps[worker] == slowest
            and self._waiting_since[worker] == math.inf
            and max(answered_at, waiting_since) + self._timeout_s <= now
        ]

    def leave(self, worker: int) -> None:
        """Wait for a worker no more."""
        self.is_active[worker] = False
