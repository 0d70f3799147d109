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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import cupy
import numpy as np
import numpy.typing as npt
import torch
from cupy.cuda import compiler, driver, nvrtc, runtime

from shard_node.cuda.cards import CardEvent, Cards, DeferredFrees, Graph, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import MAX_CARDS, POOL_KERNELS, THREADS_PER_BLOCK, WRITE_KERNEL, pointers_to
from shard_node.errors import CardError, CardsUnavailableError, DeviceChoiceError, MemoryBudgetError

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
# Handles that nobody holds, by device, and those of streams by priority. They are never destroyed: torch keeps memory
# and workspaces by a stream's handle, and CUDA may give a new stream the handle of a destroyed one.
_SPARE_EVENTS: Final[dict[int, deque[int]]] = {}
_SPARE_STREAMS: Final[dict[int, dict[int, deque[int]]]] = {}
# torch's allocator goes on asking a graph whose capture could not be ended, so such a one is never let go.
_broken_graphs: list[torch.cuda.CUDAGraph] = []

T = TypeVar("T")


def usable_devices() -> int:
    """Return how many devices this process sees, at least 1. Their compute capability is not looked at.

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
        CardsUnavailableError: this process can't use a GPU, or one is too old.
        DeviceChoiceError: there is no such device, or as many cards can't be.
        CardError: CUDA failed, or the kernels do not compile.
    """
    available = usable_devices()
    if not 1 <= len(devices) <= MAX_CARDS:
        raise DeviceChoiceError(f"{len(devices)} cards: 1..{MAX_CARDS} are allowed")
    for device in devices:
        if not 0 <= device < available:
            raise DeviceChoiceError(f"there is no device {device}; this process sees 0..{available - 1}")
        if (capability := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
            raise CardsUnavailableError(
                f"device {device} ({torch.cuda.get_device_name(device)}) has compute capability "
                f"{'.'.join(map(str, capability))}; the kernels need {'.'.join(map(str, OLDEST_CAPABILITY))} or newer"
            )
    opened = {index: _Device(index) for index in dict.fromkeys(devices)}
    return _CupyCards([_CupyCard(number, opened[index]) for number, index in enumerate(devices)])


class _CupyCards:
    def __init__(self, cards: Sequence[_CupyCard]) -> None:
        self.cards = tuple(cards)
        devices = list(dict.fromkeys(card.device for card in cards))
        self.peer_access = _enable_peer_access(devices)
        kinds = Counter(torch.cuda.get_device_name(device.index) for device in devices)
        named = " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
        self.name = named if len(devices) == len(cards) else f"{len(cards)} logical cards on {named}"

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        for device in {card.device for card in self.cards}:
            device.load_kernels(source, kernels)

    def allocate_pinned(self, size_bytes: int) -> _CupyPinnedMemory:
        return self.cards[0].device.allocate_pinned(size_bytes)


def _enable_peer_access(devices: Sequence[_Device]) -> bool:
    """Lets all devices read each other's memory, as far as that can be; whether all do. What fails is logged."""
    complete = True
    for reader in devices:
        for owner in devices:
            if reader is owner:
                continue
            try:
                with reader.current(f"access to the memory of device {owner.index}"):
                    if not runtime.deviceCanAccessPeer(reader.index, owner.index):
                        raise CardError(f"device {reader.index} has no way to the memory of device {owner.index}")
                    runtime.deviceEnablePeerAccess(owner.index)
            except CardError as error:
                if _cuda_status(error) != _PEER_ACCESS_ALREADY_ENABLED:
                    logger.warning("%s", error)
                    complete = False
    return complete


class _CupyCard:
    """A device, or a part of one."""

    def __init__(self, number: int, device: _Device) -> None:
        self.number = number
        self.device = device
        self.device_index = device.index
        self.torch_device = device.torch_device
        self.total_bytes = device.total_bytes

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def give_back_unused(self) -> None:
        self.device.give_back_unused()

    def allocate(self, size_bytes: int) -> _CupyMemory:
        return self.device.allocate(size_bytes)

    def stream(self, *, low_priority: bool = False) -> _CupyStream:
        return _CupyStream(self.device, LOW_PRIORITY if low_priority else LANE_PRIORITY)

    def launch(self, kernel: str, grid: tuple[int, int], params: Sequence[ctypes.Structure], stream: Stream) -> None:
        # The parameters themselves are copied by the driver before it returns.
        pointers = pointers_to(params)
        address = ctypes.addressof(pointers)
        function = self.device.kernels[kernel]
        with self.device.current(f"launching {kernel} with {grid[0]} x {grid[1]} blocks"):
            driver.launchKernel(function, grid[0], grid[1], 1, THREADS_PER_BLOCK, 1, 1, 0, stream.pointer, address, 0)

    def copy_to_card(self, target: int, source: PinnedMemory, first: int, size_bytes: int, stream: Stream) -> None:
        self._copy(target, _address_within(source, first, size_bytes), size_bytes, stream)

    def copy_to_host(self, target: PinnedMemory, first: int, source: int, size_bytes: int, stream: Stream) -> None:
        self._copy(_address_within(target, first, size_bytes), source, size_bytes, stream)

    def _copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        if size_bytes:
            with self.device.current(f"copying {size_bytes} bytes"):
                # Default: the addresses say by themselves on which side they are.
                runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream.pointer)

    def zero(self, target: int, size_bytes: int, stream: Stream) -> None:
        if size_bytes:
            with self.device.current(f"zeroing {size_bytes} bytes"):
                runtime.memsetAsync(target, 0, size_bytes, stream.pointer)

    def tensor(self, memory: Memory, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        address = _address_within(memory, first, size_bytes)
        if address % dtype.itemsize:
            raise CardError(f"byte {first} of memory is not where a {dtype} can lie")
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        with self.device.current("viewing memory"):
            return _view(address, size_bytes, memory, self.device.index).view(dtype).view(shape)

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(_made_here(stream, _CupyStream).for_torch)

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        return _capture(_made_here(stream, _CupyStream), work)


def _view(address: int, size_bytes: int, owner: object, device: int) -> torch.Tensor:
    """uint8 [size_bytes], at least 1: memory of a device, or pinned memory, as torch sees it; it keeps the owner."""
    memory = cupy.cuda.UnownedMemory(address, size_bytes, owner, device)
    array = cupy.ndarray((size_bytes,), dtype=np.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    # -1: no order is asked for. Else CuPy would make torch's stream wait for CuPy's, which ends a capture.
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
    return tensor


def _made_here(thing: object, kind: type[T]) -> T:
    if not isinstance(thing, kind):
        raise CardError(f"{type(thing).__name__} is of other cards: it must be a {kind.__name__}")
    return thing


# ---------------------------------------------------------------------------------------------------------------------
# Devices and their memory


class _Current:
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
    """CUDA's number of what went wrong, if it was CUDA's."""
    status = getattr(error.__cause__, "status", None)
    return None if status is None else int(status)


class _Device:
    """One device, shared by its logical cards: kernels, memory, and handles of events and streams that nobody holds.

    Raises:
        CardError: CUDA failed, or the kernels do not compile.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        with self.current("opening it"):
            self.total_bytes = int(runtime.memGetInfo()[1])
        # The functions are kept, as the code is unloaded with the last of them.
        self._functions: dict[str, Any] = {}
        self.kernels: dict[str, int] = {}
        self.load_kernels(_SOURCE, _KERNELS)
        self.spare_events = _SPARE_EVENTS.setdefault(index, deque())
        self.spare_streams = _SPARE_STREAMS.setdefault(index, {})

    def load_kernels(self, source: Path, kernels: Sequence[str]) -> None:
        """Compile kernels, or take them from CuPy's cache on disk, unless it was done before."""
        if self.kernels.keys() >= set(kernels):
            return
        with self.current(f"compiling {source.name}"):
            code = source.read_text(encoding="utf-8")
            module = cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")
            try:
                compiled = {name: module.get_function(name).kernel for name in kernels}
            except (compiler.CompileException, OSError, RuntimeError) as error:
                raise CardError(f"device {self.index}: the kernels can't be compiled: {error}") from error
        self._functions |= compiled
        self.kernels |= {name: int(function.ptr) for name, function in compiled.items()}

    def current(self, action: str) -> _Current:
        """Return a context within which the device is current; `action` is for the message of CardError."""
        return _Current(self.index, action)

    def allocate(self, size_bytes: int) -> _CupyMemory:
        """By cudaMalloc, outside of every pool, so that peers have access."""

        def make() -> int:
            with self.current(f"allocating {size_bytes} bytes"):
                return int(runtime.malloc(size_bytes))

        address = self._address_of_new(make) if size_bytes else 0
        if address is None:
            raise MemoryBudgetError(
                f"{size_bytes} bytes can't be allocated on device {self.index}: {self.free_bytes()} of "
                f"{self.total_bytes} are free"
            )
        return _CupyMemory(_free, self, address, size_bytes)

    def allocate_pinned(self, size_bytes: int) -> _CupyPinnedMemory:
        """By cudaHostAlloc, for all devices."""
        flags = runtime.hostAllocPortable | runtime.hostAllocMapped

        def make() -> int:
            with self.current(f"allocating {size_bytes} bytes of pinned memory"):
                return int(runtime.hostAlloc(size_bytes, flags))

        address = self._address_of_new(make) if size_bytes else 0
        if address is None:
            raise MemoryBudgetError(f"the host can't lock {size_bytes} bytes of memory for cards")
        return _CupyPinnedMemory(_free_pinned, self, address, size_bytes)

    def _address_of_new(self, make: Callable[[], int]) -> int | None:
        """Make memory, of what is freed by now and, if that is not enough, of all that is kept; None if it isn't."""
        _FREES.settle()
        for again in (False, True):
            try:
                return make()
            except CardError as error:
                if _cuda_status(error) != _OUT_OF_MEMORY:
                    raise
            if not again:
                self.give_back_unused()
        return None

    def free_bytes(self) -> int:
        """Return what torch's allocator keeps for later counts as used."""
        with self.current("asking for its memory"):
            return int(runtime.memGetInfo()[0])

    def give_back_unused(self) -> None:
        """Has torch's allocator let go of what it keeps for later, on all devices. Waits for them, and for captures."""
        try:
            with _FREES.alone(), self.current("giving back unused memory"):
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CardError(f"device {self.index}: unused memory can't be given back: {error}") from error


class _CupyMemory:
    """Bytes that are given back by `free`, or when nobody holds them any more. Address 0 for no bytes."""

    def __init__(
        self, release: Callable[[_Device, int, int], None], device: _Device, address: int, size_bytes: int
    ) -> None:
        self.address, self.size_bytes = address, size_bytes
        self._release = weakref.finalize(self, _FREES.free, partial(release, device, address, size_bytes))
        self._release.atexit = False

    @property
    def freed(self) -> bool:
        return not self._release.alive

    def free(self) -> None:
        """Wait for the device, as cudaFree and cudaFreeHost do; but not for a capture, which does this at its end."""
        self._release()


class _CupyPinnedMemory(_CupyMemory):
    """At one address for the host and all cards."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """It keeps the memory, but no view may be used after `free`."""
        if self.freed:
            raise CardError(f"pinned memory of {self.size_bytes} bytes was given back")
        if not self.size_bytes:
            return np.empty(0, np.uint8)
        held = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        held._owner = self  # type: ignore[attr-defined]  # The array keeps `held`, which keeps the memory.
        return np.frombuffer(memoryview(held), np.uint8)


def _free(device: _Device, address: int, size_bytes: int) -> None:
    if address:
        with device.current(f"freeing {size_bytes} bytes"):
            runtime.free(address)


def _free_pinned(device: _Device, address: int, size_bytes: int) -> None:
    if address:
        with device.current(f"freeing {size_bytes} bytes of pinned memory"):
            runtime.freeHost(address)


def _address_within(memory: Memory, first: int, size_bytes: int) -> int:
    """Return the address of byte `first` of memory with size_bytes from there on. Raises CardError if it has not."""
    memory = _made_here(memory, _CupyMemory)
    if memory.freed or not 0 <= first <= first + size_bytes <= memory.size_bytes:
        state = "that was given back" if memory.freed else f"of {memory.size_bytes} bytes"
        raise CardError(f"bytes {first}..{first + size_bytes} are not within memory {state}")
    return memory.address + first


# ---------------------------------------------------------------------------------------------------------------------
# Streams, events and graphs


class _CupyEvent:
    """A moment on a stream.

    Its handle is recorded again when nobody holds the event any more. Waits that were put on streams before are for the
    moment that they were put there for (cudaStreamWaitEvent).
    """

    def __init__(self, device: _Device, pointer: int) -> None:
        self._device, self.pointer = device, pointer

    def synchronize(self) -> None:
        """Without the interpreter lock, but not without the processor: it spins."""
        with self._device.current("waiting for an event"):
            runtime.eventSynchronize(self.pointer)

    @property
    def done(self) -> bool:
        """Raises CardError if work before it failed."""
        with self._device.current("asking an event"):
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
        self._device.spare_events.append(self.pointer)


class _CupyStream:
    """Work of one card, in order. It neither waits for the default stream nor is waited for by it.

    Its handle is used again when nobody holds the stream any more: new ones with every version would take more and more
    of the card, by what torch keeps for each.

    Attributes:
        device_index: of its device.
        for_torch: the same stream.
        graphs: that were captured on it and are still there. They share memory.
        graph_pool: where torch's allocator takes it from.
    """

    def __init__(self, device: _Device, priority: int) -> None:
        self._device, self.device_index = device, device.index
        spare = device.spare_streams.setdefault(priority, deque())
        try:
            self.pointer = spare.popleft()
        except IndexError:
            with device.current("making a stream"):
                self.pointer = int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, priority))
        self._give_back = weakref.finalize(self, spare.append, self.pointer)
        self._give_back.atexit = False
        self.for_torch: torch.cuda.Stream = torch.cuda.ExternalStream(self.pointer, device.torch_device)  # type: ignore[no-untyped-call]
        self.graphs: weakref.WeakSet[_CupyGraph] = weakref.WeakSet()
        self.graph_pool: Any = None

    def keep_handle(self) -> None:
        """Never uses the handle again after this stream: nobody knows what state it is in."""
        self._give_back.detach()

    def synchronize(self) -> None:
        """Raise CardError if work on it failed."""
        with self._device.current("waiting for a stream"):
            runtime.streamSynchronize(self.pointer)

    def record(self) -> _CupyEvent:
        with self._device.current("recording an event"):
            try:
                pointer = self._device.spare_events.popleft()
            except IndexError:
                pointer = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))
            event = _CupyEvent(self._device, pointer)
            runtime.eventRecord(pointer, self.pointer)
        return event

    def wait(self, event: CardEvent) -> None:
        with self._device.current("waiting for another stream"):
            runtime.streamWaitEvent(self.pointer, _made_here(event, _CupyEvent).pointer, 0)


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


def _capture(on: _CupyStream, work: Callable[[], None]) -> _CupyGraph:
    """Record what `work` puts on the stream. There is one capture at a time in a process: others wait for it.

    Raises:
        CardError: `work` did what can't be captured.
    """
    with _FREES.alone(), _no_collection(), torch.cuda.stream(on.for_torch):
        if not on.graphs:  # The allocator does not take up a pool again that no graph uses any more.
            on.graph_pool = torch.cuda.graph_pool_handle()
        # Has cuBLAS take new workspaces for what comes, so that those of a graph lie in the graphs' own memory. A graph
        # knows its workspace's address, and torch gives a stream's workspaces back as soon as one of its graphs ends
        # (pytorch/pytorch#193402). From the graphs' memory nobody else is given anything while one of them lives.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=on.graph_pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                # The stream must not go on capturing. That the end fails too says no more than the error does.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException as error:
            # Nobody knows what state it is in: neither this graph nor its pool is used again.
            _broken_graphs.append(graph)
            # A capture that CUDA gave up ends in torch's allocator only by this; before, that gives nothing back.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(on.device_index, on.graph_pool)
            on.graphs.clear()
            on.keep_handle()
            if isinstance(error, RuntimeError):
                raise CardError(f"a graph can't be captured: {error}") from error
            raise
        captured = _CupyGraph(graph, on)
        on.graphs.add(captured)
    return captured


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected within: if it holds things of CUDA, a thread that captures must not free them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
