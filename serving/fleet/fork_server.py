"""Starts processes as forks of one that has imported their modules: without the imports, and with its pages shared.

A fork server imports modules and forks on request. Each connection to its Unix socket is one process, in JSON packets:

1. `{"command": [...], "environment": {...}, "folder": "..."}` with the descriptors of stdin, stdout and stderr,
2. `{"pid": 71}` from the process itself once it has a session and these descriptors, or `{"refused": "..."}`,
3. `{"code": 0}` when it has ended, as `subprocess` has it: -9 after SIGKILL.

A process whose connection closes is killed with its group, and all of them die with the fork server. One that has ended
stays a zombie until its connection closes, so that nobody signals another process of the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.fleet.process import PARENT_PID_VARIABLE, die_with_parent

logger = logging.getLogger(__name__)

FORK_SERVER_VARIABLE = "SHARDRANK_FORK_SERVER"
"""Names the socket of a fork server that runs already."""
SERVED_MODULES = (
    *("serving.server", "serving.shard_server", "serving.cli.fleet", "serving.fleet.local_fleet"),
    *("loader.registry", "loader.rollout.coordinator"),
)
"""What `serve`, `shard-node` and `coordinator` import."""
FREE_VARIABLES = ("SHARDRANK_", "PROMETHEUS_MULTIPROC_DIR", "OTEL_", "AWS_", "PYTEST_")
"""Prefixes of variables that no import reads, or that `_become` reads again; others must be the fork server's."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
MAX_PACKET_BYTES = 1 << 17
_TITLE_BYTES = 4096


class ForkedProcess:
    """A process that a fork server has started. It is killed if its handle is collected before it has ended."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._exit: asyncio.Future[int] | None = None

    @classmethod
    async def start(
        cls, path: str, command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> ForkedProcess | None:
        """Start a process in this one's folder. Returns None, and logs why, if it has to be started by exec."""
        try:
            connection = send_request(path, command, descriptors, environment)
            async with asyncio.timeout(START_TIMEOUT_S):
                packet = await asyncio.get_running_loop().sock_recv(connection, MAX_PACKET_BYTES)
        except OSError as error:
            logger.warning("a process starts slower than it could, the fork server does not answer: %s", error)
            return None
        return cls.from_reply(connection, packet)

    @classmethod
    def from_reply(cls, connection: socket.socket, packet: bytes) -> ForkedProcess | None:
        """Read the first packet on the connection of a request. Returns what `start` does."""
        reply = json.loads(packet or '{"refused": "the fork server has ended"}')
        if "pid" in reply:
            return cls(connection, reply["pid"])
        logger.warning("a process starts slower than it could: %s", reply.get("refused", "the fork has ended at once"))
        connection.close()
        return None

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that killed it; None while it runs."""
        if self.returncode is None:
            try:
                packet = self._connection.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                packet = b""
            # Without a packet the fork server was killed, and the process with it.
            self.returncode = json.loads(packet)["code"] if packet else -signal.SIGKILL
            if self._exit is not None:
                self._exit.get_loop().remove_reader(self._connection)
                self._exit.set_result(self.returncode)
            self._connection.close()
        return self.returncode

    async def wait(self) -> int:
        """Wait for the process to end. Returns what `poll` does."""
        while (code := self.poll()) is None:
            if self._exit is None:
                self._exit = asyncio.get_running_loop().create_future()
                self._exit.get_loop().add_reader(self._connection, self.poll)
            await asyncio.shield(self._exit)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def send_request(
    path: str, command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
) -> socket.socket:
    """Request a process with this stdin, stdout and stderr. Returns its non-blocking connection. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"command": command, "environment": dict(environment), "folder": os.getcwd()}
    try:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    except OSError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


