"""Workers that share a port have as many connections as each other, by real processes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.api.dealing import Dealer, Place
from serving.api.listening import Accepted, Addresses, Front
from serving.errors import ListenError
from serving.limits import RequestLimits

SPAWN = multiprocessing.get_context("spawn")


class Named(Accepted, asyncio.Protocol):
    """Says which worker it is of, and stays open."""

    def __init__(self, front: NamedFront, address: str) -> None:
        self.front, self.address = front, address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.has_connected = True
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes([self.front.worker]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.front.lose(self)


class NamedFront(Front[Named]):
    def __init__(self, worker: int) -> None:
        super().__init__(Addresses(RequestLimits(), time.monotonic), 1000, 5.0, None)
        self.worker = worker

    def new_connection(self, address: str) -> Named:
        return Named(self, address)

    def idle_connections(self) -> list[Named]:
        return []

    def note(self, kind: str) -> None:
        pass


def run_worker(place: Place, port: int, ready, stop) -> None:
    async def main() -> None:
        front = NamedFront(place.worker)
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

    def start(self, worker: int):
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
        for process, _ in self.running:
            process.kill()
            process.join()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Workers]:
    # Longer than a socket's address may be.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    workers = Workers(folder, 3)
    yield workers
    workers.close()


def test_connections_are_dealt_out_evenly_and_refilled_where_they_end(three: Workers) -> None:
    with contextlib.ExitStack() as kept:
        with contextlib.ExitStack() as short:
            assert sorted(three.connect(short, 30).values()) == [10, 10, 10]
        # Those have gone; what comes is even again, however they went.
        time.sleep(0.2)
        assert sorted(three.connect(kept, 31).values()) == [10, 10, 11]


def test_what_a_dead_worker_had_goes_to_the_others_and_its_successor_catches_up(three: Workers) -> None:
    with contextlib.ExitStack() as kept:
        assert sorted(three.connect(kept, 6).values()) == [2, 2, 2]
        process, _ = three.running[1]
        process.kill()
        process.join()
        assert sorted(three.connect(kept, 6).items()) == [(0, 3), (2, 3)]
        three.running[1] = three.start(1)
        found = three.connect(kept, 8)
        assert found[1] >= 5
        assert found.total() == 8


def test_a_worker_that_stops_loses_no_connection(three: Workers) -> None:
    process, stop = three.running[0]
    with contextlib.ExitStack() as kept:
        found = three.connect(kept, 9)
        stop.set()
        found += three.connect(kept, 60)
        process.join(20)
        assert process.exitcode == 0
        found += three.connect(kept, 9)
    assert found.total() == 78
    assert abs(found[1] - found[2]) <= 1


def test_a_place_is_told_in_an_environment_variable(monkeypatch, tmp_path: Path) -> None:
    place = Place(2, 4, tmp_path)
    monkeypatch.setenv("SHARDRANK_WORKER", str(place))
    assert Place.here() == place
    monkeypatch.delenv("SHARDRANK_WORKER")
    assert Place.here() is None


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ListenError, match="workers can't share connections in"):
            Dealer(Place(0, 2, tmp_path / "missing"), 1, os.close)

    asyncio.run(scenario())
