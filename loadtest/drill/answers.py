"""What answers say together: how many are not right, which overlap a time; and what every report says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import Frozen
from loadtest.drill.load import Answers
from loadtest.drill.oracle import Kind


class Span(NamedTuple):
    """A span of time, in seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float


class AnswerCounts(Frozen):
    """How many answers there were, and how many were not right."""

    answers: int
    failed: int
    mixed: int
    wrong: int


class FleetReport(AnswerCounts):
    """What every drill on a fleet reports.

    Attributes:
        answers: requests that were due while the drill ran, answered or not.
        registry, shards, replicas, cards, workers, rate: what ran.
        details: the first answers that were not right.
        problems: why the drill did not pass; empty if it did.
    """

    registry: str
    shards: int
    replicas: int
    cards: int
    workers: int
    rate: float
    details: tuple[str, ...]
    problems: tuple[str, ...] = ()

    @property
    def not_right(self) -> str:
        """Failed, mixed and wrong answers."""
        return f"{self.failed}, {self.mixed}, {self.wrong}"


def count_kinds(answers: Answers) -> dict[str, int]:
    """Return the fields of `AnswerCounts`."""
    kinds = np.bincount(answers["kind"], minlength=len(Kind)).tolist()
    return {"answers": len(answers), **{kind.name.lower(): kinds[kind] for kind in Kind if kind is not Kind.OK}}


def counted(found: Mapping[str, int]) -> list[str]:
    """Return a problem for each kind of answers of which there is one, by what is wrong with it."""
    return [f"{count} answers {what}" for what, count in found.items() if count]


def overlaps(answers: Answers, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return which requests were out at any time within one of the spans, which are in order and apart: bool [n]."""
    if not spans:
        return np.zeros(len(answers), np.bool_)
    begins, ends = np.array(spans).T
    last_begun = np.searchsorted(begins, answers["ended"], side="right") - 1
    result: npt.NDArray[np.bool_] = (last_begun >= 0) & (ends[np.maximum(last_begun, 0)] >= answers["intended"])
    return result


def latency_ms(answers: Answers) -> npt.NDArray[np.float64]:
    """Return times from when requests were due."""
    result: npt.NDArray[np.float64] = 1e3 * (answers["ended"] - answers["intended"])
    return result


def percentile(values: Sequence[float] | npt.NDArray[np.floating], percent: float) -> float | None:
    """Return a percentile; None of nothing."""
    return float(np.percentile(values, percent)) if np.size(values) else None


Facts = Mapping[str, Any]
"""Of a report: what ran, and the details."""