@contextlib.contextmanager
def running_fork_server(path: str, modules: Sequence[str] = SERVED_MODULES) -> Iterator[int]:
    """Run a fork server at a path while the block runs; yields its process id. Requests wait for its imports.

    The kernel kills it with the thread that starts it. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(128)
        # In the memory of the last argument is room for the titles of processes.
        command = (sys.executable, "-m", __name__, *modules, " " * _TITLE_BYTES)
        environment = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}
        process = subprocess.Popen(command, stdin=listener.fileno(), env=environment, start_new_session=True)
    try:
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()
        Path(path).unlink(missing_ok=True)


@dataclass(slots=True)
class _Child:
    pid: int
    connection: socket.socket | None
    has_ended: bool = False


class _Server:
    """Forks for each request. It has one thread, and nothing in the kernel that a child changes by closing it."""

    def __init__(self, listener: socket.socket, environment: Mapping[str, str]) -> None:
        self._listener = listener
        self._environment = environment
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> tuple[dict[str, Any], list[int], socket.socket]:
        """Serve until killed. Returns in each child: its request, descriptors and connection."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                elif not isinstance(key.fileobj, socket.socket):
                    self._report_exit(key.fd, key.data)
                elif key.data is not None:
                    self._drop(key.data)
                elif (request := self._fork(key.fileobj)) is not None:
                    return (*request, key.fileobj)

    def _fork(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        """Fork for a request, or refuse it. Returns in the child alone: its request and descriptors."""
        self._selector.unregister(connection)
        descriptors: list[int] = []
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 3)
            request = json.loads(packet)
            if reason := self._reason_to_refuse(request["command"], request["environment"]):
                raise ValueError(reason)
            pid = os.fork()
        except (ValueError, KeyError, OSError) as error:
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"refused": str(error)}).encode())
            connection.close()
        else:
            if pid == 0:
                # As objects: collected later, they would close descriptors of the child's.
                for key in self._selector.get_map().values():
                    if isinstance(key.fileobj, socket.socket):
                        key.fileobj.close()
                return request, descriptors
            child = _Child(pid, connection)
            self._selector.register(connection, selectors.EVENT_READ, child)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, child)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _reason_to_refuse(self, command: list[str], environment: dict[str, str]) -> str:
        """Return why a fork would differ from a new process; empty if it would not."""
        if command[:2] != [sys.executable, "-m"]:
            return f"{command[:2]} is not {sys.executable} -m"
        names = {name for name, _ in environment.items() ^ self._environment.items()}
        if changed := sorted(name for name in names if not name.startswith(FREE_VARIABLES)):
            return f"{', '.join(changed)} differ from the fork server's"
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            return f"the fork server has {threads} threads"
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                    return "the fork server has opened a CUDA device"
        return ""

    def _report_exit(self, pidfd: int, child: _Child) -> None:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        child.has_ended = True
        if child.connection is None:
            os.waitpid(child.pid, 0)
        else:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):
                child.connection.send(json.dumps({"code": code}).encode())

    def _drop(self, child: _Child) -> None:
        """Reap a process whose connection has closed, or kill it with its group."""
        assert child.connection is not None
        self._selector.unregister(child.connection)
        child.connection.close()
        child.connection = None
        if child.has_ended:
            os.waitpid(child.pid, 0)
        else:
            # Without a group it has not answered yet, and ends when it can't.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _become(request: dict[str, Any], descriptors: Sequence[int], connection: socket.socket) -> None:
    """Make this fork what exec would have made of it, and answer its request."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.pop(PARENT_PID_VARIABLE, None)
    _set_title(request["command"])
    # Python seeds its generator in every fork; torch's begins with the same seed in every process.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # Whether metrics are in files that several processes add up, which PROMETHEUS_MULTIPROC_DIR says.
    if "prometheus_client" in sys.modules:
        values: Any = sys.modules["prometheus_client.values"]
        values.ValueClass = values.get_value_class()
    connection.send(json.dumps({"pid": os.getpid()}).encode())
    connection.close()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _, _, module, *sys.argv[1:] = request["command"]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_title(command: Sequence[str]) -> None:
    """Have /proc, and so `ps`, show a command, cut to the memory of this process' arguments."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    # A last byte that is not 0 has the kernel end the title at the first 0.
    title = " ".join(command).encode("utf-8", "surrogateescape")[: end - start - 2].ljust(end - start - 1, b"\0")
    ctypes.memmove(start, title + b"\1", end - start)


def main() -> None:
    """Import the modules that are named, and serve forks on the socket that is stdin."""
    die_with_parent(os.environ)
    environment = dict(os.environ)
    _set_title((sys.executable, "-m", "serving.fleet.fork_server"))
    # NumPy starts threads at its import, unless told that one is enough, and with threads nothing could be forked.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in sys.argv[1:-1]:
        importlib.import_module(module)
    # No collection writes to the pages of what is there now.
    gc.collect()
    gc.freeze()
    pid = os.getpid()
    mine = _Server(socket.socket(fileno=os.dup(0)), environment).run()
    die_with_parent({PARENT_PID_VARIABLE: str(pid)})
    _become(*mine)


if __name__ == "__main__":
    main()
