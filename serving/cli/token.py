"""`shardrank token`: makes tokens for `--tokens`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from serving.cli.examples import WithExamples

Scope = Literal["rank", "describe", "admin"]


class TokenGroup(WithExamples, click.Group):
    """Subcommands with examples."""

    command_class = WithExamples


@click.group(cls=TokenGroup)
def token() -> None:
    """Make tokens that clients of `shardrank serve --tokens FILE` show.

    Examples:
      shardrank token new --name shop --scope rank --tokens tokens.json
    """


@token.command()
@click.option("--name", required=True, metavar="NAME", help="Whose it is: letters, digits, and _ . -")
@click.option(
    "--scope",
    type=click.Choice(["rank", "describe", "admin"]),
    required=True,
    help="rank: rank, lookup, infer, and describe. describe: models' descriptions, metadata and statistics. "
    "admin: everything, metrics too.",
)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file that it is added to, made with mode 0600 if it is not there. Without, its entry is printed.",
)
def new(name: str, scope: Scope, tokens: Path | None) -> None:
    """Make a random token of 256 bits and print it, this once: the file has only its SHA-256.

    Servers that use the file take the token a second later. To take one away, remove its entry.

    Examples:
      shardrank token new --name shop --scope rank --tokens tokens.json
      shardrank token new --name prometheus --scope admin
    """
    from pydantic import ValidationError

    from serving.api.tokens import add_token, new_token

    try:
        made, entry = new_token(name, scope)
    except ValidationError:
        raise click.UsageError(f"--name {name!r}: allowed are 1 to 64 letters, digits, and _ . -") from None
    if tokens is not None:
        add_token(tokens, entry)
    click.echo(made)
    if tokens is None:
        click.echo(entry.model_dump_json())
