"""Make a page of what ran on a GPU: `python -m loadtest.gpu.report FILE... [--write docs/measurements/gpu-DATE.md]`.

Files, or folders of them, are what `scripts/gpu/a`, `b` and `c` leave: results of bench_gpu (json), of pytest (xml), of
ncu (csv), of compute-sanitizer (log), and of the steps (tsv). Rows for README's table follow the page.
"""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from loadtest.gpu.parts import BenchReport, BenchReportError, Row
from loadtest.gpu.tables import AIMS, MISSING, Content, contents, judge

ROWS_COUNTED = 20 * 65536
"""Of a launch that `scripts/gpu/c` counts: hotness and bags."""
SECTOR_BYTES = 32
FULL_MEMORY, FULL_ISSUE, FEW_WARPS = 85.0, 0.8, 50.0
"""From where on memory (percent of its peak) or issue (instructions a cycle) is the limit; percent of all warps."""
_DIM = re.compile(r"\bdim[- ](\d+)")
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_INVALID = "========= Invalid"
DRAM, PEAK = "dram__bytes_read.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
SECTORS, HITS = "lts__t_sectors_op_read.sum", "lts__t_sector_hit_rate.pct"
WARPS, ISSUE = "sm__warps_active.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.per_cycle_active"
STALLED = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
DURATION, REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
SCALES = {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
          "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # fmt: skip
"""Of the units that ncu may write in place of ns and byte."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Hardware counters of one launch, by ncu's names, in ns and bytes; without `dim` if the file's name has none."""

    dim: int | None
    kernel: str
    counters: dict[str, float]

    @property
    def ceiling(self) -> bool:
        """Tell whether it is not the engine's, but reads as many rows at random and does nothing else."""
        return self.kernel.startswith("gather")

    def figures(self) -> list[str]:
        """Give what a reader judges it by; bytes are by row looked up."""

        def of(name: str, digits: int, by: float = 1.0) -> str:
            return f"{self.counters[name] / by:.{digits}f}" if name in self.counters else MISSING

        return [of(DURATION, 1, 1e3), of(DRAM, 0, ROWS_COUNTED), of(SECTORS, 0, ROWS_COUNTED / SECTOR_BYTES),
                of(PEAK, 0), of(HITS, 0), of(WARPS, 0), of(ISSUE, 2), of(STALLED, 1), of(REGISTERS, 0)]  # fmt: skip

    def limit(self) -> str:
        """Say which of its resources was the limit, as far as the counters tell."""
        if self.counters.get(PEAK, 0) >= FULL_MEMORY:
            return "memory is at its peak: only fewer bytes a row would help"
        if self.counters.get(ISSUE, 0) >= FULL_ISSUE:
            return "issue is full: fewer instructions a row"
        if self.counters.get(WARPS, 100) < FEW_WARPS:
            return "few warps are there to wait for memory: fewer registers, or more rows in flight each"
        return "neither memory nor issue is full: warps wait for memory with too few rows in flight"


LAUNCH_COLUMNS = (
    "us", "DRAM bytes read a row", "L2 bytes read a row", "DRAM % of peak", "L2 hits %", "warps % of all",
    "instructions a cycle", "warps waiting for memory", "registers",
)  # fmt: skip


@dataclass(slots=True)
class PytestRun:
    """Tests of one run of pytest: how many, and what failed or was skipped, each with its reason."""

    name: str
    seconds: float
    passed: int
    failed: list[str]
    skipped: Counter[str]

    @classmethod
    def read(cls, path: Path) -> PytestRun:
        """Read a file of pytest's `--junitxml`."""
        passed, failed, skipped = 0, [], Counter[str]()
        suite = ElementTree.parse(path).getroot().find("testsuite")
        if suite is None:
            raise ElementTree.ParseError("no testsuite in it")
        for case in suite.findall("testcase"):
            outcomes = [one for one in case if one.tag in ("skipped", "failure", "error")]
            passed += not outcomes
            for outcome in outcomes:
                reason = (outcome.get("message") or outcome.text or "").strip().partition("\n")[0]
                if outcome.tag == "skipped":
                    skipped[reason] += 1
                else:
                    failed.append(f"`{case.get('classname')}::{case.get('name')}`: {reason}")
        return cls(path.name, float(suite.get("time", 0)), passed, failed, skipped)


@dataclass(slots=True)
class Found:
    """All results, by the kind of file that they were in."""

    benches: list[BenchReport] = field(default_factory=list)
    tests: list[PytestRun] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    memchecks: list[list[str]] = field(default_factory=list)
    steps: list[list[str]] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Found:
        """Read files, and those of folders.

        Raises:
            BenchReportError: a file that can't be read as what its name says, or of a name that says nothing.
        """
        found = cls()
        for path in paths:
            for one in sorted(path.iterdir()) if path.is_dir() else [path]:
                try:
                    found._add(one)
                except (ElementTree.ParseError, csv.Error, UnicodeDecodeError, KeyError, ValueError) as error:
                    raise BenchReportError(f"{one}: {error}") from error
        return found

    def _add(self, path: Path) -> None:
        match path.suffix:
            case ".json":
                self.benches.append(BenchReport.read(path))
            case ".xml":
                self.tests.append(PytestRun.read(path))
            case ".csv":
                self.launches += read_launches(path)
            case ".tsv":
                lines = path.read_text(encoding="utf-8").splitlines()
                self.steps += [[path.name.partition("-")[0], *line.split("\t")] for line in lines[1:]]
            case ".log":
                text = path.read_text(encoding="utf-8", errors="replace")
                if "COMPUTE-SANITIZER" in text:
                    errors = _ERRORS.findall(text)
                    summary = str(sum(map(int, errors))) if errors else "it did not come to its summary"
                    self.memchecks.append([path.name, summary, str(text.count(_INVALID))])
            case suffix:
                raise ValueError(f"{suffix or 'no suffix'} is not .json, .xml, .csv, .tsv or .log")

    def main_bench(self) -> BenchReport | None:
        """Choose the result that measured the most."""
        return max(self.benches, key=lambda one: sum(len(part.rows) for part in one.parts.values()), default=None)


def read_launches(path: Path) -> list[Launch]:
    """Read what `ncu --csv --metrics ...` told among its other output: one counter a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    dim = _DIM.search(path.stem)
    launches: dict[str, Launch] = {}
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        launch = launches.setdefault(row["ID"], Launch(int(dim[1]) if dim else None, row["Kernel Name"], {}))
        value = row["Metric Value"].replace(",", "")
        if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", value):  # What a device can't count is "n/a".
            launch.counters[row["Metric Name"]] = float(value) * SCALES.get(row["Metric Unit"], 1.0)
    return list(launches.values())


def explain(aim: Row, bench: BenchReport, launches: Sequence[Launch]) -> str:
    """Say what explains a missed aim: counters of a launch of its dim, or a request's time by stage."""
    ranking = bench.parts.get("ranking")
    rows = ranking.rows if ranking is not None else []
    worst = next((row for row in rows if row.get("p50_ms") == aim["worst"]), None)
    if worst is not None and "mean_stage_ms" in worst:
        return ", ".join(f"{stage} {ms:.3f} ms" for stage, ms in worst["mean_stage_ms"].items())
    dim = _DIM.search(str(aim.get("worst_at")))
    same = [one for one in launches if dim and one.dim == int(dim[1])]
    launch = next((one for one in same if not one.ceiling), None)
    if launch is None:
        return "not counted"
    beside = "; of random reads alone: ".join(
        _named(one) for one in [launch, *[one for one in same if one.ceiling][:1]]
    )
    return f"{launch.limit()} ({beside})"


def _named(launch: Launch) -> str:
    named = zip(LAUNCH_COLUMNS, launch.figures(), strict=True)
    return ", ".join(f"{name} {figure}" for name, figure in named if figure != MISSING)


def aim_lines(bench: BenchReport, launches: Sequence[Launch]) -> tuple[list[list[str]], list[str]]:
    """Make the rows of README's table (what, aim, measured), and a line for each aim that was missed."""
    rows, missed = [], []
    for aim, judged in zip(AIMS, judge(bench), strict=True):
        bound = f"{'≥' if aim.at_least else '≤'} {aim.bound:g}"
        if judged["met"] is None:
            rows.append([aim.text, bound, "not measured"])
            continue
        figure = f"{judged['worst']:.3g}"
        measured = f"**{figure}**" if judged["met"] else figure
        best = f"; {judged['best']:.3g} at best" if judged["configurations"] > 1 else ""
        rows.append([aim.text, bound, f"{measured} ({judged['worst_at']}){best}"])
        if not judged["met"]:
            count = f"{judged['configurations'] - judged['met_in']} of {judged['configurations']}"
            missed.append(f"- {aim.text}: missed in {count}. At its worst: {explain(judged, bench, launches)}.")
    return rows, missed


def predictions(bench: BenchReport) -> Content:
    """Compare the cost model with what was measured, by share of the lookups on the card."""
    ratios: dict[float, list[float]] = {}
    for row in bench.parts["kernel"].rows if "kernel" in bench.parts else ():
        predicted, measured = row.get("predicted_ns_per_row"), row.get("ns_per_row")
        if predicted and measured and row.get("logical_cards", 1) == 1:
            ratios.setdefault(row.get("share_on_card", 1.0), []).append(measured / predicted)
    lines = [
        [f"{share:.0%}", str(len(each)), f"{median(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}"]
        for share, each in sorted(ratios.items(), reverse=True)
    ]
    columns = ["lookups on the card", "configurations", "median", "least", "most"]
    return "measured by predicted time, uniform ids, one card", columns, lines


def page(found: Found) -> str:
    """Make the page, as markdown."""
    main = found.main_bench()
    head = {} if main is None else main.head
    machine = head.get("machine", {})
    name = machine.get("device", {}).get("name", "a GPU")
    lines = [f"# The CUDA engine on {name}, {str(head.get('date', ''))[:10]}", ""]
    lines += [f"- {key}: {_plain(value)}" for key, value in machine.items() if value is not None]
    if main is not None:
        rows, missed = aim_lines(main, found.launches)
        lines += ["", "## Aims", "", *table(["what", "aim", "measured"], rows)]
        lines += ["", "Missed, and what the counters say:", "", *missed] if missed else []
    for bench in found.benches:
        lines += ["", f"## {bench.path.name if bench.path else 'bench'}: `{bench.head.get('command')}`"]
        for title, columns, rows in [predictions(bench), *contents(bench)]:
            lines += ["", f"{title}:", "", *table(columns, rows)] if rows else []
        lines += ["", *(f"- {part.name}: {part.error}" for part in bench.parts.values() if part.error)]
        lines += [f"- {part.name}: {note}" for part in bench.parts.values() for note in part.notes]
    launches = [[MISSING if one.dim is None else str(one.dim), one.kernel, *one.figures()] for one in found.launches]
    tests = [
        [one.name, *map(str, (one.passed, len(one.failed), one.skipped.total())), f"{one.seconds:.0f}"]
        for one in found.tests
    ]
    for title, columns, rows in (
        ("Hardware counters, 65,536 bags of 20", ["dim", "kernel", *LAUNCH_COLUMNS], launches),
        ("Tests", ["run", "passed", "failed", "skipped", "seconds"], tests),
        ("Memcheck", ["run", "errors", "invalid accesses told"], found.memchecks),
        ("Steps", ["script", "step", "exit status", "seconds", "limit"], found.steps),
    ):
        lines += ["", f"## {title}", "", *table(columns, rows)] if rows else []
    for run in found.tests:
        lines += ["", f"{run.name}:", ""] if run.failed or run.skipped else []
        lines += [f"- failed: {one}" for one in run.failed]
        lines += [f"- skipped, {count}: {reason}" for reason, count in run.skipped.most_common()]
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table as markdown, the first column to the left."""
    cells = [
        list(columns),
        ["---"] + ["---:"] * (len(columns) - 1),
        *([one.replace("|", "\\|") for one in row] for row in rows),
    ]
    return [f"| {' | '.join(row)} |" for row in cells]


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--write", type=click.Path(path_type=Path, dir_okay=False), help="Write the page here, not to the output."
)
def main(paths: tuple[Path, ...], write: Path | None) -> None:
    """Make the page and README's rows."""
    try:
        found = Found.read(paths)
    except BenchReportError as error:
        raise click.UsageError(str(error)) from error
    if write is None:
        click.echo(page(found))
    else:
        write.write_text(page(found), encoding="utf-8")
    bench = found.main_bench()
    if bench is not None:
        click.echo("For README:\n")
        click.echo("\n".join(table(["on a GPU", "aim", "measured"], aim_lines(bench, found.launches)[0])))


if __name__ == "__main__":
    main()
