"""The fork server: its processes are those that exec would have made, and none outlives whoever it belongs to."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.fleet.fork_server import ForkedProcess, running_fork_server, send_request
from serving.fleet.supervisor import ChildSpec, SupervisionConfig, Supervisor
from shardrank_testing.processes import Forked, descendants, fork_module, is_alive, wait_until

STATE = "shardrank_testing.process_state"
# Runs a fork server and a process of it, and tells their ids.
SUPERVISOR = """
import os, signal, sys
from serving.fleet.fork_server import running_fork_server
from shardrank_testing.processes import fork_module
with running_fork_server(sys.argv[1], ()) as server:
    process = fork_module(sys.argv[1], "shardrank_testing.process_state", "stay")
    process.stdout.readline()
    print(server, process.pid, flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("fork") / "socket")
    with running_fork_server(path, ("numpy", "prometheus_client")):
        yield path


def forked(server: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[Forked, dict[str, Any]]:
    process = fork_module(server, STATE, *arguments, environment=environment or dict(os.environ))
    assert process is not None
    return process, json.loads(process.stdout.readline())


@pytest.mark.parametrize("variable", ["", "SHARDRANK_LOG_LEVEL", "PROMETHEUS_MULTIPROC_DIR"])
def test_a_fork_differs_in_nothing_from_exec(server: str, tmp_path: Path, variable: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    process, found = forked(server, "a", "b c", "")
    assert process.wait(20) == 7
    command = [sys.executable, "-m", STATE, "a", "b c", ""]
    # A library has set variables of C's that Python has not been told.
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ, start_new_session=True, check=False
    )
    assert run.returncode == 7
    expected = json.loads(run.stdout)
    assert found["state"] == expected["state"]
    assert expected["state"]["command"] == " ".join(command).split()
    assert (expected["state"]["metric_values"] == "MutexValue") == (variable != "PROMETHEUS_MULTIPROC_DIR")


def test_forks_draw_different_random_values(server: str) -> None:
    draws = [forked(server)[1]["random"] for _ in range(3)]
    for values in zip(*draws, strict=True):
        assert len(set(values)) == 3


@pytest.mark.parametrize(
    ("program", "changed", "reason"),
    [
        (sys.executable, {"OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS differ"),
        (sys.executable, {"CUDA_VISIBLE_DEVICES": "1", "X": ""}, "DEVICES, X differ"),
        ("/usr/bin/python3", {}, "is not"),
    ],
)
def test_neither_the_interpreter_nor_variables_that_imports_read_change(
    server: str, program: str, changed: dict[str, str], reason: str, caplog
) -> None:
    start = ForkedProcess.start(server, (program, "-m", STATE), (0, 1, 2), {**os.environ, **changed})
    assert asyncio.run(start) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "has 2 threads"),
        ("import os; os.readlink = lambda path: '/dev/nvidiactl'", "has opened a CUDA device"),
        ("raise ImportError", "the fork server has ended"),
    ],
    ids=["thread", "cuda", "failed import"],
)
def test_nothing_is_forked_where_a_fork_would_be_broken(
    tmp_path: Path, module: str, reason: str, caplog, monkeypatch
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    with running_fork_server(str(tmp_path / "socket"), ("broken",)):
        assert fork_module(str(tmp_path / "socket"), STATE) is None
    assert reason in caplog.text


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_numbers_of_threads_keep_nothing_from_being_forked(tmp_path: Path, variable: str, monkeypatch) -> None:
    monkeypatch.setenv(variable, "3")
    with running_fork_server(str(tmp_path / "socket"), ("numpy",)):
        assert forked(str(tmp_path / "socket"))[0].wait(20) == 7


def test_a_killed_process_keeps_its_id_until_it_is_reported(server: str) -> None:
    process, _ = forked(server, "stay")
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(process.pid), "it to end")
    assert Path(f"/proc/{process.pid}").exists()
    assert process.wait(20) == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists(), "it to be reaped")
    process.send_signal(signal.SIGKILL)


def test_a_process_is_killed_with_its_handle(server: str) -> None:
    process, _ = forked(server, "stay")
    pid = process.pid
    del process
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it to be killed")


@pytest.mark.parametrize("killed", ["supervisor", "fork server"])
def test_all_die_with_a_killed(killed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "socket")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        server, process = map(int, supervisor.stdout.readline().split())
        os.kill(supervisor.pid if killed == "supervisor" else server, signal.SIGKILL)
        wait_until(lambda: not is_alive(process), "the process to die")
        wait_until(lambda: not is_alive(server), "the fork server to die")
        supervisor.kill()


def test_a_supervisor_goes_on_by_exec_without_its_fork_server(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    path = str(tmp_path / "socket")

    async def is_there(process_id: int) -> None:
        return None

    async def run(server: int) -> None:
        config = SupervisionConfig(first_backoff_s=0.01, probe_interval_s=0.01)
        supervisor = Supervisor(tmp_path, config, fork_server=path)
        try:
            await supervisor.start([ChildSpec("a", (sys.executable, "-m", STATE, "stay"), is_there)])
            child = supervisor.children["a"]
            assert child.pid in descendants(server)
            os.kill(server, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: child.restarts and child.state == "ready", "it to be back")
            assert child.pid in descendants(os.getpid())
        finally:
            await supervisor.stop()

    with running_fork_server(path, ()) as server:
        asyncio.run(run(server))
    assert "a: killed by SIGKILL; restart in" in caplog.text
    assert "a process starts slower than it could, the fork server does not answer" in caplog.text


def test_several_wait_for_one_process(server: str) -> None:
    async def run() -> list[int]:
        command = (sys.executable, "-m", STATE, "stay")
        process = await ForkedProcess.start(server, command, (0, 2, 2), os.environ)
        assert process is not None
        waiting = [asyncio.create_task(process.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting.pop().cancel()
        process.send_signal(signal.SIGTERM)
        return [*await asyncio.gather(*waiting), await process.wait()]

    assert asyncio.run(run()) == [-signal.SIGTERM] * 3


def test_whoever_leaves_before_an_answer_disturbs_nobody(server: str) -> None:
    send_request(server, (sys.executable, "-m", STATE, "stay"), (0, 2, 2), os.environ).close()
    forked(server)[0].wait(20)
