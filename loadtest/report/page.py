"""Make the page: one HTML file with everything in it, from a run, a sweep or a comparison."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter

from loadtest.load.result import LoadResult, SweepResult, read_document
from loadtest.report import numbers
from loadtest.report.comparison import ComparedMeasure, Comparison
from loadtest.report.errors import PageFileError
from loadtest.report.markup import (
    Cell,
    Content,
    Element,
    Fields,
    Form,
    Shown,
    element,
    figure,
    folded,
    pairs,
    plain,
    section,
    table,
    tile,
    verdict,
    written,
)
from loadtest.report.plots import (
    MAX_CURVES,
    Histogram,
    TimeLine,
    by_rate,
    curves_plot,
    histogram_plot,
    judged,
    latency_plot,
    percentile_plot,
    ratio_plot,
    rounds_plot,
    throughput_plot,
    time_line_plot,
)
from loadtest.workloads.payloads import FORMS

PERCENTILES = ("min_ms", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")


def _setup(fields: Fields) -> Element:
    """Say what was asked, of whom, and how."""
    varied = element("span", FORMS[fields.value("varied")], data_of=fields.pointer("varied"))
    return pairs(
        [
            *fields.pairs(
                ("target", "text", "target"),
                ("model", "text", "model"),
                ("workload", "text", "workload"),
                ("API", "text", "api"),
            ),
            ("ids", _or_own(fields, "ids")),
            ("candidates", _or_own(fields, "candidates")),
            ("requests are", Cell(varied)),
            *fields.pairs(
                ("distinct requests", "count", "requests"),
                ("arrivals", "text", "arrivals"),
                ("seed", "plain", "seed"),
                ("rate wanted", "exact", "rate", "/s"),
                ("warm-up, left out", "exact", "warmup_s", "s"),
                ("duration", "exact", "duration_s", "s"),
                ("deadline of goodput", "exact", "slo_ms", "ms"),
                ("timeout", "exact", "timeout_ms", "ms"),
                ("started", "text", "started_at"),
            ),
        ]
    )


def _or_own(fields: Fields, field: str) -> Cell:
    if fields.value(field) is None:
        return Cell(element("span", "the workload's own", data_of=fields.pointer(field)))
    return fields.text(field)


def _latencies(fields: Fields) -> Element:
    """Show every percentile, three ways."""
    rows: list[list[Shown]] = [
        [name, *[fields.ms(part, field) for field in PERCENTILES]]
        for name, part in (
            ("latency, from the intended send time", "latency"),
            ("the same of all that were due, failures last", "latency_of_due"),
            ("service time, from the actual send", "service"),
        )
    ]
    return table(["ms", "min", "mean", "p50", "p90", "p99", "p99.9", "max"], rows)


def _counts(result: LoadResult, fields: Fields) -> Element:
    """Count requests by what became of them."""
    rows: list[list[Shown]] = [
        [name, fields.shown("count", field), _percent(fields.value(field), result.due)]
        for name, field in (("due", "due"), ("sent", "sent"), ("answered right", "answered"),
                            ("within the deadline", "within_slo"))
    ]  # fmt: skip
    rows += [
        [f"failed: {kind}", fields.shown("count", "errors", kind), _percent(number, result.due)]
        for kind, number in sorted(result.errors.items(), key=lambda one: -one[1])
    ]
    return table(["requests", "number", "of due, %"], rows)


def _percent(part: int, whole: int) -> Cell:
    return Cell(numbers.share(part / whole) if whole else numbers.MISSING, True)


_PROCESS: tuple[tuple[Form, str], ...] = (
    ("share", "cpu_share"), ("count", "due"), ("count", "connections"), ("ms", "lag_p99_ms"), ("ms", "lag_max_ms"),
)  # fmt: skip


def _generator(result: LoadResult, fields: Fields) -> Element:
    """Show whether the generator kept up, process by process."""
    own = fields.below("generator")
    rows: list[list[Shown]] = [
        [f"process {index + 1}", *own.below("processes", index).row(*_PROCESS)]
        for index in range(len(result.generator.processes))
    ]
    rows.append(["all together", "", "", "", own.ms("lag_p99_ms"), ""])
    rows.append(["not valid beyond", own.shown("exact_share", "max_cpu_share"), "", "", own.ms("max_lag_p99_ms"), ""])
    limits = own.pairs(
        ("requests in flight, at most", "count", "max_in_flight"),
        ("connections, at most", "count", "max_connections"),
    )
    heads = ["", "CPU of a core", "due", "connections", "late p99, ms", "late max, ms"]
    return element("div", table(heads, rows), pairs(limits))


def _marks(result: LoadResult, fields: Fields) -> Element:
    """List what happened, with the numbers that it has in the time line."""
    rows: list[list[Shown]] = [
        [str(index + 1), *fields.below("marks", index).row(("ms", "at_s"), ("text", "label"))]
        for index in range(len(result.marks))
    ]
    return table(["mark", "at, s", "what"], rows, "narrow")


_SECOND: tuple[tuple[Form, str], ...] = (
    ("exact", "at_s"), ("count", "due"), ("count", "ok"), ("count", "errors"), ("ms", "p50_ms"), ("ms", "p99_ms"),
    ("count", "in_flight"),
)  # fmt: skip


def _seconds(result: LoadResult, fields: Fields) -> Element:
    """Show the time line as numbers."""
    rows: list[list[Shown]] = [
        [*fields.below("time_line", index).row(*_SECOND), "warm-up" if one.warmup else ""]
        for index, one in enumerate(result.time_line)
    ]
    return table(["at, s", "due", "answered", "failed", "p50, ms", "p99, ms", "in flight", ""], rows)


def _machine(fields: Fields, cores: str = "cores for the generator") -> list[Element]:
    """Say where it ran, and with what; nothing where that is not known."""
    rows: list[tuple[str, Shown]] = []
    if fields.value("machine") is not None:
        rows += fields.below("machine").pairs(
            ("machine", "text", "name"),
            ("processor", "text", "cpu"),
            (cores, "count", "cores"),
            ("memory", "size", "memory_bytes"),
            ("system", "text", "system"),
        )
    rows += [(name, fields.text("versions", name)) for name in sorted(fields.value("versions"))]
    return [section("Machine", pairs(rows))] if rows else []


PERCENTILES_NOTE = (
    "The axis is stretched by the nines. Where the two lines part, requests were sent late or waited for a connection."
)
BARS_NOTE = "Bars of equal ratio on a logarithmic axis; latency from the intended send time, of right answers."
TIME_LINE_NOTE = "Requests stand at the second in which they were due; what is shaded is warm-up."
# How many failures leave a percentile without a time.
_FAILED = {"p50_ms": "half or more", "p99_ms": "1% or more", "p999_ms": "0.1% or more", "max_ms": "some"}


def _reasons(fields: Fields) -> list[Content]:
    return [fields.text("invalid_because", index).content for index in range(len(fields.value("invalid_because")))]


def run_page(result: LoadResult, fields: Fields) -> list[Content]:
    """Make everything that is shown of one run."""
    failed = result.due - result.answered
    sum_of_errors = Cell(
        element("data", numbers.count(failed), value=repr(failed), data_sum_of=fields.pointer("errors"))
    )
    tiles = [
        tile("rate wanted", fields.rate("rate"), f"{result.arrivals} arrivals"),
        tile("answered right", fields.rate("throughput"), _of_due(result.answered, result.due)),
        tile(f"within {numbers.compact(result.slo_ms)} ms", fields.rate("goodput"),
             _of_due(result.within_slo, result.due)),
        *[_latency_tile(fields, name, field) for name, field in
          (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms"), ("max", "max_ms"))],
        tile("failed", sum_of_errors, _of_due(failed, result.due), "bad" if failed else ""),
    ]  # fmt: skip
    return [
        verdict(
            result.valid,
            "The generator kept up with the rate, so these numbers are the server's.",
            "These numbers are not the server's alone:",
            _reasons(fields),
        ),
        element("div", *tiles, class_="tiles"),
        *_run_body(result, fields),
    ]


def _latency_tile(fields: Fields, name: str, field: str) -> Element:
    # Of all that were due, where a failure is later than any answer: errors must not make a server look fast.
    cell = fields.ms("latency_of_due", field, unit="ms")
    if fields.value("latency_of_due", field) is None:
        return tile(name, cell, f"{_FAILED[field]} failed" if fields.value("due") else "nothing was due", "bad")
    return tile(name, cell, "of all due")


def _of_due(part: int, whole: int) -> str:
    return f"{numbers.share(part / whole)}% of due" if whole else ""


def _run_plots(result: LoadResult) -> list[Content]:
    """Draw the three plots; none of latency where nothing was answered."""
    drawn: list[Content] = []
    if Histogram.decode(result.latency_histogram).count:
        percentiles = figure("Latency by percentile", percentile_plot(result), PERCENTILES_NOTE)
        drawn.append(
            element("div", percentiles, figure("Histogram", histogram_plot(result), BARS_NOTE), class_="plots")
        )
    if result.time_line:
        window = TimeLine.of(result).window_s
        joined = f" In windows of {window} s: rates are means, latencies and requests in flight the highest second's."
        note = TIME_LINE_NOTE + (joined if window > 1 else "")
        drawn.append(figure("Time line", time_line_plot(result), note, "long"))
    return drawn


def _run_body(result: LoadResult, fields: Fields) -> list[Content]:
    examples = [
        element("li", fields.text("error_examples", index).content) for index in range(len(result.error_examples))
    ]
    requests: list[Content] = [_counts(result, fields)]
    requests += [element("p", "First failures:", class_="note"), element("ul", *examples)] if examples else []
    parts: list[Content] = _run_plots(result)
    if result.marks:
        parts.append(section("Marks", _marks(result, fields)))
    parts += [
        section(
            "Latency",
            _latencies(fields),
            note="From the intended send time, so a request that had to wait to be sent is charged for the wait. "
            "Percentiles have three significant digits.",
        ),
        element(
            "div", section("Requests", *requests), section("Generator", _generator(result, fields)), class_="columns"
        ),
        element("div", section("Setup", _setup(fields)), *_machine(fields), class_="columns"),
    ]
    if result.time_line:
        parts.append(section("Second by second", folded(f"{len(result.time_line)} seconds", _seconds(result, fields))))
    return parts


LIMITS = {
    "server": "A higher rate broke the deadline in a valid run: the limit is the server's.",
    "max_rate": "The search was told to go no further: the server may do more.",
    "generator": "The generator was the bottleneck above this rate: the server may do more.",
}
LATENCY_NOTE = (
    "Of all requests that were due; hollow points are steps that are not valid, a cross is a percentile that failed."
)
ANSWERS_NOTE = "On the dotted line everything that was due was answered."
SWEEP_CURVES_NOTE = "Of all requests that were due, at some of the rates."


def sweep_page(sweep: SweepResult, fields: Fields) -> list[Content]:
    """Make everything that is shown of a sweep."""
    best = _chosen_step(sweep)
    found = sweep.highest_rate is not None and best is not None
    slo = numbers.compact(sweep.slo_ms)
    told = LIMITS[sweep.limited_by]
    tiles = [
        tile("highest rate", fields.rate("highest_rate"), f"p99 within {slo} ms", "" if found else "bad"),
        tile("lowest rate beyond", fields.rate("lowest_failed_rate"), f"p99 over {slo} ms"),
    ]
    if best is not None:
        step = fields.below("steps", best)
        tiles += [
            tile(name, step.ms("latency_of_due", field, unit="ms"), "at the highest rate")
            for name, field in (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms"))
        ]
        tiles.append(tile("in time", step.rate("goodput"), "at the highest rate"))
    reasons: list[Content] = ["No valid step kept the deadline; the rate, if there is one, is below the lowest step."]
    reasons += [] if found else [told]
    return [
        verdict(found, told, "There is no highest rate:", reasons),
        element("div", *tiles, class_="tiles"),
        *_sweep_body(sweep, fields),
    ]


def _chosen_step(sweep: SweepResult) -> int | None:
    """Find the last valid step at the highest rate."""
    found = [index for index, step in enumerate(sweep.steps) if step.valid and step.rate == sweep.highest_rate]
    return found[-1] if found else None


def _steps_table(sweep: SweepResult, fields: Fields) -> Element:
    """Make a row for each step, by rate."""
    best = _chosen_step(sweep)
    rows: list[list[Shown]] = []
    for index, step in by_rate(sweep):
        own = fields.below("steps", index)
        rows.append(
            [
                Cell(f"{index + 1}", True),
                own.rate("rate", unit=""),
                own.rate("throughput", unit=""),
                own.rate("goodput", unit=""),
                *[own.ms("latency_of_due", field) for field in ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")],
                Cell(numbers.count(step.due - step.answered), True),
                own.ms("generator", "lag_p99_ms"),
                _outcome(sweep, step, index == best),
            ]
        )
    heads = ["step", "rate, /s", "answered, /s", "in time, /s", "p50, ms", "p90, ms", "p99, ms", "p99.9, ms", "max, ms",
             "failed", "sent late p99, ms", ""]  # fmt: skip
    return table(heads, rows)


def _outcome(sweep: SweepResult, step: LoadResult, best: bool) -> Content:
    if not step.valid:
        return element("span", "not valid", class_="worse")
    p99 = step.latency_of_due.p99_ms
    if p99 is None or p99 > sweep.slo_ms:
        return element("span", "beyond the deadline", class_="worse")
    return element("span", "the highest" if best else "kept", class_="better")


_SEARCH: tuple[tuple[str, Form, str] | tuple[str, Form, str, str], ...] = (
    ("p99 must be within", "exact", "slo_ms", "ms"),
    ("rates told apart to", "exact_share", "tolerance"),
    ("highest rate that kept it", "rate", "highest_rate"),
    ("lowest rate that did not", "rate", "lowest_failed_rate"),
    ("limited by", "text", "limited_by"),
)


def _sweep_body(sweep: SweepResult, fields: Fields) -> list[Content]:
    plots = [
        figure("Latency against rate", latency_plot(sweep), LATENCY_NOTE),
        figure("Answers against rate", throughput_plot(sweep), ANSWERS_NOTE),
    ]
    if chosen := _drawn(sweep):
        curves = curves_plot(chosen, sweep.slo_ms, "Percentiles by rate")
        plots.append(figure("Percentiles by rate", curves, SWEEP_CURVES_NOTE))
    parts: list[Content] = [element("div", *plots, class_="plots"), section("Steps", _steps_table(sweep, fields))]
    runs: list[Content] = []
    for index, step in by_rate(sweep):
        own = fields.below("steps", index)
        runs.append(folded(f"Step {index + 1}: {numbers.rate(step.rate)}/s", *run_page(step, own)))
    return [*parts, section("Search", pairs(fields.pairs(*_SEARCH))), section("Everything of each step", *runs)]


def _drawn(sweep: SweepResult) -> list[tuple[str, list[LoadResult]]]:
    """Choose the steps whose percentiles are drawn: evenly by rate, with the highest that kept and the next one."""
    steps = [(index, step) for index, step in by_rate(sweep) if step.answered]
    best = _chosen_step(sweep)
    if len(steps) > MAX_CURVES:
        apart = [place for place, (index, _) in enumerate(steps) if index == best]
        kept = {0, len(steps) - 1, *apart, *(place + 1 for place in apart)} & set(range(len(steps)))
        last = len(steps) - 1
        even = sorted({round(part * last / (MAX_CURVES - 1)) for part in range(MAX_CURVES)} - kept)
        steps = [steps[place] for place in sorted({*kept, *even[: MAX_CURVES - len(kept)]})]
    return [(f"{numbers.rate(step.rate)}/s", [step]) for _, step in steps]


FEW_ROUNDS = 6
RATIOS_NOTE = (
    "Medians of the rounds; a ratio is the geometric mean of the rounds' ratios. "
    "Coloured where the interval does not hold 1."
)
ARM_CURVES_NOTE = "Of all requests that were due, all rounds together."


def comparison_page(comparison: Comparison, fields: Fields) -> list[Content]:
    """Make everything that is shown of a comparison."""
    base = comparison.arms[comparison.baseline].name
    rounds = f"{comparison.rounds} round" + ("s" if comparison.rounds > 1 else "")
    if comparison.rounds < 2:
        sure = "One round has no confidence interval: a difference may be chance."
    else:
        sure = f"Intervals: {numbers.exact_share(comparison.confidence)}%, bootstrap over rounds."
        if comparison.rounds < FEW_ROUNDS:
            sure += (
                f" They can't go beyond the lowest and highest round, so with fewer than {FEW_ROUNDS} they cover less."
            )
    return [
        verdict(comparison.valid, "Every run is.", "Some of it can't be believed:", _reasons(fields)),
        element("p", f"{len(comparison.arms)} arms in {rounds}, as ratios to {base}. {sure}"),
        *_comparison_body(comparison, fields),
    ]


def _ratios_table(comparison: Comparison, fields: Fields) -> Element:
    """Make a row for each measure: every arm's median, and under it the ratio to the baseline."""
    rows: list[list[Shown]] = []
    for index, one in enumerate(comparison.measures):
        own = fields.below("measures", index)
        row: list[Shown] = [own.text("name"), own.text("unit")]
        for arm in range(len(comparison.arms)):
            value = _measure(one, own, "middle", arm)
            row.append(value if arm == comparison.baseline else _with_ratio(value, one, own, arm))
        rows.append(row)
    return table(["", "unit", *[arm.name for arm in comparison.arms]], rows, "wide")


