"""The drill's report, and its attacks, for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.drill.hostile.catalog import ATTACKS
from loadtest.drill.hostile.report import AttackResult, FuzzResult, HostileReport
from serving.cli.output import stdout_console


def show_hostile(console: Console, report: HostileReport) -> None:
    """What the drill found."""
    console.print(
        f"{report.machine}; steady: {report.steady_requests} valid requests, p99 {report.steady_p99_ms:.1f} ms, "
        f"longest stall {report.steady_stall_ms:.0f} ms",
        markup=False,
        highlight=False,
    )
    if report.attacks:
        console.print(_attacks(report.attacks))
    if report.fuzz:
        console.print(_fuzz(report.fuzz))
    for problem in report.problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    for one in report.fuzz:
        for example in one.examples:
            console.print(f"  {one.name}: {example}", markup=False, highlight=False, soft_wrap=True)
    console.print("not passed" if report.problems else "passed", markup=False)


def _attacks(results: tuple[AttackResult, ...]) -> Table:
    table = Table(title="attacks", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("attack", "row"):
        table.add_column(column, no_wrap=True)
    for column in ("sent", "messages", "stall", "valid", "failed", "p99", "memory, highest, after"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ended by")
    table.add_column("")
    for one in results:
        grown = [(value - one.memory_before_bytes) / 1e6 for value in (one.memory_peak_bytes, one.memory_after_bytes)]
        p99 = "-" if one.valid_p99_ms is None else f"{one.valid_p99_ms:.0f} ms"
        table.add_row(
            one.name,
            one.row,
            _size(one.bytes_sent),
            str(one.messages),
            f"{one.longest_stall_ms:.0f} ms",
            str(one.valid_requests),
            str(one.valid_failures),
            p99,
            f"{one.memory_before_bytes / 1e6:.0f} MB {grown[0]:+.0f} {grown[1]:+.0f}",
            one.ended_by,
            "[green]passed[/]" if one.passed else "[red]failed[/]",
        )
    return table


def _fuzz(results: tuple[FuzzResult, ...]) -> Table:
    table = Table(title="mutated requests", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("what", "mutations", "a second", "wrong answers", "tracebacks", "same after", "memory", "answers"):
        table.add_column(column)
    for one in results:
        answers = sorted(one.answers.items(), key=lambda pair: -pair[1])[:5]
        table.add_row(
            one.name,
            str(one.mutations),
            f"{one.mutations / max(one.seconds, 1e-9):.0f}",
            str(one.wrong_answers),
            str(one.tracebacks),
            "yes" if one.same_answers else "no",
            f"{(one.memory_after_bytes - one.memory_before_bytes) / 1e6:+.0f} MB",
            ", ".join(f"{name} ×{count}" for name, count in answers),
        )
    return table


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def list_attacks() -> None:
    """Prints all attacks."""
    console = stdout_console()
    for one in ATTACKS.values():
        row = "" if one.row == "own" else f"row {one.row}"
        console.print(f"{one.name:28} {one.kind:8} {row:7} {one.about}", markup=False, highlight=False, soft_wrap=True)
