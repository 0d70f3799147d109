from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from rich.console import Console

from loadtest.errors import LoadConfigError, ResultFileError
from loadtest.load.cli import loadtest
from loadtest.load.config import LoadTarget, OfferedLoad
from loadtest.load.generator import open_payloads
from loadtest.load.open_loop import PreciseTimer
from loadtest.load.result import Mark, write_document
from loadtest.load.run import marks_within, read_marks
from loadtest.load.show import show_result
from loadtest.report.page import html
from loadtest.report.results import read_reported
from loadtest.workloads.payloads import FORMS
from shardrank_testing.load_results import example_run, example_sweep

RESULTS = {"run": example_run(), "sweep": example_sweep()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:8080", ("http", "127.0.0.1", 8080)),
        ("http://example.org/", ("http", "example.org", 80)),
        ("grpc://[::1]:8081", ("grpc", "::1", 8081)),
    ],
)
def test_a_target_is_a_scheme_a_host_and_a_port(text, expected):
    target = LoadTarget.parse(text)
    assert (target.scheme, target.host, target.port) == expected


@pytest.mark.parametrize(
    "text", ["https://a", "a:80", "grpc://a", "http://a/v1", "http://a?x=1", "http://u@a", "http://a:99999", "http://"]
)
def test_any_other_target_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        OfferedLoad(target=text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api": "grpc"}, "'grpc' is not spoken at http://; json, oip-http are"),
        ({"slo_ms": 70, "timeout_ms": 50}, "70 is more than timeout_ms, 50"),
        ({"processes": 8, "max_connections": 4}, "max_connections: 4 is less than processes, 8"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        OfferedLoad(target="http://a", **given)


def test_the_api_is_the_target_s_unless_it_is_named():
    assert OfferedLoad(target="http://a").spoken == "json"
    assert OfferedLoad(target="grpc://a:1").spoken == "grpc"
    assert OfferedLoad(target="grpc://a:1", api="oip-grpc").spoken == "oip-grpc"


def test_requests_that_may_take_longer_than_servers_give_them_say_so():
    def deadlines(**given: float) -> set[object]:
        config = OfferedLoad(
            target="http://h", workload="merlin-tiny:0.001", candidates="3", requests=2, slo_ms=1, **given
        )
        _, pool = open_payloads(config)
        return {json.loads(one.body).get("timeout_ms") for one in pool}

    assert deadlines() == deadlines(timeout_ms=20) == {None}
    assert deadlines(timeout_ms=2500.5) == {2501}


def test_marks_are_times_and_labels(tmp_path: Path):
    path = tmp_path / "marks"
    path.write_text("1000.5 swap to version 2\n\n 999 before\n1100 after\n")
    marks = read_marks(path, began=1000)
    assert marks == (
        Mark(at_s=0.5, label="swap to version 2"),
        Mark(at_s=-1, label="before"),
        Mark(at_s=100, label="after"),
    )
    assert marks_within(marks, 50) == (Mark(at_s=0.5, label="swap to version 2"),)


@pytest.mark.parametrize("line", ["swap", "1000", "1000 " + "x" * 201, "nan swap", "inf swap"])
def test_a_line_that_is_no_mark_is_named(tmp_path: Path, line: str):
    path = tmp_path / "marks"
    path.write_text(f"1000 fine\n{line}\n")
    with pytest.raises(LoadConfigError, match="line 2"):
        read_marks(path, began=1000)


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_result_that_was_written_is_read_back(tmp_path: Path, kind: str):
    path = tmp_path / "result.json"
    write_document(RESULTS[kind], path)
    assert read_reported(path) == RESULTS[kind]


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "run"}', '{"kind": "other"}', "[1]"])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=r"result\.json is no result of a run, a sweep or a comparison"):
        read_reported(path)
    with pytest.raises(ResultFileError, match="No such file"):
        read_reported(tmp_path / "missing.json")


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_result_on_a_terminal_has_its_numbers(kind: str):
    text = io.StringIO()
    show_result(Console(file=text, width=140), RESULTS[kind])
    shown = text.getvalue()
    if kind == "run":
        assert f"{RESULTS[kind].latency.p99_ms:.2f}" in shown
        assert str(RESULTS[kind].due) in shown
    else:
        assert f"{RESULTS[kind].highest_rate:.1f}/s" in shown


@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.parametrize("varied", [True, False])
def test_a_result_says_whether_requests_were_varied_on_a_terminal_and_on_its_page(kind: str, varied: bool):
    document = RESULTS[kind].model_dump()
    for run in document.get("steps", [document]):
        run["varied"] = varied
    result = type(RESULTS[kind]).model_validate(document)
    text = io.StringIO()
    show_result(Console(file=text, width=140), result)
    assert f"requests are {FORMS[varied]}" in text.getvalue()
    assert FORMS[varied] in html(result)
    assert FORMS[not varied] not in html(result)


def test_a_result_from_before_requests_were_varied_is_read_as_one_whose_requests_were_not():
    document = RESULTS["run"].model_dump()
    del document["varied"]
    assert not type(RESULTS["run"]).model_validate(document).varied


def test_requests_are_varied_unless_the_command_line_says_same(monkeypatch):
    given: list[dict[str, object]] = []
    monkeypatch.setattr("loadtest.load.run.execute", lambda options, **_: given.append(options) or 0)
    for flags in ([], ["--same"]):
        CliRunner().invoke(loadtest, ["run", "--target", "http://a", "--rate", "5", *flags], catch_exceptions=False)
    assert [one["varied"] for one in given] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "http://a"], "--rate or --sweep is needed"),
        (["--target", "ftp://a", "--rate", "5"], "ftp://a"),
        (["--target", "http://a", "--rate", "5", "--api", "grpc"], "is not spoken at http://"),
        (["--target", "http://a", "--rate", "0"], "--rate"),
        (["--target", "http://a", "--rate", "5", "--duration", "4000"], "--duration"),
    ],
)
def test_a_command_line_that_can_not_be_run_is_refused_with_what_is_wrong(arguments, message):
    found = CliRunner().invoke(loadtest, ["run", *arguments])
    assert found.exit_code == 2
    assert message in found.output


def test_every_command_of_the_group_has_its_help():
    for name in ("run", "prepare", "report"):
        assert name in CliRunner().invoke(loadtest, ["--help"]).output
        assert "Examples:" in CliRunner().invoke(loadtest, [name, "--help"]).output


def test_the_timer_is_never_early_and_a_time_that_has_passed_comes_at_once():
    async def main() -> None:
        with contextlib.closing(PreciseTimer()) as timer:
            for when in (time.monotonic() + 0.0123, time.monotonic() - 5, 0.0, time.monotonic() + 0.001):
                await timer.until(when)
                assert time.monotonic() >= when

    asyncio.run(asyncio.wait_for(main(), 10))
