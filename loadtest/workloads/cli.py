"""`shardrank loadtest prepare`."""

from __future__ import annotations

from pathlib import Path

import click

from loadtest.workloads.options import workload_options
from serving.cli import WithExamples
from serving.cli.output import human_bytes, progress_bars


@click.command(cls=WithExamples)
@workload_options
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Where the snapshot goes: FOLDER/<model>/<version>/.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Of the rows and weights; for films, of the split and the training.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="For films: passes over the data; default: the trainer's own.",
)
def prepare(
    workload: str, context_features: int, movielens: Path | None, store: Path, seed: int, epochs: int | None
) -> None:
    """Write a workload's model into a store, to be served and load tested.

    dlrm-v2 and merlin-tiny get random rows and weights: answers mean nothing, but cost what a trained model's do.
    films is trained, as by `shardrank train`. The whole of dlrm-v2 has 28 GB of rows, merlin-tiny 1.7 GB; both go with
    the scale. An export that was interrupted goes on when it is run again.

    Examples:
      shardrank loadtest prepare --workload dlrm-v2:0.01 --store models
      shardrank serve --store models --model dlrm-v2
      shardrank loadtest run --target http://127.0.0.1:8080 --workload dlrm-v2:0.01
    """
    from loadtest.workloads.export import snapshot_bytes
    from loadtest.workloads.prepared import prepare_workload

    with progress_bars() as bars:
        folder, spec = prepare_workload(
            workload,
            store,
            context_features=context_features,
            movielens=movielens,
            seed=seed,
            epochs=epochs,
            progress=bars,
        )
    click.echo(f"wrote {folder} ({human_bytes(snapshot_bytes(spec))} of rows); serve it with")
    click.echo(f"  shardrank serve --store {store} --model {spec.model}")
