"""Run the parts of the GPU bench: how much each measures, and the result file, written again as rows come in.

Nothing that was measured is lost: a part that fails, hangs or runs out of time leaves its rows in the file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from loader.errors import LoaderError


@dataclass(frozen=True, slots=True)
class BenchSize:
    """What the parts measure.

    Attributes:
        table_bytes: of int8 rows as a snapshot stores them.
        pinned_bytes: of the host, for rows that the card reads in place.
        copy_bytes: of one copy within the card.
        dims, hotness, batches: of the grid.
        logical_cards: that one device's table is split over; the first is what the others are compared with.
        shares_on_card: of the lookups; the rest finds its rows in pinned memory.
        cell_s: seconds for one configuration of one grid.
        cache_bytes: input sets of a configuration read at least this much together.
        compared_bytes: of the torch table in the comparison, at most.
        max_sets: of input sets.
        request_table_rows: rows that a table of the ranking models is cut to.
        request_hotness: ids that a bag of theirs is cut to.
        layer_divisor: by which their hidden layers are cut.
        candidates: of a request.
        max_batch_candidates: that requests in flight are joined up to.
        requests: timed in each configuration of the ranking part.
        throughput_s: for which requests are kept in flight there.
        fbgemm: folder of FBGEMM's libraries.
    """

    table_bytes: int = 20_000_000_000
    pinned_bytes: int = 4_000_000_000
    copy_bytes: int = 4_000_000_000
    dims: tuple[int, ...] = (128, 64)
    hotness: tuple[int, ...] = (1, 20, 100)
    batches: tuple[int, ...] = (256, 1024, 8192, 65536)
    logical_cards: tuple[int, ...] = (1, 2, 4, 8)
    shares_on_card: tuple[float, ...] = (0.0, 0.5, 0.9, 0.99)
    cell_s: float = 0.2
    cache_bytes: int = 200_000_000
    compared_bytes: int = 20_000_000_000
    max_sets: int = 4096
    request_table_rows: int = 500_000
    request_hotness: int = 100
    layer_divisor: int = 1
    candidates: tuple[int, ...] = (100, 500)
    max_batch_candidates: int = 2048
    requests: int = 300
    throughput_s: float = 1.0
    fbgemm: Path = Path(sys.prefix) / "fbgemm_gpu"


FULL = BenchSize()
QUICK = BenchSize(
    table_bytes=2_000_000_000,
    pinned_bytes=500_000_000,
    copy_bytes=1_000_000_000,
    hotness=(1, 20),
    batches=(8192, 65536),
    logical_cards=(1, 8),
    shares_on_card=(0.5,),
    cell_s=0.1,
    compared_bytes=4_000_000_000,
    request_table_rows=100_000,
    requests=100,
    throughput_s=0.5,
)


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Wait for a process that leads a session of its own; kill the whole of it if it does not end in time.

    Returns:
        Its exit code; None if it was killed for its time.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


FORMAT = 1
SAVE_EVERY_S = 2.0
TRACEBACK_LINES = 30
_ROOT = Path(__file__).resolve().parents[2]
Status = Literal["not run", "running", "done", "stopped", "failed"]
"""`stopped`: its time was spent before all of it was measured; what was is in its rows."""
Row = dict[str, Any]


class BenchReportError(LoaderError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_report"):
    """A file that is not a result of this bench."""


@dataclass(slots=True)
class BenchPart:
    """What one part of the bench measured.

    Attributes:
        name: as on the command line.
        budget_s: seconds that it may take; it looks at `out_of_time` between rows.
        status: how far it came.
        seconds: that it took.
        error: why it failed.
        notes: what a reader of the rows must know, one sentence each.
        facts: figures of the part as a whole.
        rows: one for each configuration measured.
    """

    name: str
    budget_s: float = 0.0
    status: Status = "not run"
    seconds: float = 0.0
    error: str | None = None
    notes: list[str] = field(default_factory=list)
    facts: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class BenchReport:
    """All parts by name, and in `head` the benchmark, date, command and machine; without a path no file is written."""

    path: Path | None
    head: Row = field(default_factory=dict)
    parts: dict[str, BenchPart] = field(default_factory=dict)
    _saved_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def read(cls, path: Path) -> BenchReport:
        """Read a file.

        Raises:
            BenchReportError: not a result of this bench, or of another format.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["benchmark"] != "bench_gpu" or fields["format"] != FORMAT:
                raise BenchReportError(f"{path}: not a result of bench_gpu in format {FORMAT}")
            parts = {name: BenchPart(**part) for name, part in fields.pop("parts").items()}
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BenchReportError(f"{path}: not a result of bench_gpu: {error}") from error
        return cls(path, fields, parts)

    def save(self, every_s: float = 0.0) -> None:
        """Write all of it in one step, if the last time was so long ago: a reader sees the old file or the new one."""
        if self.path is None or time.monotonic() - self._saved_at < every_s:
            return
        self._saved_at = time.monotonic()
        parts = {name: asdict(part) for name, part in self.parts.items()}
        beside = self.path.with_name(f"{self.path.name}.part")
        beside.write_text(json.dumps({**self.head, "parts": parts}, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def failed(self, names: Iterable[str]) -> list[str]:
        """Name the parts that failed, or whose answers were wrong, or that left nothing."""
        return [name for name in names if name not in self.parts or self.parts[name].status == "failed"]


class Work:
    """A part while it is measured: takes its rows, and says when its time is spent."""

    def __init__(
        self, report: BenchReport, part: BenchPart, clock: Callable[[], float], say: Callable[[str], None]
    ) -> None:
        self.part = part
        self.say = say
        self._report = report
        self._clock = clock
        self._began = clock()

    @property
    def seconds(self) -> float:
        """Measure the time since it began."""
        return self._clock() - self._began

    @property
    def seconds_left(self) -> float:
        """Measure what is left of its budget."""
        return self.part.budget_s - self.seconds

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.part.rows.append(row)
        self.part.seconds = self.seconds
        self._report.save(SAVE_EVERY_S)

    def note(self, *sentences: str) -> None:
        """Keep what a reader must know, each sentence once."""
        self.part.notes += [one for one in sentences if one not in self.part.notes]

    def out_of_time(self, needed_s: float = 0.0) -> bool:
        """Tell whether there is no time for a step that takes `needed_s`; if so, the part counts as stopped."""
        spent = self.seconds_left <= needed_s
        if spent:
            self.part.status = "stopped"
        return spent

    def ran_on(self, machine: Row) -> None:
        """Keep what all parts ran on."""
        self._report.head["machine"] = machine

    def rows_of(self, part: str) -> list[Row]:
        """Look up what another part measured before."""
        return self._report.parts[part].rows if part in self._report.parts else []


def run_part(
    report: BenchReport,
    name: str,
    budget_s: float,
    measure: Callable[[Work], None],
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> BenchPart:
    """Run one part and keep whatever came of it, an error included."""
    part = report.parts[name] = BenchPart(name, budget_s, "running")
    report.save()
    work = Work(report, part, clock, say)
    try:
        measure(work)
        wrong = sum(row.get("correct") is False for row in part.rows)
        if wrong:
            part.status, part.error = "failed", f"{wrong} of {len(part.rows)} rows gave wrong answers"
        elif part.status == "running":
            part.status = "done"
    # A bench that dies of one part would lose the others: whatever went wrong is its result.
    except Exception as error:
        part.status = "failed"
        part.error = f"{type(error).__name__}: {error}"
        part.facts["traceback"] = traceback.format_exc().replace(f"{_ROOT}/", "").splitlines()[-TRACEBACK_LINES:]
    part.seconds = work.seconds
    report.save()
    return part
