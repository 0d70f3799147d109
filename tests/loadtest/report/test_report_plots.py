"""Plots: what is drawn stands where its values are."""

from __future__ import annotations

import re

import numpy as np
import pytest

from loadtest.load.result import Mark, Second
from loadtest.report.chart import Box, Panel, legend, linear, picture
from loadtest.report.comparison import Arm, Comparison, measured
from loadtest.report.markup import element, written
from loadtest.report.plots import (
    MAX_POINTS,
    TimeLine,
    curves_plot,
    histogram_plot,
    latency_plot,
    percentile_plot,
    ratio_plot,
    rounds_plot,
    throughput_plot,
    time_line_plot,
)
from shardrank_testing.load_results import QueueLoad, Stall, example_run, example_sweep
from shardrank_testing.report_pages import text_of, with_class


def panel():
    drawn = picture(200, 200, "test")
    return drawn, Panel(drawn, Box(50, 20, 100, 100), linear(0, 10, 2), linear(0, 100, 20))


def numbers_of(text):
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def ticks(drawn, kind, index=0):
    """Names and places of an axis' ticks."""
    group = with_class(drawn, "g", "panel")[index]
    side = "x" if kind == "x" else "y"
    # Names of the y axis stand with their middle at the tick, which is 4 above their baseline.
    below = 0 if side == "x" else 4
    return {text_of(one): float(one.get(side)) - below for one in with_class(group, "text", kind)}


def test_values_stand_between_their_axes_ticks():
    _, made = panel()
    assert made.across([0, 5, 10]).tolist() == [50.0, 100.0, 150.0]
    assert made.up([0, 50, 100]).tolist() == [120.0, 70.0, 20.0]


def test_a_line_has_a_gap_where_a_value_is_missing_and_a_dot_where_it_is_alone():
    drawn, made = panel()
    made.line([0, 2, 4, 6, 8, 10], [0, 100, np.nan, 50, np.nan, np.nan], "s1")
    [path] = with_class(drawn, "path", "line")
    assert path.get("d") == "M50 120L70 20M110 70h0"


def test_a_line_without_values_is_not_drawn():
    drawn, made = panel()
    made.line([1, 2], [np.nan, np.nan], "s1")
    made.line([], [], "s1")
    assert with_class(drawn, "path", "line") == []


def test_bars_stand_on_what_is_below_them_and_are_never_too_low_to_be_seen():
    drawn, made = panel()
    made.bars([0, 5, 10], [80, 0.001], "s1", ["a", "b"], gap=0)
    made.bars([0, 5, 10], [20, 0], "s2", ["c", "d"], over=[80, 0.001], gap=0)
    first, second, top = with_class(drawn, "rect", "bar")
    assert [float(first.get(name)) for name in ("x", "y", "width", "height")] == [50, 40, 50, 80]
    assert [float(second.get(name)) for name in ("x", "y", "width", "height")] == [100, 119, 50, 1]
    assert [float(top.get(name)) for name in ("x", "y", "width", "height")] == [50, 20, 50, 20]
    assert text_of(top) == "c"


def test_ticks_whose_names_would_touch_are_thinned():
    drawn = picture(200, 200, "test")
    made = Panel(drawn, Box(50, 20, 60, 100), linear(0, 10_000, 1_000), linear(0, 100, 20))
    made.axes("ms")
    shown = ticks(drawn, "x")
    assert 2 <= len(shown) < 11
    assert min(np.diff(sorted(shown.values()))) > 12


def test_a_legend_has_lines_for_lines_and_bars_for_bars():
    drawn = picture(200, 200, "test")
    legend(drawn, 0, 10, [("s1", "one"), ("bar s2", "two")])
    [group] = with_class(drawn, "g", "legend")
    assert [one.tag for one in group] == ["line", "text", "rect", "text"]


def test_a_legend_that_is_too_long_goes_on_in_the_next_row():
    drawn = picture(600, 200, "test")
    legend(drawn, 54, 16, [(f"s{index}", "a rather long name") for index in range(1, 7)])
    places = [(float(one.get("y")), float(one.get("x"))) for one in drawn.iter("text")]
    assert [y for y, _ in places] == [16, 16, 16, 30, 30, 30]
    assert places[3][1] == places[0][1]
    assert all(x + 6.3 * 18 <= 600 for _, x in places)


def test_the_percentile_plots_points_are_the_results_percentiles():
    run = QueueLoad(duration_s=4, warmup_s=1).run()
    drawn = percentile_plot(run)
    dots = with_class(drawn, "circle", "dot")
    assert [text_of(one) for one in dots] == [
        f"p50 {run.latency.p50_ms:.3g} ms", f"p90 {run.latency.p90_ms:.3g} ms",
        f"p99 {run.latency.p99_ms:.3g} ms", f"p99.9 {run.latency.p999_ms:.3g} ms",
    ]  # fmt: skip
    x = ticks(drawn, "x")
    assert [float(one.get("cx")) for one in dots] == pytest.approx([x["50%"], x["90%"], x["99%"], x["99.9%"]], abs=0.11)
    heights = [float(one.get("cy")) for one in dots]
    assert heights == sorted(heights, reverse=True)


