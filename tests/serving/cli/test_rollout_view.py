"""What is told of rollouts while the registry is away, and of one that somebody else has put an end to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry
from loader.rollout.requests import start_rollout
from serving.cli.rollout import follow_rollout, watch_status
from shardrank_testing.rollout_fleet import MODEL, NEW, Clock, PlayedFleet


class StoppedError(Exception):
    """Ends what would go on for ever."""


def test_watch_into_a_pipe_waits_for_a_registry_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, looks = tmp_path / "registry", 0
    path.write_text("in the way")

    async def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            path.unlink()
        if looks == 4:
            raise StoppedError

    async def program() -> None:
        registry = DirectoryRegistry(path)
        try:
            await watch_status(FleetRegistry(registry), None, sleep)
        finally:
            await registry.close()

    with pytest.raises(StoppedError):
        asyncio.run(program())
    told = capsys.readouterr().out
    assert told.count("waiting: registry") == 1
    assert told.count("nothing was rolled out yet") == 1


def test_of_a_rollout_that_somebody_else_put_an_end_to_the_version_that_is_live_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def program() -> None:
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

    asyncio.run(program())
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "films: version 2 was aborted: version 3 was made live by somebody else; version 3 is live"
