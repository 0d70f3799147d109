"""A comparison: the same load on several arms (numbers of cards, servers, versions), in interleaved rounds.

A round measures every arm once, in a random or turning order, so that what changes with time (the machine's clock, its
neighbours) is in all arms of a round alike. `loadtest.report.ratios` reckons the ratios;
`loadtest.report.compared_runs` compares load tests, and whatever else is measured in rounds fits in as well.
"""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from loader.manifest import Frozen
from loadtest.load.result import LoadResult, Machine

CONFIDENCE = 0.95
RESAMPLES = 10_000

Better: TypeAlias = Literal["lower", "higher"]


class Ratio(Frozen):
    """One arm's measure to the baseline's.

    Attributes:
        value: geometric mean of the rounds' ratios.
        low, high: ends of the confidence interval; None with fewer than two rounds.
    """

    value: float = Field(gt=0)
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=None, gt=0)

    @property
    def certain(self) -> bool:
        """Whether the interval has 1 outside: the arms differ."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


class Measured(Frozen):
    """One measure on every arm.

    Attributes:
        name: such as `p99, warm`.
        unit: of the values, such as `ms` or `/s`.
        better: which way is good.
        values: `[arms][rounds]`, above 0.
        middle: of each arm, the median of its rounds.
        ratios: of each arm, to the baseline's; the baseline's own is 1.
    """

    name: str = Field(min_length=1)
    unit: str
    better: Better
    values: tuple[tuple[float, ...], ...]
    middle: tuple[float, ...]
    ratios: tuple[Ratio, ...]


class Arm(Frozen):
    """What is compared.

    Attributes:
        name: such as `2 cards`.
        runs: its rounds, where each was a load test; empty if other things were measured.
        cold_runs: likewise, what was measured before them in the same rounds, from a server's start.
    """

    name: str = Field(min_length=1)
    runs: tuple[LoadResult, ...] = ()
    cold_runs: tuple[LoadResult, ...] = ()


class Comparison(Frozen):
    """Several arms side by side.

    Attributes:
        title: what is compared.
        setup: what all arms have alike, by name.
        arms: in the order of the table.
        baseline: index of the arm that the others are compared to.
        rounds: how often every arm was measured.
        measures: in the order of the table.
        confidence: of the intervals.
        resamples, seed: of the bootstrap.
        valid: whether every run was.
        invalid_because: one sentence for each that was not.
        machine, versions: where it ran; None and empty if not known.
    """

    kind: Literal["comparison"] = "comparison"
    format_version: Literal[1] = 1
    title: str = Field(min_length=1)
    setup: dict[str, str] = Field(default_factory=dict)
    arms: tuple[Arm, ...] = Field(min_length=1)
    baseline: int = Field(ge=0)
    rounds: int = Field(ge=1)
    measures: tuple[Measured, ...]
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    seed: int = 0
    valid: bool
    invalid_because: tuple[str, ...] = ()
    machine: Machine | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        arms = len(self.arms)
        if self.baseline >= arms:
            raise ValueError(f"baseline: {self.baseline}; there are {arms} arms")
        for one in self.measures:
            shapes = [len(one.values), len(one.middle), len(one.ratios)]
            if shapes != [arms] * 3 or {len(rounds) for rounds in one.values} != {self.rounds}:
                raise ValueError(f"measures: {one.name} has values for other than {arms} arms and {self.rounds} rounds")
        return self
