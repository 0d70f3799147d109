"""One stream of deltas as its publishers see it: the next number, what must be kept, what a registry has lost."""

from __future__ import annotations

import logging
from collections import deque
from itertools import pairwise
from typing import Final

from loader.errors import DeltaError, DeltaGapError, StreamSequenceError
from loader.publishing import stream_end
from loader.registry.keys import delta_stream
from loader.registry.records import PublishedVersion
from loader.registry.typed import FleetRegistry
from loader.rollout.requests import read_rollout

DEFAULT_MAX_STREAM_ENTRIES: Final = 65_536
MAX_REMEMBERED_BYTES: Final = 64 << 20
"""Of what a publisher has appended itself, kept to give it back to a registry that lost its last writes."""

_log = logging.getLogger(__name__)


class DeltaStream:
    """Appends to one stream. Used by one task at a time; call `find_end` first.

    Args:
        fleet: the registry.
        model: whose stream.
        delta_base: the version that it began with.
        max_entries: the stream is kept at most that long.
    """

    def __init__(self, fleet: FleetRegistry, model: str, delta_base: int, max_entries: int) -> None:
        if max_entries < 1:
            raise DeltaError(f"max_stream_entries: {max_entries}; at least 1 is needed")
        self._fleet = fleet
        self._registry = fleet.registry
        self._model = model
        self._delta_base = delta_base
        self._name = delta_stream(model, delta_base)
        self._max_entries = max_entries
        self._first = 0
        self._mine: deque[tuple[int, bytes]] = deque()
        self._mine_bytes = 0
        self.sequence = 0

    @property
    def name(self) -> str:
        """Its key, for logs."""
        return self._name

    async def find_end(self) -> None:
        """Finds out what the next number is.

        Raises:
            DeltaGapError: nodes, or this publisher, know of deltas that the registry has lost and that nobody here can
                give back. New ones under the same numbers would be taken for those by some nodes and not by others.
        """
        known = max(self.sequence, await stream_end(self._fleet, self._model, self._delta_base))
        # Read after what nodes tell, so that what others append meanwhile is in it.
        bounds = await self._registry.bounds(self._name)
        if bounds.last < known and self._mine and self._mine[-1][0] == known:
            await self._give_back(bounds.last)
            bounds = await self._registry.bounds(self._name)
        if 0 < bounds.last < known:
            raise DeltaGapError(
                f"stream {self._name} ends with {bounds.last}, but deltas up to {known} were published: the registry "
                "has lost the others. Publish a snapshot that begins a stream of its own"
            )
        self.sequence = max(bounds.last, known)
        self._first = bounds.first or self.sequence + 1

    async def look(self) -> None:
        """Finds the end anew if it is not where this publisher left it. Raises as `find_end`.

        A registry that lost a whole stream would take any number for its first one.
        """
        if (await self._registry.bounds(self._name)).last != self.sequence:
            await self.find_end()

    async def append(self, sequence: int, payload: bytes) -> bool:
        """Appends the next one. May be repeated with the same payload after any failure.

        Returns:
            False if somebody else has appended under that number; then `find_end` is called for.
        """
        try:
            await self._registry.append(self._name, sequence, payload)
        except StreamSequenceError:
            if not await self._is_there(sequence, payload):
                return False
        self.sequence = sequence
        self._mine.append((sequence, payload))
        self._mine_bytes += len(payload)
        while self._mine_bytes > MAX_REMEMBERED_BYTES:
            self._mine_bytes -= len(self._mine.popleft()[1])
        return True

    async def make_room(self) -> None:
        """Drops the oldest entries of a stream that is full, as far as no held version needs them.

        Raises:
            DeltaError: all are needed.
        """
        if self.sequence + 1 - self._first < self._max_entries:
            return
        self._first = (await self._registry.bounds(self._name)).first or self.sequence + 1
        # Some more than one, so that not every append asks.
        unwanted = self.sequence + 1 - (self._max_entries - max(1, self._max_entries // 16))
        needed = await self._first_needed()
        before = min(unwanted, needed)
        if before > self._first:
            await self._registry.trim(self._name, before)
            _log.info("stream %s: dropped what is before delta %d", self._name, before)
            self._first = before
        if self.sequence + 1 - self._first >= self._max_entries:
            raise DeltaError(
                f"stream {self._name} holds {self.sequence + 1 - self._first} deltas, max_stream_entries is "
                f"{self._max_entries}, and a version that is held needs all from {needed} on: roll out a snapshot that "
                "contains them, or allow more"
            )

    async def _is_there(self, sequence: int, payload: bytes) -> bool:
        found = await self._registry.read(self._name, sequence - 1, max_entries=1)
        return bool(found) and (found[0].sequence, found[0].payload) == (sequence, payload)

    async def _give_back(self, last: int) -> None:
        """Appends again what this publisher appended and the registry lost, if nothing is missing in between."""
        lost = [(sequence, payload) for sequence, payload in self._mine if sequence > last]
        if any(after[0] != before[0] + 1 for before, after in pairwise(lost)):
            return
        if last and lost[0][0] != last + 1:
            return
        _log.warning("stream %s: the registry lost deltas %d to %d; given back", self._name, lost[0][0], lost[-1][0])
        for sequence, payload in lost:
            try:
                await self._registry.append(self._name, sequence, payload)
            except StreamSequenceError:
                if not await self._is_there(sequence, payload):
                    return

    async def _first_needed(self) -> int:
        """The first delta that must stay so that every version that is held, or rolled back to, can be staged anew."""
        published = [one for one in await self._fleet.versions(self._model) if one.delta_base == self._delta_base]
        wanted, on_record = await self._fleet.wanted_model(self._model), await read_rollout(self._fleet, self._model)
        named = set() if wanted is None else set(wanted.named())
        if on_record is not None:
            named |= on_record.rollout.named()
        return min((one.last_delta for one in _held(published, named)), default=self.sequence) + 1


def _held(published: list[PublishedVersion], named: set[int]) -> list[PublishedVersion]:
    """Before anything is wanted, whatever is published may become so."""
    return [one for one in published if one.version in named] if named else published
