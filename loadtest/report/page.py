"""Results as one HTML page with everything in it, without a script and with nothing to load; runs compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import Field, TypeAdapter

from loadtest.errors import ComparisonError, PageFileError
from loadtest.load.result import LoadResult, SweepResult, read_document
from loadtest.load.show import outcome_of
from loadtest.report import charts
from loadtest.rounds import FORM, Arm, Comparison, Measure, compare_rounds
from loadtest.tables import significant
from loadtest.workloads.payloads import FORMS

Reported: TypeAlias = LoadResult | SweepResult | Comparison
Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""Title, names of columns, rows."""
_REPORTED: TypeAdapter[Reported] = TypeAdapter(Annotated[Reported, Field(discriminator="kind")])
_MEASURES: tuple[Measure[LoadResult], ...] = (
    Measure("p50", "ms", "lower", lambda run: run.latency_of_due.p50_ms),
    Measure("p99", "ms", "lower", lambda run: run.latency_of_due.p99_ms),
    Measure("p99.9", "ms", "lower", lambda run: run.latency_of_due.p999_ms),
    Measure("answers in time", "/s", "higher", lambda run: run.goodput),
)
_ALIKE = ("target", "model", "workload", "api", "ids", "candidates", "arrivals", "rate", "duration_s", "slo_ms")


def read_reported(path: Path) -> Reported:
    """Read a document that `--json` wrote.

    Raises:
        ResultFileError: no such file, too large, or not such a document.
    """
    return read_document(
        path, _REPORTED, [LoadResult, SweepResult, Comparison], "no result of a run, a sweep or a comparison", 5
    )


def compare_runs(title: str, arms: Mapping[str, Sequence[LoadResult]], *, seed: int = 0) -> Comparison:
    """Compare load tests: p50, p99 and p99.9 of all requests that were due, and answers in time a second.

    The runs of an arm are its rounds; the first arm is the baseline.

    Raises:
        ComparisonError: fewer than two arms, or arms with other numbers of rounds.
    """
    if len(arms) < 2:
        raise ComparisonError(f"arms: {sorted(arms)}; a comparison needs at least 2")
    runs = [run for of_arm in arms.values() for run in of_arm]
    values = {field: {getattr(run, field) for run in runs} for field in _ALIKE}
    alike = {field: str(found.pop()) for field, found in values.items() if len(found) == 1 and None not in found}
    return compare_rounds(
        [(Arm(name=name, runs=tuple(of_arm)), of_arm) for name, of_arm in arms.items()],
        _MEASURES,
        title=title,
        setup={**alike, FORM: " or ".join(sorted({FORMS[run.varied] for run in runs}))},
        invalid_because=[
            f"{name}, round {number}: {reason}"
            for name, of_arm in arms.items()
            for number, run in enumerate(of_arm, 1)
            for reason in run.invalid_because
        ],
        machine=runs[0].machine if runs and all(run.machine == runs[0].machine for run in runs) else None,
        versions=dict(set.intersection(*(set(run.versions.items()) for run in runs))) if runs else {},
        seed=seed,
    )


def tables_of(document: Mapping[str, Any], title: str) -> Iterator[Table]:
    """Lay a document out: its values by name, then each document and list in it; histograms are left out."""
    nested = {name: value for name, value in document.items() if isinstance(value, dict | list)}
    yield title, (), [(name, value) for name, value in document.items() if name not in nested]
    for name, value in nested.items():
        if isinstance(value, dict) and "encoded" not in value:
            yield from tables_of(value, name)
        elif value and isinstance(value, list):
            rows = [list(each.values()) if isinstance(each, dict) else [each] for each in value]
            yield name, list(value[0]) if isinstance(value[0], dict) else (), rows


def value_text(value: Any) -> str:
    """Write a value of a document: floats to three significant digits."""
    if isinstance(value, float):
        return significant(value)
    return "–" if value is None else f"{value:,}" if type(value) is int else str(value)


def html(result: Reported) -> str:
    """Write the page as text. Raises HistogramError if a histogram in the result can't be decoded."""
    environment = Environment(
        loader=PackageLoader("loadtest.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["text"] = value_text
    with mpl.rc_context(charts.STYLE):
        context = {"result": result, "charts": charts, "tables_of": tables_of, "outcome_of": outcome_of}
        return environment.get_template("page.html").render(context).lstrip()


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
