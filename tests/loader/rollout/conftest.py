"""A played fleet in a real registry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from loader.registry.directory import DirectoryRegistry
from shardrank_testing.rollout_fleet import Clock, PlayedFleet


@pytest.fixture
def play(tmp_path) -> Callable[[Callable[[PlayedFleet], Awaitable[None]]], None]:
    """Runs a scenario with a fleet in a directory registry of its own, whose clock the fleet moves."""

    def run(scenario: Callable[[PlayedFleet], Awaitable[None]]) -> None:
        async def program() -> None:
            clock = Clock()
            registry = DirectoryRegistry(tmp_path / "registry", clock=clock)
            try:
                await scenario(PlayedFleet(registry, clock))
            finally:
                await registry.close()

        asyncio.run(program())

    return run
