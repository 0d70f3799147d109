"""Real cards, by CuPy and torch: whole devices, or several logical cards on one. The only module that imports CuPy.

Of CuPy the engine uses thin calls of CUDA's runtime and driver, which take and give plain integers; the compiler; and
arrays that hand memory to torch by DLPack. It does not use CuPy's pools, streams and current stream. CuPy and torch
share each device's primary context, so the streams, events and memory of one are valid in the other.
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
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import cupy
import numpy as np
import numpy.typing as npt
import torch
from cupy.cuda import compiler, driver, nvrtc, runtime

from shard_node.cuda.cards import CardEvent, Cards, DeferredFrees, Graph, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import POOL_KERNELS, THREADS_PER_BLOCK, WRITE_KERNEL, pointers_to
from shard_node.errors import CardError, CardsUnavailableError, MemoryBudgetError

logger = logging.getLogger(__name__)

OLDEST_CAPABILITY: Final = (8, 0)
"""Compute capability: the kernels convert to bf16 by an instruction that came with it."""
# Lower numbers go first, and 0 is the last, torch's own streams among them.
LANE_PRIORITY: Final = -1
LOW_PRIORITY: Final = 0

_CUDA_ERRORS: Final = (runtime.CUDARuntimeError, driver.CUDADriverError)
# Of cudaError_t and CUresult, which number them alike where both have them. CuPy has no names for them.
_OUT_OF_MEMORY: Final = 2
_NOT_READY: Final = 600
_PEER_ACCESS_ALREADY_ENABLED: Final = 704
_SOURCE: Final = Path(__file__).with_name("kernels.cu")
_KERNELS: Final = (*POOL_KERNELS.values(), WRITE_KERNEL)
# There may be one capture at a time in a process, and no memory or graph may end beside it.
_FREES: Final = DeferredFrees()
# Unused handles, of events by device, of streams by device and priority. They are never destroyed: torch keeps memory
# and workspaces by a stream's handle, and CUDA may give a new stream the handle of a destroyed one.
_SPARE_EVENTS: Final[defaultdict[int, deque[int]]] = defaultdict(deque)
_SPARE_STREAMS: Final[defaultdict[tuple[int, int], deque[int]]] = defaultdict(deque)
# torch's allocator goes on asking a graph whose capture could not be ended, so such a one is never let go.
_broken_graphs: list[torch.cuda.CUDAGraph] = []


def usable_devices() -> int:
    """Return how many devices this process sees, at least 1. Their compute capability is not checked.

    Raises:
        CardsUnavailableError: naming what is missing.
    """
    if torch.version.cuda is None:
        raise CardsUnavailableError(f"torch {torch.__version__} is built without CUDA: install one with it")
    try:
        count = int(runtime.getDeviceCount())
    except RuntimeError as error:
        raise CardsUnavailableError(
            f"no device can be used: {error}. CuPy {cupy.__version__} is built for CUDA "
            f"{runtime.runtimeGetVersion() // 1000}; a driver for CUDA 12 needs cupy-cuda12x in its place"
        ) from error
    if count == 0 or not torch.cuda.is_available():
        raise CardsUnavailableError(f"no device can be used: CuPy sees {count}, torch {torch.cuda.device_count()}")
    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        raise CardsUnavailableError(f"the compiler of kernels (NVRTC) can't be loaded: {error}") from error
    return count


def open_cupy_cards(devices: Sequence[int]) -> Cards:
    """Open a card on each of these devices, which may be named several times: contexts, kernels, peer access.

    Raises:
        CardsUnavailableError: a device is too old.
        CardError: CUDA failed, or the kernels do not compile.
    """
    distinct = list(dict.fromkeys(devices))
    for device in distinct:
        if (capability := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
            raise CardsUnavailableError(
                f"device {device} ({torch.cuda.get_device_name(device)}) has compute capability "
                f"{'.'.join(map(str, capability))}; the kernels need {'.'.join(map(str, OLDEST_CAPABILITY))} or newer"
            )
    cards = [_CupyCard(number, device) for number, device in enumerate(devices)]
    access = [_enable_peer_access(reader, owner) for reader in distinct for owner in distinct if reader != owner]
    kinds = Counter(map(torch.cuda.get_device_name, distinct))
    name = " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return Cards(cards, all(access), name if distinct == list(devices) else f"{len(cards)} logical cards on {name}")


def _enable_peer_access(reader: int, owner: int) -> bool:
    """Let a device read another's memory, if that can be, and return whether it does. What fails is logged."""
    try:
        with _Current(reader, f"access to the memory of device {owner}"):
            if not runtime.deviceCanAccessPeer(reader, owner):
                raise CardError(f"device {reader} has no way to the memory of device {owner}")
            runtime.deviceEnablePeerAccess(owner)
    except CardError as error:
        if _cuda_status(error) != _PEER_ACCESS_ALREADY_ENABLED:
            logger.warning("%s", error)
            return False
    return True


