"""What the page shows of a sweep."""

from __future__ import annotations

from loadtest.load.result import LoadResult, SweepResult
from loadtest.report import numbers
from loadtest.report.blocks import figure, folded, section, tile, verdict
from loadtest.report.curves import MAX_CURVES, curves_plot
from loadtest.report.fields import Cell, Fields
from loadtest.report.markup import Content, Element, element
from loadtest.report.run_page import headline, run_body
from loadtest.report.sweep_plots import by_rate, latency_plot, throughput_plot
from loadtest.report.tables import Shown, pairs, table

LIMITS = {
    "server": "A higher rate broke the deadline in a valid run: the limit is the server's.",
    "max_rate": "The search was told to go no further: the server may do more.",
    "generator": "The generator was the bottleneck above this rate: the server may do more.",
}
LATENCY_NOTE = (
    "Of all requests that were due; hollow points are steps that are not valid, a cross is a percentile that failed."
)
ANSWERS_NOTE = "On the dotted line everything that was due was answered."
CURVES_NOTE = "Of all requests that were due, at some of the rates."


def sweep_headline(sweep: SweepResult, fields: Fields) -> list[Content]:
    """The highest rate, what it is limited by, and the latencies at it."""
    best = chosen_step(sweep)
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
    ]


def chosen_step(sweep: SweepResult) -> int | None:
    """Index of the last valid step at the highest rate."""
    found = [index for index, step in enumerate(sweep.steps) if step.valid and step.rate == sweep.highest_rate]
    return found[-1] if found else None


def steps_table(sweep: SweepResult, fields: Fields) -> Element:
    """A row for each step, by rate."""
    best = chosen_step(sweep)
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


def sweep_body(sweep: SweepResult, fields: Fields) -> list[Content]:
    """Everything below the headline."""
    plots = [
        figure("Latency against rate", latency_plot(sweep), LATENCY_NOTE),
        figure("Answers against rate", throughput_plot(sweep), ANSWERS_NOTE),
    ]
    if chosen := _drawn(sweep):
        curves = curves_plot(chosen, sweep.slo_ms, "Percentiles by rate")
        plots.append(figure("Percentiles by rate", curves, CURVES_NOTE))
    parts: list[Content] = [element("div", *plots, class_="plots"), section("Steps", steps_table(sweep, fields))]
    runs: list[Content] = []
    for index, step in by_rate(sweep):
        own = fields.below("steps", index)
        inside = [*headline(step, own), *run_body(step, own)]
        runs.append(folded(f"Step {index + 1}: {numbers.rate(step.rate)}/s", *inside))
    return [*parts, section("Search", _search(fields)), section("Everything of each step", *runs)]


def _search(fields: Fields) -> Element:
    return pairs(
        [
            ("p99 must be within", fields.exact("slo_ms", unit="ms")),
            ("rates told apart to", fields.exact_share("tolerance")),
            ("highest rate that kept it", fields.rate("highest_rate")),
            ("lowest rate that did not", fields.rate("lowest_failed_rate")),
            ("limited by", fields.text("limited_by")),
        ]
    )


def _drawn(sweep: SweepResult) -> list[tuple[str, list[LoadResult]]]:
    """The steps whose percentiles are drawn: evenly chosen by rate, with the highest that kept and the next one."""
    steps = [(index, step) for index, step in by_rate(sweep) if step.answered]
    best = chosen_step(sweep)
    if len(steps) > MAX_CURVES:
        apart = [place for place, (index, _) in enumerate(steps) if index == best]
        kept = {0, len(steps) - 1, *apart, *(place + 1 for place in apart)} & set(range(len(steps)))
        last = len(steps) - 1
        even = sorted({round(part * last / (MAX_CURVES - 1)) for part in range(MAX_CURVES)} - kept)
        steps = [steps[place] for place in sorted({*kept, *even[: MAX_CURVES - len(kept)]})]
    return [(f"{numbers.rate(step.rate)}/s", [step]) for _, step in steps]
