"""What the engine asks of cards: memory, streams, launches, graphs. CuPy's are in `cupy_cards.py`.

A card is what the engine partitions rows over. Several logical cards may lie on one device; the engine does not see the
difference. Calls that take a stream return before the work is done; each is in order with what was put on that stream
before. Addresses are valid on every card with access to its peers, and pinned memory's on all cards and the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shard_node.cuda.kernel_params import KernelSwitches


class Memory(Protocol):
    """Bytes of one card. Not zeroed.

    Attributes:
        address: of the first byte.
        size_bytes: how many.
    """

    address: int
    size_bytes: int

    def free(self) -> None:
        """Give it back. Nothing that uses it may be under way. Idempotent. Memory that nobody holds ends by itself."""


class PinnedMemory(Memory, Protocol):
    """Page-locked memory of the host, which cards read and write in place."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 [size_bytes], writable."""


class CardEvent(Protocol):
    """A moment on a stream."""

    def synchronize(self) -> None:
        """Blocks until it has passed, without the interpreter lock."""

    @property
    def done(self) -> bool:
        """Whether it has passed."""


class Stream(Protocol):
    """Work of one card, in order."""

    @property
    def pointer(self) -> int:
        """cudaStream_t."""

    def synchronize(self) -> None:
        """Blocks until all of it is done, without the interpreter lock."""

    def record(self) -> CardEvent:
        """Return the moment when all that was put on it is done."""

    def wait(self, event: CardEvent) -> None:
        """Has what comes after wait for the event, of any card."""


class Graph(Protocol):
    """Recorded work that is launched as one. It knows addresses, and keeps none of the memory that lies there."""

    def replay(self, stream: Stream) -> None:
        """Put it on the stream, which is the one it was captured on: graphs of one stream share torch's memory."""


class Card(Protocol):
    """One card. Thread-safe, but for what is said of graphs.

    Attributes:
        number: its place among the cards, from 0.
        device_index: the device that it lies on.
        torch_device: where torch sees its memory.
    """

    number: int
    device_index: int
    torch_device: torch.device

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""

    def free_bytes(self) -> int:
        """Return what can still be allocated; logical cards of one device see the same."""

    def give_back_unused(self) -> None:
        """Frees what is only kept for later, of torch's memory on its device. May wait for the device."""

    def allocate(self, size_bytes: int) -> Memory:
        """Raise MemoryBudgetError, with the numbers, if the device has not as much."""

    def stream(self, *, low_priority: bool = False) -> Stream:
        """Make one, which does not wait for the default stream; `low_priority` gives way to all that are not."""

    def launch(self, kernel: str, grid: tuple[int, int], params: Sequence[ctypes.Structure], stream: Stream) -> None:
        """Launch `grid` blocks of THREADS_PER_BLOCK threads, at least one. The structures are copied at once."""

    def copy_to_card(self, target: int, source: PinnedMemory, first: int, size_bytes: int, stream: Stream) -> None:
        """Copy source.array[first : first + size_bytes] to the address `target`."""

    def copy_to_host(self, target: PinnedMemory, first: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Copy from the address `source` to target.array[first : first + size_bytes]."""

    def zero(self, target: int, size_bytes: int, stream: Stream) -> None:
        """Fill bytes from the address `target` on with zeros."""

    def tensor(self, memory: Memory, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of memory from byte `first` on; it does not keep the memory alive."""

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Send this thread's torch operations to the stream, within it.

        None may wait for the whole device (`torch.cuda.synchronize`) while a stream of it is captured anywhere.
        """

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Record what `work` puts on the stream, which must be no allocation of this class and no synchronisation.

        `work` has run once outside before, so that nothing is compiled or chosen during the capture. Addresses and
        launch shapes are fixed by it; only what lies in memory may change between replays.
        """


class Cards(Protocol):
    """All cards of a process, and pinned memory."""

    @property
    def cards(self) -> Sequence[Card]:
        """By number."""

    @property
    def peer_access(self) -> bool:
        """Whether every card reads every other's memory. If not, no row may be on only one card."""

    @property
    def switches(self) -> KernelSwitches:
        """How their kernels were compiled."""

    @property
    def name(self) -> str:
        """What they are, for people: `8 x NVIDIA H100 80GB HBM3`."""

    def allocate_pinned(self, size_bytes: int) -> PinnedMemory:
        """Raise MemoryBudgetError if the host has not as much."""
