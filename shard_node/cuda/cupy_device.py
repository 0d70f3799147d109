"""A device and its memory, by CuPy."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shard_node.cuda.cards import Memory
from shard_node.cuda.cupy_api import CUDA_ERRORS, OUT_OF_MEMORY, compiled, driver, runtime
from shard_node.cuda.kernel_params import POOL_KERNELS, WRITE_KERNEL
from shard_node.errors import CardError, MemoryBudgetError

KERNELS: Final = (*POOL_KERNELS.values(), WRITE_KERNEL)

CAPTURING: Final = threading.RLock()
"""Held by a capture, of which there may be one at a time in a process, and while memory of a device or pinned memory is
given back: that waits for the whole device, which nothing may do while one of its streams is captured."""

_SOURCE: Final = Path(__file__).with_name("kernels.cu")


class Current:
    """Makes a device the thread's current one for a while, and CUDA's errors ours."""

    __slots__ = ("_action", "_index", "_previous")

    def __init__(self, index: int, action: str) -> None:
        self._index, self._action = index, action
        self._previous = -1

    def __enter__(self) -> None:
        try:
            # A thread without a context has no device to go back to: going back would make a context on device 0.
            if driver.ctxGetCurrent():
                self._previous = runtime.getDevice()
            # Always, as it is what makes the context current to a thread that is new to CUDA.
            runtime.setDevice(self._index)
        except CUDA_ERRORS as error:
            raise CardError(f"device {self._index} can't be made the current one: {error}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous not in (-1, self._index):
            try:
                runtime.setDevice(self._previous)
            except CUDA_ERRORS as lost:
                error = error or lost
        if isinstance(error, CUDA_ERRORS):
            raise CardError(f"device {self._index}: {self._action}: {error}") from error


def cuda_status(error: CardError) -> int | None:
    """CUDA's number of what went wrong, if it was CUDA's."""
    status = getattr(error.__cause__, "status", None)
    return None if status is None else int(status)


class CupyDevice:
    """One device, shared by its logical cards: kernels, and handles of events and streams that nobody holds.

    Args:
        index: as CUDA counts them.

    Raises:
        CardError: CUDA failed, or the kernels do not compile.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        with self.current("opening it"):
            self.total_bytes = int(runtime.memGetInfo()[1])
            # Kept, as the code is unloaded with the last of them.
            self._functions = compiled(_SOURCE.read_text(encoding="utf-8"), KERNELS, index)
        self.kernels: dict[str, int] = {name: int(function.ptr) for name, function in self._functions.items()}
        self.spare_events: deque[int] = deque()
        self.spare_streams: dict[int, deque[int]] = {}  # by priority
        # At the end of the process CUDA may be gone before.
        weakref.finalize(self, _destroy_spares, index, self.spare_events, self.spare_streams).atexit = False

    def current(self, action: str) -> Current:
        """A context within which the device is current; `action` is for the message of CardError."""
        return Current(self.index, action)

    def allocate(self, size_bytes: int) -> CupyMemory:
        """By cudaMalloc, outside of every pool, so that peers have access.

        Raises:
            MemoryBudgetError: with the numbers, if there is not as much, even without what torch keeps for later.
        """
        try:
            try:
                address = self._malloc(size_bytes)
            except CardError as error:
                if cuda_status(error) != OUT_OF_MEMORY:
                    raise
                self.give_back_unused()
                address = self._malloc(size_bytes)
        except CardError as error:
            if cuda_status(error) != OUT_OF_MEMORY:
                raise
            raise MemoryBudgetError(
                f"{size_bytes} bytes can't be allocated on device {self.index}: {self.free_bytes()} of "
                f"{self.total_bytes} are free"
            ) from error
        return CupyMemory(self, address, size_bytes)

    def _malloc(self, size_bytes: int) -> int:
        with self.current(f"allocating {size_bytes} bytes"):
            return int(runtime.malloc(size_bytes)) if size_bytes else 0

    def allocate_pinned(self, size_bytes: int) -> CupyPinnedMemory:
        """By cudaHostAlloc, for all devices. Raises MemoryBudgetError if the host can't lock as much."""
        flags = runtime.hostAllocPortable | runtime.hostAllocMapped
        try:
            with self.current(f"allocating {size_bytes} bytes of pinned memory"):
                address = int(runtime.hostAlloc(size_bytes, flags)) if size_bytes else 0
        except CardError as error:
            if cuda_status(error) != OUT_OF_MEMORY:
                raise
            raise MemoryBudgetError(f"the host can't lock {size_bytes} bytes of memory for cards") from error
        return CupyPinnedMemory(self, address, size_bytes)

    def free_bytes(self) -> int:
        """Memory that can still be allocated. What torch's allocator keeps for later counts as used."""
        with self.current("asking for its memory"):
            return int(runtime.memGetInfo()[0])

    def give_back_unused(self) -> None:
        """Has torch's allocator let go of what it keeps for later, on all devices. Waits for them."""
        try:
            with CAPTURING, self.current("giving back unused memory"):
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CardError(f"device {self.index}: unused memory can't be given back: {error}") from error


