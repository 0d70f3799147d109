"""From a command line to a load test's exit code: its settings, its signals, its result on screen and in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
from pydantic import BaseModel, ValidationError
from rich.console import Console

from loader.snapshot.manifest import Frozen, schema_errors
from loadtest.load.config import LoadConfig, RunConfig
from loadtest.load.result import LoadResult, SweepResult
from loadtest.load.result_file import check_writable, write_document
from loadtest.load.run import run_load, run_sweep
from loadtest.load.show import show_result
from serving.cli.output import stdout_console
from serving.fleet.process import StopRequestedError, run_until_signalled

INTERRUPTED = 130
FIRST_RATE = 50.0

Config = TypeVar("Config", bound=Frozen)


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """What a command line says beside `LoadConfig`; None is the default.

    Attributes:
        rate: requests a second; of a sweep, the first.
        max_rate: of a sweep; None for one run.
        duration_s: of sending that counts.
        warmup_s: before it.
        marks: file of marks.
        json_file: where the result goes.
        html_file: where the page goes.
    """

    rate: float | None
    max_rate: float | None
    duration_s: float | None
    warmup_s: float | None
    marks: Path | None
    json_file: Path | None
    html_file: Path | None


def execute(command: LoadCommand, given: Mapping[str, object]) -> int:
    """Runs a load test.

    Args:
        command: what to do.
        given: fields of `LoadConfig`; None for the default.

    Returns:
        The exit code: 0; 1 if the result can't be believed or a sweep found no rate; 130 after a signal.

    Raises:
        click.UsageError: naming the option that does not fit.
        ShardrankError: the load can't be run to its end, or a file can't be written.
    """
    config = _checked(LoadConfig, given)
    run = _checked(
        RunConfig,
        {
            "rate": command.rate or FIRST_RATE,
            "duration_s": command.duration_s,
            "warmup_s": command.warmup_s,
            "seed": config.seed,
        },
    )
    for file in (command.json_file, command.html_file):
        if file is not None:
            check_writable(file)
    try:
        result = _measured(command, config, run)
    except StopRequestedError:
        return INTERRUPTED
    if command.json_file is not None:
        write_document(result, command.json_file)
    if command.html_file is not None:
        from loadtest.report.page import write_html

        write_html(result, command.html_file)
    show_result(stdout_console(), result)
    good = result.valid if isinstance(result, LoadResult) else result.highest_rate is not None
    return 0 if good else 1


def _measured(command: LoadCommand, config: LoadConfig, run: RunConfig) -> LoadResult | SweepResult:
    console = Console(stderr=True)
    if command.max_rate is None:
        return run_until_signalled(lambda: run_load(config, run, console, command.marks))
    max_rate = command.max_rate
    return run_until_signalled(lambda: run_sweep(config, run, console, max_rate=max_rate, marks_file=command.marks))


def _checked(schema: type[Config], given: Mapping[str, object]) -> Config:
    try:
        return schema.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        schemas: list[type[BaseModel]] = [schema]
        raise click.UsageError("; ".join(map(str, schema_errors(error, schemas)))) from error