def _measure(one: ComparedMeasure, fields: Fields, *keys: str | int) -> Cell:
    return fields.rate(*keys, unit="") if one.unit == "/s" else fields.ms(*keys)


def _with_ratio(value: Cell, one: ComparedMeasure, fields: Fields, arm: int) -> Cell:
    def part(field: str) -> Element:
        number = fields.value("ratios", arm, field)
        pointer = fields.pointer("ratios", arm, field)
        return element("data", numbers.ratio(number), value=repr(number), data_of=pointer)

    ratio: list[Content] = [element("b", part("value"), " ×")]
    if one.ratios[arm].low is not None:
        ratio += [" [", part("low"), ", ", part("high"), "]"]
    below = element("div", *ratio, class_=f"ratio {judged(one, arm)}".strip())
    return Cell(element("div", value.content, below), True)


def _rounds_table(comparison: Comparison, fields: Fields) -> Element:
    """Show every value that was measured."""
    rows: list[list[Shown]] = [
        [one.name, one.unit, arm.name, *[_measure(one, fields, "measures", index, "values", number, turn)
                                         for turn in range(comparison.rounds)]]
        for index, one in enumerate(comparison.measures)
        for number, arm in enumerate(comparison.arms)
    ]  # fmt: skip
    return table(["", "unit", "", *[f"round {turn + 1}" for turn in range(comparison.rounds)]], rows)


