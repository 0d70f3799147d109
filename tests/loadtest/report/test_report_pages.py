"""Pages: every number is the result's, nothing comes from outside, and nobody's text becomes markup."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from loadtest.errors import HistogramError, PageFileError
from loadtest.load.recorder import encode_histogram, percentiles
from loadtest.load.result import Mark
from loadtest.report.comparison import compare_runs, measured
from loadtest.report.page import html, write_html
from shardrank_testing.load_results import QueueLoad, Stall, example_run, example_sweep
from shardrank_testing.report_pages import (
    Tags,
    at_pointer,
    body_of,
    document_of,
    leaves,
    plots_of,
    text_of,
    with_class,
)

# What a page need not say: the form of the document, what is drawn, and what is said in words.
NOT_SHOWN = re.compile(
    r"/(kind|format_version|valid|encoded|unit|count|warmup|better|baseline)$|_histogram/|/arms/\d+/name$"
)


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


# Made when a test asks for them: every worker imports this file, and one runs it.
@cache
def result_of(name: str) -> Any:
    return RESULTS[name]()


@cache
def page_of(name: str) -> str:
    return html(result_of(name))


@every
def test_every_number_on_the_page_is_the_results(name):
    document = document_of(result_of(name))
    shown = list(body_of(page_of(name)).iter("data"))
    assert len(shown) > 100
    for one in shown:
        if (pointer := one.get("data-of")) is not None:
            assert one.get("value") == repr(at_pointer(document, pointer)), pointer
        else:
            assert one.get("value") == str(sum(at_pointer(document, one.get("data-sum-of")).values()))


@every
def test_every_number_is_shown_within_half_of_its_last_digit(name):
    for one in body_of(page_of(name)).iter("data"):
        pointer = one.get("data-of") or ""
        text, value = text_of(one).replace(",", ""), float(one.get("value"))
        if pointer.endswith("memory_bytes"):
            assert text == f"{value / 2**30:.1f} GiB"
            continue
        # Shares are shown in percent.
        shown = float(text) / (100 if re.search("cpu_share|confidence|tolerance", pointer) else 1)
        assert shown == pytest.approx(value, rel=5.1e-3), pointer


@every
def test_every_value_of_the_result_is_on_the_page(name):
    document = leaves(document_of(result_of(name)))
    body = body_of(page_of(name))
    shown = {one.get("data-of"): one for one in body.iter() if one.get("data-of") is not None}
    wanted = {pointer: value for pointer, value in document.items() if not NOT_SHOWN.search(pointer)}
    # The baseline's ratio to itself is not shown, nor ends of an interval that is not there.
    wanted = {key: value for key, value in wanted.items() if not re.search(r"/ratios/0/", key)}
    assert sorted(set(wanted) - set(shown)) == []
    for pointer, value in wanted.items():
        if isinstance(value, str):
            assert value.split() == text_of(shown[pointer]).split()
        elif value is None:
            assert text_of(shown[pointer]) in ("–", "the workload's own")


@every
def test_the_page_is_well_formed_for_browsers_and_for_xml(name):
    read = Tags(page_of(name))
    assert (read.wrong, read.open) == ([], [])
    assert page_of(name).startswith("<!doctype html>\n")
    assert body_of(page_of(name)).tag == "body"


@every
def test_nothing_on_the_page_comes_from_elsewhere(name):
    tags = Tags(page_of(name)).attributes
    assert {tag for tag, _, _ in tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "a",
        "use",
        "image",
        "form",
    } == set()
    loading = {"src", "href", "xlink:href", "srcset", "action", "data", "background", "style"}
    assert [one for one in tags if one[1] in loading or one[1].startswith("on")] == []
    style = page_of(name).split("<style>")[1].split("</style>")[0]
    assert not re.search(r"url\(|@import|@font-face|https?:", style)
    policy = [value for tag, attribute, value in tags if (tag, attribute) == ("meta", "content")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy


@every
def test_light_and_dark_have_the_same_colours_to_set(name):
    light, dark = re.findall(r":root \{(.*?)\}", page_of(name), re.DOTALL)
    names = [set(re.findall(r"(--[a-z0-9-]+):", part)) for part in (light, dark)]
    assert names[0] == names[1]
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page_of(name))) - {"--c"}
    assert used == names[0]


def headline_of(body):
    tiles = with_class(with_class(body, "div", "tiles")[0], "div", "tile")
    return {text_of(with_class(one, "div", "name")[0]): text_of(with_class(one, "div", "figure")[0]) for one in tiles}


def test_the_headline_says_validity_rate_latencies_and_errors():
    run = QueueLoad(duration_s=4, warmup_s=1).run()
    body = body_of(html(run))
    assert text_of(with_class(body, "div", "verdict")[0]).startswith("Valid. The generator kept up")
    tiles = headline_of(body)
    assert list(tiles) == ["rate wanted", "answered right", "within 25 ms", "p50", "p99", "p99.9", "max", "failed"]
    assert (tiles["rate wanted"], tiles["failed"]) == ("600 /s", "0")
    assert tiles["p99"] == f"{run.latency.p99_ms:.3g} ms"


def test_an_invalid_run_says_so_first_and_why():
    body = body_of(html(QueueLoad(duration_s=3, warmup_s=1, cpu_share=0.97).run()))
    verdict = with_class(body, "div", "verdict")[0]
    assert verdict.get("class") == "verdict invalid"
    assert text_of(verdict) == (
        "Not valid. These numbers are not the server's alone:process 1 used 0.97 of a core; at most 0.9 is valid"
    )


def test_failures_do_not_make_the_headlines_latency_better():
    run = QueueLoad(duration_s=4, warmup_s=1, refused=0.02).run()
    tiles = headline_of(body_of(html(run)))
    # 2% failed: p99 of all that were due is no time at all.
    assert (tiles["p99"], tiles["p99.9"]) == ("–", "–")
    assert tiles["failed"] == str(run.errors["http_503"])


def test_texts_of_the_result_never_become_markup():
    hostile = "<script>alert(1)</script>\"'&amp;\x00]]>"
    run = QueueLoad(duration_s=3, warmup_s=1, refused=0.1, stalls=(Stall(2.0, 5, "x"),)).run()
    changes = {
        "target": f"http://{hostile}", "model": hostile, "workload": hostile, "error_examples": (hostile,),
        "errors": {hostile: run.due - run.answered}, "marks": (Mark(at_s=2.0, label=hostile),), "valid": False,
        "invalid_because": (hostile,), "versions": {hostile: hostile, "a/b~c": "1"},
    }  # fmt: skip
    page = html(run.model_copy(update=changes))
    assert "<script" not in page
    assert Tags(page).wrong == []
    body = body_of(page)
    shown = hostile.replace("\x00", "\ufffd")
    pointers = {one.get("data-of"): text_of(one) for one in body.iter() if one.get("data-of")}
    for pointer in ("/model", "/error_examples/0", "/marks/0/label", "/invalid_because/0"):
        assert pointers[pointer] == shown
    assert pointers["/versions/a~1b~0c"] == "1"
    assert shown in page.split("<title>")[1].split("</title>")[0].replace("&lt;", "<").replace("&gt;", ">").replace(
        "&#x27;", "'"
    ).replace("&quot;", '"').replace("&amp;", "&")


def test_a_run_without_an_answer_has_a_page():
    run = QueueLoad(duration_s=3, warmup_s=1, refused=1.0).run()
    assert run.answered == 0
    body = body_of(html(run))
    assert list(plots_of(body)) == ["Time line"]
    assert headline_of(body)["p50"] == "–"


def test_a_run_in_which_nothing_was_due_has_a_page():
    empty, histogram = percentiles([]), encode_histogram([])
    nothing = {
        "due": 0, "sent": 0, "answered": 0, "within_slo": 0, "goodput": 0.0, "throughput": 0.0, "time_line": (),
        "latency": empty, "latency_of_due": empty, "service": empty,
        "latency_histogram": histogram, "service_histogram": histogram,
    }  # fmt: skip
    body = body_of(html(QueueLoad(duration_s=3, warmup_s=1).run().model_copy(update=nothing)))
    assert plots_of(body) == {}
    assert "nothing was due" in text_of(body)


def test_a_sweep_says_the_highest_rate_and_what_limits_it():
    sweep = result_of("sweep")
    body = body_of(page_of("sweep"))
    assert "the limit is the server's" in text_of(with_class(body, "div", "verdict")[0])
    best = next(step for step in sweep.steps if step.rate == sweep.highest_rate)
    tiles = headline_of(body)
    assert tiles["highest rate"] == "800 /s"
    assert tiles["p99"] == f"{best.latency_of_due.p99_ms:.3g} ms"


def test_a_sweep_without_a_rate_says_so():
    sweep = result_of("sweep").model_copy(
        update={"steps": result_of("sweep").steps[-1:], "highest_rate": None, "limited_by": "generator"}
    )
    body = body_of(html(sweep))
    verdict = with_class(body, "div", "verdict")[0]
    assert verdict.get("class") == "verdict invalid"
    assert "No valid step kept the deadline" in text_of(verdict)
    assert headline_of(body)["highest rate"] == "–"


def test_a_step_that_is_not_valid_is_told_from_one_that_was_too_slow():
    body = body_of(html(example_sweep(cpu_share=0.97)))
    outcomes = [text_of(list(row)[-1]) for row in body.iter("tr")]
    assert {"kept", "the highest", "beyond the deadline", "not valid"} <= set(outcomes)
    assert with_class(plots_of(body)["Latency against rate"], "circle", "hollow")


def test_a_comparison_colours_only_what_is_certain():
    result = result_of("comparison")
    noise = measured("noise", "ms", "lower", [[1.0, 1.0, 1.0], [0.9, 1.1, 1.0]])
    worse = measured("worse", "/s", "higher", [[10.0, 10.0, 10.0], [8.0, 8.5, 9.0]])
    body = body_of(html(result.model_copy(update={"measures": (*result.measures[:1], noise, worse)})))
    judged = {}
    for row in body.iter("tr"):
        cells = list(row)
        if ratios := [one for cell in cells for one in with_class(cell, "div", "ratio")]:
            judged[text_of(cells[0])] = ratios[0].get("class")
    assert judged == {"p50": "ratio better", "noise": "ratio", "worse": "ratio worse"}


def test_a_comparison_of_one_round_says_that_it_may_be_chance():
    run = QueueLoad(duration_s=3, warmup_s=1).run()
    page = html(compare_runs("once", {"a": [run], "b": [run]}))
    assert "One round has no confidence interval: a difference may be chance." in page


def test_a_page_is_written_as_utf_8(tmp_path):
    path = tmp_path / "run.html"
    write_html(result_of("run"), path)
    assert path.read_text(encoding="utf-8") == page_of("run")


def test_a_page_that_can_not_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(PageFileError, match=r"missing/run\.html: No such file"):
        write_html(result_of("run"), tmp_path / "missing" / "run.html")


def test_a_result_whose_histogram_is_broken_has_no_page():
    broken = result_of("run").model_copy(
        update={"latency_histogram": result_of("run").latency_histogram.model_copy(update={"encoded": "x"})}
    )
    with pytest.raises(HistogramError):
        html(broken)
