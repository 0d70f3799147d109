"""Cards emulated in host memory: the same kernels, compiled by g++, with the methods of `shard_node.cuda.cupy_cards`.

Work on a stream runs at once, or, with `deferred=True`, as late as a real card may run it: only when somebody waits for
it. Then a host that overwrites what a copy has yet to read, or a stream that does not wait for another's row writes,
gives wrong answers here too.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shard_node.cuda.kernel_params import MAX_CARDS
from shard_node.errors import CardError
from shardrank_testing.emulated_memory import AddressSpace, EmulatedMemory, EmulationError
from shardrank_testing.host_kernels import HostKernels, host_kernels

_Run = Callable[[], None]
_Description = tuple[object, ...]


class EmulatedEvent:
    """A moment on a stream: `position` pieces of work had been put on it."""

    def __init__(self, stream: EmulatedStream, position: int) -> None:
        self.stream = stream
        self._position = position

    def synchronize(self) -> None:
        _refuse_in_capture("synchronize with an event")
        self.stream.check()
        self.stream.run_up_to(self._position)

    def run(self) -> None:
        """Lets the work before it happen; what a stream that waits for it does."""
        self.stream.run_up_to(self._position)


class EmulatedStream:
    """Work in order."""

    def __init__(self, card: int, lock: threading.RLock, deferred: bool, check: Callable[[], None]) -> None:
        self.card = card
        self.check = check
        self._lock = lock
        self._deferred = deferred
        self._queue: deque[_Run] = deque()
        self._put_count = 0
        # Pieces of work that have run.
        self.done = 0

    @property
    def pointer(self) -> int:
        return id(self)

    def put(self, description: _Description, run: _Run) -> None:
        """Puts work on the stream, or, in a capture or a replay of this thread, on the record of that."""
        record = _current.record
        if record is not None:
            record.put(self, description, run)
        else:
            self.put_now(run)

    def put_now(self, run: _Run) -> None:
        with self._lock:
            self._queue.append(run)
            self._put_count += 1
            if not self._deferred:
                self.run_up_to(self._put_count)

    def run_up_to(self, position: int) -> None:
        if self.done >= position:
            return
        with self._lock:
            while self.done < position:
                run = self._queue.popleft()
                try:
                    run()
                finally:
                    self.done += 1

    def catch_up(self) -> None:
        """Runs all that was put on it."""
        self.run_up_to(self._put_count)

    def synchronize(self) -> None:
        _refuse_in_capture("synchronize with a stream")
        self.check()
        self.catch_up()

    def record(self) -> EmulatedEvent:
        _refuse_in_capture("record an event")
        self.check()
        with self._lock:
            return EmulatedEvent(self, self._put_count)

    def wait(self, event: EmulatedEvent) -> None:
        _refuse_in_capture("wait for an event")
        self.check()
        self.put_now(event.run)


@dataclass
class _Record:
    """What a capture saw, in order; or, replayed, what has to come again."""

    stream: EmulatedStream
    work: list[_Description]
    replayed_on: EmulatedStream | None = None
    position: int = 0

    def put(self, stream: EmulatedStream, description: _Description, run: _Run) -> None:
        if stream is not self.stream:
            raise EmulationError("work of a graph goes to the stream that captures it, and to no other")
        if self.replayed_on is None:
            self.work.append(description)
            return
        if self.position == len(self.work) or self.work[self.position] != description:
            recorded = self.work[self.position] if self.position < len(self.work) else "nothing more"
            raise EmulationError(
                f"piece {self.position} of a graph is not what was captured: {description}, not {recorded}"
            )
        self.position += 1
        self.replayed_on.put_now(run)


class _Current(threading.local):
    record: _Record | None = None


_current = _Current()


def _refuse_in_capture(action: str) -> None:
    if _current.record is not None:
        raise EmulationError(f"a graph's work may not {action}")


@contextmanager
def _recording(record: _Record) -> Iterator[None]:
    _refuse_in_capture("hold another graph")
    _current.record = record
    try:
        yield
    finally:
        _current.record = None


class EmulatedGraph:
    """Captured work. A replay calls it again, and holds it to what was captured."""

    def __init__(self, work: _Run, record: _Record) -> None:
        self._work = work
        self._record = record

    def replay(self, stream: EmulatedStream) -> None:
        if stream is not self._record.stream:
            raise EmulationError("a graph must be replayed on the stream that it was captured on")
        record = _Record(self._record.stream, self._record.work, replayed_on=stream)
        with _recording(record):
            self._work()
        if record.position != len(record.work):
            raise EmulationError(f"of a graph's {len(record.work)} pieces of work a replay put {record.position}")


class EmulatedCard:
    """One card. Work that reaches outside live memory, or into a peer's without access, is an EmulationError."""

    def __init__(self, cards: EmulatedCards, number: int, device: int) -> None:
        self._cards = cards
        self.number = number
        self.device_index = device
        self.torch_device = torch.device("cpu")

    @property
    def total_bytes(self) -> int:
        return self._cards.space.totals[self.device_index]

    def free_bytes(self) -> int:
        self._cards.check()
        return self._cards.space.free_bytes(self.device_index)

    def give_back_unused(self) -> None:
        with self._cards.space.frees.alone():
            for memory in self._cards.kept_for_later.pop(self.device_index, []):
                memory.free()

    def allocate(self, size_bytes: int) -> EmulatedMemory:
        _refuse_in_capture("allocate memory")
        self._cards.check()
        return EmulatedMemory(self._cards.space, self.device_index, size_bytes)

    def stream(self, *, low_priority: bool = False) -> EmulatedStream:
        del low_priority
        return self._cards.new_stream(self.number)

    def launch(
        self, kernel: str, grid: tuple[int, int], params: Sequence[ctypes.Structure], stream: EmulatedStream
    ) -> None:
        copied = [bytes(one) for one in params]
        sizes = self._cards.kernels_with(kernel).param_sizes[kernel]
        if tuple(map(len, copied)) != sizes:
            raise EmulationError(f"{kernel} takes structures of {sizes} bytes, not {tuple(map(len, copied))}")
        if not (0 < grid[0] < 2**31 and 0 < grid[1] < 2**16):
            raise EmulationError(f"{kernel}: a grid of {grid} can't be launched")
        addresses = [address for one in params for address in _addresses(one)]

        def run() -> None:
            for address in addresses:
                self._check_reach(address, 0)
            self._cards.kernels_with(kernel).launch(kernel, grid, copied)

        self._put(stream, ("launch", kernel, grid, *copied), run)

    def copy_to_card(
        self, target: int, source: EmulatedMemory, first: int, size_bytes: int, stream: EmulatedStream
    ) -> None:
        self._copy(target, self._cards.pinned_bytes(source, first, size_bytes), size_bytes, stream, is_up=True)

    def copy_to_host(
        self, target: EmulatedMemory, first: int, source: int, size_bytes: int, stream: EmulatedStream
    ) -> None:
        self._copy(self._cards.pinned_bytes(target, first, size_bytes), source, size_bytes, stream, is_up=False)

    def _copy(self, target: int, source: int, size_bytes: int, stream: EmulatedStream, *, is_up: bool) -> None:
        def run() -> None:
            self._check_reach(target, size_bytes)
            self._check_reach(source, size_bytes)
            ctypes.memmove(target, source, size_bytes)
            if is_up:
                self._cards.bytes_up.append(size_bytes)

        self._put(stream, ("copy", target, source, size_bytes), run)

    def zero(self, target: int, size_bytes: int, stream: EmulatedStream) -> None:
        def run() -> None:
            self._check_reach(target, size_bytes)
            ctypes.memset(target, 0, size_bytes)

        self._put(stream, ("zero", target, size_bytes), run)

    def tensor(self, memory: EmulatedMemory, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        if first % dtype.itemsize:
            raise EmulationError(f"{dtype} can't begin at byte {first}")
        view = memory.bytes_of(first, count * dtype.itemsize)
        return torch.frombuffer(view, dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)

    @contextmanager
    def torch_stream(self, stream: EmulatedStream) -> Iterator[None]:
        """torch's work on host memory happens during the call, so all before it has to have happened."""
        record = _current.record
        if record is None:
            stream.synchronize()
        elif record.replayed_on is not None:
            record.replayed_on.catch_up()
        yield

    def capture(self, stream: EmulatedStream, work: Callable[[], None]) -> EmulatedGraph:
        """Calls `work`, which puts nothing on the stream, but on the record; torch's part of it does happen."""
        record = _Record(stream, [])
        with _recording(record), self._cards.space.frees.alone():
            work()
        return EmulatedGraph(work, record)

    def _put(self, stream: EmulatedStream, description: _Description, run: _Run) -> None:
        self._cards.check()
        if stream.card != self.number:
            raise EmulationError(f"{stream!r} is no stream of card {self.number}")
        stream.put((self.number, *description), run)

    def _check_reach(self, address: int, size_bytes: int) -> None:
        """That the bytes are in live memory which this card can read."""
        if address == 0 and size_bytes == 0:
            return
        device = self._cards.space.extent_at(address, size_bytes).device
        if device not in (None, self.device_index) and not self._cards.peer_access:
            raise EmulationError(f"card {self.number} has no access to the memory of device {device} at {address:#x}")


class EmulatedCards:
    """Implements `Cards`.

    Args:
        num_cards: how many.
        peer_access: whether cards read each other's memory.
        total_bytes: memory of each device.
        num_devices: over which cards are dealt round; None: each card is a device of its own.
        pinned_bytes: pinned memory of the host.
        deferred: work runs only when it is waited for.

    Attributes:
        kept_for_later: by device, what stands for memory that torch keeps.
        bytes_up: of each copy to a card that has happened, in order.
        fault: what all that is asked of them is answered with, as CUDA does after a kernel has failed; "" for none.
    """

    def __init__(
        self,
        num_cards: int,
        peer_access: bool = True,
        total_bytes: int = 1 << 30,
        *,
        num_devices: int | None = None,
        pinned_bytes: int = 1 << 30,
        deferred: bool = False,
    ) -> None:
        if not 1 <= num_cards <= MAX_CARDS:
            raise ValueError(f"num_cards must be 1..{MAX_CARDS}, got {num_cards}")
        devices = num_cards if num_devices is None else num_devices
        self.kernels: HostKernels = host_kernels()
        self._loaded: dict[str, HostKernels] = {}
        self.peer_access = peer_access
        self._deferred = deferred
        self._lock = threading.RLock()
        totals: dict[int | None, int] = dict.fromkeys(range(devices), total_bytes)
        self.space = AddressSpace(totals | {None: pinned_bytes})
        self.bytes_up: list[int] = []
        self.fault = ""
        self.kept_for_later: dict[int, list[EmulatedMemory]] = {}
        self.cards = tuple(EmulatedCard(self, number, number % devices) for number in range(num_cards))

    @property
    def name(self) -> str:
        return f"{len(self.cards)} x emulated card"

    def free_bytes(self) -> list[int]:
        """Of each card, and of pinned memory."""
        return [*(card.free_bytes() for card in self.cards), self.space.free_bytes(None)]

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        loaded = host_kernels(source, tuple(kernels))
        self._loaded |= dict.fromkeys(kernels, loaded)

    def kernels_with(self, kernel: str) -> HostKernels:
        """The library that has this kernel."""
        return self._loaded.get(kernel, self.kernels)

    def allocate_pinned(self, size_bytes: int) -> EmulatedMemory:
        _refuse_in_capture("allocate pinned memory")
        return EmulatedMemory(self.space, None, size_bytes)

    def new_stream(self, card: int) -> EmulatedStream:
        # One lock for all streams where running one runs others: whoever waits may hold none of its own.
        lock = self._lock if self._deferred else threading.RLock()
        return EmulatedStream(card, lock, self._deferred, self.check)

    def check(self) -> None:
        """Raises CardError if they have failed."""
        if self.fault:
            raise CardError(self.fault)

    def pinned_bytes(self, memory: EmulatedMemory, first: int, size_bytes: int) -> int:
        """Address of the bytes of pinned memory, which have to be there."""
        memory.bytes_of(first, size_bytes)
        return memory.address + first


def _addresses(params: ctypes.Structure) -> Iterator[int]:
    """What a kernel's structure points to: all its 64-bit fields are addresses."""
    for name, kind in params._fields_:
        value = getattr(params, name)
        if kind is ctypes.c_uint64:
            yield value
        elif issubclass(kind, ctypes.Array):
            yield from value
