"""Memory of emulated cards: one aligned malloc for each allocation, so that AddressSanitizer sees where each ends."""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shard_node.cuda.deferred_frees import DeferredFrees
from shard_node.errors import MemoryBudgetError

# cudaMalloc aligns to it.
ALIGNMENT = 256
# Memory is not zeroed: what nobody wrote is no plausible number, place or offset.
UNWRITTEN = 0xA5

_libc = ctypes.CDLL(None)
_libc.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)


class EmulationError(AssertionError):
    """What a real card would answer with a crash, or with silent damage."""


class Extent(NamedTuple):
    """One live allocation. device: whose, or None for pinned memory of the host."""

    address: int
    size_bytes: int
    device: int | None


class AddressSpace:
    """All live allocations, and how much each device (or, for None, pinned memory) has left.

    Attributes:
        frees: by which memory is given back, and beside which nothing is captured.
    """

    def __init__(self, totals: dict[int | None, int]) -> None:
        self.totals = totals
        self._used = dict.fromkeys(totals, 0)
        self._addresses: list[int] = []
        self._extents: dict[int, Extent] = {}
        self._lock = threading.Lock()
        self.frees = DeferredFrees()

    def free_bytes(self, device: int | None) -> int:
        with self._lock:
            return self.totals[device] - self._used[device]

    def allocate(self, device: int | None, size_bytes: int) -> int:
        """Address of new bytes, or 0 for none, as cudaMalloc does.

        Raises:
            MemoryBudgetError: the device has not as much.
        """
        if size_bytes < 0:
            raise ValueError(f"size_bytes must be at least 0, got {size_bytes}")
        if size_bytes == 0:
            return 0
        self.frees.flush()
        with self._lock:
            left = self.totals[device] - self._used[device]
            if size_bytes > left:
                where = "pinned memory" if device is None else f"emulated device {device}"
                raise MemoryBudgetError(f"{where}: {size_bytes} bytes wanted, {left} of {self.totals[device]} free")
            pointer = ctypes.c_void_p()
            if _libc.posix_memalign(ctypes.byref(pointer), ALIGNMENT, size_bytes) or pointer.value is None:
                raise MemoryBudgetError(f"the host has no {size_bytes} bytes for an emulated card")
            address = pointer.value
            ctypes.memset(address, UNWRITTEN, size_bytes)
            self._used[device] += size_bytes
            bisect.insort(self._addresses, address)
            self._extents[address] = Extent(address, size_bytes, device)
            return address

    def release(self, address: int) -> None:
        with self._lock:
            extent = self._extents.pop(address)
            self._addresses.remove(address)
            self._used[extent.device] -= extent.size_bytes
            _libc.free(address)

    def extent_at(self, address: int, size_bytes: int = 0) -> Extent:
        """The allocation that holds [address, address + size_bytes).

        Raises:
            EmulationError: none does.
        """
        with self._lock:
            position = bisect.bisect_right(self._addresses, address) - 1
            if position >= 0:
                extent = self._extents[self._addresses[position]]
                if address + size_bytes <= extent.address + extent.size_bytes:
                    return extent
        raise EmulationError(f"{size_bytes} bytes at {address:#x} are not in any live allocation")


class EmulatedMemory:
    """Memory of a card, or pinned memory of the host; given back when nobody holds it any more, as CuPy's is."""

    def __init__(self, space: AddressSpace, device: int | None, size_bytes: int) -> None:
        self.address, self.size_bytes = space.allocate(device, size_bytes), size_bytes
        release = partial(space.release, self.address)
        self._release = weakref.finalize(self, space.frees.free, release) if self.address else None

    def free(self) -> None:
        if self._release is not None:
            self._release()

    def bytes_of(self, first: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [size_bytes], a writable view of the bytes from `first` on, which keeps the memory from being freed."""
        if self._release is not None and not self._release.alive:
            raise EmulationError(f"memory at {self.address:#x} was freed")
        if first < 0 or size_bytes < 0 or first + size_bytes > self.size_bytes:
            raise EmulationError(f"bytes {first}..{first + size_bytes} of {self.size_bytes} do not exist")
        if size_bytes == 0:
            return np.empty(0, np.uint8)
        held = (ctypes.c_uint8 * size_bytes).from_address(self.address + first)
        held._owner = self  # type: ignore[attr-defined]  # keeps the memory, as long as the view is held
        return np.frombuffer(held, np.uint8)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes; cards' pinned memory has it, and no other."""
        return self.bytes_of(0, self.size_bytes)
