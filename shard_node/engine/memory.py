"""Memory of this process: what it may still take, and what rows take of it, counted before they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shard_node.engine.key_index import ENTRY_BYTES, MAX_LOAD
from shard_node.errors import MemoryBudgetError

# What is left for everything else.
MEMORY_RESERVE_BYTES = 512 << 20
SLOT_BYTES = int(ENTRY_BYTES / MAX_LOAD) + 19
"""Of a row in memory whose table is on disk, beside the row: index, position, lookups, mark, counts of others."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed for it.

    The smallest of MemAvailable (proc_meminfo(5)) and, for every control group from this process's own up to the root,
    its limit less its usage (cgroup v2 memory.max and memory.current, v1 memory.limit_in_bytes and
    memory.usage_in_bytes) but for files that were read once. Other page cache counts as used: the answer is on the
    small side.
    """
    left = (max(0, limit - usage) for limit, usage in _control_groups(root) if limit is not None)
    return min([_machine_bytes(root, "MemAvailable"), *left])


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that there are: the machine's, or the smallest limit of a control group of this process."""
    limits = (limit for limit, _ in _control_groups(root) if limit is not None)
    return min([_machine_bytes(root, "MemTotal"), *limits])


def _machine_bytes(root: Path, name: str) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError(f"{path} has no {name} line")


def _control_groups(root: Path) -> list[tuple[int | None, int]]:
    # (limit, usage) in bytes of each group, from this process's own upwards; None for no limit.
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found: list[tuple[int | None, int]] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / group.lstrip("/")
        # In a container the path may be the host's: then only the mounted top is there to be read.
        for level in [folder, *folder.parents]:
            if level.is_relative_to(top):
                with suppress(FileNotFoundError, NotADirectoryError):
                    limit, usage = ((level / name).read_text(encoding="ascii").strip() for name in names)
                    stat = (
                        (level / "memory.stat").read_text(encoding="ascii") if (level / "memory.stat").exists() else ""
                    )
                    sizes = dict(line.split() for line in stat.splitlines())
                    read_once = sizes.get("total_inactive_file") or sizes.get("inactive_file") or 0
                    found.append((None if limit == "max" else int(limit), max(0, int(usage) - int(read_once))))
    return found


def choose_tiers(table_bytes: Sequence[int], budget_bytes: int | None) -> list[Literal["ram", "disk"]]:
    """Choose the tables that are in RAM: all if they fit the budget, else the smallest that fit half of it.

    The largest tables are looked up the least per byte; the other half is for the hottest rows of these, which are on
    disk. Of tables alike the first ones are in RAM.
    """
    tiers: list[Literal["ram", "disk"]] = ["ram"] * len(table_bytes)
    if budget_bytes is None or (left := budget_bytes) >= sum(table_bytes):
        return tiers
    left //= 2
    for number in sorted(range(len(table_bytes)), key=lambda number: (table_bytes[number], number)):
        left -= table_bytes[number]
        if left < 0:
            tiers[number] = "disk"
    return tiers


class Claim:
    """The right to memory of each card, or of the host, until it is given back: `sizes` in bytes.

    A temporary one ends when what it is for has been loaded.
    """

    def __init__(self, sizes: Sequence[int], *, is_temporary: bool = False) -> None:
        self.sizes = tuple(sizes)
        self.is_filling = self.is_active = True
        self._is_temporary = is_temporary

    def filled(self) -> None:
        """Note that the system counts the memory as used by now."""
        self.is_filling, self.is_active = False, self.is_active and not self._is_temporary

    def give_back(self) -> None:
        """End it. Idempotent."""
        self.is_filling = self.is_active = False


@dataclass(eq=False)
class RowMemory:
    """Claims on memory, of all versions and of several stagings at once. Thread-safe.

    The rows of all versions together may take `cap_bytes`, None for what is `available` (bytes that the system can
    still give) less `reserve_bytes`.
    """

    cap_bytes: int | None = None
    available: Callable[[], int] = available_memory_bytes
    reserve_bytes: int = MEMORY_RESERVE_BYTES
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _claims: list[Claim] = field(default_factory=list, init=False)

    @property
    def held_bytes(self) -> int:
        """Of all claims, filled or not."""
        with self._lock:
            return sum(claim.sizes[0] for claim in self._claims if claim.is_active)

    def available_bytes(self) -> int:
        """Return what may still be claimed."""
        left = self.available() - self.reserve_bytes
        return max(0, left if self.cap_bytes is None else min(left, self.cap_bytes - self.held_bytes))

    def take(self, size_bytes: int, into: Claim | None = None) -> Claim:
        """Claim memory that is about to be allocated, `into` a claim or a new one; below 0 it is given back.

        Raises MemoryBudgetError.
        """
        with self._lock:
            self._claims = [claim for claim in self._claims if claim.is_active]
            claimed = sum(claim.sizes[0] for claim in self._claims)
            filling = sum(claim.sizes[0] for claim in self._claims if claim.is_filling)
            available = self.available()
            if self.cap_bytes is not None and claimed + size_bytes > self.cap_bytes:
                raise MemoryBudgetError(
                    f"rows take {size_bytes} bytes beside {claimed} of the versions that are here, "
                    f"which is {claimed + size_bytes}, but at most {self.cap_bytes} are allowed"
                )
            if size_bytes > 0 and size_bytes + filling > available - self.reserve_bytes:
                raise MemoryBudgetError(
                    f"rows take {size_bytes} bytes, but {available} are available and {self.reserve_bytes} are kept "
                    f"free; versions that are here take {claimed - filling}, others that are being staged {filling}. "
                    "Give a (smaller) memory budget to leave rows of the largest tables on disk, "
                    "or roll replica by replica"
                )
            if into is None:
                self._claims.append(into := Claim((0,)))
            into.sizes = (into.sizes[0] + size_bytes,)
        return into
