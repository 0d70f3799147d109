"""A result on a terminal."""

from __future__ import annotations

from typing import Literal

from rich.console import Console

from loadtest.load.result import LoadResult, Percentiles, SweepResult
from loadtest.tables import line, make_table
from loadtest.workloads.payloads import FORMS

PERCENTILES = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")


def outcome_of(result: LoadResult, slo_ms: float) -> Literal["kept", "failed", "invalid"]:
    """Tell whether 99 of 100 requests that were due were answered in time; a run that is not valid does not tell."""
    if not result.valid:
        return "invalid"
    p99_ms = result.latency_of_due.p99_ms
    return "kept" if p99_ms is not None and p99_ms <= slo_ms else "failed"


def show_result(console: Console, result: LoadResult | SweepResult) -> None:
    """Print it."""
    if isinstance(result, SweepResult):
        _show_sweep(console, result)
    else:
        _show_run(console, result)


def _show_run(console: Console, result: LoadResult) -> None:
    line(
        console,
        f"{result.target} {result.api}  {result.workload}  {result.arrivals} arrivals at {result.rate:g}/s for "
        f"{result.duration_s:g} s",
    )
    line(console, f"requests are {FORMS[result.varied]}")
    table = make_table([""], ("p50", "p90", "p99", "p99.9", "max"))
    rows = {
        "latency of answers, ms": result.latency,
        "  with failed requests as later": result.latency_of_due,
        "service time, ms": result.service,
    }
    for name, percentiles in rows.items():
        table.add_row(name, *_numbers(percentiles))
    console.print(table)
    table = make_table([""], [""])
    table.add_row("due", str(result.due))
    table.add_row("answered", f"{result.answered} ({result.throughput:.1f}/s)")
    table.add_row(f"within {result.slo_ms:g} ms", f"{result.within_slo} ({result.goodput:.1f}/s)")
    for kind, count in result.errors.items():
        table.add_row(f"failed: {kind}", str(count))
    generator = result.generator
    shares = ", ".join(f"{process.cpu_share:.0%}" for process in generator.processes)
    table.add_row("generator's share of a core", shares)
    table.add_row("generator late, p99", f"{_ms(generator.lag_p99_ms)} ms")
    console.print(table)
    for example in result.error_examples:
        line(console, f"  {example}")
    for reason in result.invalid_because:
        line(console, f"not valid: {reason}")


def _show_sweep(console: Console, result: SweepResult) -> None:
    line(console, f"requests are {FORMS[result.steps[0].varied]}")
    table = make_table(["rate"], ("p50", "p99", "p99 of due", "errors", "generator", ""))
    for step in result.steps:
        cpu = max(process.cpu_share for process in step.generator.processes)
        table.add_row(
            f"{step.rate:.1f}",
            _ms(step.latency.p50_ms),
            _ms(step.latency.p99_ms),
            _ms(step.latency_of_due.p99_ms),
            str(sum(step.errors.values())),
            f"{cpu:.0%}",
            outcome_of(step, result.slo_ms),
        )
    console.print(table)
    if result.highest_rate is None:
        line(console, f"no rate kept p99 within {result.slo_ms:g} ms")
        return
    why = {
        "server": "the server does not keep to it beyond",
        "generator": "the generator could not tell beyond",
        "max_rate": "no more was tried",
    }[result.limited_by]
    line(console, f"highest rate with p99 within {result.slo_ms:g} ms: {result.highest_rate:.1f}/s; {why}")


def _numbers(percentiles: Percentiles) -> list[str]:
    return [_ms(getattr(percentiles, name)) for name in PERCENTILES]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
