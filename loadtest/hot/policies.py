"""Which policy holds the hottest rows best: `python -m loadtest.hot.policies [--json FILE]`.

LRU, the static top-k and the learning policy (`router.popularity`) see the same lookups of a table whose rows are
looked up by Zipf's law, then a shift of popularity: some rows, or all, change places at random. A hit rate is the share
of lookups that go to the rows held, summed up from the law and not drawn, so it has no noise of its own.

What can be reached at all is shown too: the top-k by exact counts of every lookup since the shift. After a shift of all
rows nobody who sees lookups only can do better in the mean, since what was before says nothing of what is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from rich.console import Console

from loader.snapshot.tables import Frozen
from loadtest.tables import line, make_table
from loadtest.workloads.distributions import Zipf
from router.popularity import Int64Array, Popularity
from shard_node.planning.hotness import power_law_sums

AIM_POINTS = 2.0
AIM_CAPACITIES = 10
"""The aim: within so many points of the new top-k after so many lookups, × capacity."""
SHOWN = (1, 2, 5, 10, 20, 40)


class PolicyConfig(Frozen):
    """What is compared. Numbers of lookups are multiples of a policy's capacity."""

    num_rows: int = 1_000_000
    exponents: tuple[float, ...] = (1.1, 0.6)
    capacities: tuple[int, ...] = (1_000, 10_000, 100_000)
    shifts: tuple[float, ...] = (1.0, 0.2)
    before: int = 200
    after: int = 60
    seeds: tuple[int, ...] = (201, 202, 203)


class Steady(Frozen):
    """Before a shift: hit rates in percent, and in points behind the top-k; means over the seeds."""

    exponent: float
    capacity: int
    top_k: float
    lru_behind: float
    learning_behind: float


class Shifted(Frozen):
    """After a shift of a part of the rows: points behind the new top-k after 0, 1, 2, ... × capacity lookups."""

    exponent: float
    capacity: int
    shift: float
    top_k: float
    static_behind: float
    lru_behind: tuple[float, ...]
    learning_behind: tuple[float, ...]
    counted_behind: tuple[float, ...]

    @staticmethod
    def within(behind: Sequence[float]) -> int | None:
        """Return after how many × capacity lookups it is within the aim, for good; None if never."""
        far = [number for number, points in enumerate(behind) if points > AIM_POINTS]
        back = far[-1] + 1 if far else 0
        return back if back < len(behind) else None


class PolicyResult(Frozen):
    """The document of `--json`."""

    config: PolicyConfig
    steady: tuple[Steady, ...]
    shifted: tuple[Shifted, ...]


class DrawnLookups:
    """Draws rows by Zipf's law, and knows what share of lookups goes to which."""

    def __init__(self, rng: np.random.Generator, num_rows: int, exponent: float) -> None:
        self._rng = rng
        self._law = Zipf(exponent)
        self._row_of_rank = rng.permutation(num_rows)
        share = np.diff(power_law_sums(np.arange(num_rows + 1), exponent))
        self._share_of_rank = share / share.sum()

    def draw(self, count: int) -> Int64Array:
        """Return rows, int64 [count]."""
        num_rows = np.full(count, self._row_of_rank.size, np.int64)
        return self._row_of_rank[self._law.ranks(self._rng, num_rows)]

    def top(self, count: int) -> Int64Array:
        """Return the rows that are looked up most."""
        return self._row_of_rank[:count]

    def hit_rate(self, rows: Int64Array) -> float:
        """Return the percent of lookups that go to these rows."""
        share = np.empty_like(self._share_of_rank)
        share[self._row_of_rank] = self._share_of_rank
        return 100 * float(share[rows].sum())

    def shifted(self, part: float) -> DrawnLookups:
        """Return lookups of which a part of the rows, chosen at random, have changed places with one another."""
        other = copy.copy(self)
        ranks = np.flatnonzero(self._rng.random(self._row_of_rank.size) < part)
        other._row_of_rank = self._row_of_rank.copy()
        other._row_of_rank[ranks] = self._row_of_rank[self._rng.permutation(ranks)]
        return other


