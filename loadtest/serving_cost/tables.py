"""The result on screen."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.serving_cost.result import MAX_CPU_RATIO, MAX_EXTRA_MS, Saturated, ServingBench, against_aim


def show(result: ServingBench, console: Console) -> None:
    """Prints what the benchmark found, beside what is aimed at."""
    console.print(f"{result.began_at}, {result.machine}, dense model in {result.dtype}, {result.rounds} rounds")
    console.print(f"requests: {result.shape.requests}")
    console.print(_saturated(result))
    if result.unloaded:
        console.print(_unloaded(result))


def _saturated(result: ServingBench) -> Table:
    table = Table(title=f"{result.in_flight} in flight: processor time of the server for each request, to its limit")
    for column in ("head", "hotness", "api", "ratio (least–most)", "aim"):
        table.add_column(column)
    for column in ("CPU ms", "limit ms", "requests/s", "batch", "server cores", "client cores", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for (head, hotness, api), ratio in result.ratios().items():
        rows = [one for one in result.saturated if (one.head, one.hotness, one.api) == (head, hotness, api)]
        table.add_row(
            head,
            str(hotness),
            api,
            against_aim(ratio, MAX_CPU_RATIO[api], "×"),
            f"≤ {MAX_CPU_RATIO[api]:.2f}×",
            *_medians(rows),
        )
    return table


def _medians(rows: list[Saturated]) -> list[str]:
    def median(name: str, digits: int) -> str:
        return f"{np.median([getattr(one, name) for one in rows]):.{digits}f}"

    return [
        median("cpu_ms", 3),
        median("limit_cpu_ms", 3),
        median("requests_per_s", 0),
        median("batch_requests", 1),
        median("server_cores", 2),
        median("client_cores", 2),
        median("p50_ms", 2),
        median("p99_ms", 2),
    ]


def _unloaded(result: ServingBench) -> Table:
    table = Table(title="One in flight: p50, and what it is beyond the limit's batch of one")
    for column in ("head", "hotness", "rows", "api", "beyond the limit, ms (least–most)", "aim"):
        table.add_column(column)
    for column in ("p50 ms", "limit ms"):
        table.add_column(column, justify="right")
    for (head, hotness, api, mode), extra in result.extra_ms().items():
        same = (head, hotness, api, mode)
        rows = [one for one in result.unloaded if (one.head, one.hotness, one.api, one.mode) == same]
        table.add_row(
            head,
            str(hotness),
            mode,
            api,
            against_aim(extra, MAX_EXTRA_MS[mode], ""),
            f"≤ {MAX_EXTRA_MS[mode]:.1f}",
            f"{np.median([one.p50_ms for one in rows]):.2f}",
            f"{np.median([one.limit_ms for one in rows]):.2f}",
        )
    return table
