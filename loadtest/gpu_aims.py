"""What the CUDA engine aims at, and what was measured of it: nothing rounded, nothing left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.gpu_compare import BAG
from loadtest.gpu_report import Report, Row

LARGE_BATCH = 8192
Figure = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that is wanted.

    Attributes:
        text: what it says.
        bound: the figure.
        at_least: whether the measured one must be at least that, else at most.
        figures: all that were measured, each with its configuration; the worst one decides.
    """

    text: str
    bound: float
    at_least: bool
    figures: Callable[[Report], list[Figure]]

    def judge(self, report: Report) -> Row:
        """The worst figure, the best one, and whether the worst will do; nothing of them if none was measured."""
        figures = sorted(self.figures(report), reverse=not self.at_least)
        row: Row = {"aim": self.text, "bound": self.bound, "configurations": len(figures)}
        if not figures:
            return {**row, "worst": None, "met": None}
        (worst, where), (best, _) = figures[0], figures[-1]
        met = sum(figure >= self.bound if self.at_least else figure <= self.bound for figure, _ in figures)
        return {**row, "worst": worst, "worst_at": where, "best": best, "met_in": met, "met": met == len(figures)}


def _rows(report: Report, part: str) -> list[Row]:
    rows = report.parts[part].rows if part in report.parts else []
    return [row for row in rows if row.get("correct")]


def _where(row: Row, *keys: str) -> str:
    return ", ".join(f"{key} {row[key]}" for key in keys)


def _large_uniform(report: Report) -> list[Row]:
    return [
        row
        for row in _rows(report, "kernel")
        if row["ids"] == "uniform" and row["share_on_card"] == 1 and row["batch"] >= LARGE_BATCH
    ]


def _shares_of_copy(report: Report) -> list[Figure]:
    rows = [row for row in _large_uniform(report) if row["logical_cards"] == 1 and row["share_of_copy"] is not None]
    return [(row["share_of_copy"], _where(row, "dim", "hotness", "batch")) for row in rows]


def _ratios_of_8_cards(report: Report) -> list[Figure]:
    rows = [row for row in _large_uniform(report) if row["logical_cards"] == 8 and row["ratio_to_one_card"] is not None]
    return [(row["ratio_to_one_card"], _where(row, "dim", "hotness", "batch")) for row in rows]


def _times_embedding_bag(report: Report) -> list[Figure]:
    rows = [
        row
        for row in _rows(report, "compare")
        if row["dtype"] == "fp16" and row["batch"] >= LARGE_BATCH and BAG in row["times"]
    ]
    return [(row["times"][BAG], _where(row, "dim", "hotness", "batch")) for row in rows]


def _dlrm_medians(report: Report) -> list[Figure]:
    rows = [row for row in _rows(report, "ranking") if row["model"] == "dlrm" and row["candidates"] == 500]
    return [(row["p50_ms"], _where(row, "graphs", "logical_cards")) for row in rows if row["graphs"]]


AIMS = (
    Aim("share of the copy bandwidth, in sectors, uniform ids, batch >= 8192", 0.85, True, _shares_of_copy),
    Aim("8 logical cards, time by that of one, uniform ids, batch >= 8192", 1.05, False, _ratios_of_8_cards),
    Aim("nn.EmbeddingBag fp16, its time by the kernel's, batch >= 8192", 2.0, True, _times_embedding_bag),
    Aim("a request of 500 candidates, DLRM-v2, local mode with graphs, median ms", 2.0, False, _dlrm_medians),
)


def judge(report: Report) -> list[Row]:
    """All aims."""
    return [aim.judge(report) for aim in AIMS]
