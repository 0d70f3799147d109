"""What a fleet's page remembers: what each version answered over the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.registry.fleet import LATENCY_BOUNDS_MS, HotReport, NodeRecord, VersionStats
from loader.rollout.guards import percentile_ms

SLOT_S = 5.0
NUM_SLOTS = 180
"""A quarter of an hour."""
MAX_TRACKS = 32
"""Versions of models that are shown, those that answered last."""
MAX_SOURCES = 4096
"""Counters of processes that are remembered, those of processes that have ended too."""
RECENT_S = 60.0
QUANTILES = (0.5, 0.95, 0.99)

_LATENCIES = 4  # before them requests, errors, lookups and hits
_NONE = np.zeros(_LATENCIES + len(LATENCY_BOUNDS_MS) + 1, np.int64)
Counts = npt.NDArray[np.int64]
_Version: TypeAlias = tuple[str, int]
_Source: TypeAlias = tuple[str, int, str, int]
"""One process's counters of a version: node, process, model, version; another process of the node counts anew."""


class History:
    """Counts of requests, errors, latencies and hot rows by version, of the last `num_slots` times `slot_s` seconds.

    A slot in which nothing was observed, or which was not seen from its beginning, is unknown. `now` is in seconds, of
    whatever clock; one that is set back adds to the last slot.
    """

    def __init__(self, num_slots: int = NUM_SLOTS, slot_s: float = SLOT_S) -> None:
        self.slot_s, self.num_slots = slot_s, num_slots
        # The newest last, which is not full yet: what was counted, by version, or None where that is unknown.
        self._slots: deque[dict[_Version, Counts] | None] = deque([None] * num_slots, num_slots)
        self._last: dict[_Source, Counts] = {}
        self._slot = -1
        self._observed_at = float("-inf")

    def observe(self, nodes: Iterable[NodeRecord], now: float) -> None:
        """Add what nodes have counted since they were observed last."""
        slot = max(self._slot, int(now // self.slot_s))
        if slot > self._slot:
            self._slots += [*[None] * min(slot - self._slot - 1, self.num_slots), {}]
        # After a pause nobody knows when what was counted meanwhile happened.
        if not 0 <= now - self._observed_at <= 2 * self.slot_s:
            self._slots[-1] = None
        for node in nodes:
            for report in node.versions:
                if report.stats is not None:
                    source = node.node_id, node.process_id, report.model, report.version
                    self._add(source, _counted(report.stats, report.hot))
        while len(self._last) > MAX_SOURCES:
            del self._last[next(iter(self._last))]
        self._slot, self._observed_at = slot, now

    @property
    def last_slot(self) -> int:
        """The last full slot, which ended at `(last_slot + 1) * slot_s`."""
        return self._slot - 1

    def document(self) -> dict[str, Any]:
        """Return all full slots, the oldest first: a list for each number, None where it is unknown."""
        full = list(self._slots)[:-1]
        shown = dict.fromkeys(version for slot in reversed(self._slots) for version in slot or ())
        tracks = []
        for model, version in sorted(list(shown)[:MAX_TRACKS]):
            numbers = [_UNKNOWN if slot is None else _numbers(slot.get((model, version))) for slot in full]
            track = {name: [slot[name] for slot in numbers] for name in _UNKNOWN}
            tracks.append({"model": model, "version": version, **track})
        return {"slot": self.last_slot, "slot_s": self.slot_s, "num_slots": self.num_slots, "tracks": tracks}

    def recent(self, model: str, version: int) -> dict[str, float | None] | None:
        """Return rates (a second), shares and percentiles (ms) of the last minute; None if nothing is known of it."""
        num_slots = min(int(RECENT_S / self.slot_s), self.num_slots - 1)
        known = [slot for slot in list(self._slots)[-1 - num_slots : -1] if slot is not None]
        if not known:
            return None
        numbers = _numbers(sum((slot.get((model, version), _NONE) for slot in known), _NONE))
        requests, errors = numbers.pop("requests") or 0, numbers.pop("errors") or 0
        rates = {"requests_per_s": requests / (len(known) * self.slot_s)}
        return {**rates, "error_rate": errors / requests if requests else None, **numbers}

    def _add(self, source: _Source, counts: Counts) -> None:
        # Taken out and put in again, so that those that have ended are the first.
        before = self._last.pop(source, None)
        self._last[source] = counts
        # What counts fewer than before was staged anew, and what was not there before has just begun.
        news = counts if before is None or (counts < before).any() else counts - before
        if (slot := self._slots[-1]) is not None and news.any():
            slot[source[2:]] = slot.get(source[2:], _NONE) + news


def _counted(stats: VersionStats, hot: HotReport | None) -> Counts:
    # One of another release may have other buckets: what it has beyond these would be shown as the last one.
    latencies = stats.latency_counts[: _NONE.size - _LATENCIES]
    lookups = (0, 0) if hot is None else (hot.lookups, hot.hits)
    counts = _NONE.copy()
    counts[: _LATENCIES + len(latencies)] = (stats.requests, stats.errors, *lookups, *latencies)
    return counts


def _numbers(counts: Counts | None) -> dict[str, float | None]:
    requests, errors, lookups, hits, *latencies = (_NONE if counts is None else counts).tolist()
    percentiles = {f"p{100 * quantile:g}": percentile_ms(latencies, quantile) for quantile in QUANTILES}
    return {"requests": requests, "errors": errors, "hit_rate": hits / lookups if lookups else None, **percentiles}


_UNKNOWN = dict.fromkeys(_numbers(None))
