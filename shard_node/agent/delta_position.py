"""How far a generation's rows are along their stream of deltas: written by its follower, read by everybody."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from loader.errors import DeltaBaseError


@dataclass(frozen=True, slots=True)
class DeltaProgress:
    """What is known at one moment. Times are seconds since the epoch.

    Attributes:
        delta_base: the version that the stream began with; 0 if the tables follow no stream.
        last_delta: the last delta that the snapshot itself contains; 0 for none.
        sequence: the last delta whose rows are here, contained ones included.
        published_at: when that was published; None if none was applied here.
        stream_last: the last delta of the stream when it was last looked at.
        fresh_at: every delta that was published before this moment is applied; None before the first look.
        behind_since: since when the stream has had something that is not applied; None if nothing is known to wait.
        batches, rows: applied here. `rows` counts those that are on this node.
        refused: batches that were not what they should be.
        reason: what keeps the next delta from being applied; "" if nothing does.
    """

    delta_base: int = 0
    last_delta: int = 0
    sequence: int = 0
    published_at: float | None = None
    stream_last: int = 0
    fresh_at: float | None = None
    behind_since: float | None = None
    batches: int = 0
    rows: int = 0
    refused: int = 0
    reason: str = ""

    @property
    def lag(self) -> int:
        """Deltas of the stream that are not applied yet, as last seen."""
        return max(0, self.stream_last - self.sequence)

    def staleness_s(self, now: float) -> float | None:
        """How old the newest change may be that is missing here; None before the first look at the stream.

        It grows while the registry can't be reached, since then nobody knows what is missing.
        """
        return None if self.fresh_at is None else max(0.0, now - self.fresh_at)


class DeltaPosition:
    """The current `DeltaProgress` of one generation. Thread-safe; one follower writes it.

    Args:
        delta_base: the version that the stream began with; 0 if the tables follow none.
        last_delta: the last delta that the snapshot contains.
    """

    def __init__(self, delta_base: int = 0, last_delta: int = 0) -> None:
        self._lock = threading.Lock()
        self._now = DeltaProgress(delta_base=delta_base, last_delta=last_delta, sequence=last_delta)

    def snapshot(self) -> DeltaProgress:
        """All fields as of one moment."""
        return self._now

    @property
    def sequence(self) -> int:
        """The last delta whose rows are here, contained ones included."""
        return self._now.sequence

    @property
    def published_at(self) -> float | None:
        """When that was published, in seconds since the epoch; None if none was applied here."""
        return self._now.published_at

    @property
    def behind_since(self) -> float | None:
        """Since when something of the stream waits to be applied; None if nothing is known to."""
        return self._now.behind_since

    def begin(self, delta_base: int, last_delta: int) -> None:
        """Says which stream the tables follow. Again the same one changes nothing.

        Raises:
            DeltaBaseError: they follow another one already.
        """
        with self._lock:
            known = (self._now.delta_base, self._now.last_delta)
            if known == (delta_base, last_delta):
                return
            if self._now.delta_base or self._now.batches:
                raise DeltaBaseError(
                    f"delta_base {delta_base}, last_delta {last_delta}: the tables follow {known[0]} after {known[1]}"
                )
            self._now = DeltaProgress(delta_base=delta_base, last_delta=last_delta, sequence=last_delta)

    def applied(self, sequence: int, published_at: float, rows: int, now: float) -> None:
        """Moves past one delta: all of its rows are in place."""
        with self._lock:
            before = self._now
            published = min(published_at, now)
            self._now = replace(
                before,
                sequence=sequence,
                published_at=published_at,
                stream_last=max(before.stream_last, sequence),
                fresh_at=published if before.fresh_at is None else max(before.fresh_at, published),
                batches=before.batches + 1,
                rows=before.rows + rows,
                reason="",
            )

    def seen(self, stream_last: int, looked_at: float) -> None:
        """Notes where the stream ended at `looked_at`. If that is applied, all that came before is."""
        with self._lock:
            before = self._now
            behind = stream_last > before.sequence
            self._now = replace(
                before,
                stream_last=stream_last,
                fresh_at=before.fresh_at if behind else looked_at,
                behind_since=(before.behind_since or looked_at) if behind else None,
                reason=before.reason if behind else "",
            )

    def refused(self, reason: str) -> None:
        """Notes why the next delta can't be applied."""
        with self._lock:
            self._now = replace(self._now, refused=self._now.refused + 1, reason=reason)
