"""Reads what a page is made of: a run, a sweep or a comparison, told apart by `kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from loadtest.load.result import LoadResult, SweepResult
from loadtest.load.result_file import read_document
from loadtest.report.comparison import Comparison

_ANY: TypeAdapter[LoadResult | SweepResult | Comparison] = TypeAdapter(
    Annotated[LoadResult | SweepResult | Comparison, Field(discriminator="kind")]
)
MAX_PROBLEMS = 5


def read_reported(path: Path) -> LoadResult | SweepResult | Comparison:
    """Reads a document that `--json` wrote.

    Raises:
        ResultFileError: no such file, too large, or not such a document.
    """
    return read_document(
        path, _ANY, [LoadResult, SweepResult, Comparison], "no result of a run, a sweep or a comparison", MAX_PROBLEMS
    )