def _comparison_body(comparison: Comparison, fields: Fields) -> list[Content]:
    parts: list[Content] = []
    if comparison.measures:
        parts.append(section("Ratios", _ratios_table(comparison, fields), note=RATIOS_NOTE))
        if len(comparison.arms) > 1:
            parts.append(figure("Ratios to the baseline", ratio_plot(comparison), kind="long"))
    with_runs = [(arm.name, arm.runs) for arm in comparison.arms if any(run.answered for run in arm.runs)]
    plots: list[Content] = []
    if comparison.measures:
        one = next((one for one in comparison.measures if one.name.startswith("p99")), comparison.measures[0])
        plots.append(figure(f"Round by round: {one.name}", rounds_plot(comparison, one)))
    if with_runs:
        for first in range(0, len(with_runs), MAX_CURVES):
            curves = curves_plot(with_runs[first : first + MAX_CURVES], with_runs[0][1][0].slo_ms, "Percentiles by arm")
            plots.append(figure("Percentiles by arm", curves, ARM_CURVES_NOTE))
    if plots:
        parts.append(element("div", *plots, class_="plots"))
    if comparison.measures:
        parts.append(section("Rounds", _rounds_table(comparison, fields)))
    setup: list[tuple[str, Shown]] = [(name, fields.text("setup", name)) for name in comparison.setup]
    setup += fields.pairs(
        ("rounds", "count", "rounds"),
        ("confidence", "exact_share", "confidence"),
        ("bootstrap resamples", "count", "resamples"),
        ("seed of the bootstrap", "plain", "seed"),
    )
    parts.append(element("div", section("Setup", pairs(setup)), *_machine(fields, "cores"), class_="columns"))
    runs: list[Content] = []
    for number, arm in enumerate(comparison.arms):
        for turn, run in enumerate(arm.runs):
            own = fields.below("arms", number, "runs", turn)
            runs.append(folded(f"{arm.name}, round {turn + 1}", *run_page(run, own)))
    return [*parts, section("Everything of each run", *runs)] if runs else parts


