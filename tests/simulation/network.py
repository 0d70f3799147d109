"""Links between hosts: delays, losses, duplicates, partitions of one or both directions; and byte streams over them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from tests.simulation.loop import PROCESS, SimulatedLoop
from tests.simulation.processes import Process

CONNECT_TIMEOUT_S = 3.0
RESET_AFTER_S = 4.0
"""Of bytes that nothing acknowledges: UNACKNOWLEDGED_TIMEOUT_MS, and what tells of it."""


class Network:
    """Carries messages between named hosts, each a process or a server outside of the fleet."""

    def __init__(self, loop: SimulatedLoop, random: Random) -> None:
        self._loop, self._random = loop, random
        # Source and target of what lets nothing through. Streams over it are reset once that is noticed.
        self.blocked: set[tuple[str, str]] = set()
        self.slow_s: dict[str, float] = {}
        self.loss = self.duplicates = 0.0
        self.listening: dict[tuple[str, int], tuple[Process, Callable[[], asyncio.BaseProtocol]]] = {}
        self._streams: list[tuple[Stream, Stream]] = []

    def delay_s(self, source: str, target: str) -> float:
        """Draw how long a message takes."""
        slow_s = self.slow_s.get(source, 0.0) + self.slow_s.get(target, 0.0)
        return self._random.expovariate(2000.0) + 0.0001 + slow_s

    def reaches(self, source: str, target: str) -> bool:
        """Return whether messages get through at all."""
        return (source, target) not in self.blocked

    def joins(self, one: str, other: str) -> bool:
        """Return whether messages get through both ways."""
        return self.reaches(one, other) and self.reaches(other, one)

    async def call(self, source: str, target: str, work: Callable[[], Any]) -> Any:
        """Have `work` done at the target, and return or raise what it does. Raises ConnectionError if no answer comes.

        Then it may have been done. Now and then it is done twice, and the first answer is taken.
        """
        random = self._random
        lost = random.random() < self.loss
        if not self.reaches(source, target) or (lost and random.random() < 0.5):
            await asyncio.sleep(random.uniform(0.05, 1.0))
            raise ConnectionError(f"{target} can't be reached")
        await asyncio.sleep(self.delay_s(source, target))
        answer = work()
        if isinstance(answer, Coroutine):
            answer = await answer
        elif self.duplicates and random.random() < self.duplicates:
            with contextlib.suppress(Exception):
                work()
        if not self.reaches(target, source) or lost:
            await asyncio.sleep(random.uniform(0.05, 1.0))
            raise ConnectionError(f"{target} does not answer")
        return answer

    async def connect(self, factory: Callable[[], Any], address: tuple[str, int]) -> Any:
        """Connect the running process to whoever listens at an address."""
        client = PROCESS.get()
        assert client is not None
        host = address[0]
        if not self.joins(client.name, host):
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise TimeoutError(f"{host}: no connection")
        await asyncio.sleep(2 * self.delay_s(client.name, host))
        server, make = self.listening.get(address, (None, None))
        if server is None or make is None or not server.is_running:
            raise ConnectionRefusedError(f"{address} refuses the connection")
        here, there = Stream(self, client, server), Stream(self, server, client)
        here.other, there.other = there, here
        self._streams.append((here, there))
        protocol = factory()
        server.run(there.begin, make)
        here.begin(lambda: protocol)
        return here, protocol

    def closed(self, process: Process) -> None:
        """Reset what a killed process had open, as its operating system does."""
        kept = []
        for pair in self._streams:
            ends = {end.process: end for end in pair}
            if process in ends:
                other = ends[process].other
                if other is not None and self.reaches(process.name, other.process.name):
                    other.lose(ConnectionResetError("connection reset by peer"), self.delay_s("", ""))
                elif other is not None:
                    other.lose(TimeoutError("nothing is acknowledged"), RESET_AFTER_S)
            elif not pair[0].is_closed or not pair[1].is_closed:
                kept.append(pair)
        self._streams = kept


class Stream(asyncio.Transport):
    """One end of a byte stream. What is written arrives in order, in pieces as it was written."""

    def __init__(self, network: Network, process: Process, peer: Process) -> None:
        super().__init__()
        self._network, self.process, self._peer = network, process, peer
        self._loop = network._loop
        self.other: Stream | None = None
        self._protocol: Any = None
        self._context = contextvars.copy_context()
        self._arrives_at = 0.0
        self.is_closed = self._is_lost = False

    def begin(self, factory: Callable[[], Any]) -> None:
        """Have a protocol at this end, which belongs to the process whose code runs."""
        self._context = contextvars.copy_context()
        self._protocol = factory()
        self._protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._peer.name, 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.writelines((data,))

    def writelines(self, buffers: Any) -> None:
        data, network = b"".join(bytes(buffer) for buffer in buffers), self._network
        if self.is_closed or self.other is None:
            return
        source, target = self.process.name, self._peer.name
        if not network.reaches(source, target):
            # Sent again and again, and given up before the partition ends, or in time.
            self._loop.call_later(RESET_AFTER_S, self._resend, data)
            return
        if not network.reaches(target, source):
            self._loop.call_later(RESET_AFTER_S, self._resend, b"")
        self._send(data)

    def _send(self, data: bytes) -> None:
        assert self.other is not None
        network, name = self._network, self.process.name
        at = self._arrives_at = max(self._arrives_at, self._loop.now + network.delay_s(name, self._peer.name))
        self._loop.call_at(at, self.other._take, data, context=self.other._context)

    def _resend(self, data: bytes) -> None:
        if self.is_closed:
            return
        if not self._network.joins(self.process.name, self._peer.name):
            self.lose(TimeoutError("nothing is acknowledged"), 0.0)
        elif data:
            self._send(data)

    def _take(self, data: bytes) -> None:
        if self._is_lost:
            # As a kernel answers what comes for a connection that it has given up.
            if data and self.other is not None and not self.other.is_closed:
                self.other.lose(ConnectionResetError("connection reset by peer"), self._network.delay_s("", ""))
            return
        view = memoryview(data)
        while view and not self._is_lost:
            buffer = self._protocol.get_buffer(len(view))
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self._protocol.buffer_updated(count)
            view = view[count:]

    def lose(self, error: Exception | None, after_s: float) -> None:
        """End it, seen from this end."""
        self.is_closed = True
        self._loop.call_later(after_s, self._lost, error, context=self._context)

    def _lost(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self.is_closed = True
            self._protocol.connection_lost(error)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_closed:
            self.lose(None, 0.0)
            name, peer = self.process.name, self._peer.name
            if self.other is not None and self._network.reaches(name, peer):
                self.other.lose(None, max(self._arrives_at - self._loop.now, 0.0) + self._network.delay_s(name, peer))
