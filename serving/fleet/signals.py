"""Ctrl-C and SIGTERM for a program that must put things away before it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequestedError(Exception):
    """SIGINT or SIGTERM came. Not an error to print: a wish that was fulfilled once it is raised."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def run_until_signalled(
    program: Callable[[], Awaitable[Result]],
    on_second_signal: Callable[[], None] = lambda: None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Result:
    """Runs an asyncio program; the first SIGINT or SIGTERM cancels it, so that it cleans up.

    Args:
        program: what to run; its `finally` blocks do the cleaning.
        on_second_signal: called for every further signal, to make the cleaning shorter.
        loop_factory: makes the event loop, such as `uvloop.new_event_loop`; None for asyncio's own.

    Returns:
        What the program returns when it ends by itself.

    Raises:
        StopRequestedError: when it ended because of a signal.
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
        raise StopRequestedError(received[0]) from None
