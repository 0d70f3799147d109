"""Reads what a page is made of: a run, a sweep or a comparison, told apart by `kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from loader.schema_errors import schema_errors
from loadtest.load.errors import ResultFileError
from loadtest.load.result import MAX_RESULT_BYTES, LoadResult, SweepResult
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
    try:
        if (size := path.stat().st_size) > MAX_RESULT_BYTES:
            raise ResultFileError(f"{path}: {size} bytes; at most {MAX_RESULT_BYTES} are read")
        return _ANY.validate_json(path.read_bytes())
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        found = [str(one) for one in schema_errors(error, [LoadResult, SweepResult, Comparison])]
        more = f" and {len(found) - MAX_PROBLEMS} more" if len(found) > MAX_PROBLEMS else ""
        raise ResultFileError(
            f"{path} is no result of a run, a sweep or a comparison: {'; '.join(found[:MAX_PROBLEMS])}{more}"
        ) from error


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes a comparison's document.

    Raises:
        ResultFileError: if the file can't be written.
    """
    try:
        path.write_text(comparison.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror or error}") from error
