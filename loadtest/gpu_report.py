"""The GPU bench's result file: parts with their rows, written again and again, so that nothing measured is lost."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from loader.errors import LoaderError

FORMAT = 1
SAVE_EVERY_S = 2.0
TRACEBACK_LINES = 30
_ROOT = Path(__file__).resolve().parent.parent
Status = Literal["not run", "running", "done", "stopped", "failed"]
"""`stopped`: its time was spent before all of it was measured; what was is in its rows."""
Row = dict[str, Any]


class ReportError(LoaderError):
    """A file that is not a result of this bench."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "bad_report"


@dataclass(slots=True)
class Part:
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
class Report:
    """All parts and what they ran on.

    Attributes:
        path: file to write; None for no file.
        head: benchmark, date, command, machine.
        parts: by name, in order.
    """

    path: Path | None
    head: Row = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    _saved_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def read(cls, path: Path) -> Report:
        """What is in a file.

        Raises:
            ReportError: not a result of this bench, or of another format.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["benchmark"] != "bench_gpu" or fields["format"] != FORMAT:
                raise ReportError(f"{path}: not a result of bench_gpu in format {FORMAT}")
            parts = {name: Part(**part) for name, part in fields.pop("parts").items()}
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ReportError(f"{path}: not a result of bench_gpu: {error}") from error
        return cls(path, fields, parts)

    def save(self) -> None:
        """Writes all of it, in one step: a reader sees the old file or the new one."""
        self._saved_at = time.monotonic()
        if self.path is None:
            return
        parts = {name: asdict(part) for name, part in self.parts.items()}
        beside = self.path.with_name(f"{self.path.name}.part")
        beside.write_text(json.dumps({**self.head, "parts": parts}, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def save_now_and_then(self) -> None:
        """Writes it if the last time was a while ago."""
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def failed(self, names: Iterable[str]) -> list[str]:
        """Those of the named parts that failed, or whose answers were wrong, or that left nothing."""
        return [name for name in names if name not in self.parts or self.parts[name].status == "failed"]


class Work:
    """A part while it is measured: takes its rows, and says when its time is spent."""

    def __init__(self, report: Report, part: Part, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self.part = part
        self.say = say
        self._report = report
        self._clock = clock
        self._began = clock()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    @property
    def seconds_left(self) -> float:
        """Of its budget."""
        return self.part.budget_s - self.seconds

    def add(self, row: Row) -> None:
        """Keeps a row."""
        self.part.rows.append(row)
        self.part.seconds = self.seconds
        self._report.save_now_and_then()

    def note(self, sentence: str) -> None:
        """Keeps something that a reader must know, once."""
        if sentence not in self.part.notes:
            self.part.notes.append(sentence)

    def out_of_time(self, needed_s: float = 0.0) -> bool:
        """Whether there is no time for a step that takes `needed_s`; if so, the part counts as stopped."""
        spent = self.seconds_left <= needed_s
        if spent:
            self.part.status = "stopped"
        return spent

    def ran_on(self, machine: Row) -> None:
        """Keeps what all parts ran on."""
        self._report.head["machine"] = machine

    def rows_of(self, part: str) -> list[Row]:
        """What another part measured before."""
        return self._report.parts[part].rows if part in self._report.parts else []


def run_part(
    report: Report,
    name: str,
    budget_s: float,
    measure: Callable[[Work], None],
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> Part:
    """Runs one part and keeps whatever came of it, an error included."""
    part = report.parts[name] = Part(name, budget_s, "running")
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
