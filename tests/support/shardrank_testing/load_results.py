"""Load tests' results without a load: a queue with one server, whose answers are reckoned from its arrivals.

Arrivals are Poisson; a request takes `service_ms`, a little more or less; at each stall the server stands still. What
an open-loop generator would have measured follows by Lindley's recursion, and it is the same for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from loadtest.load.recorder import encode_histogram, percentiles
from loadtest.load.result import Generator, GeneratorProcess, LoadResult, Machine, Mark, Second, SweepResult

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stall:
    """The server stands still at a moment.

    Attributes:
        at_s: since the run's begin.
        lasts_ms: for so long.
        label: of the mark.
    """

    at_s: float
    lasts_ms: float
    label: str


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """A load and its server.

    Attributes:
        rate: arrivals a second.
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
        """What a load test of it would find."""
        rng = np.random.default_rng(self.seed)
        due = self._arrivals(rng)
        latency = self._latencies(due, rng)
        kinds = np.full(len(due), "", dtype="<U20")
        kinds[latency > self.timeout_ms] = "timeout"
        kinds[(latency < 0) | (rng.random(len(due)) < self.refused)] = "http_503"
        return self._result(due, latency, kinds, rng)

    def _arrivals(self, rng: np.random.Generator) -> Floats:
        length = self.warmup_s + self.duration_s
        gaps = rng.exponential(1 / self.rate, int(self.rate * length * 1.3 + 50))
        times = np.cumsum(gaps)
        return times[times < length]

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

    def _result(
        self, due: Floats, latency: Floats, kinds: npt.NDArray[np.str_], rng: np.random.Generator
    ) -> LoadResult:
        late_ms = rng.exponential(0.02, len(due))
        measured = due >= self.warmup_s
        right = measured & (kinds == "")
        latency_s = latency[right] / 1000
        service_s = np.maximum(latency_s - late_ms[right] / 1000, 1e-6)
        failed, numbers = np.unique(kinds[measured & ~right], return_counts=True)
        answered, all_due = int(right.sum()), int(measured.sum())
        in_time = int((latency[right] <= self.slo_ms).sum())
        valid = self.cpu_share <= 0.9
        return LoadResult(
            target=self.target,
            api="json",
            model="ranker",
            workload="dlrm-v2:0.001",
            ids="zipf(1.05)",
            candidates="100-700",
            requests=512,
            arrivals="poisson",
            seed=self.seed,
            rate=self.rate,
            warmup_s=self.warmup_s,
            duration_s=self.duration_s,
            timeout_ms=self.timeout_ms,
            slo_ms=self.slo_ms,
            started_at="2026-03-01T12:00:00+00:00",
            due=all_due,
            sent=all_due,
            answered=answered,
            within_slo=in_time,
            errors=dict(zip(failed.tolist(), numbers.tolist(), strict=True)),
            error_examples=tuple(f"{kind}: at {self.target}" for kind in failed.tolist()),
            goodput=in_time / self.duration_s,
            throughput=answered / self.duration_s,
            latency=percentiles(latency_s),
            latency_of_due=percentiles(latency_s, all_due),
            service=percentiles(service_s),
            latency_histogram=encode_histogram(latency_s),
            service_histogram=encode_histogram(service_s),
            time_line=self._seconds(due, latency, kinds),
            marks=tuple(Mark(at_s=one.at_s, label=one.label) for one in self.stalls),
            generator=self._generator(all_due, late_ms),
            valid=valid,
            invalid_because=() if valid else (f"process 1 used {self.cpu_share:.2f} of a core; at most 0.9 is valid",),
            machine=Machine(
                name="example", cpu="Example CPU 2.0 GHz", cores=2, memory_bytes=17 << 30, system="Linux 6.1"
            ),
            versions={"shardrank": "0.1.0", "python": "3.11.9", "uvloop": "0.22.1"},
        )

    def _generator(self, due: int, late_ms: Floats) -> Generator:
        p99, most = float(np.quantile(late_ms, 0.99)), float(late_ms.max())
        processes = [
            GeneratorProcess(
                cpu_share=self.cpu_share * part, due=due // 2, connections=64, lag_p99_ms=p99, lag_max_ms=most
            )
            for part in (1.0, 0.9)
        ]
        return Generator(
            processes=tuple(processes), lag_p99_ms=p99, max_lag_p99_ms=5.0, max_cpu_share=0.9, max_in_flight=4096,
            max_connections=128,
        )  # fmt: skip

    def _seconds(self, due: Floats, latency: Floats, kinds: npt.NDArray[np.str_]) -> tuple[Second, ...]:
        found = []
        for second in range(int(np.ceil(self.warmup_s + self.duration_s))):
            inside = (due >= second) & (due < second + 1)
            right = inside & (kinds == "")
            times = latency[right]
            found.append(
                Second(
                    at_s=second,
                    warmup=second < self.warmup_s,
                    due=int(inside.sum()),
                    ok=int(right.sum()),
                    errors=int((inside & ~right).sum()),
                    p50_ms=float(np.quantile(times, 0.5)) if len(times) else None,
                    p99_ms=float(np.quantile(times, 0.99)) if len(times) else None,
                    in_flight=int(((due <= second + 1) & (due + latency / 1000 > second + 1)).sum()),
                )
            )
        return tuple(found)


@cache
def example_run() -> LoadResult:
    """A run with two swaps and a fault, with a few requests that time out."""
    stalls = (Stall(9.2, 60, "swap to 2"), Stall(18.6, 45, "swap to 3"), Stall(24.1, 290, "shard 1 killed"))
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
        tolerance=0.5,
    )
