"""Whole load tests: settings, processes that send, the search for the highest rate, and the command."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loader.errors import ConfigError
from loadtest.cli import loadtest
from loadtest.errors import LoadError
from loadtest.load import result as results
from loadtest.load import run
from loadtest.load.config import OfferedLoad, RunConfig, parse_target
from loadtest.load.generator import Generators, open_payloads
from loadtest.load.result import LoadResult, SweepResult
from loadtest.load.run import MIN_RATE, TOLERANCE, run_sweep, show_result, sweep
from loadtest.servers import stopping_on_signals
from loadtest.workloads.payloads import FORMS
from serving.cli.output import text_of
from shardrank_testing.load_results import example_run, example_sweep
from shardrank_testing.loaded_server import Reply, loaded_grpc_server, loaded_http_server

SLO_MS = 50.0
RUN, SWEEP = example_run(), example_sweep()


def small_load(target: str, **options: object) -> OfferedLoad:
    given = {"workload": "merlin-tiny:0.0001", "candidates": "3", "requests": 20, "timeout_ms": 10_000, **options}
    return OfferedLoad(target=target, **given)


@pytest.mark.parametrize(
    ("text", "scheme", "address", "api"),
    [
        ("http://127.0.0.1:8080", "http", "127.0.0.1:8080", "json"),
        ("http://example.org/", "http", "example.org", "json"),
        ("grpc://[::1]:8081", "grpc", "[::1]:8081", "grpc"),
    ],
)
def test_a_target_has_an_address_and_a_first_api(text, scheme, address, api):
    load = OfferedLoad(target=text)
    assert (load.scheme, parse_target(text).netloc, load.spoken) == (scheme, address, api)
    assert OfferedLoad(target="grpc://a:1", api="oip-grpc").spoken == "oip-grpc"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"target": text}, "target") for text in ("https://a", "a:80", "grpc://a", "http://a/v1", "http://a?x=1")),
        *(({"target": text}, "target") for text in ("http://u@a", "http://a:99999", "http://")),
        ({"api": "grpc"}, "'grpc' is not spoken at http://; json, oip-http are"),
        ({"slo_ms": 70, "timeout_ms": 50}, "70 is more than timeout_ms, 50"),
        ({"processes": 8, "max_connections": 4}, "max_connections: 4 is less than processes, 8"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        OfferedLoad(**{"target": "http://a", **given})


@pytest.mark.parametrize(("timeout_ms", "stated"), [(1000, None), (20, None), (2500.5, 2501)])
def test_requests_state_a_deadline_above_the_servers_default(timeout_ms, stated):
    _, pool = open_payloads(small_load("http://h", requests=2, timeout_ms=timeout_ms, slo_ms=1))
    assert {json.loads(payload.body).get("timeout_ms") for payload in pool} == {stated}


@pytest.mark.parametrize("varied", [True, False])
def test_a_result_is_shown(varied: bool, capsys: pytest.CaptureFixture[str]):
    for result, number in ((RUN, RUN.latency.p99_ms), (SWEEP, SWEEP.highest_rate)):
        document = result.model_dump()
        for step in document.get("steps", [document]):
            step["varied"] = varied
        show_result(type(result).model_validate(document))
        printed = capsys.readouterr().out
        assert text_of("", number) in printed
        assert f"requests are {FORMS[varied]}" in printed
        assert all(reason in printed.splitlines() for reason in document.get("invalid_because", ()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "http://a"], "--rate or --sweep is needed"),
        (["--target", "ftp://a", "--rate", "5"], "ftp://a"),
        (["--target", "http://a", "--rate", "5", "--api", "grpc"], "is not spoken at http://"),
        (["--target", "http://a", "--rate", "0"], "rate"),
        (["--target", "http://a", "--rate", "5", "--duration", "4000"], "duration"),
        (["--target", "http://a", "--rate", "5", "--model", "m", "--workload", "dlrm-v2"], "one of them"),
        (["--target", "http://a", "--rate", "5", "--hotness", "3"], "only for a served model"),
        (
            ["--target", "http://a", "--rate", "5", "--model", "m", "--like", "/dev/null", "--ids", "uniform"],
            "like: ids",
        ),
    ],
)
def test_a_command_that_can_not_be_run_is_refused(arguments, message):
    refused = CliRunner().invoke(loadtest, ["run", *arguments])
    assert refused.exit_code == 2
    assert message in refused.output


@pytest.mark.parametrize("name", ["run", "replay", "prepare"])
def test_commands_have_help(name: str):
    assert name in CliRunner().invoke(loadtest, ["--help"]).output
    assert "Examples:" in CliRunner().invoke(loadtest, [name, "--help"]).output


def test_the_command_sends_from_processes_and_writes_its_result(tmp_path: Path):
    with loaded_http_server(lambda number: Reply()) as server:
        arguments = ["--target", f"http://127.0.0.1:{server.port}", "--workload", "merlin-tiny:0.0001"]
        arguments += ["--candidates", "3", "--rate", "50", "--duration", "2", "--warmup", "0", "--requests", "20"]
        arguments += ["--processes", "2", "--arrivals", "constant", "--timeout-ms", "10000"]
        files = ["--json", str(tmp_path / "run.json")]
        done = CliRunner().invoke(loadtest, ["run", *arguments, *files], catch_exceptions=False)
    result = LoadResult.model_validate_json((tmp_path / "run.json").read_text())
    # 1 if this machine was so busy that the generator itself was late, which the result says.
    assert done.exit_code == (0 if result.valid else 1), done.output
    assert (result.due, result.answered, result.errors, result.requests) == (100, 100, {}, 40)
    assert [process.due for process in result.generator.processes] == [50, 50]
    assert "within_slo" in done.output


@pytest.mark.parametrize(("share", "is_failed"), [([], True), (["--max-failed-share", "0.2"], False)])
def test_a_run_of_which_too_many_fail_exits_with_1(share, is_failed, monkeypatch):
    monkeypatch.setattr(results, "MIN_MAX_LAG_MS", 10_000.0)
    with loaded_http_server(lambda number: Reply(status=503 if number % 10 == 0 else 200)) as server:
        arguments = [
            "--target",
            f"http://127.0.0.1:{server.port}",
            "--workload",
            "merlin-tiny:0.0001",
            "--requests",
            "5",
        ]
        arguments += ["--candidates", "3", "--rate", "50", "--duration", "1", "--warmup", "0", "--arrivals", "constant"]
        done = CliRunner().invoke(
            loadtest, ["run", *arguments, "--timeout-ms", "10000", *share], catch_exceptions=False
        )
    assert done.exit_code == int(is_failed), done.output
    assert ("10.0% of the requests failed; --max-failed-share is 1.0%" in done.output) == is_failed


def test_a_sweep_uses_the_same_processes_for_all_steps(monkeypatch):
    # A busy machine makes the generator late, which is not what this test is about.
    monkeypatch.setattr(run, "MIN_REQUESTS_OF_A_STEP", 50)
    monkeypatch.setattr(results, "MIN_MAX_LAG_MS", 10_000.0)
    with loaded_grpc_server() as server, Generators() as generators:
        load = small_load(f"grpc://127.0.0.1:{server.port}", slo_ms=9000, arrivals="constant")
        first = RunConfig(rate=100, warmup_s=0.1, duration_s=0.5)
        result = run_sweep(generators, load, first, max_rate=200)
    assert [(step.rate, step.due, step.answered) for step in result.steps] == [(100, 50, 50), (200, 100, 100)]
    assert (result.highest_rate, result.limited_by) == (200, "max_rate")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda generators: os.kill(generators.process_ids[0], signal.SIGKILL), LoadError),
        (lambda generators: os.kill(os.getpid(), signal.SIGINT), click.exceptions.Exit),
    ],
)
def test_a_killed_process_or_an_interrupt_ends_the_load(act, error):
    def plan(number: int) -> Reply:
        if number == 4:
            act(generators)
        return Reply()

    raises = pytest.raises(error, match="worker process 0 ended" if error is LoadError else "130")
    with loaded_http_server(plan) as server, Generators() as generators, stopping_on_signals(), raises:
        generators.offer(small_load(f"http://127.0.0.1:{server.port}"), RunConfig(rate=50, duration_s=60))


def test_a_workload_that_can_not_be_opened_is_a_config_error():
    with Generators() as generators, pytest.raises(ConfigError, match="zipf:x"):
        generators.prepare(small_load("http://127.0.0.1:1", ids="zipf:x"))


def search(
    capacity: float,
    *,
    valid_to: float = 1e9,
    first_rate: float = 50,
    max_rate: float = 100_000,
    bad: Sequence[int] = (),
) -> SweepResult:
    """Search the capacity of a server, where p99 is the limit or there is none; runs with numbers in `bad` fail."""
    numbers = itertools.count()

    def measure(rate: float) -> LoadResult:
        kept = rate <= capacity and next(numbers) not in bad
        p99_ms = SLO_MS if kept else (None, SLO_MS + 0.1)[len(found) % 2]
        due = RUN.latency_of_due.model_copy(update={"p99_ms": p99_ms})
        found.append(RUN.model_copy(update={"rate": rate, "latency_of_due": due, "valid": rate <= valid_to}))
        return found[-1]

    found: list[LoadResult] = []
    return sweep(measure, SLO_MS, first_rate=first_rate, max_rate=max_rate)


@given(capacity=st.floats(2, 50_000), first_rate=st.floats(1, 5000))
def test_a_sweep_finds_the_capacity(capacity, first_rate):
    found = search(capacity, first_rate=first_rate)
    assert found.limited_by == "server"
    assert found.highest_rate <= capacity < found.lowest_failed_rate <= found.highest_rate * (1 + TOLERANCE)


@pytest.mark.parametrize(
    ("options", "rates", "limited_by", "highest"),
    [
        ({"capacity": 300, "first_rate": 100}, [100, 200, 400, 400, 80_000**0.5], "server", (285, 300)),
        ({"capacity": 1000, "first_rate": 100, "bad": [0]}, [100, 100, 200], "server", (950, 1000)),
        ({"capacity": 1e9, "valid_to": 3000}, [50, 100], "generator", (2850, 3000)),
        ({"capacity": 1000, "valid_to": 1500}, [50, 100], "server", (950, 1000)),
        ({"capacity": 1e9, "first_rate": 60, "max_rate": 300}, [60, 120, 240, 300], "max_rate", (300, 300)),
    ],
)
def test_rates_of_a_sweep(options, rates, limited_by, highest):
    """Rates double until one fails twice, then the gap is bisected."""
    found = search(**options)
    assert [step.rate for step in found.steps][: len(rates)] == pytest.approx(rates)
    assert found.limited_by == limited_by
    assert highest[0] <= found.highest_rate <= highest[1]


def test_a_sweep_that_finds_no_rate():
    found = search(0)
    assert (found.highest_rate, found.lowest_failed_rate, found.limited_by) == (None, MIN_RATE, "server")
