"""Load tests' results without a load: a queue with one server, whose answers are reckoned from its arrivals.

Arrivals are Poisson; a request takes `service_ms`, a little more or less; at each stall the server stands still. What
an open-loop generator would have measured follows by Lindley's recursion, and it is the same for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.result import (
    MAX_CPU_SHARE,
    ROW,
    Done,
    LoadResult,
    Machine,
    Ready,
    Records,
    SweepResult,
    make_result,
)

Floats = npt.NDArray[np.float64]


class Stall(NamedTuple):
    """The server stands still, from so many seconds after the run's begin on."""

    at_s: float
    lasts_ms: float


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """A load and its server.

    Attributes:
        service_ms: of a request, the mean; 1000 / service_ms is what the server can do.
        overhead_ms: of every answer, beside queue and service.
        longest_wait_ms: a request that would wait for longer is shed.
        refused: share of the requests that fail at once.
        cpu_share: of the generator.
    """

    rate: float = 600.0
    service_ms: float = 1.1
    overhead_ms: float = 0.6
    warmup_s: float = 3.0
    duration_s: float = 30.0
    slo_ms: float = 25.0
    timeout_ms: float = 250.0
    longest_wait_ms: float = 200.0
    refused: float = 0.0
    stalls: tuple[Stall, ...] = ()
    cpu_share: float = 0.42
    seed: int = 0
    target: str = "http://127.0.0.1:8000"

    def run(self) -> LoadResult:
        """What a load test of it would find, sent from two processes."""
        rng = np.random.default_rng(self.seed)
        length = self.warmup_s + self.duration_s
        due = np.cumsum(rng.exponential(1 / self.rate, int(self.rate * length * 1.3 + 50)))
        due = due[due < length]
        latency = self._latencies(due, rng)
        kinds = ("ok", "http_503", "timeout")
        rows = np.zeros(len(due), ROW)
        rows["code"][latency > self.timeout_ms] = kinds.index("timeout")
        rows["code"][(latency < 0) | (rng.random(len(due)) < self.refused)] = kinds.index("http_503")
        rows["due"], rows["ended"] = due, due + np.abs(latency) / 1000
        rows["turn"] = rows["sent"] = np.minimum(due + rng.exponential(2e-5, len(due)), rows["ended"])
        load = OfferedLoad(
            target=self.target,
            ids="zipf(1.05)",
            candidates="100-700",
            varied=False,
            timeout_ms=self.timeout_ms,
            slo_ms=self.slo_ms,
            max_connections=128,
            seed=self.seed,
        )
        timing = RunConfig(rate=self.rate, warmup_s=self.warmup_s, duration_s=self.duration_s)
        done = []
        for process, cpu_share in enumerate((self.cpu_share, 0.9 * self.cpu_share)):
            records = Records(rows[process::2], kinds, tuple(f"{kind}: at {self.target}" for kind in kinds[1:]))
            done.append(Done(records, cpu_share * self.duration_s, connections=64))
        ready = [Ready(256, "ranker", "dlrm-v2:0.001")] * 2
        changed = {
            "started_at": "2026-03-01T12:00:00+00:00",
            "machine": Machine(name="example", cpu="Example 2 GHz", cores=2, memory_bytes=17 << 30, system="Linux 6.1"),
            "versions": {"shardrank": "0.1.0", "python": "3.11.9", "uvloop": "0.22.1"},
        }
        if self.cpu_share > MAX_CPU_SHARE:
            changed["invalid_because"] = (f"process 1 used {self.cpu_share:.2f} of a core; at most 0.9 is valid",)
        return make_result(load, timing, ready, 0.0, done).model_copy(update=changed)

    def _latencies(self, due: Floats, rng: np.random.Generator) -> Floats:
        """In ms; -1 if shed. Lindley: a request begins when it is due, or when the one before it ends."""
        work = rng.lognormal(np.log(self.service_ms / 1000) - 0.02, 0.2, len(due))
        for stall in self.stalls:
            if (first := int(np.searchsorted(due, stall.at_s))) < len(due):
                work[first] += stall.lasts_ms / 1000
        latency = rng.lognormal(np.log(self.overhead_ms), 0.25, len(due))
        free = 0.0
        for index, (at, takes) in enumerate(zip(due.tolist(), work.tolist(), strict=True)):
            begins = max(at, free)
            if (begins - at) * 1000 > self.longest_wait_ms:
                latency[index] = -1.0
                continue
            free = begins + takes
            latency[index] += (free - at) * 1000
        return latency


@cache
def example_run() -> LoadResult:
    """A run with two swaps and a fault, with a few requests that time out."""
    stalls = (Stall(9.2, 60), Stall(18.6, 45), Stall(24.1, 290))
    return QueueLoad(stalls=stalls).run()


@cache
def example_sweep(cpu_share: float = 0.42) -> SweepResult:
    """A sweep up to where the queue has no end; the last step's generator used `cpu_share` of a core."""
    rates = (100.0, 200.0, 400.0, 800.0, 1600.0, 1200.0, 850.0)
    steps = [QueueLoad(rate=rate, duration_s=8, warmup_s=1, seed=index).run() for index, rate in enumerate(rates)]
    steps[4] = QueueLoad(rate=rates[4], duration_s=8, warmup_s=1, seed=4, cpu_share=cpu_share).run()
    kept = [step.rate for step in steps if step.valid and (step.latency_of_due.p99_ms or 1e9) <= step.slo_ms]
    beyond = [step.rate for step in steps if step.valid and step.rate > max(kept) and step.rate not in kept]
    return SweepResult(
        slo_ms=steps[0].slo_ms,
        steps=tuple(steps),
        highest_rate=max(kept),
        lowest_failed_rate=min(beyond, default=None),
        limited_by="server" if beyond else "generator",
    )
