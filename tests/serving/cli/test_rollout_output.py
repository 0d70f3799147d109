"""What `rollout` prints: a status in full, while the registry is away, and of a rollout that another writer ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rich.console import Console

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport
from loader.rollout.coverage import FleetView
from loader.rollout.guards import GuardReport, VersionNumbers
from loader.rollout.plan import Event
from loader.rollout.requests import RolloutStatus, StepStatus, start_rollout, status_of
from serving.cli.rollout import NO_COORDINATOR, SHOWN_LAGS, _render, follow_rollout, watch_status
from shardrank_testing.rollout_fleet import MODEL, NEW, Clock, PlayedFleet


class StoppedError(Exception):
    """Ends what would go on for ever."""


def test_a_status_shows_steps_nodes_guards_and_what_is_missing() -> None:
    ready = VersionReport(model=MODEL, version=1, state="ready", memory_bytes=2_000_000, golden_difference=0.00123)
    refused = VersionReport(model=MODEL, version=NEW, state="refused", reason="rows-00003: SHA-256 differs")
    staging = VersionReport(model=MODEL, version=NEW, state="staging", progress=0.42)
    nodes = [
        NodeRecord(
            node_id="api-0",
            kind="serving",
            process_id=1,
            address="",
            draining=True,
            live={MODEL: 1},
            versions=(ready, refused),
        ),
        NodeRecord(node_id="shard-0-0", kind="shard", process_id=2, address="", shard_index=0, versions=(staging,)),
        NodeRecord(node_id="shard-1-0", kind="shard", process_id=3, address="", shard_index=1),
    ]
    reported = status_of(MODEL, None, None, FleetView.of(nodes, None))
    live = VersionNumbers(requests=200, errors=1, error_rate=0.005, p99_ms=7.25, mean_score=0.51, score_deviation=0.1)
    new = VersionNumbers(requests=3, errors=0, error_rate=None, p99_ms=None, mean_score=None, score_deviation=None)
    status = RolloutStatus(
        model=MODEL,
        live=1,
        wanted=None,
        nodes=reported.nodes,
        state="running",
        strategy="beside",
        from_version=1,
        to_version=NEW,
        canary_share=0.05,
        bake_s=60.0,
        started_at=time.time() - 20,
        step="bake",
        steps=(StepStatus(name="flip", state="done"), StepStatus(name="bake", state="running")),
        waiting_for=tuple(f"node-{number}" for number in range(SHOWN_LAGS + 3)),
        guards=GuardReport(breached=False, compared=False, reason="too little traffic", live=live, new=new),
        events=(Event(at=45_005.0, step="flip", text="version 2 is live"),),
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(_render(status, has_coordinator=False))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    origin = f"rollout of {NEW} in place of 1 (beside, canary 5%, bake 1 min): running for 20 s"
    assert lines[0] == f"{MODEL}: version 1 is live; {origin}, step bake (2 of 2)"
    assert lines[1:3] == ["steps: +flip >bake", NO_COORDINATOR]
    assert [line for line in lines if line.startswith("waiting")][-2:] == ["waiting for node-5", "waiting for 3 more"]
    text = "\n".join(lines)
    for expected in (
        "api-0 (ends)",
        "ready, live",
        "0.0012",
        "refused",
        "rows-00003: SHA-256 differs",
        "42%",
        "guards: not compared yet, too little traffic",
        "0.50%",
        "7.25",
        "0.5100",
        "12:30:05 flip: version 2 is live",
    ):
        assert expected in text


async def test_watch_waits_for_a_registry_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, polls = tmp_path / "registry", 0
    path.write_text("in the way")

    async def sleep(_: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            path.unlink()
        if polls == 4:
            raise StoppedError

    registry = DirectoryRegistry(path)
    with pytest.raises(StoppedError):
        await watch_status(FleetRegistry(registry), None, sleep)
    await registry.close()
    output = capsys.readouterr().out
    assert output.count("waiting: registry") == 1
    assert output.count("nothing was rolled out yet") == 1


async def test_follow_names_the_live_version_after_another_writer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    registry = DirectoryRegistry(tmp_path / "registry", clock=clock)
    try:
        fleet = PlayedFleet(registry, clock)
        await fleet.begin(1, 1, 1)
        begun = await start_rollout(fleet.fleet, MODEL, NEW, clock=clock, rollout_id="0" * 32)
        await fleet.until_step("stage_shards")
        await fleet.fleet.update_wanted(MODEL, lambda now: now and now.model_copy(update={"live": 3}))

        async def sleep(_: float) -> None:
            await fleet.coordinator.tick()

        assert (await follow_rollout(fleet.fleet, begun, sleep)).state == "aborted"
    finally:
        await registry.close()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "films: version 2 was aborted: version 3 was made live by somebody else; version 3 is live"
