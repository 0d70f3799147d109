"""Clocks of workers: whose push is taken, which answers are released, and who has left. No I/O, no time of its own.

The rules. A worker's steps are 1, 2, 3 and so on, and it pushes the next one once the last is answered.

    push of step s by a worker at step c       what it is
    s <= c                                     taken before: answered, not applied again
    s == c + 1                                 new: the worker's clock becomes s
    s > c + 1                                  refused: a step is missing

The answer to step s is released once s - (slowest clock of those who take part) <= bound: `bsp` is a bound of 0, with
gradients summed and applied when the last one of the step is there; `ssp:N` a bound of N, and `asp` none, with
gradients applied as they come. A worker that has been silent for `timeout_s`, while nothing of its was waited for, has
left: nobody waits for it. It comes back at the step after the slowest one, and with its next push it takes part.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

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
        # Since when nothing is waited for; infinity while an answer is withheld.
        self._silent_since = [now] * num_workers

    @property
    def slowest(self) -> int:
        """The slowest clock of those who take part; if nobody does, the fastest of all."""
        steps = [step for step, is_active in zip(self.steps, self.is_active, strict=True) if is_active]
        return min(steps, default=max(self.steps))

    def resume_step(self, worker: int) -> int:
        """Return the step at which a worker goes on: after its own, and after the slowest's if it had left."""
        return 1 + (self.steps[worker] if self.is_active[worker] else max(self.steps[worker], self.slowest))

    def check(self, worker: int, step: int) -> Literal["new", "again"]:
        """Return what a push is. Raises PushRefusedError for no such worker, or a step that is not its next one."""
        if not 0 <= worker < len(self.steps):
            raise PushRefusedError(f"worker {worker} is none of 0..{len(self.steps) - 1}")
        if 0 < step <= self.steps[worker]:
            return "again"
        if step != (due := self.resume_step(worker)):
            where = f"is at step {self.steps[worker]}" if self.is_active[worker] else "has left"
            raise PushRefusedError(f"worker {worker} {where}: it pushes step {due} next, not {step}", kind="push_step")
        return "new"

    def push(self, worker: int, step: int) -> None:
        """Take a push that is new."""
        self.steps[worker], self.is_active[worker] = step, True
        self._silent_since[worker] = math.inf

    def is_released(self, step: int) -> bool:
        """Return whether a push of this step is answered by now."""
        return step - self.slowest <= self.consistency.bound

    def answered(self, worker: int, now: float) -> None:
        """Note that a worker was answered: silence begins."""
        self._silent_since[worker] = now

    def silent(self, now: float) -> list[int]:
        """Return who takes part and has been silent for too long."""
        return [
            worker
            for worker, since in enumerate(self._silent_since)
            if self.is_active[worker] and since + self._timeout_s <= now
        ]

    def leave(self, worker: int) -> None:
        """Wait for a worker no more."""
        self.is_active[worker] = False
