"""What the page shows of one run."""

from __future__ import annotations

from loadtest.load.result import LoadResult
from loadtest.report import numbers
from loadtest.report.blocks import figure, folded, section, tile, verdict
from loadtest.report.fields import Cell, Fields
from loadtest.report.histograms import Histogram
from loadtest.report.markup import Content, Element, element
from loadtest.report.run_plots import histogram_plot, percentile_plot
from loadtest.report.run_tables import counts, generator, latencies, machine, marks, seconds, setup
from loadtest.report.time_line import TimeLine, time_line_plot

PERCENTILES_NOTE = (
    "The axis is stretched by the nines. Where the two lines part, requests were sent late or waited for a connection."
)
BARS_NOTE = "Bars of equal ratio on a logarithmic axis; latency from the intended send time, of right answers."
TIME_LINE_NOTE = "Requests stand at the second in which they were due; what is shaded is warm-up."
# How many failures leave a percentile without a time.
_FAILED = {"p50_ms": "half or more", "p99_ms": "1% or more", "p999_ms": "0.1% or more", "max_ms": "some"}


def headline(result: LoadResult, fields: Fields) -> list[Content]:
    """Whether it is valid, the rate, the latencies and the errors."""
    reasons = [fields.text("invalid_because", index).content for index in range(len(result.invalid_because))]
    failed = result.due - result.answered
    sum_of_errors = Cell(
        element("data", numbers.count(failed), value=repr(failed), data_sum_of=fields.pointer("errors"))
    )
    tiles = [
        tile("rate wanted", fields.rate("rate"), f"{result.arrivals} arrivals"),
        tile("answered right", fields.rate("throughput"), _part(result.answered, result.due, "of due")),
        tile(f"within {numbers.compact(result.slo_ms)} ms", fields.rate("goodput"),
             _part(result.within_slo, result.due, "of due")),
        *[_latency_tile(fields, name, field) for name, field in
          (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms"), ("max", "max_ms"))],
        tile("failed", sum_of_errors, _part(failed, result.due, "of due"), "bad" if failed else ""),
    ]  # fmt: skip
    return [
        verdict(
            result.valid,
            "The generator kept up with the rate, so these numbers are the server's.",
            "These numbers are not the server's alone:",
            reasons,
        ),
        element("div", *tiles, class_="tiles"),
    ]


def _latency_tile(fields: Fields, name: str, field: str) -> Element:
    # Of all that were due, where a failure is later than any answer: errors must not make a server look fast.
    cell = fields.ms("latency_of_due", field, unit="ms")
    if fields.value("latency_of_due", field) is None:
        return tile(name, cell, f"{_FAILED[field]} failed" if fields.value("due") else "nothing was due", "bad")
    return tile(name, cell, "of all due")


def _part(part: int, whole: int, of: str) -> str:
    return f"{numbers.share(part / whole)}% {of}" if whole else ""


def plots(result: LoadResult) -> list[Content]:
    """The three plots; none of latency where nothing was answered."""
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


def run_body(result: LoadResult, fields: Fields) -> list[Content]:
    """Everything below the headline."""
    examples = [
        element("li", fields.text("error_examples", index).content) for index in range(len(result.error_examples))
    ]
    requests: list[Content] = [counts(result, fields)]
    requests += [element("p", "First failures:", class_="note"), element("ul", *examples)] if examples else []
    parts: list[Content] = [*plots(result)]
    if result.marks:
        parts.append(section("Marks", marks(result, fields)))
    parts += [
        section(
            "Latency",
            latencies(fields),
            note="From the intended send time, so a request that had to wait to be sent is charged for the wait. "
            "Percentiles have three significant digits.",
        ),
        element(
            "div", section("Requests", *requests), section("Generator", generator(result, fields)), class_="columns"
        ),
        element("div", section("Setup", setup(fields)), section("Machine", machine(fields)), class_="columns"),
    ]
    if result.time_line:
        parts.append(section("Second by second", folded(f"{len(result.time_line)} seconds", seconds(result, fields))))
    return parts
