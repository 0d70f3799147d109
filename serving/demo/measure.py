"""Sends every test request over one API, one in flight, and keeps scores, latency and failures."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from loader.progress import Progress, no_progress
from serving.demo.clients import RankClient
from serving.demo.errors import DemoStoppedError, RankCallError
from shard_node.bags import Float32Array

MAX_ERROR_EXAMPLES = 5


@dataclass(slots=True, eq=False)
class Measured:
    """What came back over one API.

    Attributes:
        api: `http` or `grpc`.
        scores: float32 [N], all requests' candidates one after the other; NaN where a request failed.
        latencies_ms: of the answered requests, warm-up left out.
        requests: sent, warm-up included.
        errors: of these, failed.
        error_examples: the first messages.
        versions: that the answers named.
    """

    api: str
    scores: Float32Array
    latencies_ms: list[float] = field(default_factory=list)
    requests: int = 0
    errors: int = 0
    error_examples: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def percentile_ms(self, percent: float) -> float | None:
        """Of the latencies; None if nothing was answered."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def failed(self, error: Exception) -> None:
        """Counts a failed request."""
        self.errors += 1
        if len(self.error_examples) < MAX_ERROR_EXAMPLES:
            self.error_examples.append(str(error))


def measure(
    client: RankClient,
    num_candidates: list[int],
    *,
    warmup_requests: int,
    stop: threading.Event,
    progress: Progress = no_progress,
) -> Measured:
    """Ranks every prepared request once, after a warm-up with the first ones.

    Args:
        client: sends them.
        num_candidates: of each request; an answer with another number of scores counts as failed.
        warmup_requests: how many to send before latency counts.
        stop: set from outside to end early.
        progress: told the requests done.

    Raises:
        DemoStoppedError: when `stop` was set.
    """
    measured = Measured(client.name, np.full(sum(num_candidates), np.nan, np.float32))
    schedule = [(index % len(num_candidates), False) for index in range(warmup_requests)]
    schedule += [(index, True) for index in range(len(num_candidates))]
    starts = np.concatenate([[0], np.cumsum(num_candidates)])
    for done, (index, counts) in enumerate(schedule, start=1):
        if stop.is_set():
            raise DemoStoppedError("stopped while ranking")
        measured.requests += 1
        try:
            answer = client.rank(index)
            if answer.scores.size != num_candidates[index]:
                raise RankCallError(f"{answer.scores.size} scores for {num_candidates[index]} candidates")
        except RankCallError as error:
            measured.failed(error)
        else:
            measured.versions.add(answer.version)
            if counts:
                measured.scores[starts[index] : starts[index + 1]] = answer.scores
                measured.latencies_ms.append(1000 * answer.seconds)
        progress(f"ranking over {client.name}", done, len(schedule))
    return measured
