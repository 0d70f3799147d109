"""The page: one HTML file with everything in it, from a run, a sweep or a comparison."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

from loadtest.load.result import LoadResult, SweepResult
from loadtest.report import numbers
from loadtest.report.comparison import Comparison
from loadtest.report.comparison_page import comparison_body, comparison_headline
from loadtest.report.errors import PageFileError
from loadtest.report.fields import Fields
from loadtest.report.markup import Content, element, plain, written
from loadtest.report.run_page import headline, run_body
from loadtest.report.sweep_page import sweep_body, sweep_headline

Reported: TypeAlias = LoadResult | SweepResult | Comparison

# The page may load nothing, even if something in it tried to.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def title(result: Reported) -> str:
    """The page's title: what was measured."""
    if isinstance(result, Comparison):
        return result.title
    run = result.steps[0] if isinstance(result, SweepResult) else result
    asked = f"{run.workload} over {run.api}, {run.target}"
    if isinstance(result, SweepResult):
        found = f"{numbers.rate(result.highest_rate)}/s" if result.highest_rate is not None else "No rate"
        return f"{found} within {numbers.compact(result.slo_ms)} ms: {asked}"
    return f"{numbers.rate(run.rate)}/s: {asked}"


def html(result: Reported) -> str:
    """The page as text: an HTML document whose body is well-formed XML.

    Raises:
        HistogramError: if a histogram in the result can't be decoded.
    """
    fields = Fields(result)
    contents: list[Content]
    if isinstance(result, Comparison):
        name, contents = "comparison", [*comparison_headline(result, fields), *comparison_body(result, fields)]
    elif isinstance(result, SweepResult):
        name, contents = "load sweep", [*sweep_headline(result, fields), *sweep_body(result, fields)]
    else:
        name, contents = "load test", [*headline(result, fields), *run_body(result, fields)]
    top = [
        element("div", f"shardrank {name}", class_="product"),
        element("h1", title(result), data_of="/title" if isinstance(result, Comparison) else None),
    ]
    body = written(element("body", element("main", *top, *contents)))
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plain(title(result)))}</title>\n<style>\n{style}</style>\n</head>\n{body}\n</html>\n"
    )


def write_html(result: Reported, path: Path) -> None:
    """Writes the page.

    Args:
        result: a run, a sweep or a comparison.
        path: of the file; one that is there is replaced.

    Raises:
        HistogramError: if a histogram in the result can't be decoded.
        PageFileError: if the file can't be written.
    """
    text = html(result)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageFileError(f"{path}: {error.strerror or error}") from error
