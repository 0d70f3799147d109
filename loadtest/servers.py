"""Servers that are measured: started by their command line, ready when they answer, ended with all they started."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loader.errors import ConfigError
from loadtest.errors import LoadError
from loadtest.workloads.payloads import GRPC_APIS, Encoding
from serving.fleet.process import PARENT_PID_VARIABLE, STOP_SIGNALS
from serving.fleet.supervisor import describe_exit, shardrank_command
from shard_node.bags import Float32Array

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
METRICS_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 5.0
POLL_S = 0.05
LOG_TAIL_BYTES = 2000
INTERRUPTED = 130
"""Exit code after a signal."""
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")
THIS_CHECKOUT = Path(__file__).resolve().parents[1]
"""Whose code runs here."""
SERVED_PACKAGES = ("loader", "shard_node", "router", "serving")
# Ports that nobody gets who doesn't ask for one by number: they must be free again after a process has ended.
_UNASSIGNED = range(20_000, 32_000)
_PORTS = re.compile(r"HTTP: http://[^:]+:(\d+).*?gRPC: [^:]+:(\d+)", re.DOTALL)


def free_ports(count: int = 1) -> list[int]:
    """Return different ports that are free now. Raises LoadError."""
    ports = list[int]()
    for port in random.sample(_UNASSIGNED, len(_UNASSIGNED)):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise LoadError(f"too few ports of {HOST} from {_UNASSIGNED.start} to {_UNASSIGNED.stop} are free")


@dataclass(frozen=True, slots=True)
class Server:
    """One that serves on `HOST`; `process_ids` are of its commands and all that they started."""

    http_port: int
    grpc_port: int
    process_ids: tuple[int, ...]

    def target(self, api: Encoding) -> str:
        """Say where requests of an API go."""
        return f"grpc://{HOST}:{self.grpc_port}" if api in GRPC_APIS else f"http://{HOST}:{self.http_port}"

    def metrics(self) -> str:
        """Read its Prometheus metrics; those of several workers are added up by whichever answers."""
        with urllib.request.urlopen(f"http://{HOST}:{self.http_port}/metrics", timeout=METRICS_TIMEOUT_S) as response:
            text: str = response.read().decode()
        return text


def summed(metrics: str, sample: str, label: str = "") -> dict[str, float]:
    """Add up the samples of a name in Prometheus' text by the value of a label, `""` for those that don't have it."""
    total: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for counted in family.samples:
            if counted.name == sample:
                total[counted.labels.get(label, "")] += counted.value
    return dict(total)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One process of a server."""

    name: str
    line: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] | None = None
    folder: Path | None = None

    def log_tail(self) -> str:
        """Read the end of its output."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _stop(process: psutil.Process, known: list[psutil.Process]) -> None:
    """End a process by SIGTERM, and what is left of it and the known ones of its children after that by SIGKILL."""
    known += _children(process)
    try:
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
    finally:
        # psutil knows a process by its start time too, so a number that is in use again is no process of ours.
        for left in (process, *known):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs([process, *known], STOP_TIMEOUT_S)


@contextlib.contextmanager
def running(
    title: str, commands: Sequence[ServerCommand], why_not_ready: Callable[[], str]
) -> Iterator[tuple[int, ...]]:
    """Start a server by its commands, wait until `why_not_ready` is empty, and end it with the block.

    Yields the ids of its processes. Raises LoadError if one ends by itself, or the server is not ready in time.
    """
    started: list[tuple[ServerCommand, psutil.Popen, list[psutil.Process]]] = []

    def check(when: str) -> None:
        for command, process, _ in started:
            if (code := process.poll()) is not None:
                exited = f"{title}: {command.name} has ended {when}: {describe_exit(code)}"
                raise LoadError(f"{exited}\n{command.log_tail()}")

    with contextlib.ExitStack() as stack:
        for command in commands:
            environment = dict(os.environ if command.environment is None else command.environment)
            # The kernel ends the process with the thread that started it.
            if threading.current_thread() is threading.main_thread():
                environment[PARENT_PID_VARIABLE] = str(os.getpid())
            try:
                with command.log.open("wb") as log:
                    # A terminal's Ctrl-C is for the process that started it, hence the session.
                    process = psutil.Popen(
                        command.line,
                        env=environment,
                        cwd=command.folder,
                        start_new_session=True,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
            except OSError as error:
                raise LoadError(f"{command.name}: {command.line[0]} can't be run: {error}") from error
            started.append((command, process, []))
            stack.callback(_stop, *started[-1][1:])
        ends = time.monotonic() + START_TIMEOUT_S
        while why := why_not_ready():
            check("before it served")
            if time.monotonic() > ends:
                logs = "\n".join(f"{command.name}: {command.log_tail()}" for command in commands)
                raise LoadError(f"{title}: not ready within {START_TIMEOUT_S:.0f} s: {why}\n{logs}")
            time.sleep(POLL_S)
        for _, process, children in started:
            children.extend(_children(process))
        yield tuple(each.pid for _, process, children in started for each in (process, *children))
        check("while it was asked")


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Exit with `INTERRUPTED` from the block at the first SIGINT or SIGTERM; later ones don't disturb the cleaning."""

    def stop(*_: object) -> None:
        for ignored in STOP_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        raise click.exceptions.Exit(INTERRUPTED)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def serving(
    snapshot: Path, arguments: tuple[str, ...], log: Path, checkout: Path | None = None
) -> contextlib.AbstractContextManager[Server]:
    """Serve a snapshot while the block runs, by the code of a checkout, if there is one, and this Python.

    Raises LoadError: it ends, or does not serve in time.
    """
    line = shardrank_command("serve", "--shutdown-delay-s", "0", "--snapshot", str(snapshot), *ANY_PORTS, *arguments)
    environment = None if checkout is None else {**os.environ, "PYTHONPATH": str(checkout)}
    return running_server("shardrank", [ServerCommand("serve", line, log, environment, checkout)])


