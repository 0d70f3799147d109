"""Find the slots of 64-bit keys: open addressing with linear probing, in arrays of all tables, by whole-array steps.

Each table has a run of entries, at most 0.6 of which are used: 20 bytes for each key that it can have. An entry is
empty if its slot says so: any number is a key. Where a key's search begins:

    mixed = (key ^ key >> 32) * 0x9E3779B97F4A7C15 mod 2^64        (multiply-shift: Dietzfelbinger et al., 1997)
    home = first[table] + ((mixed >> 32) * size[table] >> 32)

A key that is removed leaves no mark: what follows it up to the next empty entry is put in anew. Where there is a C
compiler, `find_keys.c` is built once and finds the same, in a fifth of the time: its memory is fetched ahead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from loader.memory import HUGE_PAGE_BYTES, allocate_rows, give_back
from shard_node.bags import Int64Array

logger = logging.getLogger(__name__)

ABSENT: Final = -1
"""In place of the slot of a key that is not there."""
MAX_LOAD: Final = 0.6
_ENTRY: Final = np.dtype([("key", "<i8"), ("slot", "<u4")])
ENTRY_BYTES: Final = _ENTRY.itemsize
_EMPTY: Final = np.uint32(2**32 - 1)
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)
# Of a batch that is inserted: what it takes beside the index stays small.
_PIECE: Final = 1 << 18
_SOURCE: Final = Path(__file__).with_name("find_keys.c")


def num_entries(capacity: int) -> int:
    """Return how many entries a table has that may have so many keys: one is always empty."""
    return int(capacity / MAX_LOAD) + 2


def index_bytes(capacities: Iterable[int]) -> int:
    """Return the memory that an index takes."""
    return ENTRY_BYTES * sum(map(num_entries, capacities))


class KeyIndex:
    """Slots by key, of several tables. One thread may insert and remove, while none finds.

    `capacities` are the most keys of each table, below 2^32 - 1. Keys are int64, any of them; slots below 2^32 - 1.
    """

    def __init__(self, capacities: Sequence[int], *, native: bool = True) -> None:
        self._size = np.array([num_entries(capacity) for capacity in capacities], np.int64)
        self._first: Int64Array = np.cumsum(self._size) - self._size
        total = int(self._size.sum())
        # Side by side, so that a key and its slot are one read of memory.
        self._entries = allocate_rows(total, ENTRY_BYTES).reshape(-1).view(_ENTRY)
        self._keys, self._slots = self._entries["key"], self._entries["slot"]
        self._slots.fill(_EMPTY)
        self._address = self._entries.ctypes.data
        self._find = native_find() if native and total else None

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self._entries.nbytes

    def free(self) -> None:
        """Give the memory back. Nobody may need it."""
        if self._entries.nbytes >= HUGE_PAGE_BYTES:
            give_back(self._entries.view(np.uint8))

    def find(self, tables: npt.NDArray[np.integer], keys_per_table: Int64Array, keys: Int64Array) -> Int64Array:
        """Find the slot of each key, int64 [n], table by table: `ABSENT` for one that is not there.

        `tables`, integers [S], have `keys_per_table`, int64 [S], of the keys, int64 [n].
        """
        if self._find is not None:
            found = np.empty(keys.size, np.int64)
            starts = np.zeros(tables.size + 1, np.int64)
            np.cumsum(keys_per_table, out=starts[1:])
            arrays = self._first[tables], self._size[tables], starts, np.ascontiguousarray(keys), found
            self._find(self._address, tables.size, *[array.ctypes.data for array in arrays])
            return found
        first, size = self._runs(tables, keys_per_table)
        at = _homes(keys, first, size)
        slots = self._slots[at]
        is_full, is_key = slots != _EMPTY, self._keys[at] == keys
        found = slots.astype(np.int64)
        found[~(is_full & is_key)] = ABSENT
        left = (is_full & ~is_key).nonzero()[0]
        if first.size > 1:
            first, size = first[left], size[left]
        at, keys = at[left], keys[left]
        while left.size:
            at = _next(at, first, size)
            slots = self._slots[at]
            is_full, is_key = slots != _EMPTY, self._keys[at] == keys
            is_found = is_full & is_key
            found[left[is_found]] = slots[is_found]
            kept = (is_full & ~is_key).nonzero()[0]
            left, at, keys = left[kept], at[kept], keys[kept]
            if first.size > 1:
                first, size = first[kept], size[kept]
        return found

    def insert(self, table: int, keys: Int64Array, slots: npt.NDArray[np.integer]) -> None:
        """Put in keys that are not there, int64 [n], none twice, with their slots; there must be room for them."""
        for begin in range(0, keys.size, _PIECE):
            piece = slice(begin, begin + _PIECE)
            self._insert(table, keys[piece], slots[piece].astype(np.uint32))

    def remove(self, table: int, keys: Int64Array) -> None:
        """Take out keys that are there, int64 [n], none twice."""
        if not keys.size:
            return
        first, size = self._first[table : table + 1], self._size[table : table + 1]
        freed = self._places(table, keys)
        # Each run of entries behind one that becomes empty: their keys may have begun before it.
        behind: list[Int64Array] = []
        at = _next(freed, first, size)
        while at.size:
            at = at[self._slots[at] != _EMPTY]
            behind.append(at)
            at = _next(at, first, size)
        moved = np.setdiff1d(np.concatenate(behind), freed)
        keys_of, slots_of = self._keys[moved], self._slots[moved]
        self._slots[freed] = _EMPTY
        self._slots[moved] = _EMPTY
        self._insert(table, keys_of, slots_of)

    def _runs(self, tables: npt.NDArray[np.integer], keys_per_table: Int64Array) -> tuple[Int64Array, Int64Array]:
        first, size = self._first[tables], self._size[tables]
        return (first, size) if first.size == 1 else (first.repeat(keys_per_table), size.repeat(keys_per_table))

    def _places(self, table: int, keys: Int64Array) -> Int64Array:
        first, size = self._first[table : table + 1], self._size[table : table + 1]
        at, left = _homes(keys, first, size), np.arange(keys.size)
        while left.size:
            left = left[self._keys[at[left]] != keys[left]]
            at[left] = _next(at[left], first, size)
        return at

    def _insert(self, table: int, keys: Int64Array, slots: npt.NDArray[np.uint32]) -> None:
        first, size = self._first[table : table + 1], self._size[table : table + 1]
        at = _homes(keys, first, size)
        while keys.size:
            free = (self._slots[at] == _EMPTY).nonzero()[0]
            # Of those that want the same entry, whoever writes last has it.
            self._slots[at[free]] = slots[free]
            won = free[self._slots[at[free]] == slots[free]]
            self._keys[at[won]] = keys[won]
            is_left = np.ones(keys.size, np.bool_)
            is_left[won] = False
            keys, slots, at = keys[is_left], slots[is_left], _next(at[is_left], first, size)


def _homes(keys: Int64Array, first: Int64Array, size: Int64Array) -> Int64Array:
    unsigned = keys.view(np.uint64)
    mixed = unsigned >> _HALF
    mixed ^= unsigned
    mixed *= _FACTOR
    mixed >>= _HALF
    mixed *= size.view(np.uint64)
    mixed >>= _HALF
    homes = mixed.view(np.int64)
    homes += first
    return homes


def _next(at: Int64Array, first: Int64Array, size: Int64Array) -> Int64Array:
    following = at + 1
    return np.where(following == first + size, first, following)


def _build(library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        built = Path(work) / library.name
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(built), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        # In one step: another process may do the same.
        built.replace(library)


@functools.cache
def native_find() -> Callable[..., None] | None:
    """Return the compiled `find_keys`, built for this user before or now; None, with a line in the log, without."""
    source = _SOURCE.read_bytes()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardrank"
        library = folder / f"find_keys-{hashlib.sha256(source).hexdigest()[:16]}.so"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (status := folder.stat()).st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError(f"{folder} is another user's, or others may write to it")
        if not library.exists():
            _build(library)
        try:
            found = ctypes.CDLL(str(library)).find_keys
        except (OSError, AttributeError):
            # Cut short when the machine stopped: the next process builds it again.
            library.unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        logger.info("keys are found by NumPy, at several times the cost of compiled code: %s", error)
        return None
    found.restype = None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 5]
    call: Callable[..., None] = found
    return call
