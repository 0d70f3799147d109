"""Processes of a drill outside its fleet's supervisor, their ports, and waiting until something is so."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from loadtest.errors import DrillError
from loadtest.servers import HOST
from serving.fleet.supervisor import Child, ChildSpec

POLL_S = 0.1
READY_TIMEOUT_S = 120.0
# Ports that nobody gets who doesn't ask for one by number: they must be free again after a process has ended.
_PORTS = range(20_000, 32_000)

Polled = TypeVar("Polled")


async def polled(
    poll: Callable[[], Awaitable[Polled]],
    is_enough: Callable[[Polled], bool],
    timeout_s: float,
    interval_s: float = POLL_S,
) -> Polled:
    """Poll until the result is enough, or for `timeout_s`. Returns the last result."""
    deadline = time.monotonic() + timeout_s
    while True:
        if is_enough(result := await poll()) or time.monotonic() > deadline:
            return result
        await asyncio.sleep(interval_s)


@contextlib.asynccontextmanager
async def child_process(
    name: str, command: Sequence[str], folder: Path, is_ready: Callable[[], Awaitable[bool]], code: Path | None = None
) -> AsyncIterator[Child]:
    """Start a process, wait until it is ready, and kill it when the block ends.

    `NAME.log` in the folder gets its output. With `code`, the absolute folder of a checkout, it imports that one's
    packages. Raises ChildFailedError if it ends or is not ready in time.
    """

    async def unsupervised(process_id: int) -> None:
        raise DrillError(f"process {process_id} has no supervisor")

    # Without the second one Python would look in the working directory first.
    environment = {} if code is None else {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    child = Child(ChildSpec(name, tuple(command), unsupervised, environment), folder / f"{name}.log")
    await child.spawn()

    async def is_ready_now() -> bool:
        check_running(child)
        return await is_ready()

    try:
        if not await polled(is_ready_now, bool, READY_TIMEOUT_S):
            raise child.failure(f"is not ready after {READY_TIMEOUT_S:g} s")
        yield child
    finally:
        child.kill()
        await child.wait()


def check_running(child: Child) -> None:
    """Raise ChildFailedError, with the end of the log, if a process has ended."""
    if child.pid is None:
        raise child.failure("has ended by itself")


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. Raises DrillError."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server((HOST, port)))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise DrillError(f"{count} ports of {HOST} from {_PORTS.start} to {_PORTS.stop} are not free")
