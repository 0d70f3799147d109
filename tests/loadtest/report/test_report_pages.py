"""Pages: every number is the result's, nothing comes from outside, and no text becomes markup."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from loadtest.errors import HistogramError, PageFileError
from loadtest.load.result import Mark, Second, encode_histogram, percentiles
from loadtest.report.page import html, write_html
from loadtest.report.results import compare_runs
from loadtest.rounds import ComparedMeasure
from shardrank_testing.browser import chromium_path
from shardrank_testing.load_results import QueueLoad, Stall, example_run, example_sweep
from shardrank_testing.report_pages import body_of, numbers_of, rows_of, text_of, tiles_of, with_class

# The form of the document, what charts are drawn from, and what is shown in other units or words.
NOT_SHOWN = re.compile(
    r"/(kind|format_version|valid|encoded|unit|count|warmup|varied|better|baseline|memory_bytes)$|/ratios/0/"
    r"|/(ids|candidates)$"
)
PERCENT = re.compile(r"/(cpu_share|max_cpu_share|confidence|tolerance)$")


def comparison():
    arms = {
        f"{cards} cards": [
            QueueLoad(service_ms=1.2 / cards, seed=turn, duration_s=3, warmup_s=1).run() for turn in range(3)
        ]
        for cards in (1, 2)
    }
    return compare_runs("1 or 2 cards", arms)


RESULTS = {"run": example_run, "sweep": example_sweep, "comparison": comparison}
every = pytest.mark.parametrize("name", sorted(RESULTS))


# Made when a test needs them: every worker imports this file, and one runs it.
@cache
def result_of(name: str) -> Any:
    return RESULTS[name]()


@cache
def page_of(name: str) -> str:
    return html(result_of(name))


def short(**changes):
    return QueueLoad(**{"duration_s": 3, "warmup_s": 1, **changes}).run()


def leaves(document: Any, pointer: str = "") -> dict[str, Any]:
    """Every value of a document that has no parts, by its pointer."""
    if not isinstance(document, dict | list):
        return {pointer: document}
    parts = document.items() if isinstance(document, dict) else enumerate(document)
    return {key: value for name, part in parts for key, value in leaves(part, f"{pointer}/{name}").items()}


@every
def test_every_value_of_the_result_is_on_the_page(name):
    """Numbers to three significant digits, texts as they are."""
    body = body_of(page_of(name))
    text, numbers = text_of(body), np.unique(numbers_of(body))
    document = result_of(name).model_dump(mode="json")
    shown = {pointer: value for pointer, value in leaves(document).items() if not NOT_SHOWN.search(pointer)}
    assert len(shown) > 100
    for pointer, value in shown.items():
        if isinstance(value, str):
            assert " ".join(value.split()) in text, pointer
        elif value is not None:
            expected = 100 * value if PERCENT.search(pointer) else value
            assert np.isclose(numbers, expected, rtol=5.1e-3, atol=0).any(), (pointer, value)


def test_rows_of_a_run_are_its_percentiles_and_counts():
    run, rows = result_of("run"), rows_of(body_of(page_of("run")))
    for name, times in (
        ("latency, from the intended send time", run.latency),
        ("the same of all that were due, failures last", run.latency_of_due),
        ("service time, from the actual send", run.service),
    ):
        values = [value for _, value in times]
        assert [cell == "–" for cell in rows[name]] == [value is None for value in values]
        found = [float(cell) for cell in rows[name] if cell != "–"]
        assert found == pytest.approx([value for value in values if value is not None], rel=5.1e-3)
    assert rows["due"] == [f"{run.due:,}", "100"]
    assert rows["failed: timeout"] == ["1", "0.0055"]
    assert rows["memory"] == [f"{run.machine.memory_bytes / 2**30:.1f} GiB"]
    seconds = [row for row in body_of(page_of("run")).iter("tr") if len(row) == 8][5:]
    assert [int(text_of(row[1])) for row in seconds] == [second.due for second in run.time_line]


def test_rows_of_a_sweep_are_its_steps_by_rate():
    sweep = example_sweep(cpu_share=0.97)
    rows = [[text_of(cell) for cell in row] for row in body_of(html(sweep)).iter("tr") if len(row) == 12][1:]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "7", "6", "5"]
    assert [float(row[1].replace(",", "")) for row in rows] == sorted(step.rate for step in sweep.steps)
    assert [row[-1] for row in rows] == ["kept"] * 3 + ["the highest"] + ["beyond the deadline"] * 2 + ["not valid"]


def test_rows_of_a_comparison_are_medians_with_ratios_and_every_round():
    result, rows = result_of("comparison"), rows_of(body_of(page_of("comparison")))
    for measure in result.measures[:3]:
        base, other = rows[f"{measure.name}, {measure.unit}"]
        assert float(base) == pytest.approx(measure.middle[0], rel=5.1e-3)
        value, ratio, *interval = map(float, re.findall(r"[\d.]+", re.sub(r"(\d) ?(\d\.\d+ ×)", r"\1 \2", other)))
        expected = measure.ratios[1]
        assert [ratio, *interval] == pytest.approx([expected.value, expected.low, expected.high], rel=5.1e-3)
        assert value == pytest.approx(measure.middle[1], rel=5.1e-3)
        rounds = [float(cell) for cell in rows[f"{measure.name}, {measure.unit}: 2 cards"]]
        assert rounds == pytest.approx(measure.values[1], rel=5.1e-3)


@every
def test_nothing_on_the_page_comes_from_elsewhere(name):
    page = page_of(name)
    assert page.startswith("<!doctype html>\n")
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.search(r"url\((?!#)|@import|@font-face", page)
    for element in body_of(page).iter():
        tag = element.tag.rpartition("}")[2]
        assert tag not in {"script", "link", "img", "iframe", "object", "a", "image", "form"}
        for attribute, value in element.attrib.items():
            assert not attribute.startswith("on")
            if attribute.rpartition("}")[2] in {"src", "href", "srcset", "action", "data"}:
                assert value.startswith("#"), (tag, attribute)


@every
def test_every_colour_is_set_in_both_schemes(name):
    light, dark = re.findall(r":root \{(.*?)\}", page_of(name), re.DOTALL)
    names = [set(re.findall(r"(--[a-z0-9-]+):", scheme)) for scheme in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", page_of(name))) <= names[0]
    charts = "".join(re.findall(r"<svg.*?</svg>", page_of(name), re.DOTALL))
    assert not re.search(r"(?:fill|stroke): #[0-9a-f]{6}", charts)


def test_the_headline_has_validity_rate_latencies_and_errors():
    run = short()
    body = body_of(html(run))
    assert text_of(with_class(body, "verdict")[0]).startswith("Valid. The generator kept up")
    tiles = tiles_of(body)
    assert list(tiles) == ["rate wanted", "answered right", "within 25 ms", "p50", "p99", "p99.9", "max", "failed"]
    assert (tiles["rate wanted"], tiles["failed"]) == ("600 /s", "0")
    assert tiles["p99"] == f"{run.latency.p99_ms:#.3g} ms"


def test_an_invalid_run_names_its_reasons_first():
    [verdict] = with_class(body_of(html(short(cpu_share=0.97))), "verdict", "invalid")
    assert text_of(verdict) == (
        "Not valid. These numbers are not the server's alone: process 1 used 0.97 of a core; at most 0.9 is valid"
    )


def test_failures_do_not_improve_the_latency_of_the_headline():
    run = short(refused=0.02)
    tiles = tiles_of(body_of(html(run)))
    # 2% failed: p99 of all that were due is no time at all.
    assert (tiles["p99"], tiles["p99.9"]) == ("–", "–")
    assert tiles["failed"] == str(run.errors["http_503"])


def test_texts_of_the_result_are_escaped():
    hostile = "<script>alert(1)</script>\"'&amp;]]>$\\frac{$"
    run = short(refused=0.1, stalls=(Stall(2.0, 5, "x"),))
    changes = {
        "target": f"http://{hostile}", "model": hostile, "workload": hostile, "error_examples": (hostile,),
        "errors": {hostile: run.due - run.answered}, "marks": (Mark(at_s=2.0, label=hostile),), "valid": False,
        "invalid_because": (hostile,), "versions": {hostile: hostile},
    }  # fmt: skip
    run = run.model_copy(update=changes)
    for result in (run, compare_runs(hostile, {hostile: [run], "other": [run]})):
        page = html(result)
        assert "<script" not in page
        body = body_of(page)
        assert text_of(body).count(hostile) >= 8
        assert rows_of(body)["model"] == [hostile]


def test_a_run_without_answers_has_only_a_time_line():
    body = body_of(html(short(refused=1.0)))
    assert [text_of(figure[0]) for figure in body.iter("figure")] == ["Time line"]
    assert tiles_of(body)["p50"] == "–"


def test_a_run_without_requests_has_a_page():
    histogram, times = encode_histogram([]), percentiles([])
    nothing = {
        "due": 0, "sent": 0, "answered": 0, "within_slo": 0, "goodput": 0.0, "throughput": 0.0, "time_line": (),
        "latency": times, "latency_of_due": times, "service": times,
        "latency_histogram": histogram, "service_histogram": histogram,
    }  # fmt: skip
    body = body_of(html(short().model_copy(update=nothing)))
    assert list(body.iter("figure")) == []
    assert "nothing was due" in text_of(body)


def test_a_long_run_is_drawn_in_windows():
    second = Second(at_s=0, warmup=False, due=10, ok=9, errors=1, p50_ms=1.0, p99_ms=2.0, in_flight=3)
    line = tuple(second.model_copy(update={"at_s": at}) for at in range(5_000))
    page = html(short().model_copy(update={"time_line": line, "duration_s": 4_999.0}))
    assert "In windows of 5 s: rates are means" in page


def test_a_sweep_names_the_highest_rate_and_its_limit():
    sweep, body = result_of("sweep"), body_of(page_of("sweep"))
    assert "the limit is the server's" in text_of(with_class(body, "verdict")[0])
    best = next(step for step in sweep.steps if step.rate == sweep.highest_rate)
    tiles = tiles_of(body)
    assert (tiles["highest rate"], tiles["p99"]) == ("800 /s", f"{best.latency_of_due.p99_ms:#.3g} ms")
    none = sweep.model_copy(update={"steps": sweep.steps[-1:], "highest_rate": None, "limited_by": "generator"})
    body = body_of(html(none))
    assert "No valid step kept the deadline" in text_of(with_class(body, "verdict", "invalid")[0])
    assert tiles_of(body)["highest rate"] == "–"


def test_a_comparison_colours_only_what_is_certain():
    result = result_of("comparison")
    values = {
        "noise": ("lower", [[1.0, 1.0, 1.0], [0.9, 1.1, 1.0]]),
        "worse": ("higher", [[10.0, 10.0, 10.0], [8.0, 8.5, 9.0]]),
        "without ratios": ("lower", [[0.0, 0.0, 0.0], [8.0, 8.5, 9.0]]),
    }
    added = [ComparedMeasure.from_values(name, "x", *of_name) for name, of_name in values.items()]
    body = body_of(html(result.model_copy(update={"measures": (*result.measures[:1], *added)})))
    judged = {text_of(row[0]): with_class(row, "ratio") for row in body.iter("tr")}
    assert {name: ratios[0].get("class") for name, ratios in judged.items() if ratios} == {
        "p50, ms": "ratio better", "noise, x": "ratio ", "worse, x": "ratio worse",
    }  # fmt: skip


def test_one_round_has_no_interval_and_the_page_warns():
    run = short()
    page = html(compare_runs("once", {"a": [run], "b": [run]}))
    assert "One round has no confidence interval: a difference may be chance." in page


def test_a_page_that_can_not_be_made_is_an_error_with_its_reason(tmp_path):
    with pytest.raises(PageFileError, match=r"missing/run\.html: No such file"):
        write_html(result_of("run"), tmp_path / "missing" / "run.html")
    encoded = result_of("run").latency_histogram.model_copy(update={"encoded": "x"})
    with pytest.raises(HistogramError):
        html(result_of("run").model_copy(update={"latency_histogram": encoded}))


def test_pages_in_a_browser_follow_its_colour_scheme(tmp_path):
    """Nothing is requested, no policy is broken, and texts of charts have the colour of the page's."""
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        for name in sorted(RESULTS):
            (tmp_path / f"{name}.html").write_text(page_of(name), encoding="utf-8")
            grounds = []
            for scheme in ("light", "dark"):
                page = chromium.new_page(color_scheme=scheme)
                requests, errors = [], []
                page.on("request", lambda request, requests=requests: requests.append(request.url))
                page.on("console", lambda message, errors=errors: errors.append(message.text))
                page.goto(f"file://{tmp_path / name}.html")
                grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                ink = page.evaluate("getComputedStyle(document.body).color")
                colors = page.evaluate(
                    "[...document.querySelectorAll('svg text')].map((e) => getComputedStyle(e).fill)"
                )
                assert ink in colors
                assert page.evaluate("document.querySelector('svg').getBoundingClientRect().height") > 200
                assert (len(requests), errors) == (1, [])
            assert grounds == ["rgb(251, 251, 250)", "rgb(21, 23, 26)"]
        chromium.close()
