"""The server that is attacked: one of the drill's own, which can be started again, or one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol

import psutil

from loadtest.drill.errors import DrillError
from loadtest.servers import Server, serving
from loadtest.workloads.catalog import BenchShape, bench_spec
from loadtest.workloads.prepare import write_random_snapshot


class TargetConfig(Protocol):
    """Of a drill's settings, what this file needs; `HostileDrillConfig` says what they are."""

    @property
    def shape(self) -> BenchShape:
        """Of the model."""

    @property
    def http(self) -> str | None:
        """HOST:PORT of a server that runs."""

    @property
    def grpc(self) -> str | None:
        """Likewise, its gRPC port."""

    @property
    def process_id(self) -> int | None:
        """Of its process."""


class Target:
    """A server under attack.

    Args:
        shape: of its model.
        snapshot: what it serves; None for one that runs already.
        folder: for its logs.

    Attributes:
        host, http_port, grpc_port: where it is; the same after a restart.
        model, features: that it serves.
        snapshot: as given.
    """

    def __init__(self, shape: BenchShape, snapshot: Path | None, folder: Path) -> None:
        spec = bench_spec(shape, "mlp")
        self.model = spec.model
        self.features = tuple(feature.name for feature in spec.features)
        self.host, self.http_port, self.grpc_port = "127.0.0.1", 0, 0
        self.snapshot = snapshot
        self._folder = folder
        self._starts = 0
        self._running = contextlib.ExitStack()
        self._process_ids: tuple[int, ...] = ()

    def attach(self, http: str, grpc: str, process_id: int) -> None:
        """Takes a server that runs. Raises DrillError."""
        self.host, self.http_port = _split(http)
        _, self.grpc_port = _split(grpc)
        self._process_ids = (process_id,)
        if not self.alive():
            raise DrillError(f"--pid {process_id}: there is no such process")

    async def restart(self) -> None:
        """Starts the drill's own server, again if it runs. Does nothing to another one."""
        if self.snapshot is None:
            return
        await asyncio.to_thread(self._running.close)
        ports = ("--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port))
        self._starts += 1
        server: Server = await asyncio.to_thread(
            self._running.enter_context,
            serving("local", self.snapshot, ("--no-verify", "--dtype", "float32", *ports), self._log(self._starts)),
        )
        self.http_port, self.grpc_port, self._process_ids = server.http_port, server.grpc_port, server.process_ids

    async def stop(self) -> None:
        """Stops the drill's own."""
        await asyncio.to_thread(self._running.close)

    def alive(self) -> bool:
        """Whether its process runs."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._process_ids[0]).status() != psutil.STATUS_ZOMBIE
        return False

    def memory_bytes(self) -> int:
        """Resident memory of its processes."""
        return memory_of(self._process_ids)

    def log_marks(self) -> tuple[int, int]:
        """(lines, tracebacks) that the drill's own server has written so far, before restarts too."""
        logs = [
            self._log(number).read_text(encoding="utf-8", errors="replace") for number in range(1, self._starts + 1)
        ]
        return sum(text.count("\n") for text in logs), sum(text.count("Traceback (most recent") for text in logs)

    def _log(self, number: int) -> Path:
        return self._folder / f"server-{number}.log"


@contextlib.asynccontextmanager
async def running_target(config: TargetConfig, folder: Path) -> AsyncIterator[Target]:
    """The server that the settings name, or a new one while the block runs.

    Raises:
        DrillError: settings that name half a server, or one that isn't there.
        ShardrankError: it does not come up.
    """
    given = (config.http, config.grpc, config.process_id)
    if config.http is not None and config.grpc is not None and config.process_id is not None:
        target = Target(config.shape, None, folder)
        target.attach(config.http, config.grpc, config.process_id)
        yield target
        return
    if any(one is not None for one in given):
        raise DrillError("--http, --grpc and --pid go together")
    spec = bench_spec(config.shape, "mlp")
    snapshot = await asyncio.to_thread(write_random_snapshot, spec, folder / "store")
    target = Target(config.shape, snapshot, folder)
    try:
        await target.restart()
        yield target
    finally:
        await target.stop()


def memory_of(process_ids: Iterable[int]) -> int:
    """Resident memory of processes in bytes; those that have ended count 0."""
    total = 0
    for process_id in process_ids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(process_id).memory_info().rss
    return total


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DrillError(f"{address!r} is not HOST:PORT")
    return host, int(port)
