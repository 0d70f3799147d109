"""The supervisor with small real processes: anything that can be started, asked and killed will do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serving.errors import FleetError
from serving.fleet.process import WORKER_VARIABLE, num_workers
from serving.fleet.supervisor import Child, ChildSpec, NotYetError, RefusedError, SupervisionConfig, Supervisor
from shardrank_testing.errors import raises_kind
from shardrank_testing.processes import is_alive, wait_until

QUICK = SupervisionConfig(ready_timeout_s=20, probe_interval_s=0.01, first_backoff_s=0.01, stop_grace_s=10)

# Writes its pid, then waits for a signal; SIGTERM ends it with code 0.
GOOD = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(sys.argv[1] + ".part", "w") as file: file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
while True: signal.pause()
"""
DEAF = GOOD.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
BAD = "import sys; print('the disk is on fire'); sys.exit(3)"


class Probe:
    """Takes a process for ready that has written its pid, after so many refusals."""

    def __init__(self, path: Path, error: Exception | None = None) -> None:
        self.path, self.error, self.refusals = path, error, 0

    async def __call__(self, process_id: int) -> None:
        if self.error is not None:
            raise self.error
        if not self.path.exists() or process_id != int(self.path.read_text()):
            raise NotYetError("no pid file")
        if self.refusals:
            self.refusals -= 1
            raise RefusedError("a file is damaged")


def spec(name: str, folder: Path, script: str = GOOD, error: Exception | None = None) -> ChildSpec:
    path = folder / f"{name}.pid"
    return ChildSpec(name, (sys.executable, "-c", script, str(path)), Probe(path, error))


@contextlib.asynccontextmanager
async def supervising(folder: Path, config: SupervisionConfig = QUICK, **clocks: object) -> AsyncIterator[Supervisor]:
    fleet = Supervisor(folder, config, **clocks)
    try:
        yield fleet
    finally:
        await fleet.stop()


async def restarted(child: Child) -> None:
    async with asyncio.timeout(20):
        while child.restarts != 1 or child.state != "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_start_returns_when_every_child_is_ready_and_stop_leaves_none(tmp_path: Path) -> None:
    async def run() -> list[int]:
        ready: list[str] = []
        async with supervising(tmp_path) as fleet:
            await fleet.start([spec("a", tmp_path), spec("b", tmp_path)], ready.append)
            await fleet.start([spec("c", tmp_path)], ready.append)
            assert sorted(ready) == list(fleet.children) == ["a", "b", "c"]
            with pytest.raises(FleetError, match="'a' is here already"):
                await fleet.start([spec("a", tmp_path)])
            return [int((tmp_path / f"{name}.pid").read_text()) for name in ready]

    assert not any(map(is_alive, asyncio.run(run())))


@pytest.mark.parametrize(
    ("script", "error", "problem"),
    [
        (BAD, None, r"a ended with exit code 3 before it served(?s:.*)the disk is on fire"),
        (GOOD, NotYetError("tables are loading"), r"a was not ready within 0\.2 s: tables are loading"),
        (GOOD, RefusedError("version 1 is damaged"), r"a does not serve: version 1 is damaged(?s:.*)a\.log"),
    ],
    ids=["ends", "never ready", "refuses"],
)
def test_a_child_that_does_not_serve_fails_the_start(
    tmp_path: Path, script: str, error: Exception | None, problem: str
) -> None:
    timeout_s = 0.2 if isinstance(error, NotYetError) else 20

    async def run() -> None:
        async with supervising(tmp_path, QUICK.model_copy(update={"ready_timeout_s": timeout_s})) as fleet:
            await fleet.start([spec("a", tmp_path, script, error)])

    with raises_kind("child_failed", match=problem):
        asyncio.run(run())


def test_a_child_that_keeps_dying_is_restarted_ever_more_slowly(tmp_path: Path) -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            enough.set()
            await asyncio.Event().wait()

    async def run() -> None:
        config = SupervisionConfig(first_backoff_s=0.5, max_backoff_s=4, probe_interval_s=0.01)
        async with supervising(tmp_path, config, sleep=sleep) as fleet:
            await fleet.start([spec("a", tmp_path)])
            # From here on it dies at once, so it never lives long enough for the pause to be forgotten.
            child = fleet.children["a"]
            child.spec = spec("a", tmp_path / "nowhere", BAD)
            child.kill()
            await asyncio.wait_for(enough.wait(), 60)

    asyncio.run(run())
    assert pauses == [0.5, 1, 2, 4, 4, 4]


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    async def run() -> int:
        async with supervising(tmp_path, QUICK.model_copy(update={"stop_grace_s": 0.1})) as fleet:
            await fleet.start([spec("deaf", tmp_path, DEAF)])
            return int((tmp_path / "deaf.pid").read_text())

    assert not is_alive(asyncio.run(run()))


def test_killing_a_child_that_has_just_ended_is_no_error(tmp_path: Path) -> None:
    async def run() -> int:
        child = Child(spec("a", tmp_path), tmp_path / "log")
        await child.spawn()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        # Reaped by a thread of asyncio's, and the event loop has not been told.
        pid_file = Path(f"/proc/{child.pid}")
        wait_until(lambda: not pid_file.exists(), "the child to be reaped")
        child.kill()
        return await child.wait()

    assert asyncio.run(run()) == -signal.SIGKILL


def test_groups_are_stopped_in_reverse(tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = GOOD.replace("sys.exit(0)", f"(open({str(order)!r}, 'a').write(sys.argv[1][-5]), sys.exit(0))")

    async def run() -> None:
        async with supervising(tmp_path) as fleet:
            await fleet.start([spec("1", tmp_path, script)])
            await fleet.start([spec("2", tmp_path, script)])

    asyncio.run(run())
    assert order.read_text() == "21"


@pytest.mark.parametrize("refusals", [0, 3])
def test_a_killed_child_is_started_again_under_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refusals: int
) -> None:
    """One that refuses to serve is left running until it can, and reported once."""

    async def run() -> None:
        child_spec = spec("a", tmp_path)
        async with supervising(tmp_path) as fleet:
            await fleet.start([child_spec])
            child = fleet.children["a"]
            first = child.pid
            child_spec.probe.refusals = refusals
            child.kill()
            await restarted(child)
            assert first != child.pid == int((tmp_path / "a.pid").read_text())

    asyncio.run(run())
    failures = [record.getMessage() for record in caplog.records if "failed" in record.message]
    assert failures == (["restart 1 of a failed: a file is damaged"] if refusals else [])


def test_a_restarted_child_that_goes_on_refusing_is_not_killed(tmp_path: Path) -> None:
    """It serves other models meanwhile."""
    child_spec = spec("a", tmp_path)
    probe = child_spec.probe
    assert isinstance(probe, Probe)

    def clock() -> float:
        return (10 - probe.refusals) * QUICK.ready_timeout_s / 2

    async def run() -> int | None:
        async with supervising(tmp_path, clock=clock) as fleet:
            await fleet.start([child_spec])
            child = fleet.children["a"]
            probe.refusals = 10
            child.kill()
            await restarted(child)
            return child.pid

    assert asyncio.run(run()) == int((tmp_path / "a.pid").read_text())
    assert probe.refusals == 0


@pytest.mark.parametrize(("value", "count"), [(None, 1), ("2/8", 8), ("2/8/run/shardrank-1/connections", 8)])
def test_workers_are_counted_also_for_an_earlier_supervisor(monkeypatch, value, count):
    """An earlier release names a folder as well."""
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(WORKER_VARIABLE, value)
    assert num_workers() == count
