"""Pages: every number is the result's, nothing comes from outside, and no text becomes markup."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from playwright.sync_api import sync_playwright

from loadtest.load.result import percentiles
from loadtest.page import draw_percentiles, html
from shardrank_testing.browser import chromium_path
from shardrank_testing.load_results import QueueLoad, Stall, example_run, example_sweep


def short(**changes):
    return QueueLoad(**{"duration_s": 3, "warmup_s": 1, **changes}).run()


RESULTS = {"run": example_run, "sweep": example_sweep}
every = pytest.mark.parametrize("name", sorted(RESULTS))


@cache
def page_of(name: str) -> str:
    return html(RESULTS[name]())


def body_of(page: str) -> ET.Element:
    """The page's body, which must be well-formed XML."""
    return ET.fromstring(re.search(r"<body>.*</body>", page, re.DOTALL)[0])


def text_of(root: ET.Element) -> str:
    return " ".join("".join(root.itertext()).split())


def rows_of(body: ET.Element, columns: int) -> list[list[str]]:
    """The texts of all tables' rows with so many cells."""
    return [[text_of(cell) for cell in row] for row in body.iter("tr") if len(row) == columns]


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
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", " ".join(body.itertext()))
    text, numbers = text_of(body), np.unique([float(number.replace(",", "")) for number in found])
    values = {
        path: value for path, value in leaves(RESULTS[name]().model_dump(mode="json")).items() if value is not None
    }
    assert len(values) > 100
    for path, value in values.items():
        if isinstance(value, str | bool):
            assert " ".join(str(value).split()) in text, path
        else:
            assert np.isclose(numbers, value, rtol=5.1e-3, atol=0).any(), (path, value)


def test_a_run_begins_with_its_rates_and_latencies():
    run = short(refused=0.02)
    _, row = rows_of(body_of(html(run)), 11)
    times = run.latency_of_due
    expected = [600, run.throughput, run.goodput, times.p50_ms, times.p90_ms]
    assert [float(cell) for cell in row[:5]] == pytest.approx(expected, rel=5.1e-3)
    # 2% failed: p99 of all that were due is no time at all.
    assert row[5:9] == ["–", "–", "–", str(run.errors["http_503"])]
    assert row[-1] == "failed"


def test_a_sweep_has_its_steps_by_rate():
    body = body_of(html(example_sweep(cpu_share=0.97)))
    rows = rows_of(body, 11)[1:8]
    assert [row[0] for row in rows] == ["100", "200", "400", "800", "850", "1,200", "1,600"]
    assert [row[-1] for row in rows] == ["kept"] * 4 + ["failed"] * 2 + ["invalid"]
    assert text_of(body).count("×") == sum(row[5:7].count("–") for row in rows) > 0


def test_texts_of_the_result_are_escaped():
    hostile = "<script>alert(1)</script>\"'&amp;]]>$\\frac{$"
    run = short(refused=0.1, stalls=(Stall(2.0, 5),))
    changes = {
        "target": f"http://{hostile}", "model": hostile, "workload": hostile, "error_examples": (hostile,),
        "errors": {hostile: run.due - run.answered}, "valid": False,
        "invalid_because": (hostile,), "versions": {hostile: hostile},
    }  # fmt: skip
    run = run.model_copy(update=changes)
    page = html(run)
    assert "<script" not in page
    assert text_of(body_of(page)).count(hostile) >= 7


def no_rate():
    nothing = {"steps": example_sweep().steps[-1:], "highest_rate": None, "limited_by": "generator"}
    return example_sweep().model_copy(update=nothing)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (short, "Valid. The generator kept up"),
        (lambda: short(cpu_share=0.97), "Not valid. process 1 used 0.97 of a core; at most 0.9 is valid"),
        (example_sweep, "Valid. A higher rate broke the deadline in a valid run: the limit is the server's."),
        (no_rate, "Not valid. No valid step kept the deadline"),
    ],
)
def test_a_page_says_whether_to_believe_it(make, sentence):
    assert sentence in text_of(body_of(html(make())))


def test_a_curve_ends_where_requests_failed():
    """A failed request is later than any answer."""
    runs = [short(refused=share) for share in (0.0, 0.02, 0.2)]
    ends = []
    for run in runs:
        axes = Figure().add_subplot()
        draw_percentiles(axes, {"due": run.latency_of_due}, 25)
        at, times = axes.lines[0].get_data()
        ends.append(np.flatnonzero(np.isfinite(times))[-1])
        assert (at[:2].tolist(), times[:2].tolist()) == ([1, 2], [run.latency_of_due.min_ms, run.latency_of_due.p50_ms])
    assert [at[end] for end in ends] == [1000, 10, 2]


def test_a_run_without_answers_has_only_a_time_line():
    svg = next(body_of(html(short(refused=1.0))).iter("{http://www.w3.org/2000/svg}svg"))
    assert "in flight" in text_of(svg)
    assert "percentile" not in text_of(svg)


def test_a_run_without_requests_has_a_page():
    times = percentiles([])
    nothing = {
        "due": 0, "sent": 0, "answered": 0, "within_slo": 0, "goodput": 0.0, "throughput": 0.0, "time_line": (),
        "latency": times, "latency_of_due": times, "service": times,
    }  # fmt: skip
    assert "<svg" not in html(short().model_copy(update=nothing))


def test_pages_in_a_browser_follow_its_colour_scheme(tmp_path):
    """Nothing is requested, no policy is broken, and charts have light lines on a dark ground in the dark scheme."""
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        for name, scheme in product(RESULTS, ("light", "dark")):
            (tmp_path / f"{name}.html").write_text(page_of(name), encoding="utf-8")
            page = chromium.new_page(color_scheme=scheme)
            requests, errors = [], []
            page.on("request", lambda request, requests=requests: requests.append(request.url))
            page.on("console", lambda message, errors=errors: errors.append(message.text))
            page.goto(f"file://{tmp_path / name}.html")
            assert page.evaluate("document.querySelectorAll('script, link, img, iframe, object, form').length") == 0
            pixels = imread(io.BytesIO(page.locator("svg").first.screenshot()))[..., :3].mean(axis=-1)
            assert pixels.shape[0] > 200
            ground, ink = np.median(pixels), pixels.min() if scheme == "light" else pixels.max()
            assert (ground, ink) == pytest.approx((1, 0) if scheme == "light" else (0, 1), abs=0.1)
            assert (len(requests), errors) == (1, [])
            assert "default-src 'none'; style-src 'unsafe-inline'" in page.content()
        chromium.close()
