"""`python -m loadtest.levers movielens` and `lookups`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from loadtest.levers.lookups import measure_lookups
from loadtest.levers.movielens import EPOCHS, compare
from serving.training.interactions import read_movielens

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_OUT = click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON.")


@click.group()
def main() -> None:
    """Measure what levers that make tables smaller cost and save."""


@main.command()
@click.option("--movielens", "folder", type=_FOLDER, required=True, help="Folder with MovieLens 100K.")
@click.option("--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="How many, from 0.")
@click.option("--epochs", type=click.IntRange(1, 100), default=EPOCHS, show_default=True)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes, a seed each.")
@_OUT
def movielens(folder: Path, seeds: int, epochs: int, workers: int, out: Path | None) -> None:
    """Train and store models of MovieLens with each lever: AUC and bytes, paired by seed."""
    report = compare(
        read_movielens(folder),
        range(seeds),
        epochs=epochs,
        workers=workers,
        told=lambda seed: click.echo(f"seed {seed} done", err=True),
    )
    _show(out, report.model_dump_json(indent=1))


@main.command()
@click.option("--rounds", type=click.IntRange(1, 1000), default=6, show_default=True, help="Of 16 batches.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON.")
def lookups(rounds: int, out: Path | None) -> None:
    """Measure what levers cost at lookup: 26 tables of 100,000 rows of 64 columns, 50 to 500 candidates a batch."""
    found = measure_lookups(rounds, lambda text: click.echo(text, err=True))
    _show(out, json.dumps([one.model_dump() for one in found], indent=1))


def _show(out: Path | None, document: str) -> None:
    if out is None:
        click.echo(document)
    else:
        out.write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(prog_name="python -m loadtest.levers")
