"""Ends processes on Ctrl-C or SIGTERM, after putting things away, and with their supervisor; reports them ready."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

WORKER_VARIABLE = "SHARDRANK_WORKER"
"""Of a server's worker: `2/8` for the third of eight that share its ports."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
READY_POLL_S = 0.1


def num_workers() -> int:
    """Return how many workers share the ports of this process: 1 if it is alone."""
    return int(os.environ.get(WORKER_VARIABLE, "0/1").split("/")[1])


def run_until_signalled(
    program: Callable[[], Awaitable[Result]],
    on_second_signal: Callable[[], None] = lambda: None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Result | None:
    """Run an asyncio program; the first SIGINT or SIGTERM cancels it, so that its `finally` blocks clean up.

    For every further signal `on_second_signal` is called, to make the cleaning shorter. Returns None if a signal ended
    it.
    """
    received: list[signal.Signals] = []

    async def run() -> Result:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(program())

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            if len(received) == 1:
                task.cancel()
            else:
                on_second_signal()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await task
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(run())
    except asyncio.CancelledError:
        if not received:
            raise
        logger.info("stopped by %s", received[0].name)
        return None


PARENT_PID_VARIABLE = "SHARDRANK_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(environment: MutableMapping[str, str]) -> None:
    """Asks the kernel to kill this process when its supervisor dies; does nothing outside a fleet.

    The supervisor names itself in `SHARDRANK_PARENT_PID`, which is taken out of `environment`, so that a grandchild
    does not look for the wrong parent. The child asks for itself, rather than the parent between fork and exec, because
    code in that gap can deadlock in a process with threads. Raises SystemExit(1) if the supervisor is gone already.
    """
    parent = environment.pop(PARENT_PID_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        logger.warning("prctl(PR_SET_PDEATHSIG) failed: %s", os.strerror(ctypes.get_errno()))
    # The parent may have died before the request reached the kernel; then no signal will ever come.
    if str(os.getppid()) != parent:
        logger.error("the supervisor (process %s) is gone; not starting", parent)
        raise SystemExit(1)


def notify_ready() -> None:
    """Report to systemd that this process is ready, if it was started as a unit of `Type=notify`."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"READY=1", f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError as error:
            logger.warning("NOTIFY_SOCKET %s does not take that the process is ready: %s", address, error)


async def until_ready(problems: Callable[[], object]) -> None:
    """Wait until there are no problems."""
    while problems():  # noqa: ASYNC110 - what is missing has no event
        await asyncio.sleep(READY_POLL_S)
