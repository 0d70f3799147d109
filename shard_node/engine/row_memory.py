"""What rows take of this process's RAM: counted before it is taken, over all versions, and given back with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from shard_node.engine.available_memory import available_memory_bytes
from shard_node.errors import MemoryBudgetError

# What is left for everything else.
MEMORY_RESERVE_BYTES = 512 << 20


class Claim(Protocol):
    """The right to the memory that a version's tables take."""

    def filled(self) -> None:
        """The system counts it as used by now."""
        ...

    def give_back(self) -> None:
        """Ends it. Idempotent."""
        ...


class MemoryClaim:
    """The right to `size_bytes` of rows, until it is given back. Made by `RowMemory.take`."""

    def __init__(self, memory: RowMemory, size_bytes: int) -> None:
        self._memory = memory
        self.size_bytes = size_bytes

    def filled(self) -> None:
        """The system counts it as used by now."""
        self._memory.end_filling(self)

    def give_back(self) -> None:
        """Ends it. Idempotent."""
        self._memory.forget(self)


class RowMemory:
    """Claims on memory, of several stagings at once. Thread-safe.

    Args:
        cap_bytes: what the rows of all versions together may take; None for what is available.
        available: bytes that the system can still give.
        reserve_bytes: of those, what is left for everything else.
    """

    def __init__(
        self,
        cap_bytes: int | None = None,
        available: Callable[[], int] = available_memory_bytes,
        reserve_bytes: int = MEMORY_RESERVE_BYTES,
    ) -> None:
        self._cap_bytes = cap_bytes
        self._available = available
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._claims: set[MemoryClaim] = set()
        self._filling: set[MemoryClaim] = set()

    @property
    def held_bytes(self) -> int:
        """Of all claims, filled or not."""
        with self._lock:
            return sum(claim.size_bytes for claim in self._claims)

    def take(self, size_bytes: int) -> MemoryClaim:
        """Claims memory that is about to be allocated.

        Raises:
            MemoryBudgetError: with the numbers, if there is not as much.
        """
        with self._lock:
            held = sum(claim.size_bytes for claim in self._claims)
            if self._cap_bytes is not None and held + size_bytes > self._cap_bytes:
                raise MemoryBudgetError(
                    f"rows take {size_bytes} bytes beside {held} of the versions that are here, "
                    f"which is {held + size_bytes}, but at most {self._cap_bytes} are allowed"
                )
            filling = sum(claim.size_bytes for claim in self._filling)
            available = self._available()
            if size_bytes and size_bytes + filling > available - self._reserve_bytes:
                raise MemoryBudgetError(
                    f"rows take {size_bytes} bytes, but {available} are available and {self._reserve_bytes} are kept "
                    f"free; versions that are here take {held - filling}, others that are being staged {filling}. "
                    "Give a (smaller) memory budget to leave the largest tables in the mapped snapshot, "
                    "or roll replica by replica"
                )
            claim = MemoryClaim(self, size_bytes)
            self._claims.add(claim)
            self._filling.add(claim)
        return claim

    def end_filling(self, claim: MemoryClaim) -> None:
        """Called by `MemoryClaim.filled`."""
        with self._lock:
            self._filling.discard(claim)

    def forget(self, claim: MemoryClaim) -> None:
        """Called by `MemoryClaim.give_back`."""
        with self._lock:
            self._claims.discard(claim)
            self._filling.discard(claim)
