"""When requests are due: absolute times from a rate, known before any answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from loadtest.load.result import Arrivals

Float64Array = npt.NDArray[np.float64]

TIMES_PER_CHUNK = 4096


def arrival_times(
    arrivals: Arrivals, rate: float, until_s: float, *, seed: int, process: int = 0, processes: int = 1
) -> Iterator[Float64Array]:
    """The part of one process in the arrivals of a run.

    `constant`: request k of the run is due at k / rate; the processes take turns. `poisson`: independent exponential
    gaps of mean 1 / rate; each process draws its own at its share of the rate, and together they are such a process
    again, since a superposition of Poisson processes is one.

    Args:
        arrivals: kind.
        rate: requests a second of all processes together.
        until_s: times are below it.
        seed: of the gaps.
        process: number of this one, from 0.
        processes: that share the rate.

    Yields:
        float64 [n], ascending seconds since the run's begin, 1 <= n <= 4096.
    """
    if arrivals == "constant":
        times = _constant(rate, process, processes)
    else:
        times = _poisson(rate / processes, np.random.default_rng([seed, process]))
    for chunk in times:
        inside = int(np.searchsorted(chunk, until_s, side="left"))
        if inside:
            yield chunk[:inside]
        if inside < len(chunk):
            return


def _constant(rate: float, process: int, processes: int) -> Iterator[Float64Array]:
    first = 0
    while True:
        # Multiplied, not added up, so that an hour of requests has the rounding error of one.
        yield ((first + np.arange(TIMES_PER_CHUNK)) * processes + process) / rate
        first += TIMES_PER_CHUNK


def _poisson(rate: float, rng: np.random.Generator) -> Iterator[Float64Array]:
    begin = 0.0
    while True:
        times = begin + np.cumsum(rng.exponential(1 / rate, TIMES_PER_CHUNK))
        yield times
        begin = float(times[-1])
