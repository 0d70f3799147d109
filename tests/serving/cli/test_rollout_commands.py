"""`publish`, `versions`, `rollout`, `rollback`, `coordinator` and `dashboard` on real stores, with a played fleet."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loader.registry import open_registry
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import COORDINATOR_LOCK, Canary, FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.rollout.coordinator import CoordinatorConfig
from shardrank_testing.background import in_background
from shardrank_testing.command_line import shardrank
from shardrank_testing.processes import running, wait_until
from shardrank_testing.ranking import random_tensors
from shardrank_testing.registries import REGISTRY_KINDS, registry_of
from shardrank_testing.rollout_fleet import MODEL, Clock, PlayedFleet
from shardrank_testing.snapshots import one_table_spec, rewrite_manifest, write_snapshot


@pytest.fixture
def training(tmp_path: Path) -> Path:
    spec = one_table_spec(260)
    (tmp_path / "store").mkdir()
    for seed in range(3):
        write_snapshot(tmp_path / "training", spec, seed=seed, dense=random_tensors(spec, seed))
    return tmp_path / "training" / "small"


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_publish_tells_what_it_did_and_versions_lists_it(kind: str, training: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with registry_of(kind, tmp_path) as url:
        where = ("--store", store, "--registry", url)
        first = shardrank("publish", training / "1", *where)
        assert "model small, version 1, identity " in first.output
        assert "rows_bytes 4.2 kB, published_at 20" in first.output
        assert f"folder {store}/small/1, copied yes, is_new yes, golden_checked no, unchecked there" in first.output
        assert "is_new no" in shardrank("publish", training / "1", *where).output
        report = json.loads(shardrank("publish", training / "2", *where, "--json").stdout)
        assert (report["version"], report["copied"], report["is_new"], report["kept"]) == (2, True, True, None)
        assert report["folder"] == str(store / "small" / "2")
        listed = json.loads(shardrank("versions", "--registry", url, "--json").stdout)["versions"]
        assert [(one["model"], one["version"], one["uses"], one["nodes"]) for one in listed] == [
            ("small", 1, [], 0),
            ("small", 2, [], 0),
        ]
        assert listed[1]["identity"] == report["identity"]


def test_a_version_of_a_fresh_folder_is_published_as_the_next_one(training: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shardrank("publish", training / "2", "--store", store)
    for version in (1, 3):
        shutil.copytree(training / str(version), tmp_path / f"fresh-{version}" / "small" / "1", dirs_exist_ok=True)
        rewrite_manifest(tmp_path / f"fresh-{version}" / "small" / "1", lambda manifest: manifest.update(version=1))
    for fresh, becomes, is_new in (("fresh-1", 3, True), ("fresh-3", 4, True), ("fresh-1", 3, False)):
        flags = ("--store", store, "--next", "--json")
        published = json.loads(shardrank("publish", tmp_path / fresh / "small" / "1", *flags).stdout)
        assert (published["version"], published["delta_base"], published["is_new"]) == (becomes, becomes, is_new)
        assert "may be served" in shardrank("verify", "--store", store, "--version", becomes).output
    assert shardrank("publish", tmp_path / "fresh-1" / "small" / "1", "--store", store).output
    refused = shardrank("publish", tmp_path / "fresh-3" / "small" / "1", "--store", store, code=1)
    assert "a version is immutable; `publish --next` makes a new one of it" in " ".join(refused.stderr.split())


def test_retain_deletes_all_but_the_highest(training: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for version in (1, 2):
        shardrank("publish", training / str(version), "--store", store)
    result = shardrank("publish", training / "3", "--store", store, "--retain", 2)
    assert result.output.endswith("kept 2, 3, deleted 1\n")
    assert sorted(path.name for path in (store / "small").iterdir() if path.is_dir()) == ["2", "3"]


def test_versions_tells_what_a_fleet_does_with_them(training: Path, tmp_path: Path) -> None:
    store, registry = tmp_path / "store", tmp_path / "registry"
    for version in (1, 2, 3):
        shardrank("publish", training / str(version), "--store", store, "--registry", registry)

    async def use() -> None:
        fleet = FleetRegistry(DirectoryRegistry(registry))
        canary = Canary(version=2, share=0.05)
        wanted = {"live": 1, "hold": (1, 2), "canary": canary, "refused": {3: "golden scores differ"}}
        await fleet.put_wanted(WantedModel.model_validate({"model": "small", "epoch": 1, **wanted}), None)
        for node_id, state in (("a", "ready"), ("b", "staging")):
            report = VersionReport(model="small", version=2, state=state)
            node = NodeRecord(node_id=node_id, kind="shard", process_id=1, address="h:1", versions=(report,))
            await fleet.announce_node(node, 60)

    def uses() -> list[tuple[list[str], int]]:
        listed = json.loads(shardrank("versions", "small", "--registry", registry, "--json").stdout)["versions"]
        return [(one["uses"], one["nodes"]) for one in listed]

    asyncio.run(use())
    others = [(["staged", "canary 0.05"], 1), (["refused: golden scores differ"], 0)]
    assert uses() == [(["wanted"], 0), *others]
    assert (
        "  version 3 is refused: golden scores differ\n"
        in shardrank("rollout", "status", "small", "--registry", registry).output
    )
    serving = NodeRecord(node_id="c", kind="serving", process_id=1, address="h:2", live={"small": 1})
    asyncio.run(FleetRegistry(DirectoryRegistry(registry)).announce_node(serving, 60))
    assert uses() == [(["live"], 0), *others]

    async def stray() -> None:
        fleet = FleetRegistry(DirectoryRegistry(registry))
        fleet.foreign = "this registry is not the one that it knows"
        await fleet.announce_node(serving, 60)

    asyncio.run(stray())
    shown = shardrank("rollout", "status", "--registry", registry).output
    assert shown.startswith("c: this registry is not the one that it knows\nmodel small, ")


@pytest.mark.parametrize(
    "words", ["versions smal", "rollout status smal", "rollout start smal 1", "rollout abort smal", "rollback smal"]
)
def test_a_model_that_is_not_there_is_refused_with_the_name_that_is_near(
    training: Path, tmp_path: Path, words: str
) -> None:
    shardrank("publish", training / "1", "--store", tmp_path / "store")
    refused = shardrank(*words.split(), "--store", tmp_path / "store", code=1)
    assert "has no model 'smal'; it has ['small']" in " ".join(refused.stderr.split())


def test_a_bad_snapshot_ends_with_one_line_and_code_1(training: Path, tmp_path: Path) -> None:
    (training / "1" / "dense.safetensors").write_bytes(b"x")
    result = shardrank("publish", training / "1", "--store", tmp_path / "store", code=1)
    assert result.stderr.startswith("error: ")
    assert "dense.safetensors" in result.stderr.splitlines()[-1]


Where = tuple[str, str]
QUICK = CoordinatorConfig(settle_s=0.05, restore_wait_s=0.1)


class WallClock(Clock):
    def __call__(self) -> float:
        return time.time()


@asynccontextmanager
async def played_fleet(
    url: str | Path, *, coordinator: bool = True, prepare: Callable[[PlayedFleet], None] = lambda _: None
) -> AsyncIterator[None]:
    """Two shards with two replicas and a serving process, until the block ends."""
    registry = open_registry(url)
    fleet = PlayedFleet(registry, WallClock(), QUICK)
    await fleet.begin(2, 2, 1)
    if not coordinator:
        await registry.release(COORDINATOR_LOCK, "the one")
    prepare(fleet)
    ended = asyncio.Event()

    async def play() -> None:
        while not ended.is_set():
            await fleet.react()
            if coordinator:
                await fleet.coordinator.tick()
            await asyncio.sleep(0.01)

    played = asyncio.create_task(play())
    try:
        yield
    finally:
        ended.set()
        await played
        await registry.close()


@pytest.fixture
def where(tmp_path: Path) -> Where:
    """The flags that name the registry of a fleet in `tmp_path`."""
    return ("--registry", str(tmp_path))


def status(url: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shardrank("rollout", "status", MODEL, "--json", "--registry", url).stdout)
    return document


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_a_rollout_is_followed_to_its_end_and_a_rollback_returns(kind: str, tmp_path: Path) -> None:
    with registry_of(kind, tmp_path) as url, in_background(played_fleet(url)):
        result = shardrank("rollout", "start", MODEL, 2, "--follow", "--registry", url)
        lines = result.stdout.splitlines()
        assert lines[0] == "films: rolling out version 2, in place of 1"
        assert lines[-1].startswith("films: version 2 is live, after ")
        assert any("flip" in line for line in lines)
        found = status(url)
        assert (found["state"], found["live"], found["from_version"], found["to_version"]) == ("done", 2, 1, 2)
        assert {step["state"] for step in found["steps"]} == {"done"}

        back = shardrank("rollback", MODEL, "--follow", "--registry", url)
        assert back.stdout.splitlines()[0] == "films: going back to version 1"
        assert status(url)["live"] == 1


def test_a_refused_version_ends_with_code_1_and_the_reason(tmp_path: Path, where: Where) -> None:
    reason = "rows-00003: SHA-256 is not the one"

    def refuse(fleet: PlayedFleet) -> None:
        fleet.node("shard-1-0").refuses[2] = reason

    with in_background(played_fleet(tmp_path, prepare=refuse)):
        result = shardrank("rollout", "start", MODEL, 2, "--follow", *where, code=1)
        assert result.stderr.startswith("films: version 2 was refused: ")
        assert reason in result.stderr
        assert result.stderr.endswith("version 1 is live\n")
        found = status(tmp_path)
        assert (found["state"], found["live"]) == ("refused", 1)
        assert reason in found["reason"]
        shown = shardrank("rollout", "status", MODEL, *where).output
        assert "model films, live 1, state refused, " in shown
        assert reason in shown


def test_a_rollout_that_may_fail_requests_says_so(tmp_path: Path, where: Where) -> None:
    def fill(fleet: PlayedFleet) -> None:
        for node in fleet.shard_nodes():
            node.told[1], node.machine = {"memory_bytes": 6_000_000_000}, {"memory_available_bytes": 4_500_000_000}

    with in_background(played_fleet(tmp_path, prepare=fill)):
        wait_until(lambda: "6000000000" in str(status(tmp_path)["nodes"]), "what the nodes tell")
        result = shardrank("rollout", "start", MODEL, 2, "--strategy", "by-replica", *where)
        (warning,) = status(tmp_path)["warnings"]
        assert result.stderr == f"warning: {warning}\n"
        assert "or about 1.5 GB more memory for each node" in warning


def never_stage(fleet: PlayedFleet) -> None:
    fleet.node("shard-0-1").stage_rounds = 10**9


def test_a_running_rollout_is_shown_and_aborted(tmp_path: Path, where: Where) -> None:
    with in_background(played_fleet(tmp_path, prepare=never_stage)):
        options = ("--canary", "5%", "--bake", "2m", "--bake-timeout", "3m", "--guard", "max_p99_ratio=1.5")
        result = shardrank("rollout", "start", MODEL, 2, *options, *where)
        assert result.stdout.splitlines()[-1] == "see: shardrank rollout status films"
        wait_until(lambda: "shard-0-1" in str(status(tmp_path)["waiting_for"]), "the others to stage")
        found = status(tmp_path)
        assert (found["state"], found["step"], found["live"]) == ("running", "stage_shards", 1)
        assert (found["canary_share"], found["bake_s"]) == (0.05, 120)
        shown = shardrank("rollout", "status", *where).output
        assert "from_version 1, to_version 2, canary_share 5.00%, bake_s 120, " in shown
        assert "step stage_shards" in shown
        assert "waiting for shard-0-1" in shown

        second = shardrank("rollout", "start", MODEL, 3, *where, code=1)
        assert second.stderr.count("\n") == 1
        assert second.stderr.startswith("error: films: ")
        assert "version 2 is running, in stage_shards" in second.stderr

        shardrank("rollout", "abort", MODEL, "--reason", "second thoughts", *where)
        wait_until(lambda: status(tmp_path)["state"] == "aborted", "the way back")
        found = status(tmp_path)
        assert (found["live"], found["reason"]) == (1, "second thoughts")


def test_what_cannot_be_rolled_out_is_one_line_and_code_1(tmp_path: Path, where: Where) -> None:
    with in_background(played_fleet(tmp_path)):
        unpublished = shardrank("rollout", "start", MODEL, 9, *where, code=1)
        assert unpublished.stderr == "error: films: version 9 is not published; published are [1, 2, 3, 4]\n"
        assert "live already" in shardrank("rollout", "start", MODEL, 1, *where, code=1).stderr
        shardrank("rollout", "abort", MODEL, *where, code=1)
        assert "no earlier version" in shardrank("rollback", MODEL, *where, code=1).stderr


@pytest.mark.nightly
def test_a_killed_coordinator_process_is_taken_over_from(tmp_path: Path, where: Where, monkeypatch) -> None:
    with in_background(played_fleet(tmp_path, coordinator=False)):
        arguments, slow = ("coordinator", *where), tmp_path / "slow.toml"
        monkeypatch.setenv("SHARDRANK_OWNER", "it")
        # So slow that it can be killed before it has done anything but the record.
        slow.write_text('step_delay_s = "60s"')
        with running(*arguments, "--config", str(slow)) as first:
            first.read_until("coordinator it works with registry")
            shardrank("rollout", "start", MODEL, 2, *where)
            first.process.kill()
        assert (status(tmp_path)["state"], status(tmp_path)["live"]) == ("running", 1)
        with running(*arguments) as second:
            wait_until(lambda: status(tmp_path)["state"] == "done", "the end of the rollout")
            assert status(tmp_path)["live"] == 2
            assert second.stop(signal.SIGTERM) == 0


@pytest.mark.nightly
def test_a_dashboard_shows_a_fleet_until_it_is_stopped(tmp_path: Path, where: Where) -> None:
    with in_background(played_fleet(tmp_path)), running("dashboard", *where, "--port", "0") as dashboard:
        url = dashboard.read_until(r"dashboard: (http://127.0.0.1:\d+/)")[1]
        with httpx.Client(base_url=url) as client:
            found: list[str] = []
            # The first ones may be of before it has read.
            while "shard-1-1" not in found:
                found = [one["node_id"] for one in client.get("/status").json()["state"]["nodes"]]
            assert client.get("/status/access").json()["fixed"].endswith("started without --tokens")
            assert dashboard.stop(signal.SIGTERM) == 0
