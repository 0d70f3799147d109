"""Reports as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.drill.broken_report import BrokenReport
from loadtest.drill.crash_report import CrashReport
from loadtest.drill.swap_report import SwapReport


def show_swap(console: Console, report: SwapReport) -> None:
    """What a swap drill found."""
    rows: list[tuple[str, object]] = [
        ("swaps", report.swaps),
        ("answers (steady / during swaps / apart)", _counts(report)),
        ("failed, mixed, wrong, stale", f"{report.failed}, {report.mixed}, {report.wrong}, {report.stale}"),
        ("p50 steady, during swaps", f"{_ms(report.p50_ms_steady)}, {_ms(report.p50_ms_during_swap)}"),
        ("p99 steady, during swaps", f"{_ms(report.p99_ms_steady)}, {_ms(report.p99_ms_during_swap)}"),
        ("ratio of p99", "-" if report.ratio_p99 is None else f"{report.ratio_p99:.2f}"),
        ("time of a swap, median and longest", f"{_seconds(report.swap_s_median)}, {_seconds(report.swap_s_max)}"),
        ("memory (RSS) before, after", f"{report.rss_mb_before:.0f} MB, {report.rss_mb_after:.0f} MB"),
        ("memory (USS) before, after", f"{report.uss_mb_before:.0f} MB, {report.uss_mb_after:.0f} MB"),
        ("growth per swap; rows of a version", f"{_mb(report.rss_mb_per_swap)}; {_mb(report.rows_mb)}"),
    ]
    _facts(console, "swap drill", rows)
    _end(console, report.problems, report.details)


def show_crash(console: Console, report: CrashReport) -> None:
    """What a crash drill found."""
    table = Table(title="crash drill", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rollout", "step", "killed", "ended in", "rollout ended", "restart", "settled", "answers", "failed"):
        table.add_column(column, no_wrap=True)
    for one in report.results:
        who = one.process or one.victim
        times = f"{one.restart_s:.1f} s", _seconds(one.settled_s)
        table.add_row(one.course, one.step, who, one.ended_in, one.rollout, *times, str(one.answers), str(one.failed))
    console.print(table)
    ended = f"{report.ended_old}, {report.ended_new}, {report.ended_neither}"
    rows: list[tuple[str, object]] = [
        ("kills", report.cases),
        ("ended in the old, the new, neither version", ended),
        ("settled within 10 s; longest", f"{report.settled_within_10_s}; {_seconds(report.settled_s_max)}"),
        ("answers", report.answers),
        ("failed, mixed, wrong, stale", f"{report.failed}, {report.mixed}, {report.wrong}, {report.stale}"),
        ("answers lost to a killed shard node", _share(report.answers_lost_share_shard_node)),
        ("the same in rollouts by replica", _share(report.answers_lost_share_shard_node_by_replica)),
        ("answers lost to a killed Redis", _share(report.answers_lost_share_redis)),
    ]
    _facts(console, "", rows)
    _end(console, report.problems, report.details)


def show_broken(console: Console, report: BrokenReport) -> None:
    """What a drill against broken snapshots found."""
    table = Table(title="broken snapshots", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("damage", "tried", "refused by publish", "by the rollout", "accepted"):
        table.add_column(column, justify="left" if column == "damage" else "right", no_wrap=True)
    for name, group in report.groups.items():
        counts = (group.tried, group.refused_by_publish, group.refused_by_rollout, group.accepted)
        table.add_row(name, *map(str, counts))
    console.print(table)
    rows: list[tuple[str, object]] = [
        ("refused of tried", f"{report.refused} of {report.tried}"),
        ("answers", report.answers),
        ("failed, mixed, wrong", f"{report.failed}, {report.mixed}, {report.wrong}"),
        ("answers of another version", report.other_versions),
        ("disk made full by", report.disk_full_means),
        ("a sound snapshot goes live", "yes" if report.control_went_live else "no"),
    ]
    _facts(console, "", rows)
    _end(console, report.problems, report.details)


def _facts(console: Console, title: str, rows: Iterable[tuple[str, object]]) -> None:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE, show_header=False)
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table)


def _end(console: Console, problems: Sequence[str], details: Sequence[str]) -> None:
    for line in problems:
        console.print(f"problem: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in details if problems else ():
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print("not passed" if problems else "passed", markup=False)


def _counts(report: SwapReport) -> str:
    return f"{report.answers} ({report.answers_steady} / {report.answers_during_swap} / {report.answers_apart})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} MB"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"
