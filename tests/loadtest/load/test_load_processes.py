"""Whole load tests: processes that send, against the project's own server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from hdrh.histogram import HdrHistogram
from rich.console import Console

from loadtest.errors import GeneratorError, LoadConfigError
from loadtest.load import recorder, run
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.result import LoadResult
from loadtest.load.run import run_load, run_sweep
from loadtest.load.workers import stopping_on_signals
from loadtest.report.results import read_reported
from loadtest.workloads.prepare import prepare_workload
from serving.fleet.process import StopRequestedError
from serving.rank.service import RankingService
from serving.server import Listening, ServerConfig, running_server
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.loaded_server import Reply, loaded_http_server

WORKLOAD = "merlin-tiny:0.0001"


@contextlib.asynccontextmanager
async def serving(store: Path) -> AsyncIterator[Listening]:
    """The workload's model behind real ports."""
    folder, spec = prepare_workload(WORKLOAD, store)
    service = RankingService(expected_models=[spec.model])
    service.install(load_served_model(ModelSource(snapshot=folder, dtype="float32"), service))
    try:
        async with running_server(service, ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)) as listening:
            yield listening
    finally:
        await asyncio.to_thread(service.close)


def config_for(target: str, **options: object) -> OfferedLoad:
    given = {"workload": WORKLOAD, "candidates": "3", "requests": 20, "timeout_ms": 10_000, **options}
    return OfferedLoad(target=target, **given)


def quiet() -> Console:
    return Console(file=io.StringIO())


def check_right(result: LoadResult, due: int) -> None:
    assert result.due == due == result.answered == result.sent, result.error_examples
    assert result.errors == {}
    assert sum(process.due for process in result.generator.processes) == due
    assert all(process.connections >= 1 for process in result.generator.processes)
    assert HdrHistogram.decode(result.latency_histogram.encoded).get_total_count() == due


def test_the_server_answers_a_load_from_several_processes_over_http_and_grpc(tmp_path: Path):
    async def main() -> None:
        async with serving(tmp_path) as listening:
            http, grpc = f"http://127.0.0.1:{listening.http_port}", f"grpc://127.0.0.1:{listening.grpc_port}"
            for api, target, processes in (("json", http, 2), ("grpc", grpc, 1)):
                config = config_for(target, api=api, processes=processes, arrivals="constant")
                run = RunConfig(rate=40, warmup_s=0.5, duration_s=1)
                result = await asyncio.to_thread(run_load, config, run, quiet())
                check_right(result, 40)
                assert (result.api, result.model, len(result.generator.processes)) == (api, "merlin-tiny", processes)
                assert result.requests == 20 * processes
                assert [second.due for second in result.time_line] == [40, 20]

    asyncio.run(main())


def test_the_command_writes_a_result_and_a_page_with_marks(tmp_path: Path):
    async def main() -> None:
        async with serving(tmp_path / "store") as listening:
            marks = tmp_path / "marks"
            marks.write_text(f"{time.time() - 3600} long ago\n")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serving.cli", "loadtest", "run"),
                *("--target", f"http://127.0.0.1:{listening.http_port}", "--workload", WORKLOAD, "--candidates", "3"),
                *("--rate", "50", "--duration", "2", "--warmup", "0", "--requests", "20", "--timeout-ms", "10000"),
                *("--arrivals", "constant", "--marks", str(marks)),
                *("--json", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            seen = asyncio.create_task(_note_when_it_asks(process.pid, listening.http_port, marks))
            text, _ = await process.communicate()
            await seen
            # 1 if this machine was so busy that the generator itself was late, which the result says.
            result = read_reported(tmp_path / "run.json")
            assert isinstance(result, LoadResult)
            assert process.returncode == (0 if result.valid else 1), text.decode()
            check_right(result, 100)
            assert {mark.label for mark in result.marks} == {"swap of films", "mark 1"}
            assert "p99.9" in text.decode()
            page = (tmp_path / "run.html").read_text()
            assert page.startswith("<!doctype html>")
            assert "swap of films" in page

    asyncio.run(main())


async def _note_when_it_asks(pid: int, port: int, marks: Path) -> None:
    """Sets marks once the generator has a connection to the server."""
    main = psutil.Process(pid)
    while not any(  # noqa: ASYNC110 - another process tells nothing but what the kernel knows of it
        connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port == port
        for child in main.children()
        for connection in child.net_connections("tcp")
    ):
        await asyncio.sleep(0.02)
    with marks.open("a") as file:
        file.write(f"{time.time()} swap of films\n")
    os.kill(pid, signal.SIGUSR1)


def test_a_sweep_uses_the_same_processes_for_all_its_steps():
    with loaded_http_server() as server:
        config = config_for(f"http://127.0.0.1:{server.port}", slo_ms=9000, arrivals="constant")
        first = RunConfig(rate=100, warmup_s=0.1, duration_s=0.5)
        console = quiet()
        with _short_steps_of_a_patient_judge():
            result = run_sweep(config, first, console, max_rate=200)
    rates = [step.rate for step in result.steps]
    assert rates == [100, 200]
    assert [step.answered for step in result.steps] == [50, 100] == [step.due for step in result.steps]
    assert (result.highest_rate, result.limited_by) == (200, "max_rate")
    assert "/s  p99" in console.file.getvalue()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _short_steps_of_a_patient_judge():
    """A busy machine makes the generator late, which is not what this test is about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "MIN_REQUESTS_OF_A_STEP", 50)
        patch.setattr(recorder, "MIN_MAX_LAG_MS", 10_000.0)
        yield


def test_a_workload_that_can_not_be_opened_is_an_error_of_the_load():
    config = config_for("http://127.0.0.1:1", ids="zipf:x")
    with Generators() as generators, pytest.raises(LoadConfigError, match="zipf:x"):
        generators.prepare(config)


def offer_for_a_minute(generators: Generators, act: Callable[[], object]) -> None:
    """Load a server that acts when it gets its fifth request."""

    def plan(number: int) -> Reply:
        if number == 4:
            act()
        return Reply()

    with loaded_http_server(plan) as server:
        generators.offer(config_for(f"http://127.0.0.1:{server.port}"), RunConfig(rate=50, duration_s=60))


def test_a_process_that_is_killed_ends_the_load_with_an_error():
    with Generators() as generators, pytest.raises(GeneratorError, match=r"worker process 0 ended: .*KILL"):
        offer_for_a_minute(generators, generators._workers[0].process.kill)


def test_an_interrupt_ends_the_load():
    with Generators() as generators, stopping_on_signals(), pytest.raises(StopRequestedError):
        offer_for_a_minute(generators, lambda: os.kill(os.getpid(), signal.SIGINT))
