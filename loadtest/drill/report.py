"""A drill's report: its figures and its verdict, on the terminal, in a file and as an exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import click
from pydantic import BaseModel

from loader.progress import Progress
from loadtest.documents import show_document, write_document
from loadtest.errors import LoadError
from loadtest.servers import INTERRUPTED
from serving.cli.output import progress_bars, stdout_console
from serving.fleet.process import StopRequestedError, run_until_signalled


class Limit(NamedTuple):
    """A figure that decides whether a drill passes; one that there is not does not pass."""

    name: str
    value: float | None
    limit: float
    must: Literal["at most", "at least"] = "at most"

    @property
    def ok(self) -> bool:
        """Whether the figure is within its limit."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.must == "at most" else self.value >= self.limit

    def __str__(self) -> str:
        value = "none" if self.value is None else f"{self.value:.4g}"
        return f"{self.name}: {value}; it must be {self.must} {self.limit:.4g}"


Judged: TypeAlias = tuple[dict[str, Any], list[Limit]]
"""Figures by the names of the report, and their limits."""


def answer_limits(figures: Mapping[str, Any], *more: str) -> list[Limit]:
    """Return the limits of answers that may not be, counted by their names."""
    return [Limit(name, figures[name], 0) for name in ("failed", "mixed", "wrong", *more)]


class Report(BaseModel, extra="allow"):
    """What `--json` writes: the verdict, and all figures by name; docs/drills.md says what they mean."""

    problems: tuple[str, ...]
    details: tuple[str, ...]


def make_report(
    figures: Mapping[str, Any], limits: Iterable[Limit], details: Iterable[str], problems: Iterable[str] = ()
) -> Report:
    """Judge figures by their limits; `problems` are others that are known."""
    missed = (str(limit) for limit in limits if not limit.ok)
    return Report(problems=(*problems, *missed), details=tuple(details), **figures)


def execute(run: Callable[[Path, Progress], Awaitable[Report]], json_file: Path | None, keep: Path | None) -> int:
    """Run a drill until it ends or a signal comes, and print its report, or write it to a file too.

    `keep` is an empty folder for its files; None for a temporary one. Returns the exit code: 0 if it passed, 1 if not,
    130 after a signal. Raises ShardrankError if it could not be run to its end.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise LoadError(f"--keep {keep}: the folder is not empty")
    with tempfile.TemporaryDirectory(prefix="shardrank-drill-") as temporary, progress_bars() as bars:
        folder = Path(temporary) if keep is None else keep.resolve()
        try:
            report = run_until_signalled(lambda: run(folder, bars))
        except StopRequestedError:
            return INTERRUPTED
    show_document(stdout_console(), report.model_dump(exclude={"problems", "details"}))
    for problem in report.problems:
        click.echo(f"problem: {problem}")
    for detail in report.details if report.problems else ():
        click.echo(f"  {detail}")
    click.echo("not passed" if report.problems else "passed")
    if json_file is not None:
        write_document(report, json_file)
    return 1 if report.problems else 0
