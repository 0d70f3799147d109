"""Streams, events and graphs of a device, by CuPy and torch."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import torch

from shard_node.cuda.cards import Event, Stream
from shard_node.cuda.cupy_api import CUDA_ERRORS, NOT_READY, runtime
from shard_node.cuda.cupy_device import CAPTURING, CupyDevice
from shard_node.errors import CardError

# Lower numbers go first, and 0 is the last, torch's own streams among them.
LANE_PRIORITY: Final = -1
LOW_PRIORITY: Final = 0

T = TypeVar("T")

# torch's allocator goes on asking a graph whose capture could not be ended, so such a one is never let go.
_broken_graphs: list[torch.cuda.CUDAGraph] = []


class CupyEvent:
    """A moment on a stream.

    Its handle is recorded again when nobody holds the event any more. Waits that were put on streams before are for the
    moment that they were put there for (cudaStreamWaitEvent).
    """

    def __init__(self, device: CupyDevice, pointer: int) -> None:
        self._device, self.pointer = device, pointer

    def synchronize(self) -> None:
        """Blocks until it has passed, without the interpreter lock, but not without the processor: it spins."""
        with self._device.current("waiting for an event"):
            runtime.eventSynchronize(self.pointer)

    @property
    def done(self) -> bool:
        """Whether it has passed. Raises CardError if work before it failed."""
        with self._device.current("asking an event"):
            status = int(runtime.eventQuery(self.pointer))
            try:
                runtime.check_status(status)
            except CUDA_ERRORS:
                # CUDA keeps "not ready" as the thread's last error, for which torch would take it at its next launch;
                # checking the status has cleared it.
                if status != NOT_READY:
                    raise
        return status != NOT_READY

    def __del__(self) -> None:
        self._device.spare_events.append(self.pointer)


class CupyStream:
    """Work of one card, in order. It neither waits for the default stream nor is waited for by it.

    Its handle is used again when nobody holds the stream any more: by the handle torch keeps memory for later, and
    workspaces for ever, so new handles with every version would take more and more of the card.

    Attributes:
        for_torch: the same stream.
        graphs: that were captured on it and are still there. They share memory.
        graph_pool: where torch's allocator takes it from.
    """

    def __init__(self, device: CupyDevice, priority: int) -> None:
        self._device = device
        spare = device.spare_streams.setdefault(priority, deque())
        try:
            self._pointer = spare.popleft()
        except IndexError:
            with device.current("making a stream"):
                self._pointer = int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, priority))
        self._give_back = weakref.finalize(self, spare.append, self._pointer)
        self._give_back.atexit = False
        self.for_torch: torch.cuda.Stream = torch.cuda.ExternalStream(self._pointer, device.torch_device)  # type: ignore[no-untyped-call]
        self.graphs: weakref.WeakSet[CupyGraph] = weakref.WeakSet()
        self.graph_pool: Any = None

    @property
    def pointer(self) -> int:
        """cudaStream_t."""
        return self._pointer

    def keep_handle(self) -> None:
        """Never uses the handle again after this stream: nobody knows what state it is in."""
        self._give_back.detach()

    def synchronize(self) -> None:
        """Blocks until all of it is done, without the interpreter lock. Raises CardError if work on it failed."""
        with self._device.current("waiting for a stream"):
            runtime.streamSynchronize(self._pointer)

    def record(self) -> CupyEvent:
        """The moment when all that was put on it is done."""
        with self._device.current("recording an event"):
            try:
                pointer = self._device.spare_events.popleft()
            except IndexError:
                pointer = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))
            event = CupyEvent(self._device, pointer)
            runtime.eventRecord(pointer, self._pointer)
        return event

    def wait(self, event: Event) -> None:
        """What comes after waits for the event, of any card."""
        with self._device.current("waiting for another stream"):
            runtime.streamWaitEvent(self._pointer, made_here(event, CupyEvent).pointer, 0)


class CupyGraph:
    """A torch graph, as the memory of models comes from torch's allocator, which must know of a capture."""

    def __init__(self, graph: torch.cuda.CUDAGraph, captured_on: CupyStream) -> None:
        self._graph = graph
        self._captured_on = captured_on

    def __del__(self) -> None:
        # Not beside a capture: torch keeps a list of a device's graphs without a lock.
        with CAPTURING:
            del self._graph

    def replay(self, stream: Stream) -> None:
        """Puts it on the stream, which must be the one it was captured on: graphs of a stream share memory.

        Raises:
            CardError: it is another stream.
        """
        if stream is not self._captured_on:
            raise CardError("a graph must be replayed on the stream that it was captured on")
        with torch.cuda.stream(self._captured_on.for_torch):
            self._graph.replay()


def capture(on: CupyStream, work: Callable[[], None]) -> CupyGraph:
    """Records what `work` puts on the stream. There is one capture at a time in a process: others wait for it.

    Raises:
        CardError: `work` did what can't be captured.
    """
    with CAPTURING, _no_collection(), torch.cuda.stream(on.for_torch):
        if not on.graphs:  # The allocator does not take up a pool again that no graph uses any more.
            on.graph_pool = torch.cuda.graph_pool_handle()
        _forget_workspaces()
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
            on.graphs.clear()
            on.keep_handle()
            if isinstance(error, RuntimeError):
                raise CardError(f"a graph can't be captured: {error}") from error
            raise
        captured = CupyGraph(graph, on)
        on.graphs.add(captured)
    return captured


def _forget_workspaces() -> None:
    """Has cuBLAS take new workspaces for what comes, so that those of a graph lie in the graphs' own memory.

    A graph knows its workspace's address, and torch gives a stream's workspaces back as soon as one of the stream's
    graphs ends (pytorch/pytorch#193402). From the graphs' memory nobody else is given anything while one of them lives.
    """
    torch._C._cuda_clearCublasWorkspaces()


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


def made_here(thing: object, kind: type[T]) -> T:
    """The thing, if it is of real cards. Raises CardError if not."""
    if not isinstance(thing, kind):
        raise CardError(f"{type(thing).__name__} is of other cards: it must be a {kind.__name__}")
    return thing