@cache
def _compiled(device: int, source: Path, kernels: tuple[str, ...]) -> dict[str, Any]:
    """Compile kernels for a device, or take them from CuPy's cache on disk. Code is unloaded with its last function."""
    with _Current(device, f"compiling {source.name}"):
        code = source.read_text(encoding="utf-8")
        module = cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")
        try:
            return {name: module.get_function(name).kernel for name in kernels}
        except (compiler.CompileException, OSError, RuntimeError) as error:
            raise CardError(f"device {device}: the kernels can't be compiled: {error}") from error


class _CupyCard:
    """A device, or a part of one."""

    def __init__(self, number: int, device: int) -> None:
        self.number, self.device_index = number, device
        self.torch_device = torch.device("cuda", device)
        with self._current("opening it"):
            self.total_bytes = int(runtime.memGetInfo()[1])
        self._kernels: dict[str, int] = {}
        self.load_kernels(_SOURCE, _KERNELS)

    def _current(self, action: str) -> _Current:
        return _Current(self.device_index, action)

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        compiled = _compiled(self.device_index, source, tuple(kernels))
        self._kernels |= {name: int(function.ptr) for name, function in compiled.items()}

    def free_bytes(self) -> int:
        """Return it by cudaMemGetInfo: what torch's allocator keeps for later counts as used."""
        with self._current("asking for its memory"):
            return int(runtime.memGetInfo()[0])

    def give_back_unused(self) -> None:
        """Free what torch's allocator keeps for later, on all devices. Waits for them, and for captures."""
        try:
            with _FREES.alone(), self._current("giving back unused memory"):
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CardError(f"device {self.device_index}: unused memory can't be given back: {error}") from error

    def allocate(self, size_bytes: int) -> _CupyMemory:
        """By cudaMalloc, outside of every pool, so that peers have access."""
        address = self._address_of_new(size_bytes, lambda: runtime.malloc(size_bytes))
        if address is None:
            raise MemoryBudgetError(
                f"{size_bytes} bytes can't be allocated on device {self.device_index}: {self.free_bytes()} of "
                f"{self.total_bytes} are free"
            )
        return _CupyMemory(runtime.free, self.device_index, address, size_bytes)

    def allocate_pinned(self, size_bytes: int) -> _CupyMemory:
        """By cudaHostAlloc, for all devices."""
        flags = runtime.hostAllocPortable | runtime.hostAllocMapped
        address = self._address_of_new(size_bytes, lambda: runtime.hostAlloc(size_bytes, flags))
        if address is None:
            raise MemoryBudgetError(f"the host can't lock {size_bytes} bytes of memory for cards")
        return _CupyMemory(runtime.freeHost, self.device_index, address, size_bytes)

    def _address_of_new(self, size_bytes: int, make: Callable[[], int]) -> int | None:
        """Make memory, after freeing what is kept unused if it must be: None if there is no room, 0 for no bytes."""
        _FREES.settle()
        for is_last in (False, True):
            try:
                with self._current(f"allocating {size_bytes} bytes"):
                    return int(make()) if size_bytes else 0
            except CardError as error:
                if _cuda_status(error) != _OUT_OF_MEMORY:
                    raise
            if not is_last:
                self.give_back_unused()
        return None

    def stream(self, *, low_priority: bool = False) -> _CupyStream:
        return _CupyStream(self.device_index, LOW_PRIORITY if low_priority else LANE_PRIORITY)

    def launch(self, kernel: str, grid: tuple[int, int], params: Sequence[ctypes.Structure], stream: Stream) -> None:
        # The parameters themselves are copied by the driver before it returns.
        pointers = pointers_to(params)
        address = ctypes.addressof(pointers)
        function = self._kernels[kernel]
        with self._current(f"launching {kernel} with {grid[0]} x {grid[1]} blocks"):
            driver.launchKernel(function, grid[0], grid[1], 1, THREADS_PER_BLOCK, 1, 1, 0, stream.pointer, address, 0)

    def copy_to_card(self, target: int, source: PinnedMemory, first: int, size_bytes: int, stream: Stream) -> None:
        self._copy(target, _address_within(source, first, size_bytes), size_bytes, stream)

    def copy_to_host(self, target: PinnedMemory, first: int, source: int, size_bytes: int, stream: Stream) -> None:
        self._copy(_address_within(target, first, size_bytes), source, size_bytes, stream)

    def _copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        if size_bytes:
            with self._current(f"copying {size_bytes} bytes"):
                # Default: the addresses say by themselves on which side they are.
                runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream.pointer)

    def zero(self, target: int, size_bytes: int, stream: Stream) -> None:
        if size_bytes:
            with self._current(f"zeroing {size_bytes} bytes"):
                runtime.memsetAsync(target, 0, size_bytes, stream.pointer)

    def tensor(self, memory: Memory, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        address = _address_within(memory, first, size_bytes)
        if address % dtype.itemsize:
            raise CardError(f"byte {first} of memory is not where a {dtype} can lie")
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        with self._current("viewing memory"):
            unowned = cupy.cuda.UnownedMemory(address, size_bytes, memory, self.device_index)
            array = cupy.ndarray((size_bytes,), dtype=np.uint8, memptr=cupy.cuda.MemoryPointer(unowned, 0))
            # -1: no order is asked for. Else CuPy would make torch's stream wait for CuPy's, which ends a capture.
            view: torch.Tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
            return view.view(dtype).view(shape)

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, _CupyStream)
        return torch.cuda.stream(stream.for_torch)

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """There is one capture at a time in a process: others wait for it."""
        assert isinstance(stream, _CupyStream)
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
            captured = _CupyGraph(graph, stream)
            stream.graphs.add(captured)
        return captured


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous not in (-1, self._index):
            try:
                runtime.setDevice(self._previous)
            except _CUDA_ERRORS as lost:
                error = error or lost
        if isinstance(error, _CUDA_ERRORS):
            raise CardError(f"device {self._index}: {self._action}: {error}") from error


