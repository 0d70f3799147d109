"""`shardrank loadtest report`: a page from results that are there, and comparisons between them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples

if TYPE_CHECKING:
    from loadtest.load.result import LoadResult

FILE = click.Path(path_type=Path, dir_okay=False)


class PageFile(click.Path):
    """A page to write, refused where what draws it is not installed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return its path."""
        if not (importlib.util.find_spec("matplotlib") and importlib.util.find_spec("jinja2")):
            self.fail("pages are drawn by matplotlib: pip install 'shardrank[report]'", param, ctx)
        return super().convert(value, param, ctx)


PAGE = PageFile(path_type=Path, dir_okay=False)
"""The type of `--html`."""


@click.command(cls=WithExamples)
@click.argument("files", nargs=-1, required=True, metavar="[NAME=]FILE...")
@click.option("--html", "html_file", required=True, type=PAGE, metavar="FILE", help="Write the page to this file.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the comparison to this file.")
@click.option("--title", metavar="TEXT", help="Of a comparison. Default: its names.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, metavar="N", help="Of a comparison's bootstrap.")
def report(files: tuple[str, ...], html_file: Path, json_file: Path | None, title: str | None, seed: int) -> None:
    """Write a page with plots from what `loadtest run --json` wrote.

    From one file: of that run, sweep or comparison. From several: a comparison of these runs, with the first as the
    baseline. Files of the same NAME are the rounds of one arm, in their order; without a NAME each file is an arm.

    Examples:
      shardrank loadtest report run.json --html run.html
      shardrank loadtest report before.json after.json --html compared.html
      shardrank loadtest report one=a1.json two=b1.json one=a2.json two=b2.json --html compared.html
    """
    from loadtest.documents import write_document
    from loadtest.report.page import compare_runs, read_reported, write_html

    if len(files) == 1:
        if json_file is not None:
            raise click.UsageError("--json is for comparisons; it needs at least two files")
        write_html(read_reported(_name_and_path(files[0])[1]), html_file)
    else:
        arms = _arms(files)
        comparison = compare_runs(title or " against ".join(arms), arms, seed=seed)
        if json_file is not None:
            write_document(comparison, json_file)
        write_html(comparison, html_file)
    click.echo(f"{html_file}: written")


def _name_and_path(text: str) -> tuple[str, Path]:
    """Return a file's arm, by default its name without the suffix, and where it is."""
    name, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        return Path(text).stem, Path(text)
    if not name or not rest:
        raise click.UsageError(f"{text!r}: expected FILE or NAME=FILE")
    return name, Path(rest)


def _arms(files: Sequence[str]) -> dict[str, list[LoadResult]]:
    """Return the runs of each name, in the order in which they were given."""
    from loader.errors import ConfigError
    from loadtest.load.result import LoadResult
    from loadtest.report.page import read_reported

    arms: dict[str, list[LoadResult]] = {}
    for text in files:
        name, path = _name_and_path(text)
        if name in arms and text == str(path):
            raise click.UsageError(f"{text!r}: there is another {name}; give each a name, as in {name}2={path}")
        run = read_reported(path)
        if not isinstance(run, LoadResult):
            raise ConfigError(f"{path}: a {run.kind}; only runs can be compared")
        arms.setdefault(name, []).append(run)
    return arms
