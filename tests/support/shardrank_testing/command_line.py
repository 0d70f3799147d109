"""What the command line would take."""

from __future__ import annotations

import click


def flags_of(group: click.Group, line: str) -> set[str]:
    """The flags of the command, or subcommand, that a line of words names; `--help` is every command's."""
    command: click.Command = group
    for word in line.split():
        if not isinstance(command, click.Group):
            break
        found = command.get_command(click.Context(command), word)
        if found is None:
            break
        command = found
    return {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
