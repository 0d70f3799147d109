"""The cards that rows are partitioned over, by CuPy and torch. The only module that imports CuPy.

A card is a device, or one of several logical cards on one; the engine does not see the difference. Calls that take a
stream return before the work is done; each is in order with what was put on that stream before. Addresses are valid on
every card with access to its peers, and pinned memory's on all cards and the host. What CUDA refuses is a CardError.

CuPy's pools, streams and current stream are not used. CuPy and torch share each device's primary context, so the
streams, events and memory of one are valid in the other.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import cupy
import numpy as np
import numpy.typing as npt
import torch
from cupy.cuda import compiler, driver, nvrtc, runtime

from shard_node.cuda.deferred_frees import DeferredFrees
from shard_node.cuda.kernel_params import POOL_KERNELS, THREADS_PER_BLOCK, WRITE_KERNEL, pointers_to
from shard_node.errors import CardError, CardsUnavailableError, MemoryBudgetError

logger = logging.getLogger(__name__)

# Compute capability: the kernels convert to bf16 by an instruction that came with it.
OLDEST_CAPABILITY: Final = (8, 0)

_CUDA_ERRORS: Final = (runtime.CUDARuntimeError, driver.CUDADriverError)
# Of cudaError_t and CUresult, which number them alike where both have them. CuPy has no names for them.
_MEMORY_EXHAUSTED: Final = 2
_PEER_ACCESS_ALREADY_ENABLED: Final = 704
# There may be one capture at a time in a process, and no memory or graph may end meanwhile.
_FREES: Final = DeferredFrees()
# Unused handles, of events by device, of streams by device and priority. They are never destroyed: torch keeps memory
# and workspaces by a stream's handle, and CUDA may give a new stream the handle of a destroyed one.
_SPARE_EVENTS: Final[defaultdict[int, deque[int]]] = defaultdict(deque)
_SPARE_STREAMS: Final[defaultdict[tuple[int, int], deque[int]]] = defaultdict(deque)
# torch's allocator goes on asking a graph whose capture could not be ended, so such a one is never let go.
_broken_graphs: list[torch.cuda.CUDAGraph] = []


class _Current:
    """Makes a device the thread's current one for a while, and CUDA's errors ours; `action` is for the message."""

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
        except _CUDA_ERRORS as error:
            raise CardError(f"device {self._index} can't be made the current one: {error}") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._previous not in (-1, self._index):
            try:
                runtime.setDevice(self._previous)
            except _CUDA_ERRORS as lost:
                error = error or lost
        if isinstance(error, _CUDA_ERRORS):
            raise CardError(f"device {self._index}: {self._action}: {error}") from error


class Memory:
    """`size_bytes` bytes from `address` on, not zeroed: of one card, or page-locked ones of the host (pinned).

    Freed when nobody holds it any more. The address is 0 for no bytes.
    """

    def __init__(self, release: Callable[[int], object], device: int, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes
        self._release = weakref.finalize(self, _FREES.free, partial(_free, release, device, address, size_bytes))
        self._release.atexit = False

    def free(self) -> None:
        """Free it, after its device's work, or once the capture that is under way has ended. Idempotent."""
        self._release()

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 [size_bytes], writable, of pinned memory. No view may be used after `free`."""
        if not self.size_bytes:
            return np.empty(0, np.uint8)
        owned = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        owned._owner = self  # type: ignore[attr-defined]  # The array keeps `owned`, which keeps the memory.
        return np.frombuffer(memoryview(owned), np.uint8)


def _free(release: Callable[[int], object], device: int, address: int, size_bytes: int) -> None:
    if address:
        with _Current(device, f"freeing {size_bytes} bytes"):
            release(address)


class Event:
    """A moment on a stream.

    Its handle is recorded again when nobody holds the event any more; waits that were put on streams stay as they are.
    """

    def __init__(self, device: int, pointer: int) -> None:
        self._device, self.pointer, self._spare = device, pointer, _SPARE_EVENTS[device]

    def synchronize(self) -> None:
        """Block until it has passed: without the interpreter lock, but not without the processor, since it spins."""
        with _Current(self._device, "waiting for an event"):
            runtime.eventSynchronize(self.pointer)

    def __del__(self) -> None:
        self._spare.append(self.pointer)


class Stream:
    """Work of one card, in order. It neither waits for the default stream nor is waited for by it.

    Its handle is used again when nobody holds the stream any more: new ones with every version would take more and more
    of the card, by what torch keeps for each.

    `pointer` is its handle, a cudaStream_t, which `give_back` keeps for another stream; `for_torch` is the same stream.
    `graphs` were captured on it and are still there: they share memory, which torch's allocator has in `graph_pool`.
    """

    def __init__(self, device: int, priority: int) -> None:
        self.device_index = device
        spare = _SPARE_STREAMS[device, priority]
        try:
            self.pointer = spare.popleft()
        except IndexError:
            with _Current(device, "making a stream"):
                self.pointer = int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, priority))
        self.give_back = weakref.finalize(self, spare.append, self.pointer)
        self.give_back.atexit = False
        self.for_torch: torch.cuda.Stream = torch.cuda.ExternalStream(self.pointer, torch.device("cuda", device))  # type: ignore[no-untyped-call]
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.graph_pool: Any = None

    def synchronize(self) -> None:
        """Block until all of it is done, without the interpreter lock. Raise CardError if work on it failed."""
        with _Current(self.device_index, "waiting for a stream"):
            runtime.streamSynchronize(self.pointer)

    def record(self) -> Event:
        """Return the moment when all that was put on it is done."""
        with _Current(self.device_index, "recording an event"):
            try:
                pointer = _SPARE_EVENTS[self.device_index].popleft()
            except IndexError:
                pointer = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))
            event = Event(self.device_index, pointer)
            runtime.eventRecord(pointer, self.pointer)
        return event

    def wait(self, event: Event) -> None:
        """Let what comes after wait for the event, of any card."""
        with _Current(self.device_index, "waiting for another stream"):
            runtime.streamWaitEvent(self.pointer, event.pointer, 0)


class Graph:
    """Recorded work that is launched as one. It knows addresses, and keeps none of the memory there.

    It is torch's, as the memory of models comes from torch's allocator, which must know of a capture.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, captured_on: Stream) -> None:
        self._captured_on = captured_on
        # Ends where this list is emptied: torch keeps one of a device's graphs without a lock.
        self._graph = [graph]
        weakref.finalize(self, _FREES.free, self._graph.clear).atexit = False

    def replay(self, stream: Stream) -> None:
        """Put it on the stream, which is the one it was captured on: graphs of one stream share torch's memory."""
        if stream is not self._captured_on:
            raise CardError("a graph must be replayed on the stream that it was captured on")
        with torch.cuda.stream(self._captured_on.for_torch):
            self._graph[0].replay()


