"""`shardrank drill`: proof that swaps, crashes, upgrades, broken snapshots and time cost no answer."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import click

from serving.cli import GroupWithExamples, WithExamples

if TYPE_CHECKING:
    from pydantic import BaseModel

DRILLS = ("swap", "crash", "broken", "upgrade", "soak", "overload")
"""Each has a module of its name with `run_drill`, and its settings in `loadtest.drill.config`."""
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
TYPES: dict[Any, tuple[Any, str]] = {
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    Path: (click.Path(path_type=Path, file_okay=False, exists=True), "FOLDER"),
}
"""Of options, with their metavar; of others there are choices."""


class DrillGroup(GroupWithExamples):
    """Loads the settings of the drills when one of them is named, so that `shardrank --help` stays light."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all drills."""
        return list(DRILLS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a drill, or None."""
        if cmd_name not in DRILLS:
            return None
        from loadtest.drill import config

        return make_command(cmd_name, getattr(config, f"{cmd_name.title()}DrillConfig"))


@click.group(cls=DrillGroup)
def drill() -> None:
    """Put a real fleet through swaps, crashes, broken snapshots and upgrades, or a server through overload.

    In all but `overload` a fleet serves oracle models: every row has 1.0 in dimension 0 in version A and 1024.0 in
    version B, so a bag of n ids must answer exactly n or 1024 n, and its score tells which dense model made it. A load
    asks over HTTP and gRPC, in all but `upgrade` at a fixed rate and from a process of its own, and checks every
    answer. Exit code 1 if anything was not as it must be.

    Examples:
      shardrank drill swap --swaps 100 --json swap.json
      shardrank drill crash --help
    """


def make_command(name: str, schema: type[BaseModel]) -> click.Command:
    """Return the command of a drill: an option for each setting that has a description, and those of its report.

    A setting that is a tuple has the option of its singular, which may be repeated.
    """
    params: list[click.Parameter] = []
    for key, field in schema.model_fields.items():
        kind, flag, text = field.annotation, f"--{key.replace('_', '-')}", field.description
        if is_many := get_origin(kind) is tuple:
            kind, flag, text = get_args(kind)[0], flag.removesuffix("s"), f"{text} Repeatable."
        elif not field.is_required():
            text = f"{text} Default: {field.default}."
        type_, metavar = TYPES.get(kind, (click.Choice(get_args(kind)), None))
        if field.description:
            option = partial(click.Option, [flag, key], type=type_, metavar=metavar, help=text)
            params.append(option(multiple=is_many, required=field.is_required()))
    keep = "Keep stores, logs and answers in this folder, which must be empty."
    params.append(click.Option(["--json", "json_file"], type=FILE, metavar="FILE", help="Write the report."))
    params.append(click.Option(["--keep"], type=FOLDER, metavar="FOLDER", help=keep))
    return WithExamples(name, params=params, callback=partial(_run, name, schema), help=inspect.getdoc(schema))


def _run(name: str, schema: type[BaseModel], json_file: Path | None, keep: Path | None, **options: Any) -> None:
    """Run a drill with the options that were given, and end with its exit code."""
    from loadtest.drill.report import execute
    from serving.cli.settings import config_of

    # An option that may be repeated, and was not given, is an empty tuple.
    config = config_of(schema, {key: value for key, value in options.items() if value != ()})
    run_drill = importlib.import_module(f"loadtest.drill.{name}").run_drill
    click.get_current_context().exit(execute(partial(run_drill, config), json_file, keep))
