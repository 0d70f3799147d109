"""Make the page: one HTML file with everything in it, from a run, a sweep or a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter

from loadtest.errors import PageFileError
from loadtest.load.result import LoadResult, SweepResult, read_document
from loadtest.report import numbers
from loadtest.report.comparison import ComparedMeasure, Comparison
from loadtest.report.markup import (
    Cell,
    Content,
    Element,
    Fields,
    Shown,
    Shows,
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

# Percentiles that have a tile, and how many failures leave them without a time.
LATER_IF_FAILED = {"p50": "half or more", "p99": "1% or more", "p99.9": "0.1% or more", "max": "some"}
PERCENTILES = (
    Shows("min", "ms", "min_ms"),
    Shows("mean", "ms", "mean_ms"),
    Shows("p50", "ms", "p50_ms"),
    Shows("p90", "ms", "p90_ms"),
    Shows("p99", "ms", "p99_ms"),
    Shows("p99.9", "ms", "p999_ms"),
    Shows("max", "ms", "max_ms"),
)
TILES = tuple(
    Shows(name, "ms", f"latency_of_due/{field}", "ms") for name, _, field, _ in PERCENTILES if name in LATER_IF_FAILED
)
ASKED = (
    Shows("target", "text", "target"),
    Shows("model", "text", "model"),
    Shows("workload", "text", "workload"),
    Shows("API", "text", "api"),
)
SENT = (
    Shows("distinct requests", "count", "requests"),
    Shows("arrivals", "text", "arrivals"),
    Shows("seed", "plain", "seed"),
    Shows("rate wanted", "exact", "rate", "/s"),
    Shows("warm-up, left out", "exact", "warmup_s", "s"),
    Shows("duration", "exact", "duration_s", "s"),
    Shows("deadline of goodput", "exact", "slo_ms", "ms"),
    Shows("timeout", "exact", "timeout_ms", "ms"),
    Shows("started", "text", "started_at"),
)
LATENCIES = (
    ("latency, from the intended send time", "latency"),
    ("the same of all that were due, failures last", "latency_of_due"),
    ("service time, from the actual send", "service"),
)
COUNTS = (
    Shows("due", "count", "due"),
    Shows("sent", "count", "sent"),
    Shows("answered right", "count", "answered"),
    Shows("within the deadline", "count", "within_slo"),
)
PROCESS = (
    Shows("CPU of a core", "share", "cpu_share"),
    Shows("due", "count", "due"),
    Shows("connections", "count", "connections"),
    Shows("late p99, ms", "ms", "lag_p99_ms"),
    Shows("late max, ms", "ms", "lag_max_ms"),
)
GENERATOR_LIMITS = (
    Shows("requests in flight, at most", "count", "max_in_flight"),
    Shows("connections, at most", "count", "max_connections"),
)
MARK = (Shows("at, s", "ms", "at_s"), Shows("what", "text", "label"))
SECOND = (
    Shows("at, s", "exact", "at_s"),
    Shows("due", "count", "due"),
    Shows("answered", "count", "ok"),
    Shows("failed", "count", "errors"),
    Shows("p50, ms", "ms", "p50_ms"),
    Shows("p99, ms", "ms", "p99_ms"),
    Shows("in flight", "count", "in_flight"),
)
MACHINE = (
    Shows("machine", "text", "name"),
    Shows("processor", "text", "cpu"),
    Shows("cores", "count", "cores"),
    Shows("memory", "size", "memory_bytes"),
    Shows("system", "text", "system"),
)


def _heads(columns: Sequence[Shows]) -> list[str]:
    return [one.name for one in columns]


def _setup(fields: Fields) -> Element:
    """Say what was asked, of whom, and how."""
    own = [
        (name, fields.text(name) if fields.value(name) is not None else Cell(_said(fields, name, "the workload's own")))
        for name in ("ids", "candidates")
    ]
    varied = ("requests are", Cell(_said(fields, "varied", FORMS[fields.value("varied")])))
    return pairs([*fields.pairs(ASKED), *own, varied, *fields.pairs(SENT)])


def _said(fields: Fields, field: str, text: str) -> Element:
    return element("span", text, data_of=fields.pointer(field))


def _latencies(fields: Fields) -> Element:
    """Show every percentile, three ways."""
    rows = [[name, *fields.below(part).row(PERCENTILES)] for name, part in LATENCIES]
    return table(["ms", *_heads(PERCENTILES)], rows)


def _counts(result: LoadResult, fields: Fields) -> Element:
    """Count requests by what became of them."""
    rows: list[list[Shown]] = [
        [name, cell, _percent(fields.value(one.path), result.due)]
        for one, (name, cell) in zip(COUNTS, fields.pairs(COUNTS), strict=True)
    ]
    rows += [
        [f"failed: {kind}", fields.shown("count", "errors", kind), _percent(number, result.due)]
        for kind, number in sorted(result.errors.items(), key=lambda one: -one[1])
    ]
    return table(["requests", "number", "of due, %"], rows)


def _percent(part: int, whole: int) -> Cell:
    return Cell(numbers.share(part / whole) if whole else numbers.MISSING, True)


def _generator(fields: Fields) -> Element:
    """Show whether the generator kept up, process by process."""
    rows: list[list[Shown]] = [
        [f"process {number}", *one.row(PROCESS)] for number, one in enumerate(fields.each("processes"), 1)
    ]
    rows.append(["all together", "", "", "", fields.shown("ms", "lag_p99_ms"), ""])
    most = fields.shown("exact_share", "max_cpu_share"), fields.shown("ms", "max_lag_p99_ms")
    rows.append(["not valid beyond", most[0], "", "", most[1], ""])
    return element("div", table(["", *_heads(PROCESS)], rows), pairs(fields.pairs(GENERATOR_LIMITS)))


def _marks(fields: Fields) -> Element:
    """List what happened, with the numbers that it has in the time line."""
    rows = [[str(number), *one.row(MARK)] for number, one in enumerate(fields.each("marks"), 1)]
    return table(["mark", *_heads(MARK)], rows, "narrow")


def _seconds(fields: Fields) -> Element:
    """Show the time line as numbers."""
    rows = [[*one.row(SECOND), "warm-up" if one.value("warmup") else ""] for one in fields.each("time_line")]
    return table([*_heads(SECOND), ""], rows)


def _machine(fields: Fields, cores: str = "cores for the generator") -> list[Element]:
    """Say where it ran, and with what; nothing where that is not known."""
    rows: list[tuple[str, Shown]] = []
    if fields.value("machine") is not None:
        shown = fields.below("machine").pairs(MACHINE)
        rows += [(cores if name == "cores" else name, cell) for name, cell in shown]
    rows += [(name, fields.text("versions", name)) for name in sorted(fields.value("versions"))]
    return [section("Machine", pairs(rows))] if rows else []


PERCENTILES_NOTE = (
    "The axis is stretched by the nines. Where the two lines part, requests were sent late or waited for a connection."
)
BARS_NOTE = "Bars of equal ratio on a logarithmic axis; latency from the intended send time, of right answers."
TIME_LINE_NOTE = "Requests stand at the second in which they were due; what is shaded is warm-up."
LATENCIES_NOTE = (
    "From the intended send time, so a request that had to wait to be sent is charged for the wait. "
    "Percentiles have three significant digits."
)


def _reasons(fields: Fields) -> list[Content]:
    return [one.text().content for one in fields.each("invalid_because")]


def run_page(result: LoadResult, fields: Fields) -> list[Content]:
    """Make everything that is shown of one run."""
    failed = result.due - result.answered
    sum_of_errors = Cell(
        element("data", numbers.count(failed), value=repr(failed), data_sum_of=fields.pointer("errors"))
    )
    in_time = f"within {numbers.compact(result.slo_ms)} ms"
    tiles = [
        tile("rate wanted", fields.shown("rate", "rate"), f"{result.arrivals} arrivals"),
        tile("answered right", fields.shown("rate", "throughput"), _of_due(result.answered, result.due)),
        tile(in_time, fields.shown("rate", "goodput"), _of_due(result.within_slo, result.due)),
        *[_latency_tile(fields, one) for one in TILES],
        tile("failed", sum_of_errors, _of_due(failed, result.due), "bad" if failed else ""),
    ]
    good = "The generator kept up with the rate, so these numbers are the server's."
    return [
        verdict(result.valid, good, "These numbers are not the server's alone:", _reasons(fields)),
        element("div", *tiles, class_="tiles"),
        *_run_body(result, fields),
    ]


def _latency_tile(fields: Fields, one: Shows) -> Element:
    # Of all that were due, where a failure is later than any answer: errors must not make a server look fast.
    if fields.value(*one.path.split("/")) is None:
        more = f"{LATER_IF_FAILED[one.name]} failed" if fields.value("due") else "nothing was due"
        return tile(one.name, fields.show(one), more, "bad")
    return tile(one.name, fields.show(one), "of all due")


def _of_due(part: int, whole: int) -> str:
    return f"{numbers.share(part / whole)}% of due" if whole else ""


def _run_plots(result: LoadResult) -> list[Content]:
    """Draw the three plots; none of latency where nothing was answered."""
    drawn: list[Content] = []
    if Histogram.decode(result.latency_histogram).count:
        percentiles = figure("Latency by percentile", percentile_plot(result), PERCENTILES_NOTE)
        histogram = figure("Histogram", histogram_plot(result), BARS_NOTE)
        drawn.append(element("div", percentiles, histogram, class_="plots"))
    if result.time_line:
        window = TimeLine.of(result).window_s
        joined = f" In windows of {window} s: rates are means, latencies and requests in flight the highest second's."
        note = TIME_LINE_NOTE + (joined if window > 1 else "")
        drawn.append(figure("Time line", time_line_plot(result), note, "long"))
    return drawn


def _run_body(result: LoadResult, fields: Fields) -> list[Content]:
    requests: list[Content] = [_counts(result, fields)]
    if result.error_examples:
        examples = [element("li", one.text().content) for one in fields.each("error_examples")]
        requests += [element("p", "First failures:", class_="note"), element("ul", *examples)]
    generator = section("Generator", _generator(fields.below("generator")))
    parts: list[Content] = _run_plots(result)
    if result.marks:
        parts.append(section("Marks", _marks(fields)))
    parts += [
        section("Latency", _latencies(fields), note=LATENCIES_NOTE),
        element("div", section("Requests", *requests), generator, class_="columns"),
        element("div", section("Setup", _setup(fields)), *_machine(fields), class_="columns"),
    ]
    if result.time_line:
        parts.append(section("Second by second", folded(f"{len(result.time_line)} seconds", _seconds(fields))))
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


BEST = (
    *(one for one in TILES if one.name != "max"),
    Shows("in time", "rate", "goodput"),
)
STEP = (
    Shows("rate, /s", "rate", "rate", ""),
    Shows("answered, /s", "rate", "throughput", ""),
    Shows("in time, /s", "rate", "goodput", ""),
    *(
        Shows(f"{name}, ms", "ms", f"latency_of_due/{field}")
        for name, _, field, _ in PERCENTILES
        if name not in ("min", "mean")
    ),
)
SEARCH = (
    Shows("p99 must be within", "exact", "slo_ms", "ms"),
    Shows("rates told apart to", "exact_share", "tolerance"),
    Shows("highest rate that kept it", "rate", "highest_rate"),
    Shows("lowest rate that did not", "rate", "lowest_failed_rate"),
    Shows("limited by", "text", "limited_by"),
)


def sweep_page(sweep: SweepResult, fields: Fields) -> list[Content]:
    """Make everything that is shown of a sweep."""
    best = _chosen_step(sweep)
    found = sweep.highest_rate is not None and best is not None
    slo = numbers.compact(sweep.slo_ms)
    told = LIMITS[sweep.limited_by]
    tiles = [
        tile("highest rate", fields.shown("rate", "highest_rate"), f"p99 within {slo} ms", "" if found else "bad"),
        tile("lowest rate beyond", fields.shown("rate", "lowest_failed_rate"), f"p99 over {slo} ms"),
    ]
    if best is not None:
        step = fields.below("steps", best)
        tiles += [tile(one.name, step.show(one), "at the highest rate") for one in BEST]
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
        failed = Cell(numbers.count(step.due - step.answered), True)
        late, outcome = own.shown("ms", "generator", "lag_p99_ms"), _outcome(sweep, step, index == best)
        rows.append([Cell(f"{index + 1}", True), *own.row(STEP), failed, late, outcome])
    return table(["step", *_heads(STEP), "failed", "sent late p99, ms", ""], rows)


def _outcome(sweep: SweepResult, step: LoadResult, best: bool) -> Content:
    if not step.valid:
        return element("span", "not valid", class_="worse")
    p99 = step.latency_of_due.p99_ms
    if p99 is None or p99 > sweep.slo_ms:
        return element("span", "beyond the deadline", class_="worse")
    return element("span", "the highest" if best else "kept", class_="better")


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
    return [*parts, section("Search", pairs(fields.pairs(SEARCH))), section("Everything of each step", *runs)]


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
BOOTSTRAP = (
    Shows("rounds", "count", "rounds"),
    Shows("confidence", "exact_share", "confidence"),
    Shows("bootstrap resamples", "count", "resamples"),
    Shows("seed of the bootstrap", "plain", "seed"),
)


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
    for one, own in zip(comparison.measures, fields.each("measures"), strict=True):
        row: list[Shown] = [own.text("name"), own.text("unit")]
        for arm in range(len(comparison.arms)):
            value = _measure(one, own, "middle", arm)
            row.append(value if arm == comparison.baseline or not one.ratios else _with_ratio(value, one, own, arm))
        rows.append(row)
    return table(["", "unit", *[arm.name for arm in comparison.arms]], rows, "wide")


def _measure(one: ComparedMeasure, fields: Fields, *keys: str | int) -> Cell:
    return fields.shown("rate" if one.unit == "/s" else "ms", *keys, unit="")


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
    rounds = range(comparison.rounds)
    rows: list[list[Shown]] = [
        [one.name, one.unit, arm.name, *[_measure(one, own, "values", number, turn) for turn in rounds]]
        for one, own in zip(comparison.measures, fields.each("measures"), strict=True)
        for number, arm in enumerate(comparison.arms)
    ]
    return table(["", "unit", "", *[f"round {turn + 1}" for turn in rounds]], rows)


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
    setup += fields.pairs(BOOTSTRAP)
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
