"""Servers as users start them: `shardrank serve`, or `shardrank up` with several shard processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeAlias, TypedDict

import psutil

from loadtest.serving_cost.errors import HelperProcessError
from serving.fleet.supervisor import shardrank_command

Mode: TypeAlias = Literal["local", "two_shards"]

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_PORTS = re.compile(r"HTTP: http://[^:]+:(\d+).*?gRPC: [^:]+:(\d+)", re.DOTALL)
_ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")
_MODE_ARGUMENTS: dict[Mode, tuple[str, ...]] = {
    "local": ("serve", "--shutdown-delay-s", "0"),
    # Without replicating, so that a small table is divided like a large one.
    "two_shards": ("up", "--shards", "2", "--replicate-bytes", "0"),
}


class Place(TypedDict):
    """Where a server listens, as messages to the client say it."""

    host: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True, slots=True)
class Server:
    """One that serves.

    Attributes:
        http_port, grpc_port: on `HOST`.
        process_ids: of the command and all that it started.
    """

    http_port: int
    grpc_port: int
    process_ids: tuple[int, ...]

    @property
    def place(self) -> Place:
        """Where it listens."""
        return {"host": HOST, "http_port": self.http_port, "grpc_port": self.grpc_port}


@contextlib.contextmanager
def serving(
    mode: Mode, snapshot: Path, arguments: tuple[str, ...], log: Path, checkout: Path | None = None
) -> Iterator[Server]:
    """Serves a snapshot while the block runs.

    Args:
        mode: rows in the serving process, or in two shard processes.
        snapshot: its folder.
        arguments: further flags of the command.
        log: gets the error output.
        checkout: absolute folder of the repository whose code is run, by this Python; None for the code that runs here.

    Raises:
        HelperProcessError: it ends, or does not serve in time.
    """
    command = shardrank_command(*_MODE_ARGUMENTS[mode], "--snapshot", str(snapshot), *_ANY_PORTS, *arguments)
    environment = os.environ if checkout is None else {**os.environ, "PYTHONPATH": str(checkout)}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            cwd=checkout,
            env=environment,
        )
        try:
            http_port, grpc_port = _ports(process, mode, log)
            started = [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))]
            yield Server(http_port, grpc_port, tuple(started))
        finally:
            _stop(process)


def _ports(process: subprocess.Popen[str], mode: Mode, log: Path) -> tuple[int, int]:
    """Waits for the lines that tell the ports."""
    output = process.stdout
    assert output is not None
    late = threading.Timer(START_TIMEOUT_S, process.kill)
    late.start()
    told = ""
    try:
        for line in output:
            told += line
            if (match := _PORTS.search(told)) is not None:
                threading.Thread(target=_drain, args=(output,), name="drain", daemon=True).start()
                return int(match[1]), int(match[2])
    finally:
        late.cancel()
    tail = log.read_text(encoding="utf-8")[-2000:]
    raise HelperProcessError(f"the server ({mode}) has ended before it served:\n{told}{tail}")


def _drain(output: IO[str]) -> None:
    # Until the server ends: a full pipe would stop it. What `_stop` closes meanwhile is read no more.
    with contextlib.suppress(ValueError):
        for _ in output:
            pass


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # A second signal ends it at once, and its children with it.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
