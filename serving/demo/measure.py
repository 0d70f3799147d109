"""Sends every test request over one API, one in flight, and keeps scores, latency and failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loader.progress import Progress, no_progress
from serving.client import Client, ClientError
from serving.demo.errors import DemoStoppedError, RankCallError
from shard_node.bags import Float32Array

MAX_ERROR_EXAMPLES = 5


@dataclass(slots=True, eq=False)
class Measured:
    """What came back over one API.

    Attributes:
        api: `http` or `grpc`.
        scores: float32 [N], all requests' candidates one after the other; NaN where a request failed.
        latencies_ms: of the answered requests, the client's packing included, warm-up left out.
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


def rank_arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turns the JSON form of a rank request into arguments of `Client.rank`. For models without weighted features."""
    context, candidates = document["context"], document["candidates"]
    return {
        "context": context["sparse"],
        "candidates": candidates["sparse"],
        "context_dense": context.get("dense") or None,
        "candidate_dense": candidates.get("dense") or None,
    }


def measure(
    api: str,
    client: Client,
    model: str,
    requests: Sequence[dict[str, Any]],
    num_candidates: list[int],
    *,
    warmup_requests: int,
    stop: threading.Event,
    progress: Progress = no_progress,
) -> Measured:
    """Ranks every request once, after a warm-up with the first ones.

    Args:
        api: what it is called.
        client: sends them.
        model: the model's name.
        requests: arguments of `Client.rank`.
        num_candidates: of each request; an answer with another number of scores counts as failed.
        warmup_requests: how many to send before latency counts.
        stop: set from outside to end early.
        progress: told the requests done.

    Raises:
        DemoStoppedError: when `stop` was set.
    """
    measured = Measured(api, np.full(sum(num_candidates), np.nan, np.float32))
    schedule = [(index % len(num_candidates), False) for index in range(warmup_requests)]
    schedule += [(index, True) for index in range(len(num_candidates))]
    starts = np.concatenate([[0], np.cumsum(num_candidates)])
    for done, (index, counts) in enumerate(schedule, start=1):
        if stop.is_set():
            raise DemoStoppedError("stopped while ranking")
        measured.requests += 1
        try:
            began = time.perf_counter()
            answer = client.rank(model, **requests[index])
            seconds = time.perf_counter() - began
            if answer.scores.size != num_candidates[index]:
                raise RankCallError(f"{answer.scores.size} scores for {num_candidates[index]} candidates")
        except (ClientError, RankCallError) as error:
            measured.failed(error)
        else:
            measured.versions.add(answer.version)
            if counts:
                measured.scores[starts[index] : starts[index + 1]] = answer.scores
                measured.latencies_ms.append(1000 * seconds)
        progress(f"ranking over {api}", done, len(schedule))
    return measured
