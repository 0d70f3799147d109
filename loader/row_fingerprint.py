"""Whether a table's rows are those of an earlier run, told without reading them all.

An export that goes on after an interruption must not mix the rows of two training runs. Rows may be larger than memory,
so they are compared by a fingerprint: of the file they lie in, or of a sample of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from loader.errors import ExportError

SAMPLED_ROWS = 1024


@runtime_checkable
class FingerprintedRows(Protocol):
    """A row source that can tell its rows from others. One that is read only once can't."""

    def fingerprint(self) -> str:
        """Equal for the same rows; differs, as far as can be told cheaply, for others."""


def fingerprint_of(source: object) -> str:
    """The source's fingerprint, or "" if it has none."""
    return source.fingerprint() if isinstance(source, FingerprintedRows) else ""


def file_fingerprint(path: Path, name: str) -> str:
    """Of rows called `name` in a file: its resolved path, size and time of change. Raises ExportError."""
    try:
        found = path.stat()
        return json.dumps([str(path.resolve()), name, found.st_size, found.st_mtime_ns])
    except OSError as error:
        raise ExportError(f"rows: {path}: {error}") from error


def sample_fingerprint(num_rows: int, take: Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]) -> str:
    """Of rows in memory: SHA-256 of up to 1024 of them, the first and the last and evenly spaced ones between.

    Args:
        num_rows: how many there are.
        take: gives the rows of these numbers, int64 [k], as an array [k, dim].
    """
    numbers = np.linspace(0, num_rows - 1, min(num_rows, SAMPLED_ROWS)).astype(np.int64)
    rows = np.ascontiguousarray(take(numbers))
    digest = hashlib.sha256(json.dumps([num_rows, rows.dtype.str, rows.shape]).encode())
    digest.update(rows.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