def test_the_percentile_lines_never_fall_and_pass_through_the_points():
    run = QueueLoad(duration_s=4, warmup_s=1).run()
    drawn = percentile_plot(run)
    [path] = with_class(drawn, "path", "line", "s1")
    points = np.array(numbers_of(path.get("d"))).reshape(-1, 2)
    assert (np.diff(points[:, 0]) >= 0).all()
    assert (np.diff(points[:, 1]) <= 0).all()
    for dot in with_class(drawn, "circle", "dot")[:3]:
        at = np.interp(float(dot.get("cx")), points[:, 0], points[:, 1])
        assert at == pytest.approx(float(dot.get("cy")), abs=2.5)


def test_where_failures_begin_the_percentile_lines_end():
    run = QueueLoad(duration_s=4, warmup_s=1, refused=0.05).run()
    drawn = percentile_plot(run)
    [line] = with_class(drawn, "line", "failures")
    for series in ("s1", "s2"):
        [path] = with_class(drawn, "path", "line", series)
        assert numbers_of(path.get("d"))[-2] == pytest.approx(float(line.get("x1")), abs=0.11)
    assert f"{run.due - run.answered} failed" in text_of(drawn)


def test_the_histograms_bars_hold_every_answer():
    run = QueueLoad(duration_s=4, warmup_s=1).run()
    bars = with_class(histogram_plot(run), "rect", "bar")
    assert sum(int(text_of(bar).split(": ")[1].replace(",", "")) for bar in bars) == run.answered


def test_marks_go_through_every_panel_at_their_moment():
    run = example_run()
    drawn = time_line_plot(run)
    panels = with_class(drawn, "g", "panel")
    assert len(panels) == 3
    x = ticks(drawn, "x", 2)
    assert list(x) == ["0", "5", "10", "15", "20", "25", "30"]
    for group in panels:
        lines = with_class(group, "line", "mark")
        assert [text_of(one) for one in lines] == [
            f"{number}: {mark.label}, at {mark.at_s:.1f} s" for number, mark in enumerate(run.marks, 1)
        ]
        for line, mark in zip(lines, run.marks, strict=True):
            assert float(line.get("x1")) == pytest.approx(x["0"] + (x["30"] - x["0"]) * mark.at_s / 30, abs=0.2)
    assert [text_of(one) for one in with_class(drawn, "text", "mark")] == [
        "1 swap to 2",
        "2 swap to 3",
        "3 shard 1 killed",
    ]


def test_names_of_marks_that_are_close_do_not_touch():
    stalls = tuple(Stall(1.5 + index / 100, 1, f"fault number {index}") for index in range(6))
    drawn = time_line_plot(QueueLoad(duration_s=3, warmup_s=1, stalls=stalls).run())
    names = [(float(one.get("y")), float(one.get("x")), text_of(one)) for one in with_class(drawn, "text", "mark")]
    assert len(names) == 3
    assert len({y for y, _, _ in names}) == 3
    assert len(with_class(drawn, "line", "mark")) == 3 * 6


def test_a_mark_before_the_run_widens_the_time_line():
    run = QueueLoad(duration_s=3, warmup_s=1).run()
    drawn = time_line_plot(run.model_copy(update={"marks": (Mark(at_s=-2.0, label="started"),)}))
    x = ticks(drawn, "x", 2)
    [line] = with_class(with_class(drawn, "g", "panel")[0], "line", "mark")
    assert float(line.get("x1")) < x["0"]


def test_the_warm_up_is_set_apart():
    drawn = time_line_plot(example_run())
    x = ticks(drawn, "x", 2)
    for shade in with_class(drawn, "rect", "apart"):
        assert float(shade.get("x")) == pytest.approx(x["0"])
        assert float(shade.get("width")) == pytest.approx((x["5"] - x["0"]) * 3 / 5, abs=0.11)


def long_run(seconds):
    run = QueueLoad(duration_s=3, warmup_s=1).run()
    line = tuple(
        Second(
            at_s=at, warmup=False, due=10, ok=9, errors=1, p50_ms=1.0, p99_ms=90.0 if at == 4_001 else 2.0, in_flight=3
        )
        for at in range(seconds)
    )
    return run.model_copy(update={"time_line": line, "duration_s": seconds - 1.0, "slo_ms": 5.0})


def test_a_long_run_is_drawn_in_windows_that_keep_the_worst_second():
    line = TimeLine.of(long_run(5_000))
    assert line.window_s == 5
    assert len(line.p99_ms) == 1_000 <= MAX_POINTS
    assert np.nanmax(line.p99_ms) == 90.0
    assert int(np.nanargmax(line.p99_ms)) == 800
    assert set(line.due.tolist()) == {10.0}
    assert set(line.errors.tolist()) == {1.0}


