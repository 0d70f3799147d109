"""Results on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rich.console import Console

from loadtest.load.result import LoadResult, Percentiles, SweepResult
from loadtest.tables import line, make_table
from loadtest.workloads.payloads import FORMS


def outcome_of(result: LoadResult, slo_ms: float) -> Literal["kept", "failed", "invalid"]:
    """Return whether 99 of 100 requests that were due were answered in time; an invalid run does not tell."""
    if not result.valid:
        return "invalid"
    p99_ms = result.latency_of_due.p99_ms
    return "kept" if p99_ms is not None and p99_ms <= slo_ms else "failed"


def show_times(console: Console, rows: Mapping[str, Percentiles]) -> None:
    """Print a table of percentiles, in ms, by name."""
    table = make_table([""], ("p50", "p90", "p99", "p99.9", "max"))
    for name, times in rows.items():
        table.add_row(name, *map(_ms, (times.p50_ms, times.p90_ms, times.p99_ms, times.p999_ms, times.max_ms)))
    console.print(table)


def show_facts(console: Console, facts: Iterable[tuple[str, object]]) -> None:
    """Print a table of values by name."""
    table = make_table([""], [""])
    for name, value in facts:
        table.add_row(name, str(value))
    console.print(table)


def show_result(console: Console, result: LoadResult | SweepResult) -> None:
    """Print it."""
    if isinstance(result, SweepResult):
        _show_sweep(console, result)
    else:
        _show_run(console, result)


def _show_run(console: Console, result: LoadResult) -> None:
    how = f"{result.arrivals} arrivals at {result.rate:g}/s for {result.duration_s:g} s"
    line(console, f"{result.target} {result.api}  {result.workload}  {how}")
    line(console, f"requests are {FORMS[result.varied]}")
    times = {
        "latency of answers, ms": result.latency,
        "  with failed requests as later": result.latency_of_due,
        "service time, ms": result.service,
    }
    show_times(console, times)
    shares = ", ".join(f"{process.cpu_share:.0%}" for process in result.generator.processes)
    facts = [
        ("due", result.due),
        ("answered", f"{result.answered} ({result.throughput:.1f}/s)"),
        (f"within {result.slo_ms:g} ms", f"{result.within_slo} ({result.goodput:.1f}/s)"),
        *((f"failed: {kind}", count) for kind, count in result.errors.items()),
        ("generator's share of a core", shares),
        ("generator late, p99", f"{_ms(result.generator.lag_p99_ms)} ms"),
    ]
    show_facts(console, facts)
    for example in result.error_examples:
        line(console, f"  {example}")
    for reason in result.invalid_because:
        line(console, f"not valid: {reason}")


def _show_sweep(console: Console, result: SweepResult) -> None:
    line(console, f"requests are {FORMS[result.steps[0].varied]}")
    table = make_table(["rate"], ("p50", "p99", "p99 of due", "errors", "generator", ""))
    for step in result.steps:
        times = map(_ms, (step.latency.p50_ms, step.latency.p99_ms, step.latency_of_due.p99_ms))
        cpu_share = max(process.cpu_share for process in step.generator.processes)
        outcome = outcome_of(step, result.slo_ms)
        table.add_row(f"{step.rate:.1f}", *times, str(sum(step.errors.values())), f"{cpu_share:.0%}", outcome)
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


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
