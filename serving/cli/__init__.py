"""The command line `shardrank`: each file holds one group of commands, which read flags, call a package, and print.

Heavy imports (torch, numpy, grpc, pydantic) are made inside commands, so that `shardrank --help` is quick.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from keyword import iskeyword
from typing import Any, get_args

import click
from click.core import ParameterSource

from serving.fleet.process import PARENT_PID_VARIABLE, die_with_parent
from serving.observe.logs import ERROR_PREFIX, LogFormat, LogLevel, announce, start_logging

PLUGIN_GROUP = "shardrank.commands"
"""Entry-point group by which other packages add commands; the name is the command's, the object a click command."""

COMMANDS = {
    "demo": "fleet",
    "up": "fleet",
    "serve": "fleet",
    "shard-node": "fleet",
    "train": "train",
    "export": "export",
    "import": "imports",
    "deltas": "deltas",
    "fit": "fit",
    "plan": "plan",
    "counts": "counts",
    "inspect": "snapshots",
    "verify": "snapshots",
    "publish": "rollout",
    "versions": "rollout",
    "rollout": "rollout",
    "rollback": "rollout",
    "coordinator": "fleet",
    "dashboard": "fleet",
    "token": "fleet",
}
"""The module of each command, in the order in which a newcomer meets them."""
OBJECTS_BETWEEN_COLLECTIONS = 100_000

LOGGED = {"log_level": "warning", "log_format": "text"}
"""What is logged of a command by default; of those that have settings, these say it."""


def _keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Keep an option of logs for the command that is run: the last on the command line counts, then its variable."""
    name = str(param.name)
    if value is not None and (name not in ctx.meta or ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE):
        ctx.meta[name] = value


def _log_option(name: str, values: Any, text: str) -> click.Option:
    flag, kind, variable = f"--{name.replace('_', '-')}", click.Choice(get_args(values)), f"SHARDRANK_{name.upper()}"
    return click.Option([flag], type=kind, envvar=variable, callback=_keep, expose_value=False, help=text)


_LOG_OPTIONS = [
    _log_option("log_level", LogLevel, "How much to log to stderr. Default: warning, of servers info."),
    _log_option("log_format", LogFormat, "Lines of text (default), or JSON objects."),
]


class WithExamples(click.Command):
    """A command that has the options of logs; its docstring may end in `Examples:`, shown line by line at the end."""

    def __init__(self, name: str | None, **more: Any) -> None:
        more["help"], _, examples = inspect.cleandoc(more.get("help") or "").partition("\nExamples:\n")
        if examples:
            more["epilog"] = f"\b\nExamples:\n{examples}"
        super().__init__(name, **more)
        self.params += _LOG_OPTIONS

    def log(self, ctx: click.Context) -> None:
        """Log as the options say that were read."""
        start_logging(**{name: ctx.meta.get(name, default) for name, default in LOGGED.items()})

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        self.log(ctx)
        return super().invoke(ctx)


class GroupWithExamples(WithExamples, click.Group):
    """A group whose help, and that of its commands, may end in examples."""

    command_class = WithExamples


class LazyGroup(GroupWithExamples):
    """Loads a command's module when the command is named; `modules` has them in the order in which one meets them."""

    def __init__(self, name: str | None, *, modules: Mapping[str, str], **more: Any) -> None:
        super().__init__(name, **more)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None."""
        if cmd_name not in self.modules:
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(self.modules[cmd_name]), f"{name}_" if iskeyword(name) else name)
        assert isinstance(command, click.Command)
        return command


class ShardrankGroup(LazyGroup):
    """The commands of this package, then those of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return own commands, then plugins by name."""
        return [*self.modules, *sorted(_plugins().keys() - self.modules.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None. Raises click.ClickException: a plugin that is no command."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (plugin := _plugins().get(cmd_name)) is not None:
            command = plugin.load()
            if not isinstance(command, click.Command):
                raise click.ClickException(f"command {cmd_name!r}: {command!r} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that shardrank raises on purpose becomes `error: …` and exit code 1."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            from loader.errors import ShardrankError

            if ctx.params["debug"] or not isinstance(error, (OSError, ShardrankError)):
                raise
            message = str(error)
            if isinstance(error, OSError) and error.strerror:
                message = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
            announce(f"{ERROR_PREFIX}{message}", logging.ERROR)
            ctx.exit(1)


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGIN_GROUP)}


@click.group(
    cls=ShardrankGroup,
    modules={name: f"serving.cli.{file}" for name, file in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="shardrank", prog_name="shardrank")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def main(ctx: click.Context, /, debug: bool) -> None:
    """Online ranking from sharded embeddings: ids in, scores out.

    Examples:
      shardrank demo                          train, export, serve and rank, from nothing
      shardrank export --help                 make a snapshot of your own model
      shardrank verify --store models --model films
      shardrank up --store models --model films --shards 2 --cards 2
    """
    del debug  # read from the context, where an error finds it
    # What a command imports stays. Going over it while it comes is a fifth of a server's start: 2.2 s of CPU, not 1.8.
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    ctx.obj = {"is_supervised": PARENT_PID_VARIABLE in os.environ}
    die_with_parent(os.environ)
