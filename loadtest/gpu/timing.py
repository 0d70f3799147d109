"""Time work on a card: CUDA events around replays of a graph, many times, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from shard_node.cuda.cards import Card, Stream

GROUP, MAX_ROUNDS = 5, 200
LEAST_LAUNCHES, LONG_S = 32, 0.02
"""Of one graph, unless it takes longer: the gap between an event and a graph is then nothing beside it."""
Name = TypeVar("Name", str, int)


class Stopwatch:
    """Time one piece of work on a stream: by CUDA events where there are any, else by the host's clock.

    Events go onto torch's current stream, so it is used within `card.torch_stream(stream)`. Of the host's time only the
    gaps that it leaves on the stream are in what events measure, which is exact to half a microsecond.
    """

    def __init__(self, card: Card, stream: Stream) -> None:
        self._stream = stream
        self._times = [0.0, 0.0]
        self._events: list[torch.cuda.Event] = []
        if card.torch_device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Put the beginning on the stream."""
        self._mark(0)

    def stop(self) -> None:
        """Put the end on the stream."""
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._stream.synchronize()
            self._times[which] = time.perf_counter()

    def seconds(self) -> float:
        """Wait for the end and measure from the beginning to it."""
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def clock_name(card: Card) -> str:
    """Name what times come from."""
    return "cuda events" if card.torch_device.type == "cuda" else "host clock"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one launch: median of the rounds, of `launches` each, and the range of the middle 80% of them."""

    median_s: float
    low_s: float
    high_s: float
    rounds: int
    launches: int = 1

    @classmethod
    def of(cls, seconds: list[float], launches: int = 1) -> Timing:
        """Summarize the seconds of rounds of `launches` each."""
        low, median, high = np.percentile(np.array(seconds) / launches, (10, 50, 90)).tolist()
        return cls(median, low, high, len(seconds), launches)

    @property
    def spread(self) -> float:
        """Measure the width of the middle 80% as a share of the median: differences below it are noise."""
        return (self.high_s - self.low_s) / self.median_s


def time_in_turns(
    card: Card,
    stream: Stream,
    work: Mapping[Name, Callable[[], None]],
    launches: int,
    seconds: float,
) -> dict[Name, Timing]:
    """Time several pieces of work, which take turns, so that all see the same noise.

    Rounds are put on the stream in groups, each behind work that is not timed: the host is then ahead of the card, and
    no measured span holds the time in which the card waited for it.

    Args:
        card: of the stream.
        stream: where the work goes.
        work: puts `launches` launches on the stream, each.
        launches: in one piece of work.
        seconds: about how long to go on, all pieces together; GROUP to MAX_ROUNDS rounds.
    """
    watches = {name: [Stopwatch(card, stream) for _ in range(GROUP)] for name in work}
    taken: dict[Name, list[float]] = {name: [] for name in work}
    for one in work.values():  # Warm-up: the first replay of a graph uploads it.
        one()
    stream.synchronize()
    ahead = next(iter(work.values()))
    began = time.perf_counter()
    rounds = 0
    while rounds == 0 or (rounds < MAX_ROUNDS and time.perf_counter() - began < seconds):
        with card.torch_stream(stream):
            ahead()
            for turn in range(GROUP):
                for name, one in work.items():
                    watches[name][turn].start()
                    one()
                    watches[name][turn].stop()
        for name, group in watches.items():
            taken[name] += [watch.seconds() for watch in group]
        rounds += GROUP
    return {name: Timing.of(each, launches) for name, each in taken.items()}


def time_graphs(
    card: Card, stream: Stream, work: Mapping[Name, Callable[[], None]], launches: int, seconds: float
) -> dict[Name, Timing]:
    """Capture each piece of work as a graph, so often that it has LEAST_LAUNCHES, and time replays in turns."""
    longest_s = 0.0
    watch = Stopwatch(card, stream)
    for one in work.values():
        one()  # Once before, as captures demand.
        stream.synchronize()
        with card.torch_stream(stream):
            watch.start()
            one()
            watch.stop()
        longest_s = max(longest_s, watch.seconds())
    times = max(1, min(-(-LEAST_LAUNCHES // launches), int(LONG_S / max(longest_s, 1e-9))))
    replays: dict[Name, Callable[[], None]] = {}
    for name, one in work.items():
        replays[name] = partial(card.capture(stream, partial(_repeat, one, times)).replay, stream)
    return time_in_turns(card, stream, replays, launches * times, seconds)


def _repeat(one: Callable[[], None], times: int) -> None:
    for _ in range(times):
        one()
