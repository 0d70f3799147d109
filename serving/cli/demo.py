"""`shardrank demo` and `train`: the demo's model of films, trained, exported, and served in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from serving.cli.group import WithExamples
from serving.cli.options import (
    cards_option,
    count_option,
    device_option,
    films_options,
    folder_option,
    out_store_option,
    port_options,
    sharding_option,
)
from serving.cli.output import progress_bars, stdout_console


@click.command(cls=WithExamples)
@films_options
@folder_option("--store", "Keep the snapshot in this store; without it, it is removed at the end.")
@count_option("--shards", "Shard nodes; each is a process.", 1, 64, default=2)
@cards_option(2)
@device_option("cpu")
@sharding_option
@click.option("--local", is_flag=True, help="Everything in this process, nothing serialised between router and rows.")
@port_options
@click.option("--once", is_flag=True, help="Stop after the report.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Also write the report as JSON.",
)
@click.pass_context
def demo(ctx: click.Context, /, once: bool, json_file: Path | None, **options: Any) -> None:
    """The whole path from one command: train, export, serve, rank.

    Trains a small ranking model on film ratings (MovieLens 100K with --movielens, else generated ones with planted
    tastes), exports it as an int8 snapshot, starts shard nodes and a serving process, ranks every held-out rating over
    HTTP and gRPC, and reports quality, latency and sizes from the answers. Then it keeps serving until Ctrl-C. Exits
    with 1 if any request failed.

    Examples:
      shardrank demo
      shardrank demo --movielens ml-100k --shards 3 --sharding table
      shardrank demo --local --once --json report.json
      shardrank demo --local --device cuda:0
      shardrank demo --once --ratings 3000 --epochs 1       (quick and poor)
    """
    from serving.demo.run import DemoConfig, run_demo

    config = DemoConfig.model_validate(options | ({"shards": 1} if options["local"] else {}))
    ctx.exit(run_demo(config, stdout_console(), once=once, json_file=json_file))


@click.command(cls=WithExamples)
@out_store_option
@films_options
@click.option("--model", default="films", show_default=True, metavar="NAME", help="The model's name.")
@click.option(
    "--kind",
    type=click.Choice(["target_attention", "dlrm", "dcn_v2", "mlp"]),
    default="target_attention",
    show_default=True,
    help="The ranking model.",
)
@click.option(
    "--dtype",
    type=click.Choice(["int8", "int4", "fp16", "fp32"]),
    default="int8",
    show_default=True,
    help="Number format of the rows.",
)
@count_option("--dim", "Width of every table.", 2, 512, default=16)
@click.option("--profile", is_flag=True, help="Also use age, occupation, zip code, and two dense inputs of a film.")
@click.option(
    "--bucketing",
    type=click.Choice(["hash", "range"]),
    default="hash",
    show_default=True,
    help="Order of the rows in their files: what `--sharding hash` or `--sharding range` needs later.",
)
def train(
    store: Path,
    movielens: Path | None,
    ratings: int,
    epochs: int | None,
    seed: int,
    bucketing: Literal["hash", "range"],
    **described: Any,
) -> None:
    """Train the demo's model and write it into a store.

    It becomes the model's next version. The same data, flags and seed give the same model. The last lines say where
    the snapshot lies and how well the float32 model ranks the ratings that were held out.

    Examples:
      shardrank train --store models
      shardrank train --store models --movielens ml-100k --kind dcn_v2 --profile
    """
    from serving.training.description import FilmsOptions
    from serving.training.version import expectation, read_interactions, train_version

    described["embedding_dim"] = described.pop("dim")
    films = FilmsOptions.model_validate(described)
    interactions = read_interactions(movielens, ratings, seed)
    with progress_bars() as bars:
        version = train_version(
            interactions, store, seed=seed, epochs=epochs, options=films, bucketing=bucketing, progress=bars
        )
    quality = expectation(version)
    click.echo(f"AUC {quality.auc_fp32:.4f} (each film by its mean label: {quality.auc_item_mean:.4f})")
    click.echo(f"wrote {version.folder}")
