"""Show the GPU bench's result as tables, and judge it by the engine's aims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.gpu.parts import BenchReport, Row
from loadtest.gpu.pooling import AIM_HOTNESS, BAG, GATHER, OURS, TBE

LARGE_BATCH = 8192
AIM_BATCH = 65536
COPY_SHARE = 0.85
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


def _large(report: BenchReport) -> list[Row]:
    """Find what the aims of the kernel are about: bags of 20 and more, as the product writes them."""
    return [
        row
        for row in _right_rows(report, "kernel")
        if row["ids"] == "uniform"
        and row["share_on_card"] == 1
        and row["columns"] == "product"
        and row["hotness"] >= AIM_HOTNESS
        and row["batch"] >= AIM_BATCH
    ]


def _at(row: Row) -> str:
    """Say where a figure is from, and what bounds it: the ceiling, and the kernel."""
    at = _where(row, "dim", "hotness", "batch", "out_dtype")
    return f"{at}: ceiling {row['ceiling_us']:.1f} us, kernel {row['us_per_launch']:.1f} us"


def _shares_of_ceiling(report: BenchReport) -> list[Figure]:
    return [(row["share_of_ceiling"], _at(row)) for row in _large(report) if not row["places"]]


def _shares_of_copy(report: BenchReport) -> list[Figure]:
    """Take configurations whose ceiling allows the bound."""
    return [
        (row["share_of_copy"], _at(row))
        for row in _large(report)
        if not row["places"] and (row["ceiling_share_of_copy"] or 0.0) >= COPY_SHARE
    ]


def _ratios_of_cards(report: BenchReport) -> list[Figure]:
    rows = [row for row in _large(report) if row["logical_cards"] > 1 and row["ratio_to_one_card"] is not None]
    return [(row["ratio_to_one_card"], _where(row, "dim", "hotness", "batch", "logical_cards")) for row in rows]


def _times_of(name: str, dim: int | None = None) -> Callable[[BenchReport], list[Figure]]:
    """Make what finds another's time by the kernel's."""

    def figures(report: BenchReport) -> list[Figure]:
        return [
            (row["times"][name], _where(row, "dim", "hotness", "batch"))
            for row in _right_rows(report, "compare")
            if row["dtype"] == "fp16"
            and row["batch"] >= LARGE_BATCH
            and name in row["times"]
            and dim in (None, row["dim"])
        ]

    return figures


def _dlrm_medians(report: BenchReport) -> list[Figure]:
    rows = [row for row in _right_rows(report, "ranking") if row["model"] == "dlrm" and row["candidates"] == 500]
    return [(row["p50_ms"], _where(row, "graphs", "logical_cards")) for row in rows if row["graphs"]]


AIMS = (
    Aim("int8 by the random-gather ceiling, hotness >= 20, 65,536 bags", 0.9, True, _shares_of_ceiling),
    Aim("share of the copy bandwidth in sectors, there, where the ceiling has it", COPY_SHARE, True, _shares_of_copy),
    Aim("2, 4, 8 logical cards, time by that of one with places, there", 1.05, False, _ratios_of_cards),
    Aim("nn.EmbeddingBag fp16, its time by the kernel's, dim 64, batch >= 8192", 1.3, True, _times_of(BAG, 64)),
    Aim("nn.EmbeddingBag fp16, its time by the kernel's, dim 128, batch >= 8192", 1.8, True, _times_of(BAG, 128)),
    Aim("FBGEMM's TBE, int8, fp16 out, its time by the kernel's, batch >= 8192", 1.0, True, _times_of(TBE)),
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
    makers = (_copies, _kernel, _shares, _compared, _variants, _requests, _parts, _aims)
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
    """One line for each size, kind of ids and output: without places, then the ratios of logical cards with them."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in _rows(report, "kernel"):
        if row["share_on_card"] == 1:
            key = tuple(row[name] for name in ("ids", "dim", "hotness", "batch", "out_dtype", "columns"))
            cells.setdefault(key, []).append(row)
    more = sorted({row["logical_cards"] for cell in cells.values() for row in cell if row["places"]})
    lines = []
    for key, cell in cells.items():
        bare = next((row for row in cell if not row["places"]), {})
        placed = {row["logical_cards"]: row for row in cell if row["places"]}
        figures = [_number(bare.get("us_per_launch"), 1), _number(bare.get("ceiling_us"), 1)]
        figures += [_number(bare.get("share_of_ceiling")), _number(bare.get("ns_per_row"), 3)]
        figures += [_number(bare.get("predicted_ns_per_row"), 3), _number(bare.get("gb_per_s_stored"), 0)]
        figures += [_number(bare.get("gb_per_s_all"), 0), _number(bare.get("share_of_copy"))]
        first = placed.get(more[0], {}) if more else {}
        figures += [_number(first.get("ratio_to_no_places"), 3)]
        lines.append(
            [*map(str, key), *figures, *(_number(placed.get(n, {}).get("ratio_to_one_card"), 3) for n in more[1:])]
        )
    columns = ["ids", "dim", "hotness", "batch", "out", "columns", "us", "ceiling us", "of ceiling", "ns/row"]
    columns += ["predicted", "stored GB/s", "GB/s", "of copy", "places"]
    return "kernel, int8, all rows on the card", [*columns, *(f"{count} cards" for count in more[1:])], lines


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
        figures = [_number(row["ns_per_row"][OURS], 3), *(_number(times.get(name)) for name in (BAG, GATHER, TBE))]
        lines.append([*key, *figures])
    columns = ["dtype", "dim", "hotness", "batch", "ns/row", "EmbeddingBag", "torch gather", "FBGEMM"]
    return "beside others: shardrank's int8, then their time by its", columns, lines


def _variants(report: BenchReport) -> Content:
    columns = ["switch", "dim", "hotness", "batch", "logical_cards"]
    lines = [
        [*(str(row[name]) for name in columns), _number(row["us_per_launch"], 1), _number(row["default_us"], 1),
         _number(row["times"], 3)]
        for row in _rows(report, "variants")
    ]  # fmt: skip
    return "switches of the kernels, their time by the defaults'", [*columns, "us", "defaults us", "times"], lines


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
