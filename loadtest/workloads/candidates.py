"""How many candidates a request has."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadtest.workloads.errors import WorkloadError

MAX_CANDIDATES = 2**20
_RANGE = re.compile(r"(\d+)-(\d+):(\d+(?:\.\d+)?)")
_BISECTIONS = 200


class CandidateCounts(Protocol):
    """A distribution of numbers of candidates."""

    @property
    def name(self) -> str:
        """As `parse_candidates` reads it."""

    def draw(self, rng: np.random.Generator) -> int:
        """The number of candidates of one request, at least 1."""


@dataclass(frozen=True)
class Fixed:
    """Always the same number."""

    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_CANDIDATES:
            raise WorkloadError(f"candidates: {self.count} is not in 1..{MAX_CANDIDATES}")

    @property
    def name(self) -> str:
        """Such as `100`."""
        return str(self.count)

    def draw(self, rng: np.random.Generator) -> int:
        """As `CandidateCounts.draw`."""
        return self.count


@dataclass(frozen=True)
class Ranged:
    """From `least` to `most` with a given mean: of all such distributions the one that assumes nothing else.

    That of the largest entropy: P(n) proportional to q^n. MLPerf's DLRM-v2 asks for 100 to 700 user-item pairs with a
    mean of 270.

    Attributes:
        least: the smallest number.
        most: the largest number.
        mean: between them.
    """

    least: int
    most: int
    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.least < self.most <= MAX_CANDIDATES:
            raise WorkloadError(
                f"candidates: {self.least}-{self.most} is not LEAST-MOST with 1 <= LEAST < MOST <= {MAX_CANDIDATES}"
            )
        # Nearer to an end than this, a few numbers would have all the weight: ask for a fixed number instead.
        margin = (self.most - self.least) / 100
        if not self.least + margin <= self.mean <= self.most - margin:
            raise WorkloadError(
                f"candidates: mean {self.mean:g} is not in {self.least + margin:g}..{self.most - margin:g}"
            )

    @property
    def name(self) -> str:
        """Such as `100-700:270`."""
        return f"{self.least}-{self.most}:{self.mean:g}"

    def draw(self, rng: np.random.Generator) -> int:
        """As `CandidateCounts.draw`."""
        return self.least + int(np.searchsorted(self._cumulated, rng.random(), side="right"))

    @cached_property
    def _cumulated(self) -> npt.NDArray[np.float64]:
        """float64 [most - least], P(number <= least + i); what is above the last is `most`."""
        span = self.most - self.least
        low, high = -100.0 / span, 100.0 / span
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            mean = self.least + float((_weights(span, middle) * np.arange(span + 1)).sum())
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return np.cumsum(_weights(span, (low + high) / 2))[:-1]


def _weights(span: int, log_q: float) -> npt.NDArray[np.float64]:
    """float64 [span + 1], q^i, normalised."""
    logs = np.arange(span + 1) * log_q
    weights: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    return weights / math.fsum(weights)


MLPERF_CANDIDATES = Ranged(100, 700, 270)
VARIED_CANDIDATES = Ranged(50, 500, 200)


def parse_candidates(text: str) -> CandidateCounts:
    """`N`, or `LEAST-MOST:MEAN` such as `100-700:270`. Raises WorkloadError."""
    if text.isascii() and text.isdecimal():
        return Fixed(int(text))
    if match := _RANGE.fullmatch(text):
        return Ranged(int(match[1]), int(match[2]), float(match[3]))
    raise WorkloadError(f"candidates: {text!r} is not N or LEAST-MOST:MEAN, such as 100 or 100-700:270")
