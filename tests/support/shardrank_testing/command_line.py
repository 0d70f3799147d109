"""What the command line would take, and what pages tell people to type."""

from __future__ import annotations

import re
import shlex

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


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of code of a page that say to be in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The `shardrank` commands in the blocks of a page, as words."""
    return [shlex.split(line) for block in blocks(text) for line in block.splitlines() if line.startswith("shardrank ")]
