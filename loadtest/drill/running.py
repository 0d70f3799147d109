"""From a command line to a drill's exit code: its folder, its signals, its report on screen and in a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import click
from pydantic import BaseModel, ValidationError
from rich.console import Console

from loader.progress import Progress
from loader.snapshot.manifest import Frozen, schema_errors
from loadtest.drill.errors import DrillError
from serving.cli.output import progress_bars, stdout_console
from serving.fleet.process import StopRequestedError, run_until_signalled

INTERRUPTED = 130

Config = TypeVar("Config", bound=Frozen)


class Report(Protocol):
    """What a drill found: a pydantic model with problems."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it did not pass."""
        ...

    def model_dump_json(self, *, indent: int) -> str:
        """As JSON."""
        ...


R = TypeVar("R", bound=Report)
Drill = Callable[[Path, Progress], Awaitable[R]]


def drill_config(schema: type[Config], given: dict[str, object]) -> Config:
    """The settings of a command line. Raises click.UsageError, naming the option that does not fit."""
    try:
        return schema.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        schemas: list[type[BaseModel]] = [schema]
        raise click.UsageError("; ".join(map(str, schema_errors(error, schemas)))) from error


def run_drill(drill: Drill[R], show: Callable[[Console, R], None], json_file: Path | None, keep: Path | None) -> int:
    """Runs a drill until it ends or a signal comes.

    Args:
        drill: takes its folder, and what is told its progress.
        show: prints its report.
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
            report = run_until_signalled(lambda: drill(folder, bars))
        except StopRequestedError:
            return INTERRUPTED
    show(stdout_console(), report)
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return 1 if report.problems else 0


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
