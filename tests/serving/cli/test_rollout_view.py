"""What is told of rollouts while the registry is away, and of one that somebody else has put an end to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry
from serving.cli.rollout import watch_status


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
