"""What `rollout` prints: a status in full, while the registry is away, and of a rollout that another writer ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import NodeRecord, VersionReport
from loader.rollout.guards import GuardReport, VersionNumbers
from loader.rollout.plan import Event
from loader.rollout.requests import FleetState, RolloutStatus, StepStatus, start_rollout
from serving.cli.output import print_document
from serving.cli.rollout import NO_COORDINATOR, follow_rollout, print_status
from shardrank_testing.rollout_fleet import MODEL, NEW, Clock, PlayedFleet


def test_a_status_shows_steps_nodes_guards_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
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
    reported = FleetState(nodes=tuple(nodes)).status(MODEL)
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
        baked_s=20.0,
        started_at=44_980.0,
        step="bake",
        steps=(StepStatus(name="flip", state="done"), StepStatus(name="bake", state="running")),
        waiting_for=("node-1", "node-2"),
        guards=GuardReport(breached=False, compared=False, reason="too little traffic", live=live, new=new),
        events=(Event(at=45_005.0, step="flip", text="version 2 is live"),),
    )
    print_status(status, has_coordinator=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == (
        f"model {MODEL}, live 1, state running, strategy beside, from_version 1, to_version {NEW}, canary_share 5.00%, "
        "bake_s 60, baked_s 20, started_at 1970-01-01 12:29:40 UTC, step bake"
    )
    assert lines[1] == "steps: flip done, bake running"
    assert lines[-3:] == [NO_COORDINATOR, "waiting for node-1", "waiting for node-2"]
    text = "\n".join(lines)
    for expected in (
        "api-0 serving yes 1",
        "api-0 1 ready 0 0 2.0 MB 0 0 0.00123",
        "api-0 2 refused 0 0 0 B 0 0 rows-00003: SHA-256",
        "shard-0-0 2 staging 0.42",
        "guards: breached no, compared no, missing 0, reason too little traffic",
        "error_rate 0.50%",
        "p99_ms 7.25",
        "mean_score 0.51",
        "1970-01-01 12:30:05 UTC flip version 2 is live",
    ):
        assert expected in text


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


def test_a_list_is_printed_whole_and_versions_are_no_counts(capsys: pytest.CaptureFixture[str]) -> None:
    versions = [{"version": 20_261_100 + number, "rows_bytes": 10, "num_rows": 2_000_000} for number in range(20)]
    print_document({"versions": versions})
    printed = capsys.readouterr().out
    assert all(str(entry["version"]) in printed for entry in versions)
    assert "2 M" in printed
    print_document({"tables": versions}, max_rows=16)
    assert "tables, 16 of 20" in capsys.readouterr().out
