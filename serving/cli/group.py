"""The `shardrank` group: finds commands by name, shows examples, logs, turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from serving.fleet.process import die_with_parent

PLUGIN_GROUP = "shardrank.commands"
"""Entry-point group by which other packages add commands; the name is the command's, the object a click command."""

COMMANDS = {
    "demo": "serving.cli.demo:demo",
    "up": "serving.cli.fleet:up",
    "serve": "serving.cli.serve:serve",
    "shard-node": "serving.cli.shard_node:shard_node",
    "train": "serving.cli.demo:train",
    "export": "serving.cli.snapshots:export",
    "plan": "serving.cli.plan:plan",
    "inspect": "serving.cli.snapshots:inspect",
    "verify": "serving.cli.snapshots:verify",
    "publish": "serving.cli.rollout:publish",
    "versions": "serving.cli.rollout:versions",
    "rollout": "serving.cli.rollout:rollout",
    "rollback": "serving.cli.rollout:rollback",
    "coordinator": "serving.cli.fleet:coordinator",
    "token": "serving.cli.fleet:token",
}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_EXAMPLES = "\nExamples:\n"


class WithExamples(click.Command):
    """A command whose docstring may end in a block `Examples:`; click would wrap its lines into a paragraph."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what stands before the examples."""
        text, self.help = self.help, self._parts()[0]
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = text

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, after the options."""
        if examples := self._parts()[1]:
            formatter.write(f"{_EXAMPLES}{examples}\n")
        super().format_epilog(ctx, formatter)

    def _parts(self) -> tuple[str, str]:
        text, _, examples = inspect.cleandoc(self.help or "").partition(_EXAMPLES)
        return text, examples


class GroupWithExamples(WithExamples, click.Group):
    """A group whose help, and that of its commands, may end in examples."""

    command_class = WithExamples


class ShardrankGroup(GroupWithExamples):
    """Loads a command's module when the command is named; its own commands come before those of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return own commands in the order in which a newcomer meets them, then plugins by name."""
        return [*COMMANDS, *sorted(_plugins().keys() - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None."""
        if cmd_name in COMMANDS:
            module, attribute = COMMANDS[cmd_name].split(":")
            command = getattr(importlib.import_module(module), attribute)
        elif (plugin := _plugins().get(cmd_name)) is not None:
            command = plugin.load()
        else:
            return None
        if not isinstance(command, click.Command):
            raise click.ClickException(f"command {cmd_name!r}: {command!r} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that shardrank raises on purpose becomes `error: …` and exit code 1."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params["debug"] or not _is_expected(error):
                raise
            click.echo(f"error: {_message(error)}", err=True)
            ctx.exit(1)


def set_up_logging(level: str) -> None:
    """Send records of `level` and above to stderr; libraries stay at warning unless `level` is debug.

    Args:
        level: one of `LOG_LEVELS`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.handlers = [handler]  # not added to: the group may run more than once in one process
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for package in ("loader", "shard_node", "router", "serving", "loadtest"):
        logging.getLogger(package).setLevel(level.upper())


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGIN_GROUP)}


def _is_expected(error: Exception) -> bool:
    """Whether the message is for the user, rather than a traceback for us."""
    # Importing the loader's errors imports torch, for seconds; if nobody has, the error is not one of them.
    errors = sys.modules.get("loader.errors")
    return isinstance(error, OSError) or (errors is not None and isinstance(error, errors.ShardrankError))


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{where}"
    return str(error)


@click.group(cls=ShardrankGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="shardrank", prog_name="shardrank")
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="warning",
    show_default=True,
    envvar="SHARDRANK_LOG_LEVEL",
    help="How much to log to stderr.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(log_level: str, debug: bool) -> None:
    """Online ranking from sharded embeddings: ids in, scores out.

    Examples:
      shardrank demo                          train, export, serve and rank, from nothing
      shardrank export --help                 make a snapshot of your own model
      shardrank verify --store models --model films
      shardrank up --store models --model films --shards 2 --cards 2
    """
    del debug  # read from the context, where an error finds it
    set_up_logging(log_level)
    die_with_parent(os.environ)