def test_a_last_second_that_is_shorter_is_drawn_at_its_rate():
    run = QueueLoad(duration_s=2.5, warmup_s=1, rate=1_000.0).run()
    line = TimeLine.of(run)
    assert line.edges_s[-1] == 3.5
    assert line.due[-1] == pytest.approx(2 * run.time_line[-1].due)


def test_a_sweep_draws_a_point_for_every_percentile_or_a_cross_where_it_failed():
    sweep = example_sweep()
    drawn = latency_plot(sweep)
    missing = [
        (step.rate, field)
        for step in sweep.steps
        for field in ("p50_ms", "p99_ms", "p999_ms")
        if getattr(step.latency_of_due, field) is None
    ]
    assert missing
    assert len(with_class(drawn, "text", "cross")) == len(missing)
    assert len(with_class(drawn, "circle", "dot")) == 3 * len(sweep.steps) - len(missing)
    [line] = with_class(drawn, "line", "highest")
    at = next(one for one in with_class(drawn, "circle", "dot") if text_of(one).startswith("800/s: p99 "))
    assert line.get("x1") == at.get("cx")


def test_what_is_answered_at_the_rate_stands_on_the_even_line():
    sweep = example_sweep()
    drawn = throughput_plot(sweep)
    x, y = ticks(drawn, "x"), ticks(drawn, "y")
    [even] = with_class(drawn, "path", "line", "even")
    begin_x, begin_y, end_x, end_y = numbers_of(even.get("d"))
    assert (begin_x, begin_y) == (x["0"], y["0"])
    assert end_x == pytest.approx(x["0"] + (x["1,000"] - x["0"]) * 1.6, abs=0.11)
    assert end_y == pytest.approx(y["0"] + (y["1,000"] - y["0"]) * 1.6, abs=0.11)


def test_curves_of_several_runs_are_told_apart_by_more_than_colour():
    runs = [QueueLoad(duration_s=3, warmup_s=1, rate=rate).run() for rate in (100.0, 300.0, 500.0)]
    drawn = curves_plot([(f"{run.rate:g}/s", [run]) for run in runs], 25.0, "test")
    assert [one.get("class") for one in with_class(drawn, "path", "line")] == ["line s1", "line s2", "line s3"]
    [names] = with_class(drawn, "g", "legend")
    assert [text_of(one) for one in names.iter("text")] == ["100/s", "300/s", "500/s"]


def compared():
    one = measured("p99", "ms", "lower", [[10.0, 12.0, 11.0], [8.0, 9.0, 10.0], [12.0, 12.0, 11.0]])
    arms = tuple(Arm(name=name) for name in ("1 card", "2 cards", "4 cards"))
    return Comparison(title="t", arms=arms, baseline=0, rounds=3, measures=(one,), valid=True)


def test_ratios_stand_on_their_axis_with_their_intervals():
    comparison = compared()
    drawn = ratio_plot(comparison)
    x = ticks(drawn, "x")
    [one] = with_class(drawn, "line", "one")
    assert float(one.get("x1")) == x["1"]
    low, high = min(x, key=float), max(x, key=float)
    for arm, dot, interval in zip(
        (1, 2), with_class(drawn, "circle", "dot"), with_class(drawn, "line", "interval"), strict=True
    ):
        ratio = comparison.measures[0].ratios[arm]
        for value, at in (
            (ratio.value, dot.get("cx")),
            (ratio.low, interval.get("x1")),
            (ratio.high, interval.get("x2")),
        ):
            part = np.log(value / float(low)) / np.log(float(high) / float(low))
            assert float(at) == pytest.approx(x[low] + (x[high] - x[low]) * part, abs=0.2)


def test_a_measures_rounds_are_a_line_for_each_arm():
    drawn = rounds_plot(compared(), compared().measures[0])
    assert list(ticks(drawn, "x")) == ["1", "2", "3"]
    assert len(with_class(drawn, "path", "line")) == 3
    assert [text_of(one) for one in with_class(drawn, "circle", "dot")][:3] == [
        "1 card: 10.0 ms", "1 card: 12.0 ms", "1 card: 11.0 ms",
    ]  # fmt: skip


def test_every_coordinate_is_a_number_within_the_picture():
    for drawn in (percentile_plot(example_run()), histogram_plot(example_run()), time_line_plot(example_run())):
        _, _, width, height = numbers_of(drawn.get("viewBox"))
        text = written(element("div", drawn))
        assert not re.search(r"nan|inf\b", text.replace("in flight", ""))
        for one in drawn.iter():
            for name, limit in (
                ("x", width),
                ("y", height),
                ("x1", width),
                ("y2", height),
                ("cx", width),
                ("cy", height),
            ):
                if (value := one.get(name)) is not None:
                    assert 0 <= float(value) <= limit
