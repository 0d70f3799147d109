"""The comparison on screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from loadtest.peers.comparison import MAX_OFFERED_P99_RATIO, MAX_P50_RATIO, MIN_THROUGHPUT_RATIO, Ahead
from loadtest.report.comparison import Comparison, Ratio

WIDTH = 150


def show(comparison: Comparison, found: Sequence[Ahead], console: Console | None = None) -> None:
    """Prints every measure of every server, and how far shardrank is ahead."""
    console = console or Console(width=WIDTH)
    table = Table(title=f"{comparison.title}: medians of {comparison.rounds} rounds (ratio to shardrank)")
    table.add_column("")
    for arm in comparison.arms:
        table.add_column(arm.name, justify="right")
    for one in comparison.measures:
        digits = 0 if one.unit == "/s" else 2
        cells = [
            f"{middle:.{digits}f}" + ("" if arm == comparison.baseline else f" ({_ratio(ratio)})")
            for arm, (middle, ratio) in enumerate(zip(one.middle, one.ratios, strict=True))
        ]
        table.add_row(f"{one.name}, {'requests/s' if one.unit == '/s' else one.unit}", *cells)
    console.print(f"requests: {comparison.setup['requests']}")
    console.print(table)
    for ahead in found:
        console.print(
            f"hotness {ahead.hotness}, to the best peer of each round: "
            f"throughput {_against(ahead.throughput, ahead.throughput_met)} (aim ≥ {MIN_THROUGHPUT_RATIO:g}×), "
            f"p50 {_against(ahead.p50, ahead.p50_met)} (aim ≤ {MAX_P50_RATIO:g}×), p99 {ahead.p99:.2f}×, "
            f"p99 at an equal rate {_against(ahead.offered_p99, ahead.offered_p99_met)} "
            f"(aim ≤ {MAX_OFFERED_P99_RATIO:g}×)"
        )
    for reason in comparison.invalid_because:
        console.print(f"[red]not valid:[/] {reason}")


def _ratio(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}×"
    return f"{ratio.value:.2f}×, {ratio.low:.2f}–{ratio.high:.2f}"


def _against(value: float, met: bool) -> str:
    return f"[{'green' if met else 'red'}]{value:.2f}×[/]"
