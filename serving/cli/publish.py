"""`shardrank publish`: a snapshot becomes a version that may be rolled out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import json_flag, registry_option
from serving.cli.output import human_bytes, print_json, progress_bars
from serving.cli.registries import registry_url, with_registry

if TYPE_CHECKING:
    from loader.publishing import Publication, Retained
    from loader.registry.typed import FleetRegistry


@click.command(cls=WithExamples)
@click.argument("snapshot_folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where the fleet's processes find snapshots; default: the store in which the folder lies.",
)
@registry_option
@click.option(
    "--retain",
    type=click.IntRange(min=1),
    metavar="K",
    help="Keep the K highest published versions of the model and delete the others from the store, but never one that "
    "is wanted, rolled out, or the last rollout's origin. Default: keep all.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    metavar="N",
    help="How many files are hashed at a time.",
)
@json_flag("what was published")
def publish(
    snapshot_folder: Path, store: Path | None, registry: str | None, retain: int | None, threads: int, as_json: bool
) -> None:
    """Check a snapshot in full, copy it into the store, and put it on record.

    Nothing is rolled out by this: see `shardrank rollout start`. Without --registry it is the one in the store.
    May be run again: a copy that was interrupted goes on, and what is published already stays as it is.

    Examples:
      shardrank publish models/films/3
      shardrank publish /training/out/films/3 --store models --retain 5
      shardrank publish /training/out/films/3 --store models --registry redis://10.0.0.9:6379/0
    """
    from loader import publishing
    from serving.cli.published import PublishReport

    folder = snapshot_folder.resolve()
    where = folder.parent.parent if store is None else store

    async def work(fleet: FleetRegistry) -> tuple[Publication, Retained | None]:
        done = await publishing.publish(fleet, folder, where, clock=time.time, threads=threads, progress=bars)
        if retain is None:
            return done, None
        return done, await publishing.retain(fleet, where, done.record.model, retain)

    with progress_bars() as bars:
        published, retained = with_registry(registry_url(registry, where), work)
    if as_json:
        print_json(PublishReport.of(published, retained))
        return
    record = published.record
    how = "copied to" if published.copied else "lies in"
    news = "is published" if published.is_new else "was published before"
    click.echo(f"{record.model} version {record.version} {news}; {human_bytes(record.rows_bytes)} of rows")
    click.echo(f"{how} {published.folder}, identity {record.identity}")
    if retained is not None:
        click.echo(f"kept: {_numbers(retained.kept)}; deleted: {_numbers(retained.dropped)}")


def _numbers(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
