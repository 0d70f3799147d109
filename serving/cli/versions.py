"""`shardrank versions`: what is published, and what the fleet does with it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import fleet_options, json_flag
from serving.cli.output import human_bytes, print_json, print_table
from serving.cli.registries import registry_url, with_registry

if TYPE_CHECKING:
    from loader.registry.typed import FleetRegistry
    from serving.cli.published import VersionList


@click.command(cls=WithExamples)
@click.argument("model", required=False)
@fleet_options
@json_flag("the list")
def versions(model: str | None, registry: str | None, store: Path | None, as_json: bool) -> None:
    """List the versions that are published, and what they are used for.

    Examples:
      shardrank versions --store models
      shardrank versions films --registry redis://10.0.0.9:6379/0 --json
    """
    from serving.cli.published import list_versions

    async def work(fleet: FleetRegistry) -> VersionList:
        return await list_versions(fleet, model)

    found = with_registry(registry_url(registry, store), work)
    if as_json:
        print_json(found)
        return
    rows = [
        (one.model, one.version, ", ".join(one.uses) or "-", _date(one.published_at), human_bytes(one.rows_bytes),
         _lineage(one.version, one.delta_base, one.last_delta), one.nodes, one.identity[:12])
        for one in found.versions
    ]  # fmt: skip
    if not rows:
        click.echo("no version is published" if model is None else f"no version of {model!r} is published")
        return
    columns = ("model", "#version", "use", "published", "#rows", "deltas", "#nodes ready", "identity")
    print_table("Versions", columns, rows)


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"


def _lineage(version: int, delta_base: int, last_delta: int) -> str:
    origin = "own stream" if delta_base == version else f"stream of {delta_base}"
    return f"{origin}, has {last_delta}" if last_delta else origin
