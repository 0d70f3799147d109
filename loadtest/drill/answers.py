"""The log of answers: fixed-size records in a file that grows while the load runs, and is read while it grows.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. Beside the records lies a text file with
the details of the first answers that were not right.
"""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from loadtest.drill.verdict import Kind, Verdict

APIS = ("http rank", "grpc rank", "http lookup", "grpc lookup")
RECORD = np.dtype(
    [
        ("intended", "<f8"),  # when the request was due: latency counts from here
        ("sent", "<f8"),  # when the load got to it
        ("ended", "<f8"),
        ("version", "<i8"),  # that the answer names; 0 for none
        ("api", "u1"),  # index in APIS
        ("kind", "u1"),  # `Kind`
    ]
)
Answers = npt.NDArray[np.void]
MAX_DETAILS = 1000


class AnswerLog:
    """Writes records; what is flushed can be read by another process at once.

    Args:
        path: of the records; made new. The details are beside it.
    """

    def __init__(self, path: Path) -> None:
        self._records: BufferedWriter = path.open("wb")
        self._details: TextIO = details_path(path).open("w", encoding="utf-8")
        self._num_details = 0
        self._record = np.zeros(1, RECORD)

    def add(self, api: int, intended: float, sent: float, ended: float, version: int, verdict: Verdict) -> None:
        """Adds one answer."""
        self._record[0] = (intended, sent, ended, version, api, verdict.kind)
        self._records.write(self._record.tobytes())
        if verdict.kind is not Kind.OK and self._num_details < MAX_DETAILS:
            self._num_details += 1
            self._details.write(f"{intended:.3f} {verdict.kind.name.lower()} {APIS[api]}: {verdict.detail}\n")

    def flush(self) -> None:
        """Makes all that was added readable."""
        self._records.flush()
        self._details.flush()

    def close(self) -> None:
        """Flushes and ends."""
        self._records.close()
        self._details.close()


def details_path(path: Path) -> Path:
    """Where the details of answers that are not right lie."""
    return path.with_suffix(".details")


def read_answers(path: Path, first: int = 0) -> Answers:
    """The records from number `first` on that are complete by now, in the order in which they ended."""
    size = path.stat().st_size // RECORD.itemsize
    return np.fromfile(path, RECORD, count=max(0, size - first), offset=first * RECORD.itemsize)


def read_details(path: Path, max_lines: int = 20) -> list[str]:
    """The first details, one line each."""
    lines = details_path(path).read_text(encoding="utf-8").splitlines()
    return lines[:max_lines]
