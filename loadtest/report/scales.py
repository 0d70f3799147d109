"""Axes: where a value stands between its ends, and which values have a tick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadtest.report.numbers import compact, percentile_name

Floats = npt.NDArray[np.float64]
_CLOSE = 4.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A value of an axis that is named."""

    value: float
    label: str


class Scale(Protocol):
    """An axis."""

    @property
    def low(self) -> float:
        """Value at the low end."""

    @property
    def high(self) -> float:
        """Value at the high end."""

    def place(self, values: npt.ArrayLike) -> Floats:
        """Where values stand: 0 at the low end, 1 at the high one; NaN stays, others are held within."""

    def ticks(self) -> list[Tick]:
        """From low to high."""


def _finite(values: npt.ArrayLike) -> Floats:
    array = np.asarray(values, np.float64).ravel()
    return array[np.isfinite(array)]


def _nice_step(least: float) -> float:
    """The first of 1, 2, 2.5, 5 and 10 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _multiples(step: float, low: float, high: float) -> list[Tick]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [Tick(value, compact(value)) for value in (index * step for index in range(first, last + 1))]


@dataclass(frozen=True, slots=True)
class Rows:
    """Names and no numbers: rows of a height of 1, the first at the low end."""

    high: float
    low: float = 0.0

    def place(self, values: npt.ArrayLike) -> Floats:
        """See `Scale`."""
        return np.clip(np.asarray(values, np.float64) / self.high, 0.0, 1.0)

    def ticks(self) -> list[Tick]:
        """None."""
        return []


@dataclass(frozen=True, slots=True)
class Linear:
    """Equal steps of 1, 2, 2.5 or 5 times a power of ten."""

    low: float
    high: float
    step: float

    @classmethod
    def around(cls, values: npt.ArrayLike, steps: int = 5, *, whole: bool = False) -> Linear:
        """From 0 to the first step at or above all values, in about as many steps as asked for.

        Args:
            values: none may be below 0.
            steps: more or less.
            whole: whether steps are whole numbers, as counts are.
        """
        highest = max(_finite(values).max(initial=0.0), 0.0) or 1.0
        step = _nice_step(highest / steps)
        if whole and not step.is_integer():
            step = float(math.ceil(step)) if step < 1 else 5.0
        return cls(0.0, step * math.ceil(highest / step - 1e-9), step)

    @classmethod
    def between(cls, low: float, high: float, steps: int = 8) -> Linear:
        """From `low` to `high` exactly; ticks are the multiples of a step in between."""
        return cls(low, high if high > low else low + 1.0, _nice_step(max(high - low, 1e-9) / steps))

    def place(self, values: npt.ArrayLike) -> Floats:
        """See `Scale`."""
        return np.clip((np.asarray(values, np.float64) - self.low) / (self.high - self.low), 0.0, 1.0)

    def ticks(self) -> list[Tick]:
        """See `Scale`."""
        return _multiples(self.step, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Log:
    """Equal ratios: ticks at powers of ten, at 2 and 5 times each where there is room; at equal steps if close.

    Attributes:
        step: between ticks; None for powers of ten.
    """

    low: float
    high: float
    step: float | None = None

    @classmethod
    def around(cls, values: npt.ArrayLike) -> Log:
        """From the last of 1, 2, 5, 10, ... at or below all values above 0 to the first at or above them.

        Where the highest is at most 4 times the lowest, from and to multiples of a step.
        """
        array = _finite(values)
        array = array[array > 0]
        if not len(array):
            return cls(1.0, 10.0)
        low, high = float(array.min()), float(array.max())
        if high > _CLOSE * low:
            return cls(cls._at_or_below(low), cls._at_or_above(high))
        if high <= low * 1.001:
            low, high = low * 0.99, high * 1.01
        # The step is at most a quarter of the span, so at most three quarters of `low`: 0 is not reached.
        step = _nice_step((high - low) / 8)
        return cls(step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9), step)

    @staticmethod
    def _at_or_below(value: float) -> float:
        power = math.floor(math.log10(value))
        return max(
            one for one in (_of_ten(factor, power) for factor in (0.5, 1, 2, 5, 10)) if one <= value * (1 + 1e-9)
        )

    @staticmethod
    def _at_or_above(value: float) -> float:
        power = math.floor(math.log10(value))
        return min(one for one in (_of_ten(factor, power) for factor in (1, 2, 5, 10, 20)) if one >= value * (1 - 1e-9))

    def place(self, values: npt.ArrayLike) -> Floats:
        """See `Scale`; what is 0 or below stands at the low end."""
        array = np.asarray(values, np.float64)
        logs = np.log(np.where(array <= 0, self.low, array) / self.low) / math.log(self.high / self.low)
        return np.clip(logs, 0.0, 1.0)

    def ticks(self) -> list[Tick]:
        """See `Scale`."""
        if self.step is not None:
            return _multiples(self.step, self.low, self.high)
        powers = range(math.floor(math.log10(self.low) + 1e-9), math.ceil(math.log10(self.high) - 1e-9) + 1)
        factors: Sequence[int] = (1, 2, 5) if len(powers) <= 5 else (1,)
        values = [_of_ten(factor, power) for power in powers for factor in factors]
        inside = [value for value in values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
        return [Tick(value, compact(value)) for value in inside]


def _of_ten(factor: float, power: int) -> float:
    # 10.0 ** -1 times 2 is exact to the digit that repr shows; 10 ** -3 times 5 is not, a division is.
    return factor * 10.0**power if power >= 0 else factor / 10.0**-power


@dataclass(frozen=True, slots=True)
class Nines:
    """Percentiles, as far apart as the nines they have: 0, 90%, 99% and 99.9% stand at equal distances.

    A percentile q (0 to 1) stands at log10(1 / (1 - q)), as in the plots of HdrHistogram.

    Attributes:
        nines: at the high end; 3 is 99.9%.
    """

    nines: float

    @classmethod
    def of(cls, count: int) -> Nines:
        """As far as `count` values have percentiles: the largest one of n stands at 1 - 1 / (2 n)."""
        return cls(max(1.0, math.log10(2.0 * max(count, 1))))

    @property
    def low(self) -> float:
        """0."""
        return 0.0

    @property
    def high(self) -> float:
        """Below 1."""
        return 1.0 - math.pow(10.0, -self.nines)

    def place(self, values: npt.ArrayLike) -> Floats:
        """See `Scale`."""
        rest = np.maximum(1.0 - np.asarray(values, np.float64), 1e-300)
        return np.clip(-np.log10(rest) / self.nines, 0.0, 1.0)

    def at(self, places: npt.ArrayLike) -> Floats:
        """The percentiles at places between 0 and 1."""
        return 1.0 - 10.0 ** (-np.asarray(places, np.float64) * self.nines)

    def ticks(self) -> list[Tick]:
        """See `Scale`: 0, 50%, and each further nine."""
        nines = [1.0 - 10.0**-count for count in range(1, math.floor(self.nines + 1e-9) + 1)]
        return [Tick(value, percentile_name(value)) for value in (0.0, 0.5, *nines)]
