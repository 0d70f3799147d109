"""What the engine asks of cards: memory, streams, launches, graphs. CuPy's are in `cupy_cards.py`.

A card is what the engine partitions rows over. Several logical cards may lie on one device; the engine does not see the
difference. Calls that take a stream return before the work is done; each is in order with what was put on that stream
before. Addresses are valid on every card with access to its peers, and pinned memory's on all cards and the host.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from shard_node.errors import CardError

if TYPE_CHECKING:
    # Not loaded: who only reads what devices were named supervises processes that load it.
    import torch

logger = logging.getLogger(__name__)


class Memory(Protocol):
    """`size_bytes` bytes of one card from `address` on, not zeroed. Freed when nobody holds it any more."""

    address: int
    size_bytes: int

    def free(self) -> None:
        """Free it, or note that while a graph is captured anywhere. No work may use it any more. Idempotent."""


class PinnedMemory(Memory, Protocol):
    """Page-locked memory of the host, which cards read and write in place."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 [size_bytes], writable."""


class CardEvent(Protocol):
    """A moment on a stream."""

    def synchronize(self) -> None:
        """Block until it has passed, without the interpreter lock."""

    @property
    def done(self) -> bool:
        """Whether it has passed."""


class Stream(Protocol):
    """Work of one card, in order; `pointer` is a cudaStream_t."""

    pointer: int

    def synchronize(self) -> None:
        """Block until all of it is done, without the interpreter lock."""

    def record(self) -> CardEvent:
        """Return the moment when all that was put on it is done."""

    def wait(self, event: CardEvent) -> None:
        """Let what comes after wait for the event, of any card."""


class Graph(Protocol):
    """Recorded work that is launched as one. It knows addresses, and keeps none of the memory there."""

    def replay(self, stream: Stream) -> None:
        """Put it on the stream, which is the one it was captured on: graphs of one stream share torch's memory."""


class Card(Protocol):
    """One card. Thread-safe, but for what is said of graphs.

    Attributes:
        number: its index among the cards.
        device_index: the device that it is on.
        torch_device: where torch sees its memory.
        total_bytes: memory of the device.
    """

    number: int
    device_index: int
    torch_device: torch.device
    total_bytes: int

    def free_bytes(self) -> int:
        """Return what can still be allocated; logical cards of one device see the same."""

    def give_back_unused(self) -> None:
        """Free what torch keeps for later on its device. May wait for the device."""

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate memory. Raise MemoryBudgetError, with the numbers, if the device has not as much."""

    def allocate_pinned(self, size_bytes: int) -> PinnedMemory:
        """Allocate memory of the host, for all cards. Raise MemoryBudgetError if it has not as much."""

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        """Compile more kernels for it. Idempotent. Raise CardError if they do not compile."""

    def stream(self, *, low_priority: bool = False) -> Stream:
        """Make a stream that does not wait for the default one; `low_priority` gives way to all that are not."""

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
        """Send this thread's torch operations to the stream while the block runs.

        None may wait for the whole device (`torch.cuda.synchronize`) while a stream of it is captured anywhere.
        """

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Record what `work` puts on the stream, which must be no allocation of this class and no synchronisation.

        `work` has run once outside before, so that nothing is compiled or chosen during the capture. Addresses and
        launch shapes are fixed by it; only what is in memory may change between replays.
        """


@dataclass(frozen=True, slots=True)
class Cards:
    """All cards of a process.

    Attributes:
        cards: by number.
        peer_access: whether every card reads every other's memory. If not, no row may be on only one card.
        name: their number and kind, for people: `8 x NVIDIA H100 80GB HBM3`.
    """

    cards: Sequence[Card]
    peer_access: bool
    name: str

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        """Compile more kernels, for all cards. Idempotent. Raise CardError if they do not compile."""
        for card in self.cards:
            card.load_kernels(source, kernels)

    def allocate_pinned(self, size_bytes: int) -> PinnedMemory:
        """Allocate memory of the host. Raise MemoryBudgetError if it has not as much."""
        return self.cards[0].allocate_pinned(size_bytes)


class DeferredFrees:
    """Keeps what frees memory and graphs apart from captures of graphs. Thread-safe.

    Freeing memory may wait for the device, and ending a graph changes what torch knows of all of them: either breaks a
    capture that is under way. But a free comes whenever a reference count falls to zero or garbage is collected: in the
    middle of a capture, or in a thread that holds what a capture waits for. So it is queued and never waits: frees are
    done, in order, by the next caller that finds no capture, or else by the thread whose capture ends.
    """

    def __init__(self) -> None:
        # Not re-entrant: its holder is in the middle of what no free may come into, also not of its thread.
        self._alone = threading.Lock()
        self._thread: int | None = None
        self._queue: deque[Callable[[], object]] = deque()

    def free(self, action: Callable[[], object]) -> None:
        """Run `action` now, or after the capture that is under way. Its errors are logged: no caller could help."""
        self._queue.append(action)
        self.settle()

    def settle(self) -> None:
        """Run all that is queued, unless a capture or another thread is going to."""
        # Again after the release: an action may have been queued by a thread that could not acquire the lock.
        while self._queue and self._alone.acquire(blocking=False):
            try:
                self._run_queue()
            finally:
                self._alone.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold frees back while the block runs, as a capture must. Waits for other threads that do.

        Raises CardError if this thread does already.
        """
        if self._thread == threading.get_ident():
            raise CardError("this can't be done while a graph is captured")
        try:
            with self._alone:
                self._run_queue()
                self._thread = threading.get_ident()
                try:
                    yield
                finally:
                    self._thread = None
        finally:
            self.settle()

    def _run_queue(self) -> None:
        while self._queue:
            try:
                self._queue.popleft()()
            except Exception:
                logger.exception("unused memory could not be freed")