def _cuda_status(error: CardError) -> int | None:
    """Return CUDA's number of the failure, if it was CUDA's."""
    status = getattr(error.__cause__, "status", None)
    return None if status is None else int(status)


class _CupyMemory:
    """Bytes that are freed by `free`, or when nobody holds them any more. Address 0 for no bytes."""

    def __init__(self, release: Callable[[int], object], device: int, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes
        self._release = weakref.finalize(self, _FREES.free, partial(_free, release, device, address, size_bytes))
        self._release.atexit = False

    @property
    def freed(self) -> bool:
        return not self._release.alive

    def free(self) -> None:
        """Wait for the device, as cudaFree and cudaFreeHost do; but not for a capture, which does this at its end."""
        self._release()

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Of pinned memory, which has one address for the host and all cards. No view may be used after `free`."""
        if self.freed:
            raise CardError(f"pinned memory of {self.size_bytes} bytes was freed")
        if not self.size_bytes:
            return np.empty(0, np.uint8)
        held = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        held._owner = self  # type: ignore[attr-defined]  # The array keeps `held`, which keeps the memory.
        return np.frombuffer(memoryview(held), np.uint8)


def _free(release: Callable[[int], object], device: int, address: int, size_bytes: int) -> None:
    if address:
        with _Current(device, f"freeing {size_bytes} bytes"):
            release(address)


def _address_within(memory: Memory, first: int, size_bytes: int) -> int:
    """Return the address of byte `first` of memory; raise CardError if size_bytes from there on are not within it."""
    assert isinstance(memory, _CupyMemory)
    if memory.freed or not 0 <= first <= first + size_bytes <= memory.size_bytes:
        state = "that was freed" if memory.freed else f"of {memory.size_bytes} bytes"
        raise CardError(f"bytes {first}..{first + size_bytes} are not within memory {state}")
    return memory.address + first


class _CupyEvent:
    """A moment on a stream.

    Its handle is recorded again when nobody holds the event any more. Waits that were put on streams before are for the
    moment that they were put there for (cudaStreamWaitEvent).
    """

    def __init__(self, device: int, pointer: int) -> None:
        self._device, self.pointer, self._spare = device, pointer, _SPARE_EVENTS[device]

    def synchronize(self) -> None:
        """Without the interpreter lock, but not without the processor: it spins."""
        with _Current(self._device, "waiting for an event"):
            runtime.eventSynchronize(self.pointer)

    @property
    def done(self) -> bool:
        """Raises CardError if work before it failed."""
        with _Current(self._device, "asking an event"):
            status = int(runtime.eventQuery(self.pointer))
            try:
                runtime.check_status(status)
            except _CUDA_ERRORS:
                # CUDA keeps "not ready" as the thread's last error, for which torch would take it at its next launch;
                # checking the status has cleared it.
                if status != _NOT_READY:
                    raise
        return status != _NOT_READY

    def __del__(self) -> None:
        self._spare.append(self.pointer)


class _CupyStream:
    """Work of one card, in order. It neither waits for the default stream nor is waited for by it.

    Its handle is used again when nobody holds the stream any more: new ones with every version would take more and more
    of the card, by what torch keeps for each.

    Attributes:
        for_torch: the same stream.
        graphs: that were captured on it and are still there. They share memory.
        graph_pool: where torch's allocator takes it from.
        give_back: keeps the handle for another stream.
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
        self.graphs: weakref.WeakSet[_CupyGraph] = weakref.WeakSet()
        self.graph_pool: Any = None

    def synchronize(self) -> None:
        """Raise CardError if work on it failed."""
        with _Current(self.device_index, "waiting for a stream"):
            runtime.streamSynchronize(self.pointer)

    def record(self) -> _CupyEvent:
        with _Current(self.device_index, "recording an event"):
            try:
                pointer = _SPARE_EVENTS[self.device_index].popleft()
            except IndexError:
                pointer = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))
            event = _CupyEvent(self.device_index, pointer)
            runtime.eventRecord(pointer, self.pointer)
        return event

    def wait(self, event: CardEvent) -> None:
        assert isinstance(event, _CupyEvent)
        with _Current(self.device_index, "waiting for another stream"):
            runtime.streamWaitEvent(self.pointer, event.pointer, 0)


class _CupyGraph:
    """A torch graph, as the memory of models comes from torch's allocator, which must know of a capture."""

    def __init__(self, graph: torch.cuda.CUDAGraph, captured_on: _CupyStream) -> None:
        self._captured_on = captured_on
        # Ends where this list is emptied: torch keeps one of a device's graphs without a lock.
        self._graph = [graph]
        weakref.finalize(self, _FREES.free, self._graph.clear).atexit = False

    def replay(self, stream: Stream) -> None:
        if stream is not self._captured_on:
            raise CardError("a graph must be replayed on the stream that it was captured on")
        with torch.cuda.stream(self._captured_on.for_torch):
            self._graph[0].replay()
