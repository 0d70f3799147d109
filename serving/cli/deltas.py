"""`shardrank deltas`: changed rows that another training system dumps become deltas of a model's stream."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import GroupWithExamples
from serving.cli import options as opts
from serving.cli.output import human_time
from serving.cli.settings import registry_url, with_registry

if TYPE_CHECKING:
    from loader.registry.fleet import FleetRegistry
    from loader.stores.cache import StorePlace


@click.group(cls=GroupWithExamples)
def deltas() -> None:
    """Publish changed rows of a model from files, where training does not by itself.

    Examples:
      shardrank deltas import --from tzrec run/delta_embedding_dump --model films --store models --follow
    """


@deltas.command("import")
@click.argument("folder", type=opts.EXISTING_FOLDER)
@opts.option("--from", "Who dumps: TorchEasyRec, Parquet.", click.Choice(["tzrec"]), required=True, name="kind")
@opts.option("--model NAME", "The model.", required=True)
@opts.count("--version", "The published version that training went on from; default: the live one.")
@opts.assignments("--table-key TABLE=FQN", "The table_fqn of a table that does not end in its name.")
@opts.count(
    "--from-step", "Begin with this step, though it was published before; default: behind what was.", 0, None, 0
)
@opts.switch("--follow", "Go on with files as they come, until it is interrupted.")
@opts.registry_option
@opts.store_options("The fleet's store: where the registry is by default, and of tables divided by popularity needed.")
def import_(
    folder: Path, model: str, version: int | None, follow: bool, store: StorePlace | None, **options: Any
) -> None:
    """Publish the rows that training dumped into FOLDER, in order of step, each file once.

    What was published is on record in the registry: run again, it goes on behind it. A line is printed for each file.
    Needs `pip install 'shardrank[parquet]'`.

    Examples:
      shardrank deltas import --from tzrec run/delta_embedding_dump --model films --store models --follow
    """
    from loader.deltas.publisher import AsyncDeltaPublisher
    from loader.deltas.tzrec_deltas import PUBLISHER, import_deltas
    from loader.errors import ConfigError
    from loader.stores import open_store

    async def work(fleet: FleetRegistry) -> None:
        base = await fleet.live_version(model) if version is None else version
        if base is None:
            raise ConfigError(f"--version: no version of {model!r} is wanted; name the one that training went on from")
        opened = None if store is None else open_store(store)
        publisher = AsyncDeltaPublisher(fleet.registry, model, base, opened, name=PUBLISHER)
        more = {"follow": follow, "table_keys": options["table_key"], "from_step": options["from_step"]}
        async for done in import_deltas(folder, fleet.registry, publisher, **more):
            unknown = f"; no table of the model: {', '.join(done.unknown)}" if done.unknown else ""
            age = human_time(max(0.0, time.time() - done.path.stat().st_mtime))
            rows = f"step {done.step}, rank {done.rank}: {done.rows} rows, {age} old, up to delta {publisher.sequence}"
            click.echo(f"{done.path.name}: {rows}{unknown}")

    with contextlib.suppress(KeyboardInterrupt):
        with_registry(registry_url(options["registry"], store), work, model)
