"""The line that tells how a run is getting on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtest.load.config import RunConfig
from loadtest.load.histogram import DIGITS_OF_A_SECOND
from loadtest.load.messages import Status
from loadtest.load.recorder import merged


class LiveLine:
    """Shows the latest status of all processes together, on a terminal; elsewhere it shows nothing.

    Args:
        console: where.
        run: that goes on.
        clock: seconds.
    """

    def __init__(self, console: Console, run: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._began = clock()
        self._latest: dict[int, Status] = {}
        self._live = Live(self._text(), console=console, transient=True, refresh_per_second=4)
        self._shown = console.is_terminal

    def __enter__(self) -> Self:
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown:
            self._live.stop()

    def update(self, process: int, status: Status) -> None:
        """Takes what a process said."""
        self._latest[process] = status
        if self._shown:
            self._live.update(self._text())

    def _text(self) -> Text:
        return Text(status_line(self._run, self._clock() - self._began, list(self._latest.values())))


def status_line(run: RunConfig, elapsed_s: float, latest: list[Status]) -> str:
    """`  7 s of 12 s  500/s  ok 3499  errors 0  in flight 4  p50 1.2 ms  p99 3.4 ms`.

    Args:
        run: that goes on.
        elapsed_s: since its begin.
        latest: status of each process; percentiles are of its last half second.
    """
    due, ok = sum(one.due for one in latest), sum(one.ok for one in latest)
    recent = merged([one.recent for one in latest], digits=DIGITS_OF_A_SECOND).percentiles()
    parts = [
        f"{min(elapsed_s, run.until_s):3.0f} s of {run.until_s:g} s",
        "warm-up" if elapsed_s < run.warmup_s else f"{run.rate:g}/s",
        f"ok {ok}",
        f"errors {due - ok}",
        f"in flight {sum(one.in_flight for one in latest)}",
    ]
    if recent.p50_ms is not None and recent.p99_ms is not None:
        parts += [f"p50 {recent.p50_ms:.1f} ms", f"p99 {recent.p99_ms:.1f} ms"]
    return "  ".join(parts)
