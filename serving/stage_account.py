"""Where the time of requests goes: every answered one's stages, added up, beside the whole that they should make up.

Parts and whole are measured each by themselves. What the parts lack is told as `unaccounted_s`, never spread over them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import Field

from loader.manifest import Frozen
from serving.stages import (
    IN_BATCH,
    NUM_BEFORE_BATCH,
    NUM_UNTIL_BATCH_END,
    STAGES,
    BatchTimes,
)


class Served(NamedTuple):
    """What an account is kept of: the names that metrics use."""

    api: str
    method: str
    model: str


class StageTime(Frozen):
    """One stage of the requests of an account.

    Attributes:
        stage: its name.
        per: whether each request goes through it alone, or all of a batch together.
        seconds: that the requests spent in it, added up. A batch's time counts for each request in it, since each has
            waited for all of it.
        busy_s: the same with a batch's time counted once: for how long something was at work.
        share: of the whole.
        mean_ms: of one request.
    """

    stage: str
    per: Literal["request", "batch"]
    seconds: float
    busy_s: float
    share: float
    mean_ms: float


class Account(Frozen):
    """The answered requests of one API, method and model.

    Attributes:
        requests: how many; refused and failed ones are in none of these numbers.
        batches: that they were in. Of a batch with requests of other APIs, this API's share.
        whole_s: from a call's begin to its encoded answer, added up; measured by itself.
        mean_ms: of one request.
        stages: in order.
        unaccounted_s: what the stages lack of the whole.
        unaccounted_share: of the whole.
    """

    api: str
    method: str
    model: str
    requests: int = Field(ge=0)
    batches: float = Field(ge=0)
    whole_s: float
    mean_ms: float
    stages: tuple[StageTime, ...]
    unaccounted_s: float
    unaccounted_share: float


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    batches: float = 0.0
    whole_s: float = 0.0
    stages_s: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    busy_s: list[float] = field(default_factory=lambda: [0.0] * len(IN_BATCH))


class StageAccount:
    """Adds up the stages of requests, apart by API, method and model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Served, _Sums] = {}

    def add(
        self, served: Served, before: Sequence[float], batch: BatchTimes, after: Sequence[float], whole_s: float
    ) -> None:
        """Adds one answered request.

        Args:
            served: what kind of request it is.
            before: seconds in each stage of `BEFORE_BATCH`.
            batch: that it was in.
            after: seconds in each stage of `AFTER_BATCH`.
            whole_s: from its call's begin to its encoded answer.
        """
        inside, part = batch.seconds(), 1 / batch.num_requests
        with self._lock:
            sums = self._sums.get(served)
            if sums is None:
                sums = self._sums[served] = _Sums()
            sums.requests += 1
            sums.batches += part
            sums.whole_s += whole_s
            for number, seconds in enumerate((*before, *inside, *after)):
                sums.stages_s[number] += seconds
            for number, seconds in enumerate(inside):
                sums.busy_s[number] += seconds * part

    def accounts(self) -> tuple[Account, ...]:
        """What was added so far, by API, method and model."""
        with self._lock:
            return tuple(_account(served, sums) for served, sums in sorted(self._sums.items()))


def _account(served: Served, sums: _Sums) -> Account:
    unaccounted_s = sums.whole_s - sum(sums.stages_s)
    stages = tuple(
        StageTime(
            stage=stage,
            per="batch" if stage in IN_BATCH else "request",
            seconds=seconds,
            busy_s=busy_s,
            share=seconds / sums.whole_s if sums.whole_s else 0.0,
            mean_ms=seconds / sums.requests * 1e3,
        )
        for stage, seconds, busy_s in zip(STAGES, sums.stages_s, _busy(sums), strict=True)
    )
    return Account(
        api=served.api,
        method=served.method,
        model=served.model,
        requests=sums.requests,
        batches=sums.batches,
        whole_s=sums.whole_s,
        mean_ms=sums.whole_s / sums.requests * 1e3,
        stages=stages,
        unaccounted_s=unaccounted_s,
        unaccounted_share=unaccounted_s / sums.whole_s if sums.whole_s else 0.0,
    )


def _busy(sums: _Sums) -> list[float]:
    alone = sums.stages_s
    return [*alone[:NUM_BEFORE_BATCH], *sums.busy_s, *alone[NUM_UNTIL_BATCH_END:]]
