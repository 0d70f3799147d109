"""Results as reports take them: read from files, and runs compared with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from loader.snapshot.schema_errors import schema_errors
from loadtest.errors import ComparisonError, ResultFileError
from loadtest.load.result import LoadResult, SweepResult
from loadtest.rounds import FORM, Arm, Comparison, Measure, compare_rounds
from loadtest.workloads.payloads import FORMS

MAX_RESULT_BYTES = 256 << 20
MAX_PROBLEMS = 5

Reported: TypeAlias = LoadResult | SweepResult | Comparison
_REPORTED: TypeAdapter[Reported] = TypeAdapter(Annotated[Reported, Field(discriminator="kind")])
_MEASURES: tuple[Measure[LoadResult], ...] = (
    Measure("p50", "ms", "lower", lambda run: run.latency_of_due.p50_ms),
    Measure("p99", "ms", "lower", lambda run: run.latency_of_due.p99_ms),
    Measure("p99.9", "ms", "lower", lambda run: run.latency_of_due.p999_ms),
    Measure("answers in time", "/s", "higher", lambda run: run.goodput),
)
_ALIKE = ("target", "model", "workload", "api", "ids", "candidates", "arrivals", "rate", "duration_s", "slo_ms")


def read_reported(path: Path) -> Reported:
    """Read a document that `--json` wrote.

    Raises:
        ResultFileError: no such file, too large, or not such a document.
    """
    try:
        if (size := path.stat().st_size) > MAX_RESULT_BYTES:
            raise ResultFileError(f"{path}: {size} bytes; at most {MAX_RESULT_BYTES} are read")
        return _REPORTED.validate_json(path.read_bytes())
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        problems = [str(problem) for problem in schema_errors(error, [LoadResult, SweepResult, Comparison])]
        more = f" and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        what = "; ".join(problems[:MAX_PROBLEMS])
        raise ResultFileError(f"{path} is no result of a run, a sweep or a comparison: {what}{more}") from error


def compare_runs(title: str, arms: Mapping[str, Sequence[LoadResult]], *, seed: int = 0) -> Comparison:
    """Compare load tests: p50, p99 and p99.9 of all requests that were due, and answers in time a second.

    The runs of an arm are its rounds; the first arm is the baseline.

    Raises:
        ComparisonError: fewer than two arms, or arms with other numbers of rounds.
    """
    if len(arms) < 2:
        raise ComparisonError(f"arms: {sorted(arms)}; a comparison needs at least 2")
    runs = [run for of_arm in arms.values() for run in of_arm]
    values = {field: {getattr(run, field) for run in runs} for field in _ALIKE}
    alike = {field: str(found.pop()) for field, found in values.items() if len(found) == 1 and None not in found}
    return compare_rounds(
        [(Arm(name=name, runs=tuple(of_arm)), of_arm) for name, of_arm in arms.items()],
        _MEASURES,
        title=title,
        setup={**alike, FORM: " or ".join(sorted({FORMS[run.varied] for run in runs}))},
        invalid_because=[
            f"{name}, round {number}: {reason}"
            for name, of_arm in arms.items()
            for number, run in enumerate(of_arm, 1)
            for reason in run.invalid_because
        ],
        machine=runs[0].machine if runs and all(run.machine == runs[0].machine for run in runs) else None,
        versions=dict(set.intersection(*(set(run.versions.items()) for run in runs))) if runs else {},
        seed=seed,
    )
