"""Show the GPU bench's result as tables, and judge it by the engine's aims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.gpu.parts import BenchReport, Row
from loadtest.gpu.pooling import BAG, GATHER, OURS

LARGE_BATCH = 8192
Figure = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound that every measured figure must reach, or not exceed; each has its configuration, the worst decides."""

    text: str
    bound: float
    at_least: bool
    figures: Callable[[BenchReport], list[Figure]]

    def judge(self, report: BenchReport) -> Row:
        """Find the worst figure, the best one, and whether the worst will do; None of them if none was measured."""
        figures = sorted(self.figures(report), reverse=not self.at_least)
        row: Row = {"aim": self.text, "bound": self.bound, "configurations": len(figures)}
        if not figures:
            return {**row, "worst": None, "met": None}
        (worst, where), (best, _) = figures[0], figures[-1]
        met = sum(figure >= self.bound if self.at_least else figure <= self.bound for figure, _ in figures)
        return {**row, "worst": worst, "worst_at": where, "best": best, "met_in": met, "met": met == len(figures)}


def _right_rows(report: BenchReport, part: str) -> list[Row]:
    return [row for row in _rows(report, part) if row.get("correct")]


def _where(row: Row, *keys: str) -> str:
    return ", ".join(f"{key} {row[key]}" for key in keys)


def _large_uniform(report: BenchReport) -> list[Row]:
    return [
        row
        for row in _right_rows(report, "kernel")
        if row["ids"] == "uniform" and row["share_on_card"] == 1 and row["batch"] >= LARGE_BATCH
    ]


def _shares_of_copy(report: BenchReport) -> list[Figure]:
    rows = [row for row in _large_uniform(report) if row["logical_cards"] == 1 and row["share_of_copy"] is not None]
    return [(row["share_of_copy"], _where(row, "dim", "hotness", "batch")) for row in rows]


def _ratios_of_8_cards(report: BenchReport) -> list[Figure]:
    rows = [row for row in _large_uniform(report) if row["logical_cards"] == 8 and row["ratio_to_one_card"] is not None]
    return [(row["ratio_to_one_card"], _where(row, "dim", "hotness", "batch")) for row in rows]


def _times_embedding_bag(report: BenchReport) -> list[Figure]:
    rows = [
        row
        for row in _right_rows(report, "compare")
        if row["dtype"] == "fp16" and row["batch"] >= LARGE_BATCH and BAG in row["times"]
    ]
    return [(row["times"][BAG], _where(row, "dim", "hotness", "batch")) for row in rows]


def _dlrm_medians(report: BenchReport) -> list[Figure]:
    rows = [row for row in _right_rows(report, "ranking") if row["model"] == "dlrm" and row["candidates"] == 500]
    return [(row["p50_ms"], _where(row, "graphs", "logical_cards")) for row in rows if row["graphs"]]


AIMS = (
    Aim("share of the copy bandwidth, in sectors, uniform ids, batch >= 8192", 0.85, True, _shares_of_copy),
    Aim("8 logical cards, time by that of one, uniform ids, batch >= 8192", 1.05, False, _ratios_of_8_cards),
    Aim("nn.EmbeddingBag fp16, its time by the kernel's, batch >= 8192", 2.0, True, _times_embedding_bag),
    Aim("a request of 500 candidates, DLRM-v2, local mode with graphs, median ms", 2.0, False, _dlrm_medians),
)


def judge(report: BenchReport) -> list[Row]:
    """Judge all aims."""
    return [aim.judge(report) for aim in AIMS]


MISSING = "-"


Content = tuple[str, list[str], list[list[str]]]
"""Title, columns and lines of a table."""


def contents(report: BenchReport) -> list[Content]:
    """Make the parts' tables, then how far each part came, then the aims; without lines where nothing was measured."""
    makers = (_copies, _kernel, _shares, _compared, _requests, _parts, _aims)
    return [make(report) for make in makers]


def show(report: BenchReport, console: Console) -> None:
    """Print all tables that have lines."""
    for title, columns, rows in contents(report):
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


def _rows(report: BenchReport, part: str) -> list[Row]:
    return report.parts[part].rows if part in report.parts else []


def _copies(report: BenchReport) -> Content:
    rows = [[row["copy"], _number(row["gb_per_s"], 1)] for row in _rows(report, "copy")]
    return "copies", ["copy", "GB/s"], rows


def _kernel(report: BenchReport) -> Content:
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


def _shares(report: BenchReport) -> Content:
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


def _compared(report: BenchReport) -> Content:
    lines = []
    for row in _rows(report, "compare"):
        key = [row["dtype"], *(str(row[name]) for name in ("dim", "hotness", "batch"))]
        times = row["times"]
        figures = [_number(row["ns_per_row"][OURS], 3), *(_number(times.get(name)) for name in (BAG, GATHER))]
        lines.append([*key, *figures])
    columns = ["dtype", "dim", "hotness", "batch", "ns/row", "EmbeddingBag", "torch gather"]
    return "beside others: shardrank's int8, then their time by its", columns, lines


def _requests(report: BenchReport) -> Content:
    lines = []
    for row in _rows(report, "ranking"):
        key = [str(row[name]) for name in ("model", "candidates", "logical_cards", "graphs")]
        lines.append([*key, _number(row.get("p50_ms"), 3), _number(row.get("p99_ms"), 3),
                      _number(row.get("candidates_per_s"), 0), str(row.get("correct"))])  # fmt: skip
    columns = ["model", "candidates", "cards", "graphs", "p50 ms", "p99 ms", "candidates/s", "correct"]
    return "one ranking request, local mode", columns, lines


def _parts(report: BenchReport) -> Content:
    lines = []
    for part in report.parts.values():
        wrong = sum(row.get("correct") is False for row in part.rows)
        lines.append(
            [part.name, part.status, f"{part.seconds:.0f} of {part.budget_s:.0f}", str(len(part.rows)), str(wrong)]
        )
    return "parts", ["part", "status", "seconds", "rows", "wrong"], lines


def _aims(report: BenchReport) -> Content:
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
