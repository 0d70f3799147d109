"""Compares load tests with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.load.result import LoadResult
from loadtest.report.comparison import Arm, Better, Comparison
from loadtest.report.errors import ComparisonError
from loadtest.report.ratios import measured
from loadtest.workloads.payloads import FORMS

MEASURES: tuple[tuple[str, str, Better], ...] = (
    ("p50", "ms", "lower"),
    ("p99", "ms", "lower"),
    ("p99.9", "ms", "lower"),
    ("answers in time", "/s", "higher"),
)
_ALIKE = ("target", "model", "workload", "api", "ids", "candidates", "arrivals", "rate", "duration_s", "slo_ms")


def compare_runs(
    title: str, arms: Mapping[str, Sequence[LoadResult]], *, setup: Mapping[str, str] | None = None, seed: int = 0
) -> Comparison:
    """Compares load tests: p50, p99 and p99.9 of all requests that were due, and answers in time a second.

    Args:
        title: what is compared.
        arms: the runs of each, in rounds; the first arm is the baseline.
        setup: what all have alike; what the runs themselves agree on is added.
        seed: of the bootstrap.

    Raises:
        ComparisonError: fewer than two arms, or arms with other numbers of rounds.
    """
    if len(arms) < 2:
        raise ComparisonError(f"arms: {sorted(arms)}; a comparison needs at least 2")
    counts = {name: len(of_arm) for name, of_arm in arms.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ComparisonError(f"arms: {counts} runs; all must have as many, at least 1")
    runs = [run for of_arm in arms.values() for run in of_arm]
    found, left_out = [], []
    for (name, unit, better), values in zip(MEASURES, _values_of(arms), strict=True):
        if all(value > 0 for of_arm in values for value in of_arm):
            found.append(measured(name, unit, better, values, seed=seed))
        else:
            left_out.append(f"{name} is left out: some runs have none, since too many of their requests failed")
    first = runs[0]
    return Comparison(
        title=title,
        setup={**_alike(runs), **(setup or {})},
        arms=tuple(Arm(name=name, runs=tuple(of_arm)) for name, of_arm in arms.items()),
        baseline=0,
        rounds=len(runs) // len(arms),
        measures=tuple(found),
        seed=seed,
        valid=all(run.valid for run in runs) and not left_out,
        invalid_because=(*_reasons(arms), *left_out),
        machine=first.machine if all(run.machine == first.machine for run in runs) else None,
        versions=dict(set.intersection(*(set(run.versions.items()) for run in runs))),
    )


def _reasons(arms: Mapping[str, Sequence[LoadResult]]) -> list[str]:
    return [
        f"{name}, round {index}: {reason}"
        for name, of_arm in arms.items()
        for index, run in enumerate(of_arm, 1)
        if not run.valid
        for reason in run.invalid_because
    ]


def _values_of(arms: Mapping[str, Sequence[LoadResult]]) -> list[list[list[float]]]:
    """`[measures][arms][rounds]`; 0 where there is none."""
    latencies = [
        [[getattr(run.latency_of_due, field) or 0.0 for run in of_arm] for of_arm in arms.values()]
        for field in ("p50_ms", "p99_ms", "p999_ms")
    ]
    return [*latencies, [[run.goodput for run in of_arm] for of_arm in arms.values()]]


def _alike(runs: Sequence[LoadResult]) -> dict[str, str]:
    """What all runs were asked, by field."""
    values = {field: {getattr(run, field) for run in runs} for field in _ALIKE}
    alike = {field: str(found.pop()) for field, found in values.items() if len(found) == 1 and None not in found}
    forms = {FORMS[run.varied] for run in runs}
    return {**alike, "requests are": " or ".join(sorted(forms))}
