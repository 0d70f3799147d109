"""The GPU bench's result as tables for people: short ones, the file has all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.gpu_aims import judge
from loadtest.gpu_compare import BAG, CUPY, GATHER, OURS
from loadtest.gpu_report import Report, Row

MISSING = "-"


def show(report: Report, console: Console) -> None:
    """Prints the parts' tables, then how far each part came, then the aims."""
    for title, columns, rows in (
        _copies(report),
        _kernel(report),
        _shares(report),
        _compared(report),
        _requests(report),
        _parts(report),
        _aims(report),
    ):
        if rows:
            _print(console, title, columns, rows)
    for part in report.parts.values():
        if part.error is not None:
            console.print(f"{part.name}: {part.error}", style="red", markup=False, highlight=False)


def _print(console: Console, title: str, columns: Iterable[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _number(value: Any, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _rows(report: Report, part: str) -> list[Row]:
    return report.parts[part].rows if part in report.parts else []


Content = tuple[str, list[str], list[list[str]]]


def _copies(report: Report) -> Content:
    rows = [[row["copy"], _number(row["gb_per_s"], 1)] for row in _rows(report, "copy")]
    return "copies", ["copy", "GB/s"], rows


def _kernel(report: Report) -> Content:
    """One line for each size and kind of ids: one card, then the ratios of more."""
    cells: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in _rows(report, "kernel"):
        if row["share_on_card"] == 1:
            key = tuple(row[name] for name in ("ids", "dim", "hotness", "batch"))
            cells.setdefault(key, {})[row["logical_cards"]] = row
    more = sorted({count for cell in cells.values() for count in cell} - {1})
    lines = []
    for key, cell in cells.items():
        one = cell.get(1, {})
        figures = [_number(one.get("us_per_launch"), 1), _number(one.get("ns_per_row"), 3)]
        figures += [_number(one.get("predicted_ns_per_row"), 3), _number(one.get("gb_per_s_all"), 0)]
        figures += [_number(one.get("share_of_copy"))]
        lines.append([*map(str, key), *figures, *(_number(cell.get(n, {}).get("ratio_to_one_card"), 3) for n in more)])
    columns = ["ids", "dim", "hotness", "batch", "us", "ns/row", "predicted", "GB/s", "of copy"]
    return "kernel, int8, all rows on the card", [*columns, *(f"{count} cards" for count in more)], lines


def _shares(report: Report) -> Content:
    cells: dict[tuple[Any, ...], dict[float, Row]] = {}
    for row in _rows(report, "kernel"):
        if row["share_on_card"] < 1:
            key = tuple(row[name] for name in ("dim", "hotness", "batch"))
            cells.setdefault(key, {})[row["share_on_card"]] = row
    shares = sorted({share for cell in cells.values() for share in cell})
    lines = [
        [*map(str, key), *(_number(cell.get(share, {}).get("ns_per_row"), 3) for share in shares)]
        for key, cell in cells.items()
    ]
    columns = ["dim", "hotness", "batch", *(f"{share:.0%}" for share in shares)]
    return "kernel, ns/row by share of the lookups on the card, the rest in pinned memory", columns, lines


def _compared(report: Report) -> Content:
    lines = []
    for row in _rows(report, "compare"):
        key = [row["dtype"], *(str(row[name]) for name in ("dim", "hotness", "batch"))]
        times = row["times"]
        figures = [_number(row["ns_per_row"][OURS], 3), *(_number(times.get(name)) for name in (BAG, GATHER, CUPY))]
        lines.append([*key, *figures])
    columns = ["dtype", "dim", "hotness", "batch", "ns/row", "EmbeddingBag", "torch gather", "CuPy gather"]
    return "beside others: shardrank's int8, then their time by its", columns, lines


def _requests(report: Report) -> Content:
    lines = []
    for row in _rows(report, "ranking"):
        key = [str(row[name]) for name in ("model", "candidates", "logical_cards", "graphs")]
        lines.append([*key, _number(row.get("p50_ms"), 3), _number(row.get("p99_ms"), 3),
                      _number(row.get("candidates_per_s"), 0), str(row.get("correct"))])  # fmt: skip
    columns = ["model", "candidates", "cards", "graphs", "p50 ms", "p99 ms", "candidates/s", "correct"]
    return "one ranking request, local mode", columns, lines


def _parts(report: Report) -> Content:
    lines = []
    for part in report.parts.values():
        wrong = sum(row.get("correct") is False for row in part.rows)
        lines.append(
            [part.name, part.status, f"{part.seconds:.0f} of {part.budget_s:.0f}", str(len(part.rows)), str(wrong)]
        )
    return "parts", ["part", "status", "seconds", "rows", "wrong"], lines


def _aims(report: Report) -> Content:
    lines = []
    for aim in judge(report):
        if aim["met"] is None:
            lines.append([aim["aim"], str(aim["bound"]), MISSING, MISSING, "not measured"])
            continue
        met = "met" if aim["met"] else f"missed in {aim['configurations'] - aim['met_in']} of {aim['configurations']}"
        lines.append(
            [aim["aim"], str(aim["bound"]), f"{aim['worst']:.3f} ({aim['worst_at']})", _number(aim["best"], 3), met]
        )
    return "aims", ["aim", "bound", "worst", "best", ""], lines
