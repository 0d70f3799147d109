"""A load test from options to exit code: one run, or the search for the highest rate that keeps to a latency."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.result import LoadResult, Measured, Outcome, SweepResult, outcome_of, write_document
from loadtest.servers import stopping_on_signals
from loadtest.workloads.payloads import FORMS
from loadtest.workloads.served import describe
from serving.cli.output import print_document, text_of
from serving.cli.settings import config_of

MIN_RATE = 1.0
TOLERANCE = 0.05
# A step of a sweep has so many requests that ten of them are beyond p99, unless that took longer than a minute.
MIN_REQUESTS_OF_A_STEP = 1000
MAX_LONGER_STEP_S = 60.0
# After a step that the server did not stand, it may still be busy with what was given up.
MAX_RECOVERY_S = 3.0


def execute(*, sweeps: bool, max_rate: float, max_failed_share: float, json_file: Path | None, **given: object) -> int:
    """Run a load test of what is given as fields of `OfferedLoad` and `RunConfig`, or a sweep up to `max_rate`.

    Returns the exit code: 1 if the result can't be believed, too many failed or a sweep found no rate. Raises
    click.UsageError: options don't fit. ShardrankError: the load can't be run to its end, or a file can't be written.
    """
    if given["rate"] is None and not sweeps:
        raise click.UsageError("--rate or --sweep is needed")
    load, run = config_of(OfferedLoad, given), config_of(RunConfig, given)
    if load.model is not None:
        load = load.model_copy(update={"workload": describe(load.target, load.model)})
    result: LoadResult | SweepResult
    with stopping_on_signals(), Generators(load.processes) as generators:
        generators.prepare(load)
        result = run_sweep(generators, load, run, max_rate=max_rate) if sweeps else generators.offer(load, run)
    write_document(result, json_file)
    show_result(result)
    if isinstance(result, SweepResult):
        return 0 if result.highest_rate is not None else 1
    failed = (result.due - result.answered) / max(result.due, 1)
    if failed > max_failed_share:
        click.echo(f"{failed:.1%} of the requests failed; --max-failed-share is {max_failed_share:.1%}")
    return 0 if result.valid and failed <= max_failed_share else 1


def run_sweep(generators: Generators, load: OfferedLoad, first: RunConfig, *, max_rate: float) -> SweepResult:
    """Search the highest rate that keeps p99 within `load.slo_ms`. Raises LoadError if a run does not end."""
    seeds = itertools.count(first.seed)

    def measure(rate: float) -> LoadResult:
        # Long enough that its p99 says something.
        duration_s = max(first.duration_s, min(MIN_REQUESTS_OF_A_STEP / rate, MAX_LONGER_STEP_S))
        changed = {"rate": rate, "seed": next(seeds), "duration_s": duration_s}
        result = generators.offer(load, first.model_copy(update=changed))
        outcome = outcome_of(result, load.slo_ms)
        p99, failed = text_of("p99_ms", result.latency_of_due.p99_ms) or "–", sum(result.errors.values())
        why = "; ".join(result.invalid_because)
        click.echo(f"{rate:.1f}/s: p99 {p99} ms, {failed} failed: {outcome} {why}", err=True)
        if outcome != "kept":
            time.sleep(min(load.timeout_ms / 1000, MAX_RECOVERY_S))
        return result

    return sweep(measure, load.slo_ms, first_rate=first.rate, max_rate=max_rate)


def sweep(measure: Callable[[float], LoadResult], slo_ms: float, *, first_rate: float, max_rate: float) -> SweepResult:
    """Double the rate (or quarter it, if the first is too high) until the answer changes, then bisect.

    `measure` makes a run at a rate of 1 to `max_rate` requests a second, of which p99 over all that were due must be
    within `slo_ms`. One that says no is made a second time: a neighbour may have been busy.
    """
    steps: list[LoadResult] = []
    last_rates: dict[Outcome, float] = {}

    def step(rate: float) -> bool:
        for _ in range(2):
            steps.append(measure(rate))
            if (outcome := outcome_of(steps[-1], slo_ms)) == "kept":
                break
        last_rates[outcome] = rate
        return outcome == "kept"

    def above() -> float:
        """Return the lowest rate above the one that was kept to, which it is not known to keep to."""
        return min(last_rates.get("failed", math.inf), last_rates.get("invalid", math.inf))

    rate = min(first_rate, max_rate)
    if step(rate):
        while rate < max_rate and last_rates.get("kept") == rate:
            step(rate := min(rate * 2, max_rate))
    else:
        while rate > MIN_RATE and "kept" not in last_rates:
            step(rate := max(rate / 4, MIN_RATE))
    while "kept" in last_rates and last_rates["kept"] * (1 + TOLERANCE) < above() < math.inf:
        step(math.sqrt(last_rates["kept"] * above()))
    limited_by: Literal["server", "generator", "max_rate"] = "server"
    if above() == math.inf:
        limited_by = "max_rate"
    elif above() == last_rates.get("invalid"):
        limited_by = "generator"
    return SweepResult(
        slo_ms=slo_ms,
        steps=tuple(steps),
        highest_rate=last_rates.get("kept"),
        lowest_failed_rate=last_rates.get("failed"),
        limited_by=limited_by,
    )


def show_measured(result: Measured) -> None:
    """Print figures by their names, then messages, one a line."""
    messages = {"error_examples", "invalid_because"}
    hidden = {"kind", "format_version", "machine", "versions", "time_line", "varied"}
    print_document(result.model_dump(exclude=hidden | messages))
    for message in (text for name in sorted(messages) for text in getattr(result, name, ())):
        click.echo(message)


def show_result(result: LoadResult | SweepResult) -> None:
    """Print a run, or the steps of a sweep as a table."""
    steps = result.steps if isinstance(result, SweepResult) else (result,)
    click.echo(f"requests are {FORMS[steps[0].varied]}")
    if isinstance(result, LoadResult):
        show_measured(result)
        return
    rows = [
        {
            "rate": step.rate,
            **step.latency_of_due.model_dump(),
            "failed": step.due - step.answered,
            "generator_cpu_share": max(process.cpu_share for process in step.generator.processes),
            "outcome": outcome_of(step, result.slo_ms),
        }
        for step in steps
    ]
    print_document({**result.model_dump(exclude={"kind", "format_version"}), "steps": rows})
