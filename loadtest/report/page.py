"""Write a result as one HTML page with everything in it: no script, and nothing to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadtest.errors import PageFileError
from loadtest.report import charts
from loadtest.report.results import Reported
from loadtest.tables import percent_text, plain_text, rate_text, significant
from loadtest.workloads.payloads import FORMS


def html(result: Reported) -> str:
    """Write the page as text. Raises HistogramError if a histogram in the result can't be decoded."""

    def or_dash(write: Callable[[float], str]) -> Callable[[float | None], str]:
        return lambda value: "–" if value is None else write(value)

    environment = Environment(
        loader=PackageLoader("loadtest.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "ms": or_dash(significant),
        "rate": or_dash(rate_text),
        "percent": or_dash(percent_text),
        "plain": plain_text,
        "count": "{:,}".format,
        "gib": lambda size: f"{size / 2**30:.1f} GiB",
        "amount": lambda value, unit: rate_text(value) if unit == "/s" else significant(value),
    }
    page = environment.get_template("page.html")
    context = {"result": result, "style": Markup(charts.STYLE_SHEET), "charts": charts, "forms": FORMS}
    return page.render(context).lstrip()


def write_html(result: Reported, path: Path) -> None:
    """Write the page to a file.

    Raises:
        HistogramError: a histogram in the result can't be decoded.
        PageFileError: the file can't be written.
    """
    text = html(result)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageFileError(f"{path}: {error.strerror or error}") from error
