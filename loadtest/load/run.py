"""A load test from options to exit code: one run, or the search for the highest rate that keeps to a latency."""

from __future__ import annotations

import contextlib
import datetime
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import click
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import Progress, TextColumn

from loader.snapshot.schema_errors import schema_errors
from loader.snapshot.tables import Frozen
from loadtest.errors import LoadConfigError
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.result import LoadResult, Mark, SweepResult, check_writable, write_document
from loadtest.load.show import outcome_of, show_result
from loadtest.load.workers import stopping_on_signals
from loadtest.tables import line
from serving.cli.output import stdout_console
from serving.fleet.process import StopRequestedError

INTERRUPTED = 130
FIRST_RATE = 50.0
MIN_RATE = 1.0
TOLERANCE = 0.05
# A step of a sweep has so many requests that ten of them are beyond p99, unless that took longer than a minute.
MIN_REQUESTS_OF_A_STEP = 1000
MAX_LONGER_STEP_S = 60.0
# After a step that the server did not stand, it may still be busy with what was given up.
MAX_RECOVERY_S = 3.0
MAX_MARKS = 10_000
MAX_MARKS_BYTES = 4 << 20

Config = TypeVar("Config", bound=Frozen)


def execute(
    given: Mapping[str, object],
    *,
    rate: float | None,
    max_rate: float | None,
    duration_s: float | None,
    warmup_s: float | None,
    marks: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> int:
    """Run a load test; None is the default of an option.

    Returns:
        The exit code: 0; 1 if the result can't be believed or a sweep found no rate; 130 after a signal.

    Raises:
        click.UsageError: naming the option that does not fit.
        ShardrankError: the load can't be run to its end, or a file can't be written.
    """
    load = checked(OfferedLoad, given)
    timing = {"rate": rate or FIRST_RATE, "duration_s": duration_s, "warmup_s": warmup_s, "seed": load.seed}
    run, console = checked(RunConfig, timing), Console(stderr=True)
    check_writable(json_file, html_file)
    result: LoadResult | SweepResult
    try:
        with stopping_on_signals(), _marking_on_signal() as signalled:
            if max_rate is None:
                result = run_load(load, run, console)
                result = with_marks(result, marks, signalled, console)
            else:
                result = run_sweep(load, run, console, max_rate=max_rate)
                steps = tuple(with_marks(step, marks, signalled, console) for step in result.steps)
                result = result.model_copy(update={"steps": steps})
    except StopRequestedError:
        return INTERRUPTED
    write_files(result, json_file, html_file)
    show_result(stdout_console(), result)
    good = result.valid if isinstance(result, LoadResult) else result.highest_rate is not None
    return 0 if good else 1


def checked(schema: type[Config], given: Mapping[str, object]) -> Config:
    """Make settings from options, of which None is the default. Raises click.UsageError."""
    try:
        return schema.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        schemas: list[type[BaseModel]] = [schema]
        raise click.UsageError("; ".join(map(str, schema_errors(error, schemas)))) from error


def write_files(document: BaseModel, json_file: Path | None, html_file: Path | None) -> None:
    """Write a result and its page, as far as they are asked for. Raises ResultFileError, PageFileError."""
    if json_file is not None:
        write_document(document, json_file)
    if html_file is not None:
        from loadtest.report.page import write_html

        write_html(document, html_file)  # type: ignore[arg-type]  # whichever result it is, it has a page


def run_load(load: OfferedLoad, run: RunConfig, console: Console) -> LoadResult:
    """Do one run, and tell on the console how it gets on. Raises LoadError if it can't be run to its end."""
    with Generators(load.processes) as generators:
        generators.prepare(load)
        return offered(generators, load, run, console)


def offered(generators: Generators, load: OfferedLoad, run: RunConfig, console: Console) -> LoadResult:
    """Do one run with generators that are there, while a terminal shows for how long. Raises LoadError."""
    text = f"{run.rate:g}/s, {{task.elapsed:.0f}} s of {run.until_s:g} s"
    with Progress(TextColumn(text), console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("")
        return generators.offer(load, run)


def run_sweep(load: OfferedLoad, first: RunConfig, console: Console, *, max_rate: float) -> SweepResult:
    """Search the highest rate that keeps p99 within `load.slo_ms`.

    Raises:
        LoadError: it can't be run to its end.
    """
    with Generators(load.processes) as generators:
        generators.prepare(load)
        steps = 0

        def measure(rate: float) -> LoadResult:
            nonlocal steps
            changed = {"rate": rate, "seed": first.seed + steps, "duration_s": step_duration_s(rate, first.duration_s)}
            steps += 1
            result = offered(generators, load, first.model_copy(update=changed), console)
            outcome = outcome_of(result, load.slo_ms)
            p99_ms = result.latency_of_due.p99_ms
            p99 = "beyond the timeout" if p99_ms is None else f"{p99_ms:.2f} ms"
            why = f" ({result.invalid_because[0]})" if result.invalid_because else ""
            line(console, f"{rate:10.1f}/s  p99 {p99}  errors {sum(result.errors.values())}  {outcome}{why}")
            if outcome != "kept":
                time.sleep(min(load.timeout_ms / 1000, MAX_RECOVERY_S))
            return result

        return sweep(measure, load.slo_ms, first_rate=first.rate, max_rate=max_rate)


def step_duration_s(rate: float, wanted_s: float) -> float:
    """Say how long a step of a sweep takes so that its p99 says something."""
    return max(wanted_s, min(MIN_REQUESTS_OF_A_STEP / rate, MAX_LONGER_STEP_S))


def sweep(
    measure: Callable[[float], LoadResult],
    slo_ms: float,
    *,
    first_rate: float,
    max_rate: float,
    tolerance: float = TOLERANCE,
) -> SweepResult:
    """Double the rate (or quarter it, if the first is too high) until the answer changes, then bisect.

    Args:
        measure: makes a run at a rate. One that says no is made a second time: a neighbour may have been busy.
        slo_ms: p99 over all that were due must be within it.
        first_rate: to begin with, requests a second, at least 1.
        max_rate: not beyond it.
        tolerance: the search ends when the two rates are at most this part of the lower one apart.
    """
    steps: list[LoadResult] = []
    # The last rate with each outcome.
    found: dict[str, float] = {}

    def step(rate: float) -> bool:
        for _ in range(2):
            steps.append(measure(rate))
            if (outcome := outcome_of(steps[-1], slo_ms)) == "kept":
                break
        found[outcome] = rate
        return outcome == "kept"

    rate = min(first_rate, max_rate)
    if step(rate):
        while rate < max_rate:
            rate = min(rate * 2, max_rate)
            if not step(rate):
                break
    else:
        while rate > MIN_RATE:
            rate = max(rate / 4, MIN_RATE)
            if step(rate):
                break

    def above() -> float:
        """Return the lowest rate above the one that was kept to, which it is not known to keep to."""
        return min(found.get("failed", math.inf), found.get("invalid", math.inf))

    while "kept" in found and found["kept"] * (1 + tolerance) < above() < math.inf:
        step(math.sqrt(found["kept"] * above()))
    limited_by: Literal["server", "generator", "max_rate"] = "server"
    if above() == math.inf:
        limited_by = "max_rate"
    elif above() == found.get("invalid"):
        limited_by = "generator"
    return SweepResult(
        slo_ms=slo_ms,
        steps=tuple(steps),
        highest_rate=found.get("kept"),
        lowest_failed_rate=found.get("failed"),
        limited_by=limited_by,
        tolerance=tolerance,
    )


@contextlib.contextmanager
def _marking_on_signal() -> Iterator[list[tuple[float, str]]]:
    """Note when SIGUSR1 comes, wall clock in seconds since 1970, and what that is called."""
    found: list[tuple[float, str]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append((time.time(), f"mark {len(found) + 1}")))
    try:
        yield found
    finally:
        signal.signal(signal.SIGUSR1, before)


def with_marks(
    result: LoadResult, file: Path | None, signalled: Sequence[tuple[float, str]], console: Console
) -> LoadResult:
    """Give a run its marks: those of a file, and the moments of signals, wall clock in seconds since 1970."""
    began = datetime.datetime.fromisoformat(result.started_at).timestamp()
    marks = [Mark(at_s=when - began, label=label) for when, label in signalled]
    if file is not None:
        try:
            marks += read_marks(file, began)
        except LoadConfigError as error:
            # What was measured is worth more than its marks.
            line(console, f"marks are left out: {error}")
    return result.model_copy(update={"marks": marks_within(marks, result.warmup_s + result.duration_s)})


def read_marks(path: Path, began: float) -> tuple[Mark, ...]:
    """Read a file of marks; each line is `UNIX_SECONDS LABEL`, as `echo "$(date +%s.%N) swap"` writes it.

    Raises:
        LoadConfigError: no such file, too large, or a line that is something else.
    """
    try:
        if (size := path.stat().st_size) > MAX_MARKS_BYTES:
            raise LoadConfigError(f"--marks {path}: {size} bytes; at most {MAX_MARKS_BYTES} are read")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadConfigError(f"--marks {path}: {error}") from error
    marks = []
    for number, text in enumerate(lines, 1):
        when, _, label = text.strip().partition(" ")
        try:
            if text.strip():
                marks.append(Mark(at_s=float(when) - began, label=label.strip()))
        except (ValueError, ValidationError) as error:
            raise LoadConfigError(
                f"--marks {path}: line {number}: {text[:100]!r} is not a time in seconds since 1970 and a label"
            ) from error
    return tuple(marks)


def marks_within(marks: Sequence[Mark], until_s: float) -> tuple[Mark, ...]:
    """Choose those within a run, by time."""
    return tuple(sorted((mark for mark in marks if 0 <= mark.at_s <= until_s), key=lambda mark: mark.at_s))[:MAX_MARKS]