class Card:
    """A part of a device, of which `total_bytes` is the memory. Thread-safe, but for what is said of graphs."""

    def __init__(self, number: int, device: int) -> None:
        self.number, self.device_index = number, device
        self.torch_device = torch.device("cuda", device)
        with _Current(device, "opening it"):
            self.total_bytes = int(runtime.memGetInfo()[1])
        kernels = (*POOL_KERNELS.values(), WRITE_KERNEL)
        self.kernels = _compiled(device, Path(__file__).with_name("kernels.cu"), kernels)

    def free_bytes(self) -> int:
        """Return what can still be allocated on the device; what torch's allocator keeps for later counts as used."""
        with _Current(self.device_index, "asking for its memory"):
            return int(runtime.memGetInfo()[0])

    def give_back_unused(self) -> None:
        """Free what torch's allocator keeps for later, on all devices. Waits for them, and for captures."""
        try:
            with _FREES.alone(), _Current(self.device_index, "giving back unused memory"):
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CardError(f"device {self.device_index}: unused memory can't be given back: {error}") from error

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate memory, outside of every pool, so that peers have access.

        Raises MemoryBudgetError, with the numbers, if the device has not as much.
        """
        address = self.address_of_new(size_bytes, lambda: runtime.malloc(size_bytes))
        if address is None:
            free = f"{self.free_bytes()} of {self.total_bytes} are free"
            raise MemoryBudgetError(f"{size_bytes} bytes can't be allocated on device {self.device_index}: {free}")
        return Memory(runtime.free, self.device_index, address, size_bytes)

    def address_of_new(self, size_bytes: int, make: Callable[[], int]) -> int | None:
        """Make memory, after freeing what is kept unused if it must be: None if there is no room, 0 for no bytes."""
        _FREES.flush()
        for free_some in (self.give_back_unused, lambda: None):
            try:
                with _Current(self.device_index, f"allocating {size_bytes} bytes"):
                    return int(make()) if size_bytes else 0
            except CardError as error:
                if getattr(error.__cause__, "status", None) != _MEMORY_EXHAUSTED:
                    raise
            free_some()
        return None

    def stream(self, *, low_priority: bool = False) -> Stream:
        """Make a stream that does not wait for the default one; `low_priority` gives way to all that are not."""
        # Lower numbers go first, and 0 is the last, torch's own streams among them.
        return Stream(self.device_index, 0 if low_priority else -1)

    def launch(self, kernel: str, grid: tuple[int, int], params: Sequence[ctypes.Structure], stream: Stream) -> None:
        """Launch `grid` blocks of THREADS_PER_BLOCK threads, at least one. The structures are copied at once."""
        function, pointers = int(self.kernels[kernel].ptr), pointers_to(params)
        address = ctypes.addressof(pointers)
        with _Current(self.device_index, f"launching {kernel} with {grid[0]} x {grid[1]} blocks"):
            driver.launchKernel(function, grid[0], grid[1], 1, THREADS_PER_BLOCK, 1, 1, 0, stream.pointer, address, 0)

    def copy_to_card(self, target: int, source: Memory, first: int, size_bytes: int, stream: Stream) -> None:
        """Copy source.array[first : first + size_bytes], of pinned memory, to the address `target`."""
        self._copy(target, source.address + first, size_bytes, stream)

    def copy_to_host(self, target: Memory, first: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Copy from the address `source` to target.array[first : first + size_bytes], of pinned memory."""
        self._copy(target.address + first, source, size_bytes, stream)

    def _copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        if size_bytes:
            with _Current(self.device_index, f"copying {size_bytes} bytes"):
                # Default: the addresses say by themselves on which side they are.
                runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream.pointer)

    def zero(self, target: int, size_bytes: int, stream: Stream) -> None:
        """Fill bytes from the address `target` on with zeros."""
        if size_bytes:
            with _Current(self.device_index, f"zeroing {size_bytes} bytes"):
                runtime.memsetAsync(target, 0, size_bytes, stream.pointer)

    def tensor(self, memory: Memory, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of memory from byte `first` on; it does not keep the memory alive."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        with _Current(self.device_index, "viewing memory"):
            unowned = cupy.cuda.UnownedMemory(memory.address + first, size_bytes, memory, self.device_index)
            array = cupy.ndarray((size_bytes,), dtype=np.uint8, memptr=cupy.cuda.MemoryPointer(unowned, 0))
            # -1: no order is asked for. Else CuPy would make torch's stream wait for CuPy's, which ends a capture.
            view: torch.Tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
            return view.view(dtype).view(shape)

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Send this thread's torch operations to the stream while the block runs.

        None may wait for the whole device (`torch.cuda.synchronize`) while a stream of it is captured anywhere.
        """
        return torch.cuda.stream(stream.for_torch)

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Record what `work` puts on the stream, which must be no allocation of this class and no synchronisation.

        `work` has run once outside before, so that nothing is compiled or chosen during the capture. Addresses and
        launch shapes are fixed by it; only what is in memory may change between replays. There is one capture at a time
        in a process: others wait for it.
        """
        with _FREES.alone(), ExitStack() as stack, torch.cuda.stream(stream.for_torch):
            if gc.isenabled():
                # What garbage holds of CUDA must not be freed by a thread that captures.
                gc.disable()
                stack.callback(gc.enable)
            if not stream.graphs:  # The allocator does not take up a pool again that no graph uses any more.
                stream.graph_pool = torch.cuda.graph_pool_handle()
            # So that cuBLAS makes new workspaces, in the graphs' memory, which nothing else is given while a graph
            # lives. A graph knows its workspace's address, and torch frees a stream's workspaces as soon as one of its
            # graphs ends (pytorch/pytorch#193402).
            torch._C._cuda_clearCublasWorkspaces()
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin(pool=stream.graph_pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    # The stream must not go on capturing. That the end fails too says no more than the error does.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException as error:
                # Its state is unknown: neither this graph nor its pool nor the stream's handle is used again.
                _broken_graphs.append(graph)
                # A capture that CUDA gave up ends in torch's allocator only by this; before, that gives nothing back.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(stream.device_index, stream.graph_pool)
                stream.graphs.clear()
                stream.give_back.detach()
                if isinstance(error, RuntimeError):
                    raise CardError(f"a graph can't be captured: {error}") from error
                raise
            captured = Graph(graph, stream)
            stream.graphs.add(captured)
        return captured


@dataclass(frozen=True, slots=True)
class Cards:
    """All cards of a process, by number. `name` is for people: `8 x NVIDIA H100 80GB HBM3`.

    `peer_access`: whether every card reads every other's memory. If not, no row may be on only one card.
    """

    cards: Sequence[Card]
    peer_access: bool
    name: str

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        """Compile more kernels, for all cards. Idempotent. Raise CardError if they do not compile."""
        for card in self.cards:
            card.kernels = card.kernels | _compiled(card.device_index, source, tuple(kernels))

    def allocate_pinned(self, size_bytes: int) -> Memory:
        """Allocate memory of the host, for all cards. Raise MemoryBudgetError if it has not as much."""
        card, flags = self.cards[0], runtime.hostAllocPortable | runtime.hostAllocMapped
        address = card.address_of_new(size_bytes, lambda: runtime.hostAlloc(size_bytes, flags))
        if address is None:
            raise MemoryBudgetError(f"the host can't lock {size_bytes} bytes of memory for cards")
        return Memory(runtime.freeHost, card.device_index, address, size_bytes)


@cache
def _compiled(device: int, source: Path, kernels: tuple[str, ...]) -> dict[str, Any]:
    """Compile kernels for a device, or read them from CuPy's cache on disk. Code is unloaded with its last function."""
    with _Current(device, f"compiling {source.name}"):
        code = source.read_text(encoding="utf-8")
        module = cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")
        try:
            return {name: module.get_function(name).kernel for name in kernels}
        except (compiler.CompileException, OSError, RuntimeError) as error:
            raise CardError(f"device {device}: the kernels can't be compiled: {error}") from error


def usable_devices() -> int:
    """Return how many devices this process sees, at least 1. Their compute capability is not checked.

    Raises:
        CardsUnavailableError: naming what is missing.
    """
    if torch.version.cuda is None:
        raise CardsUnavailableError(f"torch {torch.__version__} is built without CUDA: install one with it")
    try:
        count = int(runtime.getDeviceCount())
        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        raise CardsUnavailableError(
            f"no device can be used: {error}. CuPy {cupy.__version__} is built for CUDA "
            f"{runtime.runtimeGetVersion() // 1000}; a driver for CUDA 12 needs cupy-cuda12x in its place"
        ) from error
    if count == 0 or not torch.cuda.is_available():
        raise CardsUnavailableError(f"no device can be used: CuPy sees {count}, torch {torch.cuda.device_count()}")
    return count


def open_cupy_cards(devices: Sequence[int]) -> Cards:
    """Open a card on each of these devices, which may be named several times: contexts, kernels, peer access.

    Raises:
        CardsUnavailableError: a device is too old.
        CardError: CUDA failed, or the kernels do not compile.
    """
    distinct = list(dict.fromkeys(devices))
    for device in distinct:
        if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise CardsUnavailableError(f"device {device} ({name}) is older than compute capability 8.0")
    cards = [Card(number, device) for number, device in enumerate(devices)]
    access = [_enable_peer_access(reader, owner) for reader in distinct for owner in distinct if reader != owner]
    kinds = Counter(map(torch.cuda.get_device_name, distinct))
    name = " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return Cards(cards, all(access), name if distinct == list(devices) else f"{len(cards)} logical cards on {name}")


def _enable_peer_access(reader: int, owner: int) -> bool:
    try:
        with _Current(reader, f"access to the memory of device {owner}"):
            if runtime.deviceCanAccessPeer(reader, owner):
                runtime.deviceEnablePeerAccess(owner)
                return True
    except CardError as error:
        if getattr(error.__cause__, "status", None) == _PEER_ACCESS_ALREADY_ENABLED:
            return True
        logger.warning("%s", error)
    return False
