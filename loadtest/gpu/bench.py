"""What the GPU bench measures, its rows, in a file that is complete after each, and the engine's aims."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.documents import line
from serving.cli.output import table_of

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchSize:
    """What the parts measure: pooling a grid of dims, hotness, batches and logical cards, and ranking a workload.

    `table_bytes` are of int8 rows; `cell_s` is for one configuration of pooling, `requests` for one of ranking.
    """

    table_bytes: int = 10_000_000_000
    dims: tuple[int, ...] = (128, 64)
    hotness: tuple[int, ...] = (1, 20, 100)
    batches: tuple[int, ...] = (256, 1024, 8192, 65536)
    logical_cards: tuple[int, ...] = (1, 2, 4, 8)
    cell_s: float = 2.0
    workload: str = "dlrm-v2:0.01"
    candidates: tuple[int, ...] = (100, 500)
    requests: int = 300
    fbgemm: Path = Path(sys.prefix) / "fbgemm_gpu"


QUICK = BenchSize(
    table_bytes=2_000_000_000,
    hotness=(1, 20),
    batches=(8192, 65536),
    logical_cards=(1, 8),
    cell_s=0.5,
    workload="dlrm-v2:0.002",
    requests=100,
)


class Results:
    """Rows of all parts, and the status of each part: `running`, `done`, or `failed: ` and why.

    The file, if there is one, is written anew after each row, under a head of date, command and machine.
    """

    def __init__(self, path: Path | None, head: Row, console: Console) -> None:
        self.path, self.head, self.console = path, head, console
        self.status: dict[str, str] = {}
        self.rows: list[Row] = []

    def add(self, part: str, row: Row) -> None:
        """Keep a row, and print it."""
        self.rows.append({"part": part, **row})
        figures = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        line(self.console, f"{part}: {', '.join(f'{name} {figure}' for name, figure in figures.items())}")
        self.save()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record how a part ends; its rows are kept."""
        self.status[name] = "running"
        self.save()
        try:
            yield
            self.status[name] = "done"
        except Exception as error:  # Any failure is a result of the bench, and the other parts go on.
            self.status[name] = f"failed: {type(error).__name__}: {error}"
            line(self.console, traceback.format_exc())
        self.save()

    def save(self) -> None:
        """Write the file in one step."""
        if self.path is not None:
            content = {**self.head, "status": self.status, "rows": self.rows}
            unfinished = self.path.with_name(f"{self.path.name}.part")
            unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, self.path)


def _large(row: Row) -> bool:
    return bool(row["hotness"] >= 20 and row["batch"] >= 65536)


CONFIGURATION = ("dim", "hotness", "batch", "logical_cards", "graphs")


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on a field of the rows to which it applies: a minimum, or a maximum."""

    text: str
    field: str
    bound: float
    minimum: bool
    applies: Callable[[Row], bool] = lambda _: True


AIMS = (
    Aim("time of random reads by the kernel's, 20 rows a bag, 65,536 bags", "ceiling_fraction", 0.9, True, _large),
    Aim("2, 4, 8 logical cards, their time by one's, there", "one_card_ratio", 1.05, False, _large),
    Aim(
        "nn.EmbeddingBag in fp16, its time by the kernel's, dim 64", "embedding_bag_ratio", 1.3, True,
        lambda row: row["dim"] == 64,
    ),
    Aim(
        "nn.EmbeddingBag in fp16, its time by the kernel's, dim 128", "embedding_bag_ratio", 1.8, True,
        lambda row: row["dim"] == 128,
    ),
    Aim("FBGEMM's int8 lookup, its time by the kernel's", "fbgemm_ratio", 1.0, True),
    Aim(
        "a request of 500 candidates, DLRM-v2, with graphs, median ms", "p50_ms", 2.0, False,
        lambda row: row["candidates"] == 500 and row["graphs"],
    ),
)  # fmt: skip


def aims_table(rows: Sequence[Row]) -> Table:
    """Return a table with the worst and the best figure for each aim, and the configuration of the worst."""
    table = table_of("aims", ["aim", "worst at", "#bound", "#worst", "#best", "#configurations"], ())
    for aim in AIMS:
        judged = [row for row in rows if row.get(aim.field) is not None and aim.applies(row)]
        judged.sort(key=lambda row: float(row[aim.field]), reverse=not aim.minimum)
        bound = f"{'≥' if aim.minimum else '≤'} {aim.bound:g}"
        if not judged:
            table.add_row(aim.text, "not measured", bound)
            continue
        worst, best = judged[0][aim.field], judged[-1][aim.field]
        colour = "green" if (worst >= aim.bound if aim.minimum else worst <= aim.bound) else "red"
        where = ", ".join(f"{name} {judged[0][name]}" for name in CONFIGURATION if name in judged[0])
        table.add_row(aim.text, where, bound, f"[{colour}]{worst:.3f}[/]", f"{best:.3f}", str(len(judged)))
    return table
