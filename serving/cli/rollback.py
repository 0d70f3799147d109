"""`shardrank rollback`: back to the version before the last rollout."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import fleet_options
from serving.cli.registries import registry_url, with_registry

if TYPE_CHECKING:
    from loader.registry.typed import FleetRegistry


@click.command(cls=WithExamples)
@click.argument("model")
@click.option("--follow", is_flag=True, help="Show how far it is until it ends; exit code 1 unless it is done.")
@fleet_options
@click.pass_context
def rollback(ctx: click.Context, model: str, follow: bool, registry: str | None, store: Path | None) -> None:
    """Return to the version that was live before the last rollout.

    While a rollout runs, this is `shardrank rollout abort`. After one, the earlier version is rolled out again: staged,
    checked and flipped to like any other, so no answer fails. Its strategy is that of the last rollout; for another one
    use `shardrank rollout start`.

    Examples:
      shardrank rollback films --store models --follow
      shardrank rollback films --registry redis://10.0.0.9:6379/0
    """
    from loader.rollout.requests import roll_back
    from serving.cli.rollout_watch import follow_rollout

    async def work(fleet: FleetRegistry) -> bool:
        begun = await roll_back(fleet, model, clock=time.time, rollout_id=secrets.token_hex(16))
        back = begun.to_version if begun.state == "running" else begun.from_version
        click.echo(f"{model}: going back to {'no version' if back is None else f'version {back}'}")
        if not follow:
            click.echo(f"see: shardrank rollout status {model} --watch")
            return True
        # One that was running is back once it is aborted; a rollout of the earlier version must come to its end.
        wished = "done" if begun.state == "running" else "aborted"
        return (await follow_rollout(fleet, begun)).state == wished

    if not with_registry(registry_url(registry, store), work):
        ctx.exit(1)
