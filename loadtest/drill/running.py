"""From a command line to a drill's exit code: its folder, its signals, its report on screen and in a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import click
from pydantic import ValidationError
from rich import box
from rich.table import Table

from loader.progress import Progress
from loader.snapshot.manifest import Frozen, schema_errors
from loadtest.drill.errors import DrillError
from serving.cli.output import progress_bars, stdout_console
from serving.fleet.process import StopRequestedError, run_until_signalled

INTERRUPTED = 130

Config = TypeVar("Config", bound=Frozen)


class Report(Protocol):
    """What a drill found: a pydantic model."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it did not pass."""

    def show(self) -> None:
        """Print what was found, but for the problems."""

    def model_dump_json(self, *, indent: int) -> str:
        """Write it as JSON."""


Drill = Callable[[Config, Path, Progress], Awaitable[Report]]


def drill_config(schema: type[Config], given: dict[str, object]) -> Config:
    """Return the settings of a command line. Raises click.UsageError, naming the option that does not fit."""
    try:
        return schema.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise click.UsageError("; ".join(map(str, schema_errors(error, [schema])))) from error


def run_drill(drill: Drill[Config], config: Config, json_file: Path | None, keep: Path | None) -> int:
    """Run a drill until it ends or a signal comes.

    Args:
        drill: takes its settings, its folder, and what is told its progress.
        config: its settings.
        json_file: where the report goes too.
        keep: an empty folder for stores, logs and answers, which stay; None for a temporary one.

    Returns:
        The exit code: 0 if it passed, 1 if not, 130 after a signal.

    Raises:
        ShardrankError: the drill could not be run to its end, or a file can't be written.
    """
    if json_file is not None:
        _check_writable(json_file)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(keep))
        bars = stack.enter_context(progress_bars())
        try:
            report = run_until_signalled(lambda: drill(config, folder, bars))
        except StopRequestedError:
            return INTERRUPTED
    report.show()
    print_lines(f"problem: {problem}" for problem in report.problems)
    if report.problems:
        print_lines(f"  {line}" for line in getattr(report, "details", ()))
    print_lines(["not passed" if report.problems else "passed"])
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return 1 if report.problems else 0


def print_facts(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """Print a table of names and values."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE, show_header=False)
    for name, value in rows:
        table.add_row(name, str(value))
    stdout_console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        stdout_console().print(line, markup=False, highlight=False, soft_wrap=True)


def measure(values: Sequence[float | None], form: str) -> str:
    """Write numbers in one form, such as `{:.1f} s`; those that there are not as dashes."""
    return ", ".join("-" if value is None else form.format(value) for value in values)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardrank-drill-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise DrillError(f"--keep {keep}: the folder is not empty")
    yield keep.resolve()


def _check_writable(json_file: Path) -> None:
    """Raises DrillError. An older report stays as it is until there is a new one."""
    try:
        with json_file.open("a"):
            pass
    except OSError as error:
        raise DrillError(f"--json {json_file}: {error.strerror or error}") from error
