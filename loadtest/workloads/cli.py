"""`shardrank loadtest prepare`, and the options of every command that takes a workload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from serving.cli import WithExamples
from serving.cli.output import human_bytes, progress_bars

if TYPE_CHECKING:
    from loadtest.workloads.catalog import SideSplit

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

WORKLOAD_HELP = (
    "dlrm-v2[:SCALE] or merlin-tiny[:SCALE], SCALE being the share of the rows, such as dlrm-v2:0.01; "
    "bench-mlp[:HOTNESS] or bench-dlrm[:HOTNESS], the benchmarks' one table of a million rows, such as bench-mlp:20; "
    "films, or films:profile for a model trained with --profile."
)


def same_option(function: Decorated) -> Decorated:
    """Add `--same`: requests that are like one another, as load tests sent them before they were varied."""
    return click.option(
        "--varied/--same",
        "varied",
        default=True,
        help="Varied requests, the default, have ragged bags and another `traceparent` and `x-request-id` each time; "
        "the same ones have bags of one length and heads that are alike.",
    )(function)


def side_split_option(default: SideSplit) -> Callable[[Decorated], Decorated]:
    """Add `--workload`: which inputs of the benchmarks' model come once a request."""
    return click.option(
        "--workload",
        "side_split",
        type=click.Choice(("product", "candidates")),
        default=default,
        show_default=True,
        help="product: 20 of the 26 features and 10 of the 13 floats come once a request; candidates: none.",
    )


def workload_options(function: Decorated) -> Decorated:
    """`--workload`, `--context-features`, `--movielens`: which model."""
    function = click.option(
        "--movielens",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="FOLDER",
        help="For films: folder with the files of MovieLens 100K (u.data, u.item, u.user, u.genre).",
    )(function)
    function = click.option(
        "--context-features",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="For dlrm-v2 and merlin-tiny: so many features, those with the most ids, come once a request (a user's "
        "histories) instead of once a candidate. The same for `prepare` and `run`.",
    )(function)
    return click.option("--workload", default="dlrm-v2:0.001", show_default=True, metavar="NAME", help=WORKLOAD_HELP)(
        function
    )


def request_options(function: Decorated) -> Decorated:
    """`--ids`, `--candidates`, `--split-seed`, `--same`: what its requests are like."""
    function = same_option(function)
    function = click.option(
        "--split-seed",
        type=click.IntRange(0, 2**32 - 1),
        metavar="N",
        help="For films: which ratings are asked for; the --seed that the model was trained or prepared with, so that "
        "it has not learnt them. Default: 0.",
    )(function)
    function = click.option(
        "--candidates",
        metavar="N|LEAST-MOST:MEAN",
        help="Candidates of a request, such as 100 or 100-700:270. Default: 50-500:200, with --same "
        "100-700:270; for films, those that each user rated.",
    )(function)
    return click.option(
        "--ids",
        metavar="uniform|zipf:S|reuse",
        help="Which rows are asked for; reuse is as in the lookups that Meta published. Default: uniform for dlrm-v2, "
        "zipf:1.05 for merlin-tiny.",
    )(function)


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
    from loadtest.workloads.prepare import prepare_workload, snapshot_bytes

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
