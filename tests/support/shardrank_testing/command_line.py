"""The command line, run in this process or asked what it would accept; and what pages tell people to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import click
from click.testing import CliRunner, Result

from serving.cli import main

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")
"""Free ports, for commands that serve."""


def shardrank(*arguments: object, code: int | None = 0) -> Result:
    """Run a command in this process. Fails with its output if it exits with another code; None is any but 0."""
    words = [str(word) for word in arguments]
    result = CliRunner().invoke(main, words, prog_name="shardrank", env={"COLUMNS": "300"}, catch_exceptions=False)
    assert result.exit_code != 0 if code is None else result.exit_code == code, result.output
    return result


def _resolve(group: click.Group, words: Sequence[str]) -> tuple[click.Command, list[str]]:
    """Return the command, or subcommand, that words name, and the words after its name."""
    command: click.Command = group
    for number, word in enumerate(words):
        found = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if found is None:
            return command, list(words[number:])
        command = found
    return command, []


def flags_of(group: click.Group, line: str) -> set[str]:
    """Return the flags of the command, or subcommand, that a line of words names; `--help` is every command's."""
    command, _ = _resolve(group, line.split())
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}


def parse_command_line(words: Sequence[str], **environment: str) -> dict[str, Any]:
    """Return the options of a command line, or its settings; it isn't run. Raises click.UsageError for wrong flags."""
    command, rest = _resolve(main, words)
    assert not isinstance(command, click.Group), words
    with CliRunner().isolation(env=environment):
        options = command.make_context(command.name, rest).params
    return dict(options.get("config", options))


def blocks(text: str, language: str = "") -> list[str]:
    """Return the blocks of code of a page that say to be in a language, or in none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for stated, block in found if stated == language]


def commands(text: str) -> list[list[str]]:
    """Return the `shardrank` commands in the blocks of a page, as words."""
    return [shlex.split(line) for block in blocks(text) for line in block.splitlines() if line.startswith("shardrank ")]