def _destroy_spares(index: int, events: deque[int], streams: dict[int, deque[int]]) -> None:
    with Current(index, "ending events and streams"):
        while events:
            runtime.eventDestroy(events.pop())
        for spare in streams.values():
            while spare:
                runtime.streamDestroy(spare.pop())


class _HeldMemory:
    """Bytes that are given back by `free`, or when nobody holds them any more.

    Args:
        release: gives them back.
        device: that they are of.
        address: of the first byte.
        size_bytes: how many.
    """

    def __init__(
        self, release: Callable[[CupyDevice, int, int], None], device: CupyDevice, address: int, size_bytes: int
    ) -> None:
        self._address, self._size_bytes = address, size_bytes
        self._release = weakref.finalize(self, release, device, address, size_bytes)
        self._release.atexit = False

    @property
    def address(self) -> int:
        """Of the first byte, a multiple of 256; 0 for no bytes."""
        return self._address

    @property
    def size_bytes(self) -> int:
        """How many."""
        return self._size_bytes

    @property
    def freed(self) -> bool:
        """Whether it was given back."""
        return not self._release.alive

    def free(self) -> None:
        """Gives it back. Waits for the device, as cudaFree and cudaFreeHost do. Idempotent."""
        self._release()


class CupyMemory(_HeldMemory):
    """Bytes of one device."""

    def __init__(self, device: CupyDevice, address: int, size_bytes: int) -> None:
        super().__init__(_free, device, address, size_bytes)


class CupyPinnedMemory(_HeldMemory):
    """Page-locked memory of the host, at one address for it and all cards."""

    def __init__(self, device: CupyDevice, address: int, size_bytes: int) -> None:
        super().__init__(_free_pinned, device, address, size_bytes)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 [size_bytes], writable. It keeps the memory, but no view may be used after `free`."""
        if self.freed:
            raise CardError(f"pinned memory of {self._size_bytes} bytes was given back")
        if not self._size_bytes:
            return np.empty(0, np.uint8)
        held = (ctypes.c_uint8 * self._size_bytes).from_address(self._address)
        held._owner = self  # type: ignore[attr-defined]  # The array keeps `held`, which keeps the memory.
        return np.frombuffer(memoryview(held), np.uint8)


def _free(device: CupyDevice, address: int, size_bytes: int) -> None:
    if address:
        with CAPTURING, device.current(f"freeing {size_bytes} bytes"):
            runtime.free(address)


def _free_pinned(device: CupyDevice, address: int, size_bytes: int) -> None:
    if address:
        with CAPTURING, device.current(f"freeing {size_bytes} bytes of pinned memory"):
            runtime.freeHost(address)


def address_within(memory: Memory, first: int, size_bytes: int) -> int:
    """The address of byte `first` of memory that has size_bytes from there on.

    Raises:
        CardError: it has not, it was given back, or it is of other cards.
    """
    if not isinstance(memory, CupyMemory | CupyPinnedMemory):
        raise CardError(f"{type(memory).__name__} is memory of other cards")
    if memory.freed or not 0 <= first <= first + size_bytes <= memory.size_bytes:
        state = "that was given back" if memory.freed else f"of {memory.size_bytes} bytes"
        raise CardError(f"bytes {first}..{first + size_bytes} are not within memory {state}")
    return memory.address + first
