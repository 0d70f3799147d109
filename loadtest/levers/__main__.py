"""`python -m loadtest.levers movielens`, `hash-sizes` and `lookups`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from loadtest.errors import LeversError
from loadtest.levers import page
from loadtest.levers.hash_sizes import (
    SHARES,
    HashSizesReport,
    LossAtSize,
    count_collisions,
    measure_clicks,
    read_criteo,
)
from loadtest.levers.lookups import measure_lookups
from loadtest.levers.movielens import EPOCHS, compare
from loadtest.report.markup import Element
from serving.training.interactions import read_movielens

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_OUT = click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON; a picture comes beside it.")


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
    _write(out, report.model_dump_json(indent=1), page.levers_picture(report))
    click.echo(page.levers_table(report), nl=False)


@main.command()
@click.option(
    "--criteo", type=click.Path(path_type=Path), help="train.csv of the Criteo display-advertising challenge."
)
@click.option("--clicks", type=click.IntRange(0, 10**9), default=5_000_000, show_default=True, help="0: none.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@_OUT
def hash_sizes(criteo: Path | None, clicks: int, seed: int, out: Path | None) -> None:
    """Make hashed tables smaller: lookups in a collision, and log loss on made-up clicks."""

    def told(one: LossAtSize) -> None:
        click.echo(f"{one.rows} rows: {one.log_loss:.4f}", err=True)

    columns = None if criteo is None else read_criteo(criteo)
    report = HashSizesReport(
        criteo=None if columns is None else tuple(count_collisions(columns, share) for share in SHARES),
        clicks=measure_clicks(clicks, seed, told) if clicks else None,
    )
    _write(out, report.model_dump_json(indent=1), page.hash_sizes_picture(report))
    click.echo(page.hash_sizes_tables(report), nl=False)


@main.command()
@click.option("--rounds", type=click.IntRange(1, 1000), default=6, show_default=True, help="Of 16 batches.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON.")
def lookups(rounds: int, out: Path | None) -> None:
    """Measure what levers cost at lookup: 26 tables of 100,000 rows of 64 columns, 50 to 500 candidates a batch."""
    found = measure_lookups(rounds, lambda text: click.echo(text, err=True))
    if out is not None:
        _save(out, json.dumps([one.model_dump() for one in found], indent=1) + "\n")
    click.echo(page.lookups_table(found), nl=False)


def _write(out: Path | None, document: str, drawn: Element) -> None:
    if out is not None:
        _save(out, document + "\n")
        _save(out.with_suffix(".svg"), page.standalone(drawn))


def _save(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LeversError(f"--out {out}: {error}") from error


if __name__ == "__main__":
    main(prog_name="python -m loadtest.levers")
