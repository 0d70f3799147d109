"""The age of rows, which is the time since the last moment whose row updates are all applied, and bounds of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNKNOWN_AGE_MS = -1  # of rows that follow no stream of deltas or have not read it yet, or on a node of an older release
FORKED_AGE_MS = 2**62  # of rows with deltas that their stream does not have: another replica must be requested


@dataclass(frozen=True, slots=True)
class FreshnessBound:
    """Which rows are accepted: of delta `min_sequence` or a later one, and at most `max_age_ms` old; None for any."""

    min_sequence: int = 0
    max_age_ms: int | None = None

    def allows(self, sequence: int, age_ms: int) -> bool:
        """Return whether rows of a delta and an age are accepted."""
        if sequence < self.min_sequence or age_ms >= FORKED_AGE_MS:
            return False
        return self.max_age_ms is None or 0 <= age_ms <= self.max_age_ms


def strictest(bounds: Iterable[FreshnessBound | None]) -> FreshnessBound | None:
    """Return the bound that accepts the rows that all of these accept; None without any."""
    given = [bound for bound in bounds if bound is not None]
    ages = [bound.max_age_ms for bound in given if bound.max_age_ms is not None]
    return FreshnessBound(max(each.min_sequence for each in given), min(ages, default=None)) if given else None


def oldest(ages_ms: Sequence[int]) -> int:
    """Return the age of the oldest rows: unknown if any is, unless some are forked; 0 without rows."""
    age_ms = max(ages_ms, default=0)
    return UNKNOWN_AGE_MS if min(ages_ms, default=0) < 0 and age_ms < FORKED_AGE_MS else age_ms
