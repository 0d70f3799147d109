"""One load test from begin to end: its processes, its marks, its result."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from loadtest.load.config import LoadConfig, RunConfig
from loadtest.load.errors import LoadConfigError
from loadtest.load.live import LiveLine
from loadtest.load.marks import marks_within, read_marks
from loadtest.load.merge import make_result
from loadtest.load.processes import Generators, running_generators
from loadtest.load.result import LoadResult, Mark, SweepResult
from loadtest.load.sweep import outcome_of, sweep

# A step of a sweep has so many requests that ten of them are beyond p99, unless that took longer than a minute.
MIN_REQUESTS_OF_A_STEP = 1000
MAX_LONGER_STEP_S = 60.0
# After a step that the server did not stand, it may still be busy with what was given up.
MAX_RECOVERY_S = 3.0


class Signalled(NamedTuple):
    """When SIGUSR1 came, wall clock in seconds since 1970, and what it is called."""

    when: float
    label: str


async def run_load(config: LoadConfig, run: RunConfig, console: Console, marks_file: Path | None = None) -> LoadResult:
    """Does one run.

    Args:
        config: what to ask.
        run: at which rate, for how long.
        console: for the line that tells how it gets on.
        marks_file: as `read_marks` reads it, at the end.

    Raises:
        LoadError: it can't be run to its end, or the marks can't be read.
    """
    with _marks_by_signal() as signalled:
        async with running_generators(config) as generators:
            return await _measure(generators, run, console, marks_file, signalled)


async def run_sweep(
    config: LoadConfig, first: RunConfig, console: Console, *, max_rate: float, marks_file: Path | None = None
) -> SweepResult:
    """Searches the highest rate that keeps p99 within `config.slo_ms`.

    Args:
        config: what to ask.
        first: the first step; later ones differ in rate, seed and, if there are few requests, in duration.
        console: for the lines that tell how it gets on.
        max_rate: not beyond it.
        marks_file: as `read_marks` reads it, at the end of each step.

    Raises:
        LoadError: it can't be run to its end, or the marks can't be read.
    """
    async with contextlib.AsyncExitStack() as stack:
        signalled = stack.enter_context(_marks_by_signal())
        generators = await stack.enter_async_context(running_generators(config))
        steps = 0

        async def measure(rate: float) -> LoadResult:
            nonlocal steps
            run = first.model_copy(
                update={"rate": rate, "seed": first.seed + steps, "duration_s": step_duration_s(rate, first.duration_s)}
            )
            steps += 1
            result = await _measure(generators, run, console, marks_file, signalled)
            outcome = outcome_of(result, config.slo_ms)
            console.print(_step_line(result, outcome), markup=False, highlight=False, soft_wrap=True)
            if outcome != "kept":
                await asyncio.sleep(min(config.timeout_ms / 1000, MAX_RECOVERY_S))
            return result

        return await sweep(measure, config.slo_ms, first_rate=first.rate, max_rate=max_rate)


def step_duration_s(rate: float, wanted_s: float) -> float:
    """How long a step of a sweep takes so that its p99 says something."""
    return max(wanted_s, min(MIN_REQUESTS_OF_A_STEP / rate, MAX_LONGER_STEP_S))


async def _measure(
    generators: Generators, run: RunConfig, console: Console, marks_file: Path | None, signalled: list[Signalled]
) -> LoadResult:
    with LiveLine(console, run) as line:
        measured = await generators.run(run, line.update)
    marks = [Mark(at_s=one.when - measured.began, label=one.label) for one in signalled]
    if marks_file is not None:
        try:
            marks += read_marks(marks_file, measured.began)
        except LoadConfigError as error:
            # What was measured is worth more than its marks.
            console.print(f"marks are left out: {error}", markup=False, highlight=False, soft_wrap=True)
    return make_result(generators.config, run, generators.ready, measured, marks_within(marks, run.until_s))


@contextlib.contextmanager
def _marks_by_signal() -> Iterator[list[Signalled]]:
    """The moments at which SIGUSR1 comes."""
    found: list[Signalled] = []

    def note() -> None:
        found.append(Signalled(time.time(), f"mark {len(found) + 1}"))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, note)
    try:
        yield found
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


def _step_line(result: LoadResult, outcome: str) -> str:
    p99_ms = result.latency_of_due.p99_ms
    p99 = "beyond the timeout" if p99_ms is None else f"{p99_ms:.2f} ms"
    why = f" ({result.invalid_because[0]})" if result.invalid_because else ""
    return f"{result.rate:10.1f}/s  p99 {p99}  errors {sum(result.errors.values())}  {outcome}{why}"
