"""`shardrank inspect`: what a snapshot holds, from its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.examples import WithExamples
from serving.cli.options import json_flag, snapshot_options
from serving.cli.output import human_bytes, print_json, print_table
from serving.cli.snapshots import SnapshotChoice

if TYPE_CHECKING:
    from serving.cli.inspection import Inspection


@click.command(cls=WithExamples)
@snapshot_options
@json_flag("the description")
def inspect(store: Path | None, model: str | None, version: int | None, snapshot: Path | None, as_json: bool) -> None:
    """Show what a snapshot holds.

    Tables, features, dense model and sizes. Reads the manifest and the headers of the files; `shardrank verify`
    checks their bytes.

    Examples:
      shardrank inspect --store models
      shardrank inspect --store models --model films --version 3 --json
      shardrank inspect --snapshot models/films/3
    """
    from loader.reader import Snapshot
    from serving.cli.inspection import Inspection

    opened = Snapshot.open(SnapshotChoice(store, model, version, snapshot).folder(), verify=False)
    found = Inspection.of(opened)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: Inspection) -> None:
    saved = found.float32_bytes / max(1, sum(table.size_bytes for table in found.tables))
    click.echo(f"{found.model} version {found.version}, made {found.created_at}, in {found.path}")
    click.echo(f"identity {found.identity}")
    click.echo(f"{human_bytes(found.snapshot_bytes)} in all; the rows take {saved:.1f} times less than as float32")
    columns = ("table", "#rows", "#dim", "dtype", "pooling", "ids", "unknown id", "bucketing", "#files", "#size")
    print_table(
        "Tables",
        columns,
        [
            (one.name, one.num_embeddings, one.embedding_dim, one.dtype, one.pooling, one.id_mapping, one.unknown_id,
             one.bucketing, one.files, human_bytes(one.size_bytes))
            for one in found.tables
        ],
    )  # fmt: skip
    print_table(
        "Features",
        ("feature", "side", "table", "pooling", "weighted"),
        [(one.name, one.side, one.table, one.pooling, "yes" if one.weighted else "no") for one in found.features],
    )
    click.echo(f"Dense inputs: {found.dense_inputs.context} of the context, {found.dense_inputs.candidate} a candidate")
    click.echo(f"Dense model: {found.dense_model.kind} {dict(found.dense_model.config)}")
    if found.golden is None:
        click.echo("Golden requests: none")
    else:
        golden = found.golden
        click.echo(
            f"Golden requests: {golden.num_requests} with {golden.num_candidates} candidates, "
            f"tolerance {golden.tolerance:g}"
        )
    counted = [one.name for one in found.tables if one.access_counts]
    click.echo(f"Access counts: {', '.join(counted) or 'none'}")
    for key, value in found.metadata.items():
        click.echo(f"{key}: {value}")
