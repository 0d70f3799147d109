"""The registry goes away, comes back empty, or with old records: agents go on, and restore what they know."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest

from loader.errors import RegistryRecordError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRecord, FleetRegistry, WantedModel, rollout_key, wanted_key
from shard_node.agent.agent import Remembered
from shardrank_testing.agents import HandClock, agent_on, published, run, running_node
from shardrank_testing.bags import random_table_bags
from shardrank_testing.registries import redis_server

ROLLOUT = b'{"epoch": 4, "model": "films", "steps": ["whatever"]}'


def test_an_emptied_registry_unloads_nothing_and_is_restored(tmp_path):
    division = FleetRecord(num_shards=1, sharding="hash", replicate_bytes=0)

    async def main():
        with redis_server(tmp_path) as server:
            async with agent_on(server.url) as under:
                fleet = under.fleet
                assert await fleet.join_fleet(division) == division
                await fleet.put_version(published("films", 1))
                await fleet.put_spec("films", 1, "{}")
                await fleet.put_version(published("films", 7))
                await fleet.registry.put(rollout_key("films"), ROLLOUT, 0)
                wanted = await under.want("films", hold=(1,), live=1)
                await under.until(lambda: len(under.actions.ready) == 1)
                await under.pass_time(1.5)
                record = await under.record()

                server.kill()
                await under.pass_time(0.3)
                assert under.agent.problems()[0].startswith("registry: RegistryUnavailableError")
                assert under.agent.wanted == {"films": wanted}
                assert under.actions.held() == {("films", 1)}

                server.start()
                server.flush()
                await under.pass_time(2.5)
                await under.until(lambda: under.agent.problems() == [])
                await under.pass_time(1.2)
                assert await fleet.wanted() == {"films": wanted}
                assert await fleet.fleet() == division
                assert [one.version for one in await fleet.versions()] == [1]
                assert await fleet.spec("films", 1) == "{}"
                assert (await fleet.raw(rollout_key("films"))).value == ROLLOUT
                assert await under.record() == record
                assert under.actions.retired == []
                assert under.actions.begun == [("films", 1)]

    run(main())


def test_lookups_go_on_while_the_registry_is_disturbed(tmp_path):
    async def main():
        with redis_server(tmp_path) as server:
            async with running_node(server.url, tmp_path / "store") as under:
                await under.publish(1)
                await under.want("films", hold=(1,), live=1)
                await under.announced("films", 1, "ready")
                bags = random_table_bags(np.random.default_rng(5), under.node.table_layout("films", 1), 50, 5)
                expected = [block.tobytes() for block in under.node.pool("films", 1, bags)]
                for disturb in (server.kill, server.start, server.restart_empty, server.flush, server.restart):
                    await asyncio.to_thread(disturb)
                    for _ in range(20):
                        await asyncio.sleep(0.02)
                        assert [block.tobytes() for block in under.node.pool("films", 1, bags)] == expected
                await under.announced("films", 1, "ready")
                assert (await under.fleet.wanted())["films"].live == 1

    run(main())


WANTED = WantedModel(model="films", epoch=7, live=1, hold=(1,), serve=(1,))
PLAN = b'{"epoch": 40, "model": "films"}'


@pytest.mark.parametrize("is_broken", [False, True], ids=["lost", "broken"])
def test_desired_versions_are_restored_after_the_plan(tmp_path, is_broken):
    """Not a moment earlier: as soon as desired versions are back, a rollout can be started. A broken plan stays."""

    async def main() -> None:
        registry = DirectoryRegistry(tmp_path / "registry")
        fleet = FleetRegistry(registry)
        await fleet.put_wanted(WANTED, None)
        await registry.put(rollout_key("films"), PLAN, 0)
        remembered = Remembered(fleet, None, 1.0, HandClock())
        await remembered.refresh()
        shutil.rmtree(tmp_path / "registry")
        if is_broken:
            await registry.put(rollout_key("films"), b"{", 0)
            with pytest.raises(RegistryRecordError, match="rollouts/films: not JSON"):
                await remembered.refresh()
        else:
            await remembered.refresh()
            plan, wanted = await fleet.raw(rollout_key("films")), await fleet.raw(wanted_key("films"))
            assert plan.value == PLAN
            assert plan.revision < wanted.revision
        assert await fleet.wanted() == {"films": WANTED}
        await registry.close()

    asyncio.run(main())
