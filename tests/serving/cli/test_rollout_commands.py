"""`shardrank rollout`, `rollback` and `coordinator` against a real registry whose nodes this test plays."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from loader.registry.fleet import COORDINATOR_LOCK
from loader.registry.opening import open_registry
from loader.rollout.coordinator import CoordinatorConfig
from serving.cli import main
from shardrank_testing.processes import running, wait_until
from shardrank_testing.registries import REGISTRY_KINDS, registry_of
from shardrank_testing.rollout_fleet import MODEL, Clock, PlayedFleet

QUICK = CoordinatorConfig(settle_s=0.05, restore_wait_s=0.1)


class WallClock(Clock):
    def __call__(self) -> float:
        return time.time()


@contextmanager
def played_fleet(
    url: str | Path,
    *,
    coordinator: bool = True,
    prepare: Callable[[PlayedFleet], None] = lambda _: None,
) -> Iterator[None]:
    """Two shards with two replicas and a serving process, in a thread, until the block ends."""
    stop, begun = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    async def program() -> None:
        registry = open_registry(url)
        fleet = PlayedFleet(registry, WallClock(), QUICK)
        await fleet.begin(2, 2, 1)
        if not coordinator:
            await registry.release(COORDINATOR_LOCK, "the one")
        prepare(fleet)
        begun.set()
        while not stop.is_set():
            await fleet.react()
            if coordinator:
                await fleet.coordinator.tick()
            await asyncio.sleep(0.01)
        await registry.close()

    def run() -> None:
        try:
            asyncio.run(program())
        except BaseException as error:
            failures.append(error)
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        begun.wait()
        assert failures == []
        yield
    finally:
        stop.set()
        thread.join()
    assert failures == []


def shardrank(url: str | Path, *arguments: object) -> Result:
    words = [str(one) for one in (*arguments, "--registry", url)]
    return CliRunner().invoke(main, words, catch_exceptions=False)


def status(url: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shardrank(url, "rollout", "status", MODEL, "--json").stdout)
    return document


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_a_rollout_is_followed_to_its_end_and_a_rollback_returns(kind: str, tmp_path: Path) -> None:
    with registry_of(kind, tmp_path) as url, played_fleet(url):
        result = shardrank(url, "rollout", "start", MODEL, 2, "--follow")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0] == "films: rolling out version 2, in place of 1"
        assert lines[-1].startswith("films: version 2 is live, after ")
        assert any("flip" in line for line in lines)
        found = status(url)
        assert (found["state"], found["live"], found["from_version"], found["to_version"]) == ("done", 2, 1, 2)
        assert {step["state"] for step in found["steps"]} == {"done"}

        back = shardrank(url, "rollback", MODEL, "--follow")
        assert back.exit_code == 0, back.output
        assert back.stdout.splitlines()[0] == "films: going back to version 1"
        assert status(url)["live"] == 1


def test_a_refused_version_ends_with_code_1_and_the_nodes_reason_everywhere(tmp_path: Path) -> None:
    reason = "rows-00003: SHA-256 is not the one"

    def refuse(fleet: PlayedFleet) -> None:
        fleet.node("shard-1-0").refuses[2] = reason

    with played_fleet(tmp_path, prepare=refuse):
        result = shardrank(tmp_path, "rollout", "start", MODEL, 2, "--follow")
        assert result.exit_code == 1
        assert result.stderr.startswith("films: version 2 was refused: ")
        assert reason in result.stderr
        assert result.stderr.endswith("version 1 is live\n")
        found = status(tmp_path)
        assert (found["state"], found["live"]) == ("refused", 1)
        assert reason in found["reason"]
        shown = shardrank(tmp_path, "rollout", "status", MODEL).output
        assert "films: version 1 is live; rollout of 2 in place of 1 (beside): refused" in shown
        assert reason in shown


def never_stage(fleet: PlayedFleet) -> None:
    fleet.node("shard-0-1").stage_rounds = 10**9


def test_a_running_rollout_is_shown_and_aborted(tmp_path: Path) -> None:
    with played_fleet(tmp_path, prepare=never_stage):
        options = ("--canary", "5%", "--bake", "2m", "--guard", "max_p99_ratio=1.5")
        result = shardrank(tmp_path, "rollout", "start", MODEL, 2, *options)
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "see: shardrank rollout status films --watch")
        wait_until(lambda: "shard-0-1" in str(status(tmp_path)["waiting_for"]), "the others to stage")
        found = status(tmp_path)
        assert (found["state"], found["step"], found["live"]) == ("running", "stage_shards", 1)
        assert (found["canary_share"], found["bake_s"]) == (0.05, 120)
        shown = shardrank(tmp_path, "rollout", "status").output
        assert "rollout of 2 in place of 1 (beside, canary 5%, bake 2 min): running for " in shown
        assert "step stage_shards (1 of " in shown
        assert "waiting for shard-0-1" in shown

        second = shardrank(tmp_path, "rollout", "start", MODEL, 3)
        assert (second.exit_code, second.stderr.count("\n")) == (1, 1)
        assert second.stderr.startswith("error: films: ")
        assert "version 2 is running, in stage_shards" in second.stderr

        assert shardrank(tmp_path, "rollout", "abort", MODEL, "--reason", "second thoughts").exit_code == 0
        wait_until(lambda: status(tmp_path)["state"] == "aborted", "the way back")
        found = status(tmp_path)
        assert (found["live"], found["reason"]) == (1, "second thoughts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--canary", "150%"), "'150%' is not a share above 0% and below 100%"),
        (("--bake", "soon"), "'soon' is not a time"),
        (("--guard", "max_p99=2"), "max_p99"),
        (("--guard", "max_p99_ratio=0.5"), "max_p99_ratio"),
        (("--strategy", "at-once"), "at-once"),
    ],
)
def test_a_flag_that_makes_no_sense_is_a_usage_error(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = shardrank(tmp_path, "rollout", "start", MODEL, 2, *options)
    assert result.exit_code == 2
    assert message in result.output


def test_what_cannot_be_rolled_out_is_one_line_and_code_1(tmp_path: Path) -> None:
    with played_fleet(tmp_path):
        unpublished = shardrank(tmp_path, "rollout", "start", MODEL, 9)
        assert unpublished.exit_code == 1
        assert unpublished.stderr == "error: films: version 9 is not published; published are [1, 2, 3, 4]\n"
        assert "live already" in shardrank(tmp_path, "rollout", "start", MODEL, 1).stderr
        assert shardrank(tmp_path, "rollout", "abort", MODEL).exit_code == 1
        assert "no earlier version" in shardrank(tmp_path, "rollback", MODEL).stderr


def test_a_coordinator_process_carries_a_rollout_and_a_killed_one_is_taken_over_from(tmp_path: Path) -> None:
    with played_fleet(tmp_path, coordinator=False):
        arguments = ("coordinator", "--registry", str(tmp_path), "--owner", "it")
        # So slow that it can be killed before it has done anything but the record.
        with running(*arguments, "--step-delay", "60s") as first:
            first.read_until("coordinator it works with registry")
            shardrank(tmp_path, "rollout", "start", MODEL, 2)
            first.process.kill()
        assert (status(tmp_path)["state"], status(tmp_path)["live"]) == ("running", 1)
        with running(*arguments) as second:
            wait_until(lambda: status(tmp_path)["state"] == "done", "the end of the rollout")
            assert status(tmp_path)["live"] == 2
            assert second.stop(signal.SIGTERM) == 0


def test_a_dashboard_shows_a_fleet_until_it_is_stopped(tmp_path: Path) -> None:
    with played_fleet(tmp_path), running("dashboard", "--registry", str(tmp_path), "--port", "0") as dashboard:
        url = dashboard.read_until(r"dashboard: (http://127.0.0.1:\d+/)")[1]
        with httpx.Client(base_url=url) as client, client.stream("GET", "/status/events") as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data: "))
            found: list[str] = []
            # The first ones may be of before it has looked.
            while "shard-1-1" not in found:
                state = json.loads(next(events).removeprefix("data: "))
                found = [one["id"] for one in state.get("nodes", ())]
            assert client.get("/status/access").json()["fixed"].endswith("started without --tokens")
            assert dashboard.stop(signal.SIGTERM) == 0


def test_watch_writes_into_a_pipe_what_changes_and_ctrl_c_ends_it_with_code_0(tmp_path: Path) -> None:
    with played_fleet(tmp_path), running("rollout", "status", "--watch", "--registry", str(tmp_path)) as watching:
        watching.read_until("version 1 is live; there was no rollout yet")
        shardrank(tmp_path, "rollout", "start", MODEL, 2)
        watching.read_until(r"films: version 2 is live; rollout of 2 in place of 1 \(beside\): done")
        assert watching.stop(signal.SIGINT) == 0
