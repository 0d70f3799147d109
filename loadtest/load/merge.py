"""From what each process measured to a run's result."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.messages import Done, Ready, Weighed
from loadtest.load.recorder import DIGITS_OF_A_SECOND, LatencyHistogram, merged
from loadtest.load.result import Generator, GeneratorProcess, LoadResult, Mark, Second, this_machine, versions

MAX_CPU_SHARE = 0.9
"""A process that was busy for more of the time had requests waiting for itself."""
# The generator's lateness is part of the latency that it measures: p99 may be too high by a tenth, never too low.
MAX_LAG_SHARE = 0.1
MIN_MAX_LAG_MS = 2.0
MAX_EXAMPLES = 20


def make_result(
    config: OfferedLoad,
    run: RunConfig,
    ready: Sequence[Ready],
    began: float,
    done: Sequence[Done],
    marks: Sequence[Mark] = (),
) -> LoadResult:
    """Add up what the processes of one run measured, which began at `began`, wall clock in seconds since 1970."""
    records = [one.records for one in done]
    latency = merged(one.latency for one in records)
    service = merged(one.service for one in records)
    errors: Counter[str] = Counter()
    for one in records:
        errors.update(one.errors)
    due = latency.count + errors.total()
    within_slo = sum(one.within_slo for one in records)
    generator = _generator(config, run, done, latency)
    reasons = invalid_because(generator, due)
    return LoadResult(
        target=config.target,
        api=config.spoken,
        model=ready[0].model,
        workload=ready[0].workload,
        ids=config.ids,
        candidates=config.candidates,
        varied=config.varied,
        requests=sum(one.requests for one in ready),
        arrivals=config.arrivals,
        seed=config.seed,
        rate=run.rate,
        warmup_s=run.warmup_s,
        duration_s=run.duration_s,
        timeout_ms=config.timeout_ms,
        slo_ms=config.slo_ms,
        started_at=datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(),
        due=due,
        sent=sum(one.sent for one in records),
        answered=latency.count,
        within_slo=within_slo,
        errors=dict(sorted(errors.items())),
        error_examples=tuple(itertools.chain.from_iterable(one.examples for one in records))[:MAX_EXAMPLES],
        goodput=within_slo / run.duration_s,
        throughput=latency.count / run.duration_s,
        latency=latency.percentiles(),
        latency_of_due=latency.percentiles(out_of=due),
        service=service.percentiles(),
        latency_histogram=latency.encode(),
        service_histogram=service.encode(),
        time_line=_time_line(run, done),
        marks=tuple(marks),
        generator=generator,
        valid=not reasons,
        invalid_because=reasons,
        machine=this_machine(),
        versions=versions(),
    )


def invalid_because(generator: Generator, due: int) -> tuple[str, ...]:
    """Say why a run's numbers would be the generator's rather than the server's; nothing if they are the server's."""
    reasons = [
        f"process {number} that sends used {process.cpu_share:.0%} of a core; at most {generator.max_cpu_share:.0%} is "
        "allowed. More --processes may help, or a machine of its own."
        for number, process in enumerate(generator.processes)
        if process.cpu_share > generator.max_cpu_share
    ]
    lag = generator.lag_p99_ms
    if lag is not None and lag > generator.max_lag_p99_ms:
        reasons.append(
            f"the generator came to one of 100 requests {lag:.2f} ms late or more; at most "
            f"{generator.max_lag_p99_ms:.2f} ms is allowed: {MAX_LAG_SHARE:.0%} of the latency's p99, or "
            f"{MIN_MAX_LAG_MS:g} ms."
        )
    if due == 0:
        reasons.append("no request was due: the rate is too low for so short a run.")
    return tuple(reasons)


def not_busy_because(busy: Weighed) -> tuple[str, ...]:
    """Say why a closed loop's throughput would be the client's rather than the server's."""
    share = busy.client_cpu_s / busy.seconds
    if share <= MAX_CPU_SHARE:
        return ()
    return (f"throughput: the client used {share:.0%} of a core; at most {MAX_CPU_SHARE:.0%} is allowed",)


def _generator(config: OfferedLoad, run: RunConfig, done: Sequence[Done], latency: LatencyHistogram) -> Generator:
    processes = []
    for one in done:
        lag = merged([one.records.lag]).percentiles()
        processes.append(
            GeneratorProcess(
                cpu_share=one.cpu_s / run.duration_s,
                due=one.records.lag.histogram.count,
                connections=one.connections,
                lag_p99_ms=lag.p99_ms,
                lag_max_ms=lag.max_ms,
            )
        )
    p99_ms = latency.percentiles().p99_ms
    return Generator(
        processes=tuple(processes),
        lag_p99_ms=merged(one.records.lag for one in done).percentiles().p99_ms,
        max_lag_p99_ms=max(MIN_MAX_LAG_MS, MAX_LAG_SHARE * (p99_ms or 0.0)),
        max_cpu_share=MAX_CPU_SHARE,
        max_in_flight=config.max_in_flight,
        max_connections=config.max_connections if config.at.scheme == "http" else config.grpc_channels,
    )


def _time_line(run: RunConfig, done: Sequence[Done]) -> tuple[Second, ...]:
    records = [one.records for one in done]
    due = np.sum([one.due_by_second for one in records], axis=0)
    ok = np.sum([one.ok_by_second for one in records], axis=0)
    turns = np.sum([one.turns_by_second for one in records], axis=0)
    ends = np.sum([one.ends_by_second for one in records], axis=0)
    in_flight = np.cumsum(turns - ends)
    line = []
    for second in range(len(due)):
        parts = [one.latency_by_second[second] for one in records if second in one.latency_by_second]
        latency = merged(parts, digits=DIGITS_OF_A_SECOND).percentiles()
        line.append(
            Second(
                at_s=second,
                warmup=second < run.warmup_s,
                due=int(due[second]),
                ok=int(ok[second]),
                errors=int(due[second] - ok[second]),
                p50_ms=latency.p50_ms,
                p99_ms=latency.p99_ms,
                in_flight=int(in_flight[second]),
            )
        )
    return tuple(line)
