"""`shardrank loadtest prepare`, and the options of every command that takes a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, progress_bars

if TYPE_CHECKING:
    from loadtest.workloads.catalog import SideSplit

same_option = click.option(
    "--varied/--same",
    "varied",
    default=True,
    help="Varied requests, the default, have ragged bags and another `traceparent` and `x-request-id` each time; "
    "the same ones have bags of one length and heads that are alike.",
)


def side_split_option(default: SideSplit) -> opts.Option:
    """Declare `--workload`: which inputs of the benchmarks' model come once a request."""
    text = "product: 20 of the 26 features and 10 of the 13 floats come once a request; candidates: none."
    kind = click.Choice(("product", "candidates"))
    return opts.option("--workload", text, kind, default, name="side_split")


workload_options = opts.together(
    opts.option(
        "--workload NAME",
        "dlrm-v2[:SCALE] or merlin-tiny[:SCALE], SCALE being the share of the rows, such as dlrm-v2:0.01; "
        "bench-mlp[:HOTNESS] or bench-dlrm[:HOTNESS], the benchmarks' one table of a million rows, such as "
        "bench-mlp:20; films, or films:profile for a model trained with --profile.",
        default="dlrm-v2:0.001",
    ),
    opts.count(
        "--context-features",
        "For dlrm-v2 and merlin-tiny: so many features, those with the most ids, come once a request (a user's "
        "histories) instead of once a candidate. The same for `prepare` and `run`.",
        low=0,
        default=0,
    ),
    opts.option(
        "--movielens",
        "For films: folder with the files of MovieLens 100K (u.data, u.item, u.user, u.genre).",
        opts.EXISTING_FOLDER,
    ),
)
"""Which model."""
request_options = opts.together(
    opts.option(
        "--ids uniform|zipf:S|reuse",
        "Which rows are asked for; reuse is as in the lookups that Meta published. Default: uniform for dlrm-v2, "
        "zipf:1.05 for merlin-tiny.",
    ),
    opts.option(
        "--candidates N|LEAST-MOST:MEAN",
        "Candidates of a request, such as 100 or 100-700:270. Default: 50-500:200, with --same 100-700:270; for films, "
        "those that each user rated.",
    ),
    opts.count(
        "--split-seed",
        "For films: which ratings are asked for; the --seed that the model was trained or prepared with, so that it "
        "has not learnt them. Default: 0.",
        low=0,
    ),
    same_option,
)
"""What its requests are like."""


@click.command(cls=WithExamples)
@workload_options
@opts.out_store_option
@opts.count("--seed", "Of the rows and weights; for films, of the split and the training.", 0, 2**32 - 1, 0)
@opts.count("--epochs", "For films: passes over the data; default: the trainer's own.", high=1000)
def prepare(workload: str, store: Path, **given: Any) -> None:
    """Write a workload's model into a store, to be served and load tested.

    dlrm-v2 and merlin-tiny get random rows and weights: answers mean nothing, but cost what a trained model's do.
    films is trained, as by `shardrank train`. The whole of dlrm-v2 has 28 GB of rows, merlin-tiny 1.7 GB; both go with
    the scale. An export that was interrupted goes on when it is run again.

    Examples:
      shardrank loadtest prepare --workload dlrm-v2:0.01 --store models
      shardrank serve --store models --model dlrm-v2
      shardrank loadtest run --target http://127.0.0.1:8080 --workload dlrm-v2:0.01
    """
    from loader.snapshot.publishing import rows_bytes_of
    from loadtest.workloads.prepare import prepare_workload

    with progress_bars() as bars:
        folder, spec = prepare_workload(workload, store, progress=bars, **given)
    click.echo(f"wrote {folder} ({human_bytes(rows_bytes_of(spec))} of rows); serve it with")
    click.echo(f"  shardrank serve --store {store} --model {spec.model}")