@contextlib.contextmanager
def running_server(title: str, commands: Sequence[ServerCommand]) -> Iterator[Server]:
    """Run shard nodes, if there are any, and last what serves, until the end of the block. Raises as `running`."""
    log = commands[-1].log

    def why_not_ready() -> str:
        if (ports := ports_in(log)) is None:
            return "it has not said where it serves"
        try:
            urllib.request.urlopen(f"http://{HOST}:{ports[1]}/readyz", timeout=READY_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            return error.read(LOG_TAIL_BYTES).decode("utf-8", "replace") or str(error)
        except OSError as error:
            return str(error)
        return ""

    with running(title, commands, why_not_ready) as process_ids:
        ports = ports_in(log)
        assert ports is not None
        yield Server(int(ports[1]), int(ports[2]), process_ids)


def ports_in(log: Path) -> re.Match[str] | None:
    """Read the ports of HTTP and gRPC that a server of shardrank's says that it serves on."""
    return _PORTS.search(log.read_text(encoding="utf-8", errors="replace"))


def checked_checkout(folder: Path) -> Path:
    """Make the folder of another checkout of this repository absolute. Raises ConfigError if it is none."""
    # Where one is missing, Python would take that of another checkout, such as the installed one.
    if missing := [name for name in SERVED_PACKAGES if not (folder / name / "__init__.py").is_file()]:
        raise ConfigError(f"{folder}: not a checkout of this repository; it has no {missing[0]}/__init__.py")
    return folder.resolve()


def commit_of(checkout: Path) -> str:
    """Name what a checkout holds as `git describe` does, with `-dirty` where files differ from the commit."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{checkout.name}, not under git"


def check_scores(who: str, scores: Sequence[Float32Array], expected: Sequence[Float32Array], allowed: float) -> None:
    """Raise LoadError, with the candidate that differs most, if a request's scores differ by more than is allowed."""
    for request, (actual, right) in enumerate(zip(scores, expected, strict=True)):
        if actual.shape != right.shape:
            raise LoadError(f"{who}, request {request}: {actual.size} scores, {right.size} expected")
        differences = np.abs(actual - right)
        candidate = int(differences.argmax())
        # A NaN is not within any tolerance.
        if not differences[candidate] <= allowed:
            raise LoadError(
                f"{who}, request {request}, candidate {candidate}: its score is {actual[candidate]:.6f}, expected "
                f"{right[candidate]:.6f}; they differ by {differences[candidate]:.3g}, allowed is {allowed:g}"
            )
