"""The `shardrank` group: finds commands when they are asked for, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from serving.cli.examples import WithExamples
from serving.cli.logs import LOG_LEVELS, set_up_logging
from serving.fleet.process import die_with_parent

PLUGIN_GROUP = "shardrank.commands"
"""Entry-point group by which other packages add commands; the name is the command's, the object a click command."""

COMMANDS = {
    "demo": "serving.cli.demo:demo",
    "up": "serving.cli.up:up",
    "serve": "serving.cli.serve:serve",
    "shard-node": "serving.cli.shard_node:shard_node",
    "train": "serving.cli.train:train",
    "export": "serving.cli.export:export",
    "plan": "serving.cli.plan.command:plan",
    "inspect": "serving.cli.inspect:inspect",
    "verify": "serving.cli.verify:verify",
    "publish": "serving.cli.publish:publish",
    "versions": "serving.cli.versions:versions",
    "rollout": "serving.cli.rollout:rollout",
    "rollback": "serving.cli.rollback:rollback",
    "coordinator": "serving.cli.coordinator:coordinator",
    "token": "serving.cli.token:token",
}


class ShardrankGroup(WithExamples, click.Group):
    """Loads a command's module when the command is named; its own commands come before those of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Own commands in the order in which a newcomer meets them, then plugins by name."""
        return [*COMMANDS, *sorted(_plugins().keys() - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
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
        """Runs the command; an error that shardrank raises on purpose becomes `error: …` and exit code 1."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params["debug"] or not _is_expected(error):
                raise
            click.echo(f"error: {_message(error)}", err=True)
            ctx.exit(1)


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
