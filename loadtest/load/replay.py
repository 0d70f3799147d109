"""Recorded requests sent again, at their pace or another, and their scores compared with those that were recorded.

Scores are compared where the answer is of the same version, dense step and deltas as the recorded one; elsewhere they
are meant to be others, and are counted as not comparable.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from pydantic import Field

from loader.errors import ConfigError, ShardrankError
from loader.memory import settle_heap
from loadtest.load.config import MAX_RATE, TOLERANCES, Sending
from loadtest.load.generator import LEAD_S, event_loop, offer
from loadtest.load.result import Measured, Recorder, measured, percentiles, write_document
from loadtest.load.run import show_measured
from loadtest.load.senders import Failure, Outgoing
from loadtest.servers import stopping_on_signals
from loadtest.workloads.payloads import Pool, recorded_payload
from loadtest.workloads.served import MAX_BYTES, describe
from serving.client.features import read_rank
from serving.observe.recording import RecordedRequest, read_file, recorded_files


class ReplayConfig(Sending):
    """Which recorded requests are sent, of a model if there are several, and how fast.

    Attributes:
        speed: times the pace at which they came.
        rate: requests a second in place of that; None for their pace.
        requests: the last so many.
        tolerance: of a score; more is a difference. By default, that of the number format of the model that answers.
    """

    folder: Path
    speed: float = Field(default=1.0, gt=0, le=1e6)
    rate: float | None = Field(default=None, gt=0, le=MAX_RATE)
    requests: int = Field(default=10_000, ge=1, le=1_000_000)
    tolerance: float = Field(default=TOLERANCES["float32"], ge=0)


class ReplayResult(Measured):
    """What `loadtest replay --json` writes; what is not listed is as in `Measured`.

    Attributes:
        recorded: requests of the model in the folder; `sent` of them, the last ones.
        seconds: from the first to the last one's time.
        compared: answers of the same version, dense step and deltas: `identical` to the bit, `within` the tolerance,
            `different` beyond it; and answers that are `not_comparable`.
        max_difference: of a score, over all that were compared; None if none was.
        answers_by_version: how many.
        lag_p99_ms: how late the replay itself came to its requests.
    """

    recorded: int
    seconds: float
    speed: float
    rate: float | None
    compared: int
    identical: int
    within: int
    different: int
    not_comparable: int
    tolerance: float
    max_difference: float | None
    answers_by_version: dict[int, int]
    lag_p99_ms: float | None


class ScoreComparison:
    """A judge that compares each answer's scores with the recorded ones."""

    def __init__(self, recorded: Sequence[RecordedRequest], tolerance: float) -> None:
        self._recorded, self._tolerance = recorded, tolerance
        self.counts: Counter[str] = Counter()
        self.by_version: Counter[int] = Counter()
        self.max_difference: float | None = None

    def __call__(self, request: Outgoing, body: bytes) -> Failure | None:
        """Compare an answer; without a score for each candidate it is a failure."""
        recorded = self._recorded[request.number]
        try:
            answer = read_rank(body)
        except ShardrankError as error:
            return Failure("bad_answer", f"the answer is not one to a rank request: {error}")
        if len(answer.scores) != len(recorded.scores):
            what = f"{len(answer.scores)} scores for a request of {len(recorded.scores)} candidates"
            return Failure("bad_answer", what)
        self.by_version[answer.version] += 1
        origin = answer.version, answer.dense_step, answer.delta_sequence
        if answer.delta_sequence < 0 or origin != (recorded.version, recorded.dense_step, recorded.delta_sequence):
            self.counts["not_comparable"] += 1
            return None
        difference = float(np.abs(answer.scores - np.array(recorded.scores, np.float32)).max(initial=0.0))
        self.max_difference = max(self.max_difference or 0.0, difference)
        outcome = "identical" if not difference else "within" if difference <= self._tolerance else "different"
        self.counts[outcome] += 1
        return None


class Prepared(NamedTuple):
    """The requests of a replay, by when they came, and their bodies; of `total` requests of the model in the folder."""

    total: int
    recorded: list[RecordedRequest]
    pool: Pool


def prepare(config: ReplayConfig) -> Prepared:
    """Read a folder and encode what is to be sent.

    Raises ConfigError, RecordingDamagedError: it can't be read, or has not the requests of one model.
    """
    last, totals = deque[RecordedRequest](maxlen=config.requests), Counter[str]()
    for path in recorded_files(config.folder):
        for recorded in read_file(path):
            if config.model in (None, recorded.model):
                totals[recorded.model] += 1
                last.append(recorded)
    if len(totals) > 1:
        raise ConfigError(f"--model: {config.folder} has requests of several: {', '.join(sorted(totals))}")
    if not totals:
        of_model = "" if config.model is None else f"of model {config.model!r} "
        raise ConfigError(f"{config.folder}: no requests {of_model}are recorded")
    ((model, total),) = totals.items()
    in_order, timeout_ms = sorted(last, key=attrgetter("arrived_at")), config.stated_timeout_ms
    payloads = (recorded_payload(each, number, config.scheme, timeout_ms) for number, each in enumerate(in_order))
    pool = Pool("grpc-packed", model, payloads, MAX_BYTES)
    return Prepared(total, in_order[: len(pool)], pool)


def due_times(recorded: Sequence[RecordedRequest], speed: float, rate: float | None) -> list[float]:
    """Return when each is due, in seconds since the first one, ascending."""
    if rate is not None:
        return [number / rate for number in range(len(recorded))]
    return [(request.arrived_at - recorded[0].arrived_at) / speed for request in recorded]


async def replay(config: ReplayConfig, prepared: Prepared) -> ReplayResult:
    """Send what was prepared. Raises OSError if the target's name is not known."""
    due = due_times(prepared.recorded, config.speed, config.rate)
    comparison = ScoreComparison(prepared.recorded, config.tolerance)
    recorder = Recorder(time.monotonic() + LEAD_S)
    done = await offer(config, prepared.pool, due, recorder, cpu_s=(0.0, 0.0), judge=comparison)
    counts, rows = comparison.counts, done.records.rows
    return ReplayResult(
        **measured([done.records]),
        **config.model_dump(include={"target", "speed", "rate", "tolerance"}),
        **{name: counts[name] for name in ("identical", "within", "different", "not_comparable")},
        model=prepared.pool.model,
        recorded=prepared.total,
        seconds=due[-1],
        compared=counts.total() - counts["not_comparable"],
        max_difference=comparison.max_difference,
        answers_by_version=dict(sorted(comparison.by_version.items())),
        lag_p99_ms=percentiles(rows["turn"] - rows["due"]).p99_ms,
    )


def execute(config: ReplayConfig, json_file: Path | None) -> int:
    """Replay, print the result and write it. Returns the exit code: 1 if scores differ or nothing was answered."""
    prepared, why = prepare(config), "--tolerance"
    if "tolerance" not in config.model_fields_set:
        dtype = describe(config.target, prepared.pool.model).dense_model.dtype
        config = config.model_copy(update={"tolerance": TOLERANCES[dtype]})
        why = f"the default for a model in {dtype}; scores depend on the batch that they were in"
    settle_heap()
    with stopping_on_signals():
        result = event_loop().run(replay(config, prepared))
    write_document(result, json_file)
    show_measured(result)
    click.echo(f"tolerance {result.tolerance:g}: {why}")
    return 0 if result.answered and not result.different else 1
