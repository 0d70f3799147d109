"""What a process gives back to a registry that has lost it, and in which order."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from loader.errors import RegistryRecordError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry, WantedModel, rollout_key, wanted_key
from shard_node.agent.agent import Remembered
from shardrank_testing.agents import HandClock

WANTED = WantedModel(model="films", epoch=7, live=1, hold=(1,), serve=(1,))
PLAN = b'{"epoch": 40, "model": "films"}'


async def that_knows_all(fleet: FleetRegistry) -> Remembered:
    await fleet.put_wanted(WANTED, None)
    await fleet.registry.put(rollout_key("films"), PLAN, 0)
    remembered = Remembered(fleet, None, 1.0, HandClock())
    await remembered.refresh()
    return remembered


def test_a_lost_plan_is_restored_before_desired_versions(tmp_path):
    async def main() -> None:
        registry = DirectoryRegistry(tmp_path / "registry")
        fleet = FleetRegistry(registry)
        remembered = await that_knows_all(fleet)
        shutil.rmtree(tmp_path / "registry")
        # Not a moment later: as soon as what is wanted is back, a rollout can be started.
        await remembered.refresh()
        plan, wanted = await fleet.raw(rollout_key("films")), await fleet.raw(wanted_key("films"))
        assert plan is not None
        assert wanted is not None
        assert plan.value == PLAN
        assert plan.revision < wanted.revision
        assert await fleet.wanted() == {"films": WANTED}
        await registry.close()

    asyncio.run(main())


def test_desired_versions_are_restored_beside_a_broken_plan(tmp_path):
    async def main() -> None:
        registry = DirectoryRegistry(tmp_path / "registry")
        fleet = FleetRegistry(registry)
        remembered = await that_knows_all(fleet)
        shutil.rmtree(tmp_path / "registry")
        await registry.put(rollout_key("films"), b"{", 0)
        with pytest.raises(RegistryRecordError, match="rollouts/films: not JSON"):
            await remembered.refresh()
        assert await fleet.wanted() == {"films": WANTED}
        await registry.close()

    asyncio.run(main())
