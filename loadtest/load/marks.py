"""Moments of a run that its report shows: swaps, faults, whatever somebody noted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from loadtest.load.errors import LoadConfigError
from loadtest.load.result import Mark

MAX_MARKS = 10_000
MAX_FILE_BYTES = 4 << 20


def read_marks(path: Path, began: float) -> tuple[Mark, ...]:
    """Reads a file of marks; each line is `UNIX_SECONDS LABEL`, as `echo "$(date +%s.%N) swap"` writes it.

    Args:
        path: of the file.
        began: wall clock of the run's begin, seconds since 1970.

    Raises:
        LoadConfigError: no such file, too large, or a line that is something else.
    """
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise LoadConfigError(f"--marks {path}: {size} bytes; at most {MAX_FILE_BYTES} are read")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadConfigError(f"--marks {path}: {error}") from error
    marks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        when, _, label = line.strip().partition(" ")
        try:
            marks.append(Mark(at_s=float(when) - began, label=label.strip()))
        except (ValueError, ValidationError) as error:
            raise LoadConfigError(
                f"--marks {path}: line {number}: {line[:100]!r} is not a time in seconds since 1970 and a label"
            ) from error
    return tuple(marks)


def marks_within(marks: Sequence[Mark], until_s: float) -> tuple[Mark, ...]:
    """Those within a run, by time."""
    return tuple(sorted((mark for mark in marks if 0 <= mark.at_s <= until_s), key=lambda mark: mark.at_s))[:MAX_MARKS]
