"""Worker processes that share a port and say, to whoever connects, which of them it is connected to."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
from collections import Counter
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from serving.api.listening import Accepted, ConnectionListener, Place
from shard_node.byte_budget import ByteBudget

SPAWN = multiprocessing.get_context("spawn")


class Named(Accepted, asyncio.Protocol):
    """Says which worker it is of, and stays open."""

    def __init__(self, front: NamedListener, address: str) -> None:
        self.front, self.address = front, address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.has_connected = True
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes([self.front.worker]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.front.lose(self)


class NamedListener(ConnectionListener[Named]):
    """Takes whoever connects."""

    def __init__(self, worker: int) -> None:
        super().__init__(ByteBudget(1 << 20), 1000, 5.0, None)
        self.worker = worker

    def new_connection(self, address: str) -> Named:
        return Named(self, address)

    def idle_connections(self) -> list[Named]:
        return []

    def note(self, kind: str) -> None:
        pass


def run_worker(place: Place, port: int, ready: Event, stop: Event) -> None:
    """Listen until told to stop."""

    async def main() -> None:
        front = NamedListener(place.worker)
        front.listen("127.0.0.1", port, "names", place)
        ready.set()
        await asyncio.to_thread(stop.wait)
        await front.stop_listening(1.0)

    asyncio.run(main())


class Workers:
    """Processes that share a port."""

    def __init__(self, folder: Path, count: int) -> None:
        with socket.create_server(("127.0.0.1", 0), reuse_port=True) as held:
            self.port = held.getsockname()[1]
        self.folder, self.count = folder, count
        self.running = [self.start(worker) for worker in range(count)]

    def start(self, worker: int) -> tuple[BaseProcess, Event]:
        """Start one, and return once it listens."""
        ready, stop = SPAWN.Event(), SPAWN.Event()
        arguments = (Place(worker, self.count, self.folder), self.port, ready, stop)
        process = SPAWN.Process(target=run_worker, args=arguments, daemon=True)
        process.start()
        assert ready.wait(60)
        return process, stop

    def connect(self, stack: contextlib.ExitStack, count: int) -> Counter[int]:
        """Open that many connections, and count whose they became."""
        found: Counter[int] = Counter()
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), 20))
            found[client.recv(1)[0]] += 1
        return found

    def close(self) -> None:
        """Kill them all."""
        for process, _ in self.running:
            process.kill()
            process.join()
