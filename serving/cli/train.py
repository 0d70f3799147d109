"""`shardrank train`: the demo's trainer, writing the next version into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from serving.cli.examples import WithExamples
from serving.cli.options import films_options
from serving.cli.output import progress_bars


@click.command(cls=WithExamples)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Where the snapshot goes: FOLDER/<model>/<version>/.",
)
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
@click.option(
    "--dim", type=click.IntRange(2, 512), default=16, show_default=True, metavar="N", help="Width of every table."
)
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
    model: str,
    kind: str,
    dtype: str,
    dim: int,
    profile: bool,
    bucketing: Literal["hash", "range"],
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

    described = {"model": model, "kind": kind, "dtype": dtype, "embedding_dim": dim, "profile": profile}
    options = FilmsOptions.model_validate(described)
    interactions = read_interactions(movielens, ratings, seed)
    with progress_bars() as bars:
        version = train_version(
            interactions,
            store,
            seed=seed,
            epochs=epochs,
            options=options,
            bucketing=bucketing,
            progress=bars,
        )
    quality = expectation(version)
    click.echo(f"AUC {quality.auc_fp32:.4f} (each film by its mean label: {quality.auc_item_mean:.4f})")
    click.echo(f"wrote {version.folder}")
