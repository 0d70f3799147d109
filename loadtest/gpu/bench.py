"""What the GPU bench measures, and its rows, in a file that is complete after each."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.documents import line

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
