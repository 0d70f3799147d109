"""Time work on a card: CUDA events around replays of a graph, many times, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shard_node.cuda.cards import Card, Graph, Stream

GROUP, MAX_ROUNDS = 5, 200


class Stopwatch(Protocol):
    """Times one piece of work on a stream."""

    def start(self) -> None:
        """Puts the beginning on the stream."""
        ...

    def stop(self) -> None:
        """Puts the end on the stream."""
        ...

    def seconds(self) -> float:
        """Between the two. Waits for the end."""
        ...


class EventStopwatch:
    """Two CUDA events on torch's current stream. Of the host's time only the gaps that it leaves there are in it."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Records the first."""
        self._start.record()

    def stop(self) -> None:
        """Records the second."""
        self._stop.record()

    def seconds(self) -> float:
        """Between the two, to half a microsecond."""
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3


class HostStopwatch:
    """The host's clock, for cards that torch has no events for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._began = self._ended = 0.0

    def start(self) -> None:
        """Waits for what is under way."""
        self._stream.synchronize()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Waits for the work."""
        self._stream.synchronize()
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        """Between the two."""
        return self._ended - self._began


def stopwatch(card: Card, stream: Stream) -> Stopwatch:
    """CUDA events where there are any, for work within `card.torch_stream(stream)`; else the host's clock."""
    return EventStopwatch() if card.torch_device.type == "cuda" else HostStopwatch(stream)


def clock_name(card: Card) -> str:
    """What times came from, for the result."""
    return "cuda events" if card.torch_device.type == "cuda" else "host clock"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one launch: median of the rounds, and the range of the middle 80% of them."""

    median_s: float
    low_s: float
    high_s: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float], launches: int = 1) -> Timing:
        """From the seconds of rounds of `launches` each."""
        low, median, high = np.percentile(np.array(seconds) / launches, (10, 50, 90)).tolist()
        return cls(median, low, high, len(seconds))

    @property
    def spread(self) -> float:
        """Width of the middle 80% as a share of the median: differences below it are noise."""
        return (self.high_s - self.low_s) / self.median_s


def time_in_turns(
    card: Card,
    stream: Stream,
    work: Mapping[str, Callable[[], None]],
    launches: int,
    seconds: float,
    max_rounds: int = MAX_ROUNDS,
) -> dict[str, Timing]:
    """Times several pieces of work, which take turns, so that all see the same noise.

    Rounds are put on the stream in groups, each behind work that is not timed: the host is then ahead of the card, and
    no measured span holds the time in which the card waited for it.

    Args:
        card: of the stream.
        stream: where the work goes.
        work: puts `launches` launches on the stream, each.
        launches: in one piece of work.
        seconds: about how long to go on, all pieces together; at least GROUP rounds.
        max_rounds: at most, but for the last group.
    """
    watches = {name: [stopwatch(card, stream) for _ in range(GROUP)] for name in work}
    taken: dict[str, list[float]] = {name: [] for name in work}
    for one in work.values():  # Warm-up: the first replay of a graph uploads it.
        one()
    stream.synchronize()
    ahead = next(iter(work.values()))
    began = time.perf_counter()
    rounds = 0
    while rounds == 0 or (rounds < max_rounds and time.perf_counter() - began < seconds):
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


def captured(card: Card, stream: Stream, work: Callable[[], None]) -> Graph:
    """A graph of work that is run once before, as captures demand."""
    work()
    stream.synchronize()
    return card.capture(stream, work)