class Lru:
    """What an LRU cache holds: the rows that were looked up last."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self._capacity = capacity
        self._last = np.full(num_rows, -1, np.int64)
        self._time = 0

    def observe(self, rows: Int64Array) -> None:
        """Look rows up, one after the other."""
        # Of a row that is there twice NumPy assigns the last.
        self._last[rows] = np.arange(self._time, self._time + rows.size)
        self._time += rows.size

    def top(self, count: int) -> Int64Array:
        """Return the rows held."""
        held = _largest(self._last, min(count, self._capacity))
        return held[self._last[held] >= 0]


class Counted:
    """The top-k by exact counts of all lookups so far."""

    def __init__(self, num_rows: int) -> None:
        self._counts = np.zeros(num_rows, np.int64)

    def observe(self, rows: Int64Array) -> None:
        """Count lookups."""
        self._counts += np.bincount(rows, minlength=self._counts.size)

    def top(self, count: int) -> Int64Array:
        """Return the rows that were counted most."""
        return _largest(self._counts, count)


def _largest(values: Int64Array, count: int) -> Int64Array:
    return np.argpartition(values, values.size - count)[values.size - count :]


def compare(config: PolicyConfig, exponent: float, capacity: int) -> tuple[Steady, list[Shifted]]:
    """Run all policies over the same lookups, for each seed; return the means."""
    steady, after = [], []
    for seed in config.seeds:
        lookups = DrawnLookups(np.random.default_rng([seed, capacity]), config.num_rows, exponent)
        learning, lru = Popularity(capacity), Lru(config.num_rows, capacity)
        for _ in range(config.before):
            rows = lookups.draw(capacity)
            learning.observe(rows)
            lru.observe(rows)
        static = lookups.top(capacity)
        best = lookups.hit_rate(static)
        steady.append([best, *(best - lookups.hit_rate(policy.top(capacity)) for policy in (lru, learning))])
        for shift in config.shifts:
            policies = (copy.deepcopy(lru), copy.deepcopy(learning), Counted(config.num_rows))
            new = lookups.shifted(shift)
            behind = _behind_after(new, policies, capacity, config.after)
            after.append((shift, best - new.hit_rate(static), behind))
    top_k, lru_behind, learning_behind = np.mean(steady, axis=0).round(2).tolist()
    shifted = []
    for shift in config.shifts:
        static_behind = np.mean([behind for part, behind, _ in after if part == shift]).round(2)
        means = np.mean([behind for part, _, behind in after if part == shift], axis=0).round(2)
        lru_after, learning_after, counted_after = map(tuple, means.T.tolist())
        shifted.append(
            Shifted(
                exponent=exponent,
                capacity=capacity,
                shift=shift,
                top_k=top_k,
                static_behind=float(static_behind),
                lru_behind=lru_after,
                learning_behind=learning_after,
                counted_behind=counted_after,
            )
        )
    return (
        Steady(
            exponent=exponent,
            capacity=capacity,
            top_k=top_k,
            lru_behind=lru_behind,
            learning_behind=learning_behind,
        ),
        shifted,
    )


def _behind_after(
    lookups: DrawnLookups, policies: Sequence[Lru | Popularity | Counted], capacity: int, times: int
) -> list[list[float]]:
    """Return points behind the top-k of each policy, after 0, 1, 2, ... × capacity lookups."""
    best = lookups.hit_rate(lookups.top(capacity))
    found = []
    for number in range(times + 1):
        if number:
            rows = lookups.draw(capacity)
            for policy in policies:
                policy.observe(rows)
        found.append([best - lookups.hit_rate(policy.top(capacity)) for policy in policies])
    return found


def show(console: Console, result: PolicyResult) -> None:
    """Print both tables."""
    config = result.config
    words = ("zipf", "capacity")
    line(
        console,
        f"{config.num_rows:,} rows; seeds {', '.join(map(str, config.seeds))}; LRU and learning in points behind",
    )
    table = make_table(words, ("top-k %", "LRU", "learning"), title=f"after {config.before} × capacity lookups")
    for cell in result.steady:
        colour = "green" if cell.learning_behind <= AIM_POINTS else "red"
        learning = f"[{colour}]{cell.learning_behind:.1f}[/]"
        table.add_row(
            f"{cell.exponent:g}", f"{cell.capacity:,}", f"{cell.top_k:.1f}", f"{cell.lru_behind:.1f}", learning
        )
    console.print(table)
    times = tuple(number for number in SHOWN if number <= config.after)
    for shift in config.shifts:
        numbers = ("top-k %", "static", "policy", *(f"{number}×" for number in times), "within 2 after")
        table = make_table(words, numbers, title=f"{shift:.0%} of the rows change places: points behind the new top-k")
        for one in (one for one in result.shifted if one.shift == shift):
            first = (f"{one.exponent:g}", f"{one.capacity:,}", f"{one.top_k:.1f}", f"{one.static_behind:.1f}")
            policies = {"LRU": one.lru_behind, "learning": one.learning_behind, "counted since": one.counted_behind}
            for name, behind in policies.items():
                back = Shifted.within(behind)
                told = "never" if back is None else f"{back}×"
                if name == "learning":
                    told = f"[{'green' if back is not None and back <= AIM_CAPACITIES else 'red'}]{told}[/]"
                table.add_row(*first, name, *(f"{behind[number]:.1f}" for number in times), told)
                first = ("", "", "", "")
        console.print(table)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not numbers with commas between them") from None


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--rows", type=click.IntRange(100, 100_000_000), default=PolicyConfig().num_rows, show_default=True)
@click.option("--zipf", default="1.1,0.6", show_default=True, help="Exponents.")
@click.option("--capacities", default="1000,10000,100000", show_default=True, help="Rows that a policy holds.")
@click.option("--shifts", default="1,0.2", show_default=True, help="Parts of the rows that change places.")
@click.option("--before", type=click.IntRange(1, 10_000), default=200, show_default=True, help="Lookups, × capacity.")
@click.option("--after", type=click.IntRange(1, 10_000), default=60, show_default=True, help="Lookups, × capacity.")
@click.option("--seeds", default="201,202,203", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
def main(
    rows: int, zipf: str, capacities: str, shifts: str, before: int, after: int, seeds: str, json_file: Path | None
) -> None:
    """Compare the policies."""
    config = PolicyConfig(
        num_rows=rows,
        exponents=_numbers(zipf),
        capacities=tuple(map(int, _numbers(capacities))),
        shifts=_numbers(shifts),
        before=before,
        after=after,
        seeds=tuple(map(int, _numbers(seeds))),
    )
    if wrong := [one for one in config.capacities if not 0 < one < rows]:
        raise click.BadParameter(f"{wrong[0]} is not within 1 to {rows - 1} rows", param_hint="--capacities")
    if wrong_shift := [one for one in config.shifts if not 0 < one <= 1]:
        raise click.BadParameter(f"{wrong_shift[0]:g} is not in (0, 1]", param_hint="--shifts")
    found = [compare(config, exponent, one) for exponent in config.exponents for one in config.capacities]
    result = PolicyResult(
        config=config,
        steady=tuple(steady for steady, _ in found),
        shifted=tuple(one for _, shifted in found for one in shifted),
    )
    show(Console(), result)
    if json_file is not None:
        json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
