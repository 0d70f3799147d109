"""What a fleet's page remembers: what each version answered over the last minutes, and what has changed.

Counts are in flat arrays of a fixed size, filled slot by slot; changes are found by comparing two states of the fleet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.registry.fleet import LATENCY_BOUNDS_MS, HotReport, NodeRecord, VersionStats
from loader.rollout.plan import Rollout
from loader.rollout.requests import FleetState

SLOT_S = 5.0
NUM_SLOTS = 180
"""A quarter of an hour."""
MAX_TRACKS = 32
"""Versions of models that are kept; beyond them the one goes that answered nothing for longest."""
MAX_SOURCES = 4096
"""Counters of processes that are remembered, those of processes that have ended too."""
RECENT_S = 60.0
QUANTILES = (0.5, 0.95, 0.99)

_REQUESTS, _ERRORS, _LOOKUPS, _HITS, _LATENCIES = range(5)
# Above the last bound it is told as that bound, as `loader.rollout.guards.percentile_ms` does.
_BOUNDS_MS = np.array([*LATENCY_BOUNDS_MS, LATENCY_BOUNDS_MS[-1]])
_WIDTH = _LATENCIES + _BOUNDS_MS.size
Counts = npt.NDArray[np.int64]
MAX_EVENTS = 200
MAX_GONE = 64
GONE_S = 900.0
"""How long a node that has gone is still shown."""
MAX_TEXT = 400


_Source: TypeAlias = tuple[str, int, str, int]
"""One process's counters of a version: node, process, model, version; another process of the node counts anew."""


