"""The supervisor with small real processes: anything that can be started, asked and killed will do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serving.errors import ChildFailedError, FleetError
from serving.fleet.supervisor import Child, ChildSpec, NotYetError, RefusedError, SupervisionConfig, Supervisor

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


def spec(name: str, folder: Path, script: str = GOOD) -> ChildSpec:
    path = folder / f"{name}.pid"

    async def probe(_: int) -> None:
        if not path.exists():
            raise NotYetError("no pid file")

    return ChildSpec(name, (sys.executable, "-c", script, str(path)), probe)


@contextlib.asynccontextmanager
async def supervisor(folder: Path, config: SupervisionConfig = QUICK) -> AsyncIterator[Supervisor]:
    fleet = Supervisor(folder, config)
    try:
        yield fleet
    finally:
        await fleet.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_start_returns_when_every_child_answers_and_stop_leaves_none(tmp_path: Path) -> None:
    async def run() -> list[int]:
        ready: list[str] = []
        async with supervisor(tmp_path) as fleet:
            await fleet.start([spec("a", tmp_path), spec("b", tmp_path)], ready.append)
            await fleet.start([spec("c", tmp_path)], ready.append)
            assert sorted(ready) == ["a", "b", "c"]
            assert list(fleet.children) == ["a", "b", "c"]
            pids = [child.pid for child in fleet.children.values()]
        return [pid for pid in pids if pid is not None]

    pids = asyncio.run(run())
    assert len(pids) == 3
    assert not any(map(alive, pids))


def test_a_child_that_ends_before_it_serves_fails_the_start_with_its_last_words(tmp_path: Path) -> None:
    async def run() -> None:
        async with supervisor(tmp_path) as fleet:
            await fleet.start([spec("bad", tmp_path, BAD)])

    with pytest.raises(
        ChildFailedError, match=r"bad ended with exit code 3 before it served(?s:.*)the disk is on fire"
    ):
        asyncio.run(run())
    assert not alive(int((tmp_path / "good.pid").read_text())) if (tmp_path / "good.pid").exists() else True


def test_a_child_that_never_answers_fails_the_start_with_the_probes_reason(tmp_path: Path) -> None:
    async def never(_: int) -> None:
        raise NotYetError("tables are loading")

    async def run() -> None:
        async with supervisor(tmp_path, QUICK.model_copy(update={"ready_timeout_s": 0.2})) as fleet:
            command = spec("slow", tmp_path).command
            await fleet.start([ChildSpec("slow", command, never)])

    with pytest.raises(ChildFailedError, match=r"slow was not ready within 0\.2 s: tables are loading"):
        asyncio.run(run())


def test_a_killed_child_is_started_again_under_the_same_name(tmp_path: Path) -> None:
    async def run() -> tuple[int, int]:
        async with supervisor(tmp_path) as fleet:
            await fleet.start([spec("a", tmp_path)])
            child = fleet.children["a"]
            first = child.pid
            assert first is not None
            (tmp_path / "a.pid").unlink()
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(20):
                while child.restarts != 1 or child.state != "ready":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            second = child.pid
            assert second is not None
            assert second == int((tmp_path / "a.pid").read_text())
            return first, second

    first, second = asyncio.run(run())
    assert first != second
    assert not alive(second)


def test_a_child_that_keeps_dying_is_restarted_ever_more_slowly_up_to_the_cap(tmp_path: Path) -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            enough.set()
            await asyncio.Event().wait()

    async def run() -> None:
        config = SupervisionConfig(first_backoff_s=0.5, max_backoff_s=4, probe_interval_s=0.01)
        fleet = Supervisor(tmp_path, config, sleep=sleep)
        try:
            await fleet.start([spec("a", tmp_path)])
            # From here on it dies at once, so it never lives long enough for the pause to be forgotten.
            child = fleet.children["a"]
            child.spec = ChildSpec("a", (sys.executable, "-c", BAD), spec("gone", tmp_path / "nowhere").probe)
            child.kill()
            async with asyncio.timeout(60):
                await enough.wait()
        finally:
            await fleet.stop()

    asyncio.run(run())
    assert pauses == [0.5, 1, 2, 4, 4, 4]


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    async def run() -> int:
        async with supervisor(tmp_path, QUICK.model_copy(update={"stop_grace_s": 0.1})) as fleet:
            await fleet.start([spec("deaf", tmp_path, DEAF)])
            pid = fleet.children["deaf"].pid
            assert pid is not None
        return pid

    assert not alive(asyncio.run(run()))


def test_killing_a_child_that_has_just_ended_is_no_error(tmp_path: Path) -> None:
    async def run() -> int:
        child = Child(spec("a", tmp_path), tmp_path / "log")
        await child.spawn()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        # Reaped by a thread of asyncio's, and the event loop has not been told.
        until = time.monotonic() + 5
        while alive(child.pid) and time.monotonic() < until:
            time.sleep(0.01)  # noqa: ASYNC251
        child.kill()
        return await child.wait()

    assert asyncio.run(run()) == -signal.SIGKILL


def test_groups_are_stopped_in_reverse(tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = GOOD.replace("sys.exit(0)", f"(open({str(order)!r}, 'a').write(sys.argv[1][-5]), sys.exit(0))")

    async def run() -> None:
        async with supervisor(tmp_path) as fleet:
            await fleet.start([spec("1", tmp_path, script)])
            await fleet.start([spec("2", tmp_path, script)])

    asyncio.run(run())
    assert order.read_text() == "21"


def test_two_children_of_one_name_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with supervisor(tmp_path) as fleet:
            await fleet.start([spec("a", tmp_path)])
            await fleet.start([spec("a", tmp_path)])

    with pytest.raises(FleetError, match="'a' is here already"):
        asyncio.run(run())


def test_a_child_that_refuses_to_serve_fails_the_start_at_once_with_its_reason(tmp_path: Path) -> None:
    async def refuse(_: int) -> None:
        raise RefusedError("version 1 of 'films': SHA-256 is not the one")

    async def run() -> None:
        async with supervisor(tmp_path) as fleet:
            await fleet.start([ChildSpec("picky", spec("picky", tmp_path).command, refuse)])

    with pytest.raises(ChildFailedError, match=r"picky does not serve: version 1 (?s:.*)picky\.log"):
        asyncio.run(run())


def test_a_restarted_child_that_refuses_is_left_running_until_it_can_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = 0

    async def probe(process_id: int) -> None:
        nonlocal refusals
        if not (tmp_path / "a.pid").exists() or process_id != int((tmp_path / "a.pid").read_text()):
            raise NotYetError("no pid file")
        if refusals:
            refusals -= 1
            raise RefusedError("a file is damaged")

    async def run() -> tuple[int | None, int]:
        nonlocal refusals
        async with supervisor(tmp_path) as fleet:
            await fleet.start([ChildSpec("a", spec("a", tmp_path).command, probe)])
            child = fleet.children["a"]
            refusals = 3
            child.kill()
            async with asyncio.timeout(20):
                while child.restarts != 1 or child.state != "ready":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return child.pid, child.restarts

    pid, restarts = asyncio.run(run())
    assert (restarts, refusals) == (1, 0)
    assert pid == int((tmp_path / "a.pid").read_text())
    assert [record.getMessage() for record in caplog.records if "failed" in record.message] == [
        "restart 1 of a failed: a file is damaged"
    ]


def test_a_restarted_child_that_goes_on_refusing_one_model_is_not_killed_for_it(tmp_path: Path) -> None:
    """It serves others meanwhile."""
    now, refusals = 0.0, 0

    async def probe(process_id: int) -> None:
        nonlocal now, refusals
        if not (tmp_path / "a.pid").exists() or process_id != int((tmp_path / "a.pid").read_text()):
            raise NotYetError("no pid file")
        if refusals:
            refusals -= 1
            now += QUICK.ready_timeout_s / 2
            raise RefusedError("a file is damaged")

    async def run() -> tuple[int | None, int]:
        nonlocal refusals
        fleet = Supervisor(tmp_path, QUICK, clock=lambda: now)
        try:
            await fleet.start([ChildSpec("a", spec("a", tmp_path).command, probe)])
            child = fleet.children["a"]
            refusals = 10
            child.kill()
            async with asyncio.timeout(20):
                while refusals or child.state != "ready":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return child.pid, child.restarts
        finally:
            await fleet.stop()

    pid, restarts = asyncio.run(run())
    assert restarts == 1
    assert pid == int((tmp_path / "a.pid").read_text())
