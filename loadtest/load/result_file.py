"""Files that hold a result: whether one can be written is asked before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from loader.snapshot.manifest import schema_errors
from loadtest.load.errors import ResultFileError

MAX_RESULT_BYTES = 256 << 20

Document = TypeVar("Document")


def check_writable(file: Path) -> None:
    """Raises ResultFileError if a file can't be written. An older one stays until there is a new one."""
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror or error}") from error


def write_document(document: BaseModel, file: Path) -> None:
    """Writes a document as JSON. Raises ResultFileError if the file can't be written."""
    try:
        file.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror or error}") from error


def read_document(
    file: Path,
    adapter: TypeAdapter[Document],
    models: Sequence[type[BaseModel]],
    is_none: str,
    max_problems: int | None = None,
) -> Document:
    """Reads a document that was written as JSON.

    Args:
        file: at most MAX_RESULT_BYTES long.
        adapter: of the documents that may be in it.
        models: those documents, for the names of fields in an error.
        is_none: what the file is said to be if it is none of them.
        max_problems: how many of its problems are told; None for all.

    Raises:
        ResultFileError: no such file, too large, or not such a document.
    """
    try:
        if (size := file.stat().st_size) > MAX_RESULT_BYTES:
            raise ResultFileError(f"{file}: {size} bytes; at most {MAX_RESULT_BYTES} are read")
        return adapter.validate_json(file.read_bytes())
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        found = [str(one) for one in schema_errors(error, models)]
        told = found[:max_problems]
        more = f" and {len(found) - len(told)} more" if len(told) < len(found) else ""
        raise ResultFileError(f"{file} is {is_none}: {'; '.join(told)}{more}") from error
