"""Write what was measured of levers: tables in Markdown, and pictures that stand alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources

from loadtest.levers.hash_sizes import HashSizesReport, TeacherReport
from loadtest.levers.lookups import LookupCost
from loadtest.levers.movielens import MARGIN, LeverResult, LeversReport
from loadtest.report.chart import LETTER, Box, Panel, legend, linear, linear_around, log_around, picture, written_at
from loadtest.report.markup import Element, element, written

_SERIES = {
    "hash sizes": "s1",
    "prune": "s2",
    "unify": "s3",
    "compose": "s4",
    "mixed dims": "s5",
    "precision": "s6",
    "no crosses": "even",
    "in order": "even",
}
_WIDTH, _HEIGHT = 900.0, 460.0
_LOWEST = -0.01
"""AUC lost by more than this stands at the picture's lower end."""


def standalone(drawn: Element) -> str:
    """Write a picture as a file of its own."""
    style = resources.files("loadtest.report").joinpath("report.css").read_text(encoding="utf-8")
    drawn.insert(0, element("style", f"{style} svg {{ background: var(--tile); }}"))
    drawn.set("xmlns", "http://www.w3.org/2000/svg")
    return written(drawn) + "\n"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table whose first column is flush left and the others right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows)) + "\n"


def levers_table(report: LeversReport) -> str:
    """Write bytes and AUC of each lever, and what it is against the baseline."""
    base = report.levers[0]
    rows = []
    for one in report.levers:
        mean = sum(one.auc) / len(one.auc)
        against = "" if one is base else f"{one.difference:+.4f} ± {one.interval:.4f}"
        within = "" if one is base else "yes" if one.is_within else "no"
        rows.append(
            [
                f"{one.group}: {one.name}",
                _size(one.bytes),
                f"{base.bytes / one.bytes:.2f}",
                f"{mean:.4f}",
                against,
                within,
            ]
        )
    return markdown(
        ["lever", "bytes", "times fewer", "AUC", "against the baseline, 95%", f"surely within {MARGIN:g}"], rows
    )


def levers_picture(report: LeversReport) -> Element:
    """Draw AUC against bytes, both relative to the baseline; the proposed order is a line with numbers."""
    base = report.levers[0]
    drawn = picture(_WIDTH, _HEIGHT, "Bytes and AUC of each lever")
    highest = max(0.004, 0.002 * math.ceil(max(one.difference for one in report.levers) / 0.002))
    y = linear(_LOWEST, highest, 0.002)
    panel = Panel(drawn, Box(64, 66, _WIDTH - 90, _HEIGHT - 116), log_around([one.bytes for one in report.levers]), y)
    panel.axes("AUC against fp32, full tables", "bytes of tables")
    for margin in (-MARGIN, MARGIN):
        at = float(panel.up(margin))
        panel.add(element("line", x1=panel.box.left, x2=panel.box.right, y1=at, y2=at, class_="deadline"))
    ordered = [one for one in report.levers if one.group == "in order"]
    panel.line([base.bytes, *(one.bytes for one in ordered)], [0.0, *(one.difference for one in ordered)], "even")
    for one in report.levers:
        _mark(panel, one)
    for number, one in enumerate(ordered, start=1):
        panel.add(
            written_at(float(panel.across(one.bytes)) - 4, float(panel.up(one.difference)) - 9, f"{number}", "label")
        )
    names = [(series, group) for group, series in _SERIES.items() if group != "no crosses"]
    legend(drawn, 64, 18, names, _WIDTH - 8)
    return drawn


def _mark(panel: Panel, one: LeverResult) -> None:
    series = _SERIES.get(one.group, "even")
    title = f"{one.group}: {one.name}: {_size(one.bytes)}, {one.difference:+.4f} ± {one.interval:.4f}"
    x = float(panel.across(one.bytes))
    ends = panel.up([one.difference - one.interval, one.difference + one.interval]).tolist()
    panel.add(element("line", x1=x, x2=x, y1=ends[0], y2=ends[1], class_=f"interval {series}"))
    panel.dots([one.bytes], [one.difference], series, [title], "hollow" if one.group == "no crosses" else "")


