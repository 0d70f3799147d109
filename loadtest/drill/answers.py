"""Answers as a load records them, and what reports count in them.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadtest.drill.oracle import Kind
from loadtest.drill.report import Limit

APIS = ("http rank", "grpc rank", "http lookup", "grpc lookup")
RECORD = np.dtype(
    [
        ("intended", "<f8"),  # when the request was due: latency counts from here
        ("turn", "<f8"),  # when the load came to it
        ("ended", "<f8"),
        ("version", "<i8"),  # that the answer names; 0 for none
        ("api", "u1"),  # place in `APIS`
        ("kind", "u1"),  # `Kind`
    ]
)

Answers = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]


class TimeSpan(NamedTuple):
    """A span of time."""

    begin: float
    end: float


def count_kinds(kinds: npt.ArrayLike) -> dict[str, int]:
    """Return how many answers there were, and how many failed, were mixed and wrong."""
    counts = np.bincount(np.asarray(kinds, np.int64), minlength=len(Kind)).tolist()
    return {"answers": sum(counts), **{kind.name.lower(): counts[kind] for kind in Kind if kind is not Kind.OK}}


def answer_limits(figures: Mapping[str, Any], *more: str) -> list[Limit]:
    """Return the limits of answers that may not be: those of `count_kinds`, and others by name."""
    return [Limit(name, figures[name], 0) for name in ("failed", "mixed", "wrong", *more)]


def overlaps(answers: Answers, spans: Sequence[TimeSpan]) -> Mask:
    """Return which requests were in flight at any time within one of the spans, which ascend and are disjoint."""
    if not spans:
        return np.zeros(len(answers), np.bool_)
    begins, ends = np.array(spans).T
    last_begun = np.searchsorted(begins, answers["ended"], side="right") - 1
    result: Mask = (last_begun >= 0) & (ends[np.maximum(last_begun, 0)] >= answers["intended"])
    return result


def latency_ms(answers: Answers) -> npt.NDArray[np.float64]:
    """Return times from when requests were due."""
    result: npt.NDArray[np.float64] = 1e3 * (answers["ended"] - answers["intended"])
    return result


def percentile(values: Sequence[float] | npt.NDArray[np.floating], percent: float) -> float | None:
    """Return a percentile; None of nothing."""
    return float(np.percentile(values, percent)) if np.size(values) else None
