"""`shardrank verify`: may this snapshot be served?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import json_flag, snapshot_options
from serving.cli.output import human_bytes, print_json, progress_bars
from serving.cli.snapshots import SnapshotChoice

if TYPE_CHECKING:
    from serving.cli.verification import Verification


@click.command(cls=WithExamples)
@snapshot_options
@click.option(
    "--golden/--no-golden",
    default=True,
    show_default=True,
    help="Load the version and re-score its golden requests through the path that serves.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    metavar="N",
    help="How many files are hashed at a time.",
)
@json_flag("the result")
@click.pass_context
def verify(
    ctx: click.Context,
    store: Path | None,
    model: str | None,
    version: int | None,
    snapshot: Path | None,
    golden: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Check a snapshot in full.

    Exits with 0 if it may be served, with 1 and the reason if not. Checks the manifest, every file's size and
    SHA-256, dtypes and shapes, every row for NaN and inf, that the dense model can be built, and the golden requests:
    it loads the version in this process and compares its scores with those that training computed.

    Examples:
      shardrank verify --store models --model films
      shardrank verify --snapshot models/films/3 --no-golden --json
    """
    from serving.cli.verification import verify_served

    folder = SnapshotChoice(store, model, version, snapshot).folder()
    with progress_bars() as bars:
        found = verify_served(folder, golden=golden, threads=threads, progress=bars)
    if as_json:
        print_json(found)
    else:
        _print(found)
    ctx.exit(0 if found.ok else 1)


def _print(found: Verification) -> None:
    for check in found.checks:
        click.echo(f"ok: {check}")
    for problem in found.problems:
        click.echo(f"bad: {problem}")
    size = human_bytes(sum(file.size_bytes for file in found.files))
    where = found.path if found.model is None else f"{found.model} version {found.version} in {found.path}, {size}"
    click.echo(f"{where}: {'may be served' if found.ok else 'must not be served'}")
