"""`shardrank train`: a model of the demo's, at once from ratings that are there, or online as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import print_document, progress_bars
from serving.cli.settings import config_of
from serving.fleet.process import run_until_signalled

ONLINE = {"folder", "workers", "servers", "consistency", "dense", "optimizer", "lr", "batch", "worker_timeout_s",
          "registry", "publish_rows_s", "publish_dense_s", "snapshot_s", "bake_s"}  # fmt: skip
"""Options that go with --online."""
_online_options = opts.together(
    opts.option("--folder", "Of logs and checkpoints; started again, training goes on from these.", opts.FOLDER),
    opts.count("--workers", "K, processes that read the ratings.", 1, 64, 2),
    opts.count("--servers", "S, shard nodes that have the rows.", 1, 64, 2),
    opts.option(
        "--consistency bsp|ssp:N|asp", "Who waits for whom, as of `shard-node --train-consistency`.", default="bsp"
    ),
    opts.option(
        "--dense",
        "Dense weights: a copy in each worker, or rows of the servers. Default: allreduce with bsp, else server.",
        click.Choice(["allreduce", "server"]),
    ),
    opts.choice("--optimizer", ["adagrad", "adam", "sgd"], "Of rows and of dense weights; adagrad is row-wise."),
    opts.option("--lr X", "Its learning rate.", opts.ABOVE_ZERO, 0.2),
    opts.count("--batch", "Ratings that a worker reads for a step.", 1, 65_536, 32),
    opts.option("--worker-timeout-s X", "How long others wait for a worker.", opts.ABOVE_ZERO, 30.0),
    opts.registry_option,
    opts.option("--publish-rows-s X", "With --registry: how often changed rows are published.", opts.ABOVE_ZERO, 2.0),
    opts.option("--publish-dense-s X", "With --registry: how often dense weights are.", opts.ABOVE_ZERO, 10.0),
    opts.option("--snapshot-s X", "With --registry: how often a version is rolled out.", opts.ABOVE_ZERO, 3600.0),
    opts.option("--bake-s X", "How long its answers are compared with the one before's.", opts.FiniteRange(0), 0.0),
)


@click.command(cls=WithExamples)
@opts.out_store_option
@opts.films_options
@opts.option("--model NAME", "The model's name.", default="films")
@opts.choice("--kind", ["target_attention", "dlrm", "dcn_v2", "mlp"], "The ranking model.")
@opts.choice("--dtype", ["int8", "int4", "fp16", "fp32"], "Number format of the rows.")
@opts.count("--dim", "Width of every table.", 2, 512, 16)
@opts.switch("--profile", "Also use age, occupation, zip code, and two dense inputs of a film.")
@opts.switch("--crosses", "Also use pairs: user and genre, occupation and film, age and genre, zip code and film.")
@opts.assignments(
    "--table NAME=JSON",
    "What a table's description has instead: `num_embeddings`, `id_mapping`, `blocks`, `dtype`, `project_to`, ... "
    "A new name takes the `feature_names` that it is given from other tables.",
    json.loads,
)
@opts.switch("--prune", "Drop rows that training never looked up; their ids get one row together.")
@opts.option("--keep-share X", "With --prune, keep the hottest rows that have this share of the lookups.", opts.PART)
@opts.choice("--bucketing", ["mixed", "range"], "Order of rows in their files: --sharding range needs range.")
@opts.switch("--online", "Train on shard nodes, once, in order of time; what follows goes with it.")
@_online_options
@click.pass_context
def train(ctx: click.Context, /, store: Path, **options: Any) -> None:
    """Train the demo's model and write it into a store.

    It becomes the model's next version. The same data, flags and seed give the same model. The last lines say where
    the snapshot lies and how well the float32 model ranks the ratings that were held out.

    With --online, shard nodes of this machine train a model of users and films, and workers read the ratings in order
    of time: each is scored before it is learned, and the AUC is of these scores. What dies is started again and goes
    on. Rows reach the fleet of --registry all along, further versions by rollouts.

    Examples:
      shardrank train --store models
      shardrank train --store models --movielens ml-100k --kind dcn_v2 --profile
      shardrank train --store models --prune --table 'films={"project_to": 16, "embedding_dim": 8}'
      shardrank train --online --store models --folder online --ratings ratings.csv --workers 4 --consistency ssp:4
    """
    is_online = options.pop("online")
    shared = {"movielens", "ratings", "seed", "model", "dim", "dtype"}
    alien = options.keys() - shared - ONLINE if is_online else ONLINE
    if named := sorted(name for name in alien if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE):
        raise click.UsageError(f"--{named[0].replace('_', '-')}: {'not' if is_online else 'only'} with --online")
    if is_online:
        _train_online(ctx, store, options)
        return
    if isinstance(options["ratings"], Path):
        raise click.UsageError("--ratings: a file only with --online")
    _train(store, **options)


def _train(store: Path, movielens: Path | None, ratings: int, seed: int, **options: Any) -> None:
    from serving.training.dataset import FilmsOptions
    from serving.training.trainer import expectation, read_interactions, train_version

    is_pruned, keep_share, epochs = (options.pop(name) for name in ("prune", "keep_share", "epochs"))
    if not is_pruned and keep_share is not None:
        raise click.UsageError("--keep-share: only with --prune")
    keep_share = (keep_share or 1.0) if is_pruned else None
    films = config_of(FilmsOptions, options, embedding_dim=options["dim"], tables=options.pop("table"))
    interactions = read_interactions(movielens, ratings, seed)
    with progress_bars() as bars:
        version = train_version(
            interactions, store, seed=seed, epochs=epochs, options=films, keep_share=keep_share, progress=bars
        )
    quality = expectation(version)
    click.echo(f"AUC {quality.auc_fp32:.4f} (each film by its mean label: {quality.auc_item_mean:.4f})")
    click.echo(f"wrote {version.folder}")


def _train_online(ctx: click.Context, store: Path, options: dict[str, Any]) -> None:
    from serving.training.fleet_feed import FeedConfig, train_online
    from serving.training.online_model import OnlineConfig
    from serving.training.rating_stream import read_ratings

    if options["folder"] is None:
        raise click.UsageError("--online needs --folder.")
    training = config_of(OnlineConfig, options, write_dense_s=options["publish_dense_s"])
    feed = config_of(FeedConfig, options, store=store)
    ratings = read_ratings(options["movielens"], options["ratings"], options["seed"])
    done = run_until_signalled(lambda: train_online(training, feed, ratings, click.echo))
    if done is None:
        ctx.exit(130)
    report, folder = done
    print_document(report.model_dump())
    click.echo(f"wrote {folder}")
