"""What the page shows of a comparison."""

from __future__ import annotations

from loadtest.report import numbers
from loadtest.report.blocks import figure, folded, section, verdict
from loadtest.report.comparison import Comparison, Measured
from loadtest.report.comparison_plots import judged, ratio_plot, rounds_plot
from loadtest.report.curves import MAX_CURVES, curves_plot
from loadtest.report.fields import Cell, Fields
from loadtest.report.markup import Content, Element, element
from loadtest.report.run_page import headline, run_body
from loadtest.report.tables import Shown, pairs, table

FEW_ROUNDS = 6
RATIOS_NOTE = (
    "Medians of the rounds; a ratio is the geometric mean of the rounds' ratios. "
    "Coloured where the interval does not hold 1."
)
CURVES_NOTE = "Of all requests that were due, all rounds together."


def comparison_headline(comparison: Comparison, fields: Fields) -> list[Content]:
    """Whether it may be believed, and how sure it is."""
    base = comparison.arms[comparison.baseline].name
    reasons = [fields.text("invalid_because", index).content for index in range(len(comparison.invalid_because))]
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
        verdict(comparison.valid, "Every run is.", "Some of it can't be believed:", reasons),
        element("p", f"{len(comparison.arms)} arms in {rounds}, as ratios to {base}. {sure}"),
    ]


def ratios_table(comparison: Comparison, fields: Fields) -> Element:
    """A row for each measure: every arm's median, and under it the ratio to the baseline."""
    rows: list[list[Shown]] = []
    for index, one in enumerate(comparison.measures):
        own = fields.below("measures", index)
        row: list[Shown] = [own.text("name"), own.text("unit")]
        for arm in range(len(comparison.arms)):
            value = _measure(one, own, "middle", arm)
            row.append(value if arm == comparison.baseline else _with_ratio(value, one, own, arm))
        rows.append(row)
    return table(["", "unit", *[arm.name for arm in comparison.arms]], rows, "wide")


def _measure(one: Measured, fields: Fields, *keys: str | int) -> Cell:
    return fields.rate(*keys, unit="") if one.unit == "/s" else fields.ms(*keys)


def _with_ratio(value: Cell, one: Measured, fields: Fields, arm: int) -> Cell:
    def part(field: str) -> Element:
        number = fields.value("ratios", arm, field)
        pointer = fields.pointer("ratios", arm, field)
        return element("data", numbers.ratio(number), value=repr(number), data_of=pointer)

    ratio: list[Content] = [element("b", part("value"), " ×")]
    if one.ratios[arm].low is not None:
        ratio += [" [", part("low"), ", ", part("high"), "]"]
    below = element("div", *ratio, class_=f"ratio {judged(one, arm)}".strip())
    return Cell(element("div", value.content, below), True)


def rounds_table(comparison: Comparison, fields: Fields) -> Element:
    """Every value that was measured."""
    rows: list[list[Shown]] = [
        [one.name, one.unit, arm.name, *[_measure(one, fields, "measures", index, "values", number, turn)
                                         for turn in range(comparison.rounds)]]
        for index, one in enumerate(comparison.measures)
        for number, arm in enumerate(comparison.arms)
    ]  # fmt: skip
    return table(["", "unit", "", *[f"round {turn + 1}" for turn in range(comparison.rounds)]], rows)


def comparison_body(comparison: Comparison, fields: Fields) -> list[Content]:
    """Everything below the headline."""
    parts: list[Content] = []
    if comparison.measures:
        parts.append(section("Ratios", ratios_table(comparison, fields), note=RATIOS_NOTE))
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
            plots.append(figure("Percentiles by arm", curves, CURVES_NOTE))
    if plots:
        parts.append(element("div", *plots, class_="plots"))
    if comparison.measures:
        parts.append(section("Rounds", rounds_table(comparison, fields)))
    parts.append(
        element("div", section("Setup", _setup(comparison, fields)), *_machine(comparison, fields), class_="columns")
    )
    runs: list[Content] = []
    for number, arm in enumerate(comparison.arms):
        for turn, run in enumerate(arm.runs):
            own = fields.below("arms", number, "runs", turn)
            inside = [*headline(run, own), *run_body(run, own)]
            runs.append(folded(f"{arm.name}, round {turn + 1}", *inside))
    return [*parts, section("Everything of each run", *runs)] if runs else parts


def _setup(comparison: Comparison, fields: Fields) -> Element:
    rows: list[tuple[str, Shown]] = [(name, fields.text("setup", name)) for name in comparison.setup]
    rows += [
        ("rounds", fields.count("rounds")),
        ("confidence", fields.exact_share("confidence")),
        ("bootstrap resamples", fields.count("resamples")),
        ("seed of the bootstrap", fields.plain("seed")),
    ]
    return pairs(rows)


def _machine(comparison: Comparison, fields: Fields) -> list[Element]:
    rows: list[tuple[str, Shown]] = []
    if comparison.machine is not None:
        own = fields.below("machine")
        rows += [
            ("machine", own.text("name")),
            ("processor", own.text("cpu")),
            ("cores", own.count("cores")),
            ("memory", own.size("memory_bytes")),
            ("system", own.text("system")),
        ]
    rows += [(name, fields.text("versions", name)) for name in sorted(comparison.versions)]
    return [section("Machine", pairs(rows))] if rows else []
