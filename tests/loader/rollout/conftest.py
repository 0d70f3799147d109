from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loader.registry.directory import DirectoryRegistry
from shardrank_testing.rollout_fleet import Clock, PlayedFleet


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[PlayedFleet]:
    """A played fleet, without nodes yet, in a directory registry whose clock it moves."""
    clock = Clock()
    registry = DirectoryRegistry(tmp_path / "registry", clock=clock)
    yield PlayedFleet(registry, clock)
    await registry.close()
