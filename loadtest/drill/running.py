"""From a command line to a drill's exit code: its folder, its signals, its report on screen and in a file."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

import click
from pydantic import BaseModel

from loader.progress import Progress
from loader.snapshot.tables import Frozen
from loadtest.errors import DrillError
from loadtest.load.result import check_writable, write_document
from loadtest.load.run import INTERRUPTED
from serving.cli.output import human_bytes, print_table, progress_bars, stdout_console, table_of
from serving.fleet.process import StopRequestedError, run_until_signalled

_UNIT = re.compile(r"_(ms|s|mb)(?:_|$)")
_TEXT_CHARS = 9

Config = TypeVar("Config", bound=Frozen)


class Report(Frozen):
    """What a drill found.

    Attributes:
        problems: why it did not pass; empty if it did.
        details: what its problems come from: the first answers that were not right.
        COLUMNS: of its records that are shown, in this order; none for all.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    problems: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


Drill = Callable[[Config, Path, Progress], Awaitable[Report]]


def run_drill(drill: Drill[Config], config: Config, json_file: Path | None, keep: Path | None) -> int:
    """Run a drill until it ends or a signal comes, and print its report, or write it to a file too.

    `keep` is an empty folder for stores, logs and answers, which stay; None for a temporary one. Returns the exit code:
    0 if it passed, 1 if not, 130 after a signal. Raises ShardrankError if it could not be run to its end.
    """
    check_writable(json_file)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(keep))
        bars = stack.enter_context(progress_bars())
        try:
            report = run_until_signalled(lambda: drill(config, folder, bars))
        except StopRequestedError:
            return INTERRUPTED
    show_report(report)
    for problem in report.problems:
        click.echo(f"problem: {problem}")
    for detail in report.details if report.problems else ():
        click.echo(f"  {detail}")
    click.echo("not passed" if report.problems else "passed")
    if json_file is not None:
        write_document(report, json_file)
    return 1 if report.problems else 0


def show_report(report: Report) -> None:
    """Print a report: records as tables, single values under their names, with the unit that the name has."""
    for name in type(report).model_fields:
        records = getattr(report, name)
        if isinstance(records, dict):
            records = {key: dict(one) for key, one in records.items() if isinstance(one, BaseModel | dict)}
        elif isinstance(records, tuple):
            records = {number: dict(one) for number, one in enumerate(records) if isinstance(one, BaseModel)}
        if isinstance(records, dict) and records:
            first = next(iter(records.values()))
            columns = [column for column in report.COLUMNS or first if _is_shown(first.get(column, ()))]
            keys = [] if 0 in records else [name]
            rows = [
                [*(str(key) for _ in keys), *(_cell(column, one[column]) for column in columns)]
                for key, one in records.items()
            ]
            table = table_of(name, [column.replace("_", "\n") for column in (*keys, *columns)], rows, no_wrap=True)
            for column, cells in zip(table.columns, zip(*rows, strict=True), strict=True):
                # Long texts are cut, so that numbers are seen whole; `--json` has all of them.
                column.max_width = _TEXT_CHARS if max(map(len, cells)) > 2 * _TEXT_CHARS else None
            stdout_console().print(table)
    facts = {name: getattr(report, name) for name in type(report).model_fields}
    print_table("", ("", ""), [(name, _cell(name, value)) for name, value in facts.items() if _is_shown(value)])


def _is_shown(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _cell(name: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", False: "no", True: "yes"}[value]
    if isinstance(value, int) and "bytes" in name:
        return human_bytes(value)
    if isinstance(value, float):
        if "_share" in name:
            return f"{value:.3%}"
        unit = _UNIT.search(name)
        return f"{value:.2f} {unit[1]}" if unit else f"{value:.4g}"
    return str(value)


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