Reported: TypeAlias = LoadResult | SweepResult | Comparison
_REPORTED: TypeAdapter[Reported] = TypeAdapter(Annotated[Reported, Field(discriminator="kind")])

# The page may load nothing, even if something in it tried to.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def title(result: Reported) -> str:
    """Name what was measured."""
    if isinstance(result, Comparison):
        return result.title
    run = result.steps[0] if isinstance(result, SweepResult) else result
    asked = f"{run.workload} over {run.api}, {run.target}"
    if isinstance(result, SweepResult):
        found = f"{numbers.rate(result.highest_rate)}/s" if result.highest_rate is not None else "No rate"
        return f"{found} within {numbers.compact(result.slo_ms)} ms: {asked}"
    return f"{numbers.rate(run.rate)}/s: {asked}"


def html(result: Reported) -> str:
    """Write the page as text: an HTML document whose body is well-formed XML.

    Raises:
        HistogramError: if a histogram in the result can't be decoded.
    """
    fields = Fields(result)
    if isinstance(result, Comparison):
        name, contents = "comparison", comparison_page(result, fields)
    elif isinstance(result, SweepResult):
        name, contents = "load sweep", sweep_page(result, fields)
    else:
        name, contents = "load test", run_page(result, fields)
    top = [
        element("div", f"shardrank {name}", class_="product"),
        element("h1", title(result), data_of="/title" if isinstance(result, Comparison) else None),
    ]
    body = written(element("body", element("main", *top, *contents)))
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plain(title(result)))}</title>\n<style>\n{style}</style>\n</head>\n{body}\n</html>\n"
    )


def write_html(result: Reported, path: Path) -> None:
    """Write the page to a file.

    Raises:
        HistogramError: if a histogram in the result can't be decoded.
        PageFileError: if the file can't be written.
    """
    text = html(result)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageFileError(f"{path}: {error.strerror or error}") from error


def read_reported(path: Path) -> Reported:
    """Read a document that `--json` wrote.

    Raises:
        ResultFileError: no such file, too large, or not such a document.
    """
    return read_document(
        path, _REPORTED, [LoadResult, SweepResult, Comparison], "no result of a run, a sweep or a comparison", 5
    )
