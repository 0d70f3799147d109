"""Time work on a card: CUDA events around replays of graphs, in rounds, in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shard_node.cuda.cards import Card, Stream

GROUP, MAX_ROUNDS = 5, 200
MIN_LAUNCHES = 32
"""Of a graph: with so many in it, the gap between an event and a graph is negligible."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a launch: the median of the rounds, and the 10th and 90th percentile."""

    us: float
    low_us: float
    high_us: float


class HostEvent:
    """A `torch.cuda.Event` by the host's clock, for emulated cards, which do their work at once."""

    def record(self) -> None:
        """Keep the time."""
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Return: all work is done."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds until another event."""
        return (end.time - self.time) * 1e3


def _mark(card: Card) -> Any:
    """Return an event that is recorded on torch's current stream."""
    event = torch.cuda.Event(enable_timing=True) if card.torch_device.type == "cuda" else HostEvent()  # type: ignore[no-untyped-call]
    event.record()
    return event


def time_graphs(
    card: Card, stream: Stream, work: Mapping[str, Callable[[], None]], launches: int, seconds: float
) -> dict[str, Timing]:
    """Capture each piece of work as a graph of at least MIN_LAUNCHES, and time replays in alternation.

    Rounds are put on the stream in groups, each after a replay that is not timed: the host is then ahead of the card,
    and no measured time contains a wait of the card for the host.

    Args:
        card: of the stream.
        stream: where the work goes.
        work: puts `launches` launches on the stream, each.
        launches: of one piece of work.
        seconds: how long to go on, all pieces together; GROUP to MAX_ROUNDS rounds.
    """
    repeats = -(-MIN_LAUNCHES // launches)
    replays: dict[str, Callable[[], None]] = {}
    for name, put in work.items():
        put()  # A capture demands that it has run once.
        stream.synchronize()
        replays[name] = partial(card.capture(stream, partial(_repeat, put, repeats)).replay, stream)
        replays[name]()  # The first replay uploads the graph.
    stream.synchronize()
    times: dict[str, list[float]] = {name: [] for name in work}
    started_at = time.perf_counter()
    for _ in range(MAX_ROUNDS // GROUP):
        with card.torch_stream(stream):
            next(iter(replays.values()))()
            marks = []
            for name, replay in [*replays.items()] * GROUP:
                start = _mark(card)
                replay()
                marks.append((name, start, _mark(card)))
        for name, start, end in marks:
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / (launches * repeats))
        if time.perf_counter() - started_at >= seconds:
            break
    percentiles = {name: np.percentile(each, (50, 10, 90)).tolist() for name, each in times.items()}
    return {name: Timing(*each) for name, each in percentiles.items()}


def _repeat(put: Callable[[], None], times: int) -> None:
    for _ in range(times):
        put()