def hash_sizes_tables(report: HashSizesReport) -> str:
    """Write collisions and log losses by size."""
    found = ""
    if report.criteo is not None:
        found += markdown(
            [
                "rows, of the ids",
                "bytes",
                "lookups in a collision",
                "expected",
                "of an id that is not its row's commonest",
            ],
            [
                [
                    f"{one.share:.0%}",
                    _size(one.bytes),
                    f"{one.changed:.2%}",
                    f"{one.expected:.2%}",
                    f"{one.outnumbered:.2%}",
                ]
                for one in report.criteo
            ],
        )
    if report.clicks is not None:
        clicks = report.clicks
        base = clicks.sizes[0].log_loss
        found += "\n" + markdown(
            ["rows, of the ids", "bytes", "log loss", "more than without a hash", "of the gain over the mean rate"],
            [
                [
                    "each its own" if one.share is None else f"{one.share:.0%}",
                    _size(one.bytes),
                    f"{one.log_loss:.4f}",
                    f"{one.log_loss - base:+.4f}",
                    f"{(clicks.constant - one.log_loss) / (clicks.constant - base):.1%}",
                ]
                for one in clicks.sizes
            ],
        )
        found += f"\nThe teacher itself: {clicks.teacher:.4f}; the mean click rate for all: {clicks.constant:.4f}.\n"
    return found


def hash_sizes_picture(report: HashSizesReport) -> Element:
    """Draw both parts beside each other."""
    drawn = picture(_WIDTH, 400, "Hashed tables from a row for each id down to 1%")
    half = _WIDTH / 2
    if report.criteo is not None:
        shares = [one.share for one in report.criteo]
        panel = Panel(drawn, Box(60, 66, half - 90, 270), log_around(shares), linear_around([1.0]))
        panel.axes("share of lookups", "rows, of the ids that occur")
        panel.line(shares, [one.changed for one in report.criteo], "s1")
        panel.line(shares, [one.outnumbered for one in report.criteo], "s2")
        legend(drawn, 60, 18, [("s1", "in a collision"), ("s2", "not the row's commonest id")], half)
    if report.clicks is not None:
        _draw_losses(drawn, Box(half + 60, 66, half - 90, 270), report.clicks)
    return drawn


def _draw_losses(drawn: Element, box: Box, clicks: TeacherReport) -> None:
    sizes = [one for one in clicks.sizes if one.share is not None]
    losses = [one.log_loss for one in clicks.sizes]
    low, high = (0.005 * edge for edge in (math.floor(min(losses) / 0.005), math.ceil(max(losses) / 0.005)))
    panel = Panel(drawn, box, log_around([one.bytes for one in sizes]), linear(low, high, 0.005))
    panel.axes("log loss, clicks not seen", "bytes of tables")
    panel.line([one.bytes for one in sizes], [one.log_loss for one in sizes], "s1")
    titles = [f"{one.share:.0%}: {one.log_loss:.4f}" for one in sizes if one.share is not None]
    panel.dots([one.bytes for one in sizes], [one.log_loss for one in sizes], "s1", titles)
    at = float(panel.up(clicks.sizes[0].log_loss))
    panel.add(element("line", x1=box.left, x2=box.right, y1=at, y2=at, class_="deadline"))
    told = "a row for each id"
    panel.add(written_at(box.right - LETTER * len(told), at - 4, told, "label"))


def _size(count: float) -> str:
    """Write bytes with a decimal prefix, to three digits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def lookups_table(found: Sequence[LookupCost]) -> str:
    """Write what each lever costs at lookup, beside whole tables."""
    ids = list(found[0].us_per_batch)
    rows = [
        [one.lever, _size(one.table_bytes), *(f"{one.us_per_batch[key]:.0f} ({one.ratio[key]:.2f})" for key in ids)]
        for one in found
    ]
    return markdown(["tables", "bytes", *(f"µs a batch, {key} a bag (to whole)" for key in ids)], rows)