class History:
    """Counts of requests, errors, latencies and hot rows by version, of the last `num_slots` times `slot_s` seconds.

    A slot in which nothing was observed, or which was not seen from its beginning, is unknown. `now` is in seconds, of
    whatever clock; one that is set back adds to the last slot.
    """

    def __init__(self, num_slots: int = NUM_SLOTS, slot_s: float = SLOT_S, max_tracks: int = MAX_TRACKS) -> None:
        self.slot_s, self.num_slots = slot_s, num_slots
        self._counts: Counts = np.zeros((max_tracks, num_slots, _WIDTH), np.int64)
        self._is_known = np.zeros(num_slots, np.bool_)
        self._tracks: dict[tuple[str, int], int] = {}
        self._active = np.full(max_tracks, -1, np.int64)
        self._last: dict[_Source, Counts] = {}
        self._slot = self._complete_from = -1
        self._observed_at = float("-inf")

    def observe(self, nodes: Iterable[NodeRecord], now: float) -> bool:
        """Add what nodes have counted since they were observed last. Returns whether a slot has become full."""
        slot = max(self._slot, int(now // self.slot_s))
        # After a pause nobody knows when what was counted meanwhile happened.
        is_fresh = 0 <= now - self._observed_at <= 2 * self.slot_s
        has_closed = self._slot not in (-1, slot)
        emptied = np.arange(max(self._slot + 1, slot - self.num_slots + 1), slot + 1) % self.num_slots
        self._counts[:, emptied] = 0
        self._is_known[emptied] = False
        self._slot = slot
        if not is_fresh:
            self._complete_from = slot + 1
        self._is_known[slot % self.num_slots] = slot >= self._complete_from
        for node in nodes:
            for report in node.versions:
                if report.stats is not None:
                    source = node.node_id, node.process_id, report.model, report.version
                    self._add(source, _counted(report.stats, report.hot), is_fresh)
        while len(self._last) > MAX_SOURCES:
            del self._last[next(iter(self._last))]
        self._observed_at = now
        return has_closed

    def document(self, *, last_only: bool = False) -> dict[str, Any]:
        """Return all full slots, the oldest first, or only the last one: a list for each number, None where unknown.

        Slot `slot` is the last one, and ended at `(slot + 1) * slot_s`.
        """
        numbers = np.arange(self._slot - 1 if last_only else self._slot - self.num_slots + 1, self._slot)
        places = numbers % self.num_slots
        is_known = (self._is_known[places] & (numbers >= 0)).tolist()
        tracks = []
        for (model, version), track in sorted(self._tracks.items()):
            counts = self._counts[track, places]
            percentiles = zip(QUANTILES, percentiles_ms(counts[:, _LATENCIES:]), strict=True)
            tracks.append(
                {
                    "model": model,
                    "version": version,
                    "requests": _where(is_known, counts[:, _REQUESTS].tolist()),
                    "errors": _where(is_known, counts[:, _ERRORS].tolist()),
                    "hit_rate": _where(is_known, _shares(counts[:, _HITS], counts[:, _LOOKUPS])),
                    **{f"p{100 * quantile:g}": _where(is_known, values) for quantile, values in percentiles},
                }
            )
        return {"slot": self._slot - 1, "slot_s": self.slot_s, "num_slots": self.num_slots, "tracks": tracks}

    def recent(self, model: str, version: int) -> dict[str, float | None] | None:
        """Tell rates (a second), shares and percentiles (ms) over the last minute; None if nothing is known of it."""
        track = self._tracks.get((model, version))
        num_slots = min(int(RECENT_S / self.slot_s), self.num_slots - 1)
        numbers = np.arange(max(0, self._slot - num_slots), self._slot)
        places = (numbers % self.num_slots)[self._is_known[numbers % self.num_slots]]
        if track is None or not places.size:
            return None
        counts = self._counts[track, places].sum(axis=0, keepdims=True)
        seconds = places.size * self.slot_s
        requests, errors = int(counts[0, _REQUESTS]), int(counts[0, _ERRORS])
        p50, p95, p99 = (values[0] for values in percentiles_ms(counts[:, _LATENCIES:]))
        return {
            "requests_per_s": requests / seconds,
            "error_rate": errors / requests if requests else None,
            "hit_rate": _shares(counts[:, _HITS], counts[:, _LOOKUPS])[0],
            "p50": p50,
            "p95": p95,
            "p99": p99,
        }

    def _add(self, source: _Source, counts: Counts, is_fresh: bool) -> None:
        # Taken out and put in again, so that those that have ended are the first.
        before = self._last.pop(source, None)
        self._last[source] = counts
        if not is_fresh:
            return
        # What counts fewer than before was staged anew, and what was not there before has just begun.
        news = counts if before is None or (counts < before).any() else counts - before
        if not news.any():
            return
        key = source[2:]
        track = self._tracks.get(key)
        if track is None:
            track = int(self._active.argmin())
            self._tracks = {other: index for other, index in self._tracks.items() if index != track}
            self._counts[track] = 0
            self._tracks[key] = track
        self._counts[track, self._slot % self.num_slots] += news
        self._active[track] = self._slot


def percentiles_ms(latency_counts: Counts) -> list[list[float | None]]:
    """Return, for each of `QUANTILES`, the upper bound of the bucket that it falls into, by row of counts [N, buckets].

    None for a row without answers. As `loader.rollout.guards.percentile_ms` of each row.
    """
    up_to = latency_counts.cumsum(axis=1)
    total = up_to[:, -1:]
    rows = []
    for quantile in QUANTILES:
        values = _BOUNDS_MS[(up_to >= quantile * total).argmax(axis=1)].tolist()
        rows.append(_where((total[:, 0] > 0).tolist(), values))
    return rows


def _counted(stats: VersionStats, hot: HotReport | None) -> Counts:
    counts = np.zeros(_WIDTH, np.int64)
    counts[_REQUESTS], counts[_ERRORS] = stats.requests, stats.errors
    if hot is not None:
        counts[_LOOKUPS], counts[_HITS] = hot.lookups, hot.hits
    # One of another release may have other buckets: what it has beyond these would be told as the last one.
    latencies = np.array(stats.latency_counts[: _BOUNDS_MS.size], np.int64)
    counts[_LATENCIES : _LATENCIES + latencies.size] = latencies
    return counts


def _shares(parts: Counts, wholes: Counts) -> list[float | None]:
    shares = (parts / np.maximum(wholes, 1)).tolist()
    return _where((wholes > 0).tolist(), shares)


def _where(is_known: list[bool], values: list[Any]) -> list[Any]:
    return [value if known else None for known, value in zip(is_known, values, strict=True)]


class Changes:
    """What has changed since the first look. Bounded.

    Attributes:
        gone: nodes that went not long ago, and when, in seconds since the epoch, by node id.
        events: the last ones, the newest last, as they are shown.
    """

    def __init__(self) -> None:
        self.gone: dict[str, tuple[NodeRecord, float]] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._before: FleetState | None = None

    def update(self, state: FleetState, now: float) -> None:
        """Compare with the look before."""
        before, self._before = self._before, state
        there = {node.node_id: node for node in state.nodes}
        self.gone = {key: node for key, node in self.gone.items() if key not in there and now - node[1] < GONE_S}
        if before is None:
            return
        tell = partial(self.add, now)
        were = {node.node_id: node for node in before.nodes}
        for node_id in sorted(were.keys() - there.keys()):
            node = were[node_id]
            tell("left", "left the fleet" if node.draining else "is gone: its lease ran out", node=node_id)
            self.gone[node_id] = node, now
            while len(self.gone) > MAX_GONE:
                del self.gone[next(iter(self.gone))]
        for node_id in sorted(there.keys() - were.keys()):
            tell("joined", f"joined at {there[node_id].address or 'no address'}", node=node_id)
        for node_id in sorted(there.keys() & were.keys()):
            for kind, text in _of_node(were[node_id], there[node_id]):
                tell(kind, text, node=node_id)
        lives = [{model: desired.live for model, desired in each.wanted.items()} for each in (before, state)]
        for model in sorted(lives[0].keys() | lives[1].keys()):
            if (was := lives[0].get(model)) != (version := lives[1].get(model)):
                after = "" if was is None else f", after version {was}"
                text = "no version is wanted live" if version is None else f"version {version} is to be live{after}"
                tell("flip", text, model=model)
        for model, rollout in before.rollouts.items():
            if (now_there := state.rollouts.get(model)) is None or now_there.rollout_id != rollout.rollout_id:
                # A registry keeps the last rollout only.
                self.events.extend(_of_rollout(rollout))
        if before.coordinator != state.coordinator:
            name = state.coordinator
            tell("coordinator", f"the coordinator is {name}" if name else "no coordinator is running")

    def add(self, now: float, kind: str, text: str, *, node: str = "", model: str = "") -> None:
        """Note that something changed now."""
        self.events.append({"at": now, "kind": kind, "node": node, "model": model, "text": text[:MAX_TEXT]})


def recent_events(changes: Changes, state: FleetState, max_events: int) -> list[dict[str, Any]]:
    """List what was noticed and what rollouts have on record, the newest first; at most so many."""
    events = [*changes.events, *(event for rollout in state.rollouts.values() for event in _of_rollout(rollout))]
    # Of those of one moment, what was noticed last comes first.
    return sorted(events, key=lambda event: float(event["at"]))[-max_events:][::-1]


def _of_rollout(rollout: Rollout) -> Iterator[dict[str, Any]]:
    for event in rollout.events:
        yield {
            "at": event.at,
            "kind": event.step,
            "node": "",
            "model": rollout.model,
            "text": f"version {rollout.to_version}: {event.text}"[:MAX_TEXT],
        }


def _of_node(before: NodeRecord, now: NodeRecord) -> Iterator[tuple[str, str]]:
    if before.process_id != now.process_id:
        yield "joined", f"started anew, as process {now.process_id}"
    elif now.draining and not before.draining:
        yield "left", "is about to end"
    refused = {(report.model, report.version) for report in before.versions if report.state == "refused"}
    for report in now.versions:
        if report.state == "refused" and (report.model, report.version) not in refused:
            yield "refused", f"refuses {report.model} version {report.version}: {report.reason}"
