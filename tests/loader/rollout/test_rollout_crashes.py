"""Whoever dies, at whatever step, and whatever the registry loses: a rollout ends in exactly one version."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil

import pytest

from loader.errors import RegistryUnavailableError, RolloutError
from loader.registry.fleet import WANTED, rollout_key, wanted_key
from loader.registry.opening import open_registry
from loader.rollout.requests import abort_rollout, start_rollout
from shardrank_testing.interrupted_registry import InterruptedRegistry, KilledError
from shardrank_testing.registries import redis_server
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, Clock, PlayedFleet


async def begin(fleet, version=NEW, **asked):
    return await start_rollout(
        fleet.fleet, MODEL, version, clock=fleet.clock, rollout_id=secrets.token_hex(16), **asked
    )


async def ended_in(fleet, state, version, rounds_after=0):
    rollout = await fleet.until_ended()
    for _ in range(rounds_after):
        await fleet.round()
    assert rollout.state == state, (rollout.reason, [event.text for event in rollout.events])
    fleet.assert_all_in(version, wanted=await fleet.fleet.wanted_model(MODEL))
    return rollout


@pytest.mark.parametrize("strategy", ["beside", "by-replica"])
@pytest.mark.parametrize("when", ["kill_before", "kill_after"])
def test_a_coordinator_killed_around_each_of_its_writes_is_followed_by_another(play, strategy, when):
    async def scenario(fleet):
        await fleet.begin(1, 2, 1)
        await begin(fleet, strategy=strategy, canary_share=0.1, bake_s=1.0)
        killed = 0
        for _ in range(400):
            registry = InterruptedRegistry(fleet.registry)
            setattr(registry, when, 1)
            fleet.coordinator = fleet.new_coordinator(registry)
            try:
                # It has seen the nodes for long enough, and then dies in its first write.
                for _ in range(8):
                    await fleet.round()
            except KilledError:
                killed += 1
            if not (await fleet.rollout()).active:
                break
            if when == "kill_before":
                fleet.coordinator = fleet.new_coordinator()
                revision = (await fleet.fleet.raw(rollout_key(MODEL))).revision
                wanted = (await fleet.fleet.raw(wanted_key(MODEL))).revision
                for _ in range(30):
                    await fleet.round()
                    now = (await fleet.fleet.raw(rollout_key(MODEL))).revision
                    if now != revision or (await fleet.fleet.raw(wanted_key(MODEL))).revision != wanted:
                        break
        assert killed >= 12
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_a_coordinator_that_slept_through_an_abort_can_not_write_its_step_any_more(play):
    async def scenario(fleet):
        await fleet.begin(1, 1, 1)
        await begin(fleet)
        link = InterruptedRegistry(fleet.registry)
        sleeper = fleet.new_coordinator(link)
        link.hold_next = WANTED
        for _ in range(3):
            fleet.clock.now += 0.3
            await fleet.react()
            tick = asyncio.create_task(sleeper.tick())
            await asyncio.wait([tick, asyncio.create_task(link.held.wait())], return_when="FIRST_COMPLETED")
            if link.held.is_set():
                break
        assert not tick.done()
        await abort_rollout(fleet.fleet, MODEL, "changed my mind", clock=fleet.clock)
        await ended_in(fleet, "aborted", OLD)
        before = await fleet.fleet.wanted_model(MODEL)
        link.go_on.set()
        await tick
        assert await fleet.fleet.wanted_model(MODEL) == before
        for _ in range(5):
            await sleeper.tick()
            await fleet.round()
        fleet.assert_all_in(OLD, wanted=await fleet.fleet.wanted_model(MODEL))

    play(scenario)


def test_a_step_that_an_old_coordinator_wrote_after_an_abort_is_taken_back(play):
    async def scenario(fleet):
        await fleet.begin(1, 1, 1)
        await begin(fleet)
        link = InterruptedRegistry(fleet.registry)
        sleeper = fleet.new_coordinator(link)
        link.hold_next = WANTED
        tick = asyncio.create_task(sleeper.tick())
        await link.held.wait()
        await abort_rollout(fleet.fleet, MODEL, "changed my mind", clock=fleet.clock)
        link.go_on.set()
        await tick
        assert NEW in (await fleet.fleet.wanted_model(MODEL)).hold
        await ended_in(fleet, "aborted", OLD)

    play(scenario)


def test_two_coordinators_that_both_believe_to_lead_do_no_harm(play):
    async def scenario(fleet):
        await fleet.begin(2, 2, 2)
        others = [fleet.new_coordinator() for _ in range(2)]
        await begin(fleet, strategy="by-replica")
        for _ in range(200):
            fleet.clock.now += 0.3
            await fleet.react()
            await asyncio.gather(fleet.coordinator.tick(), *(one.tick() for one in others))
            fleet.check_answers()
            if not (await fleet.rollout()).active:
                break
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_only_one_coordinator_leads_and_another_takes_over_when_it_is_gone(play):
    async def scenario(fleet):
        await fleet.begin(1, 1, 1)
        other = fleet.new_coordinator(owner="the other")
        await other.tick()
        assert (fleet.coordinator.leads, other.leads) == (True, False)
        await begin(fleet)
        await fleet.until_step("stage_serving")
        fleet.clock.now += fleet.config.lock_ttl_s + 0.1
        await other.tick()
        assert other.leads
        fleet.coordinator, first = other, fleet.coordinator
        await ended_in(fleet, "done", NEW)
        await first.tick()
        assert not first.leads

    play(scenario)


@pytest.mark.parametrize("loss", ["flush", "restart_empty", "kill"])
@pytest.mark.parametrize("step", ["stage_shards", "flip", "retire_shards"])
def test_a_redis_that_dies_or_forgets_everything_pauses_the_rollout_only(loss, step, tmp_path):
    async def scenario(server):
        clock = Clock()
        registry = open_registry(server.url, clock=clock)
        try:
            fleet = PlayedFleet(registry, clock)
            await fleet.begin(2, 2, 2)
            await begin(fleet)
            await fleet.until_step(step)
            if loss == "kill":
                await asyncio.to_thread(server.kill)
                for _ in range(3):
                    await fleet.coordinator.tick()
                    await fleet.node("serve-0").react(fleet.fleet)
                    fleet.clock.now += 100.0
                assert "rollouts pause" in fleet.coordinator.problems()[0]
                await asyncio.to_thread(server.start)
            else:
                await asyncio.to_thread(getattr(server, loss))
            for node in fleet.nodes:
                with contextlib.suppress(RegistryUnavailableError):
                    await node.react(fleet.fleet)
            await ended_in(fleet, "done", NEW)
            assert fleet.coordinator.problems() == ()
        finally:
            await registry.close()

    with redis_server(tmp_path) as server:
        asyncio.run(scenario(server))


def test_a_registry_that_forgot_its_nodes_is_not_taken_for_an_empty_fleet(play):
    async def scenario(fleet):
        await fleet.begin(1, 1, 2)
        fleet.node("serve-1").stuck.add(OLD)
        await begin(fleet)
        await fleet.until_step("retire_serving")
        # The process that still answers with the old version is the last one to announce itself again.
        await fleet.fleet.withdraw_node("serve-1")
        others = [node for node in fleet.nodes if node.node_id != "serve-1"]
        shutil.rmtree(fleet.registry.path)
        fleet.coordinator = fleet.new_coordinator()
        await fleet.react(others)
        await fleet.coordinator.tick()
        assert (await fleet.rollout()).step == "retire_serving"
        for _ in range(10):
            await fleet.round()
        assert (await fleet.rollout()).step == "retire_serving"
        fleet.node("serve-1").stuck.clear()
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_the_last_writes_of_a_registry_are_given_back_by_those_who_know_them(play, tmp_path):
    async def scenario(fleet):
        await fleet.begin(1, 2, 1)
        await begin(fleet)
        await fleet.until_step("stage_serving")
        keys = fleet.registry.path / "keys"
        shutil.copytree(keys, tmp_path / "then")
        await fleet.until_step("retire_serving")
        await fleet.react()
        wanted, rollout = await fleet.fleet.wanted_model(MODEL), await fleet.rollout()
        shutil.rmtree(keys)
        shutil.copytree(tmp_path / "then", keys)
        assert (await fleet.rollout()).step == "stage_serving"
        with pytest.raises(RolloutError, match="is running"):
            await begin(fleet, version=3)
        fleet.coordinator = fleet.new_coordinator()
        await fleet.react()
        assert await fleet.fleet.wanted_model(MODEL) == wanted
        assert (await fleet.rollout()).epoch == rollout.epoch
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_a_rollout_is_not_started_while_the_registry_knows_less_than_its_nodes(play):
    async def scenario(fleet):
        await fleet.begin(1, 1, 1)
        await begin(fleet)
        await ended_in(fleet, "done", NEW)
        wanted = await fleet.fleet.raw(wanted_key(MODEL))
        await fleet.registry.delete(wanted_key(MODEL), wanted.revision)
        with pytest.raises(RolloutError, match="the registry has lost its last changes: "):
            await begin(fleet, version=3)

    play(scenario)


@pytest.mark.parametrize("victim", ["shard-0-0", "shard-1-1", "serve-0"])
@pytest.mark.parametrize("step_index", [0, 1, 3, 4, 5])
def test_a_node_that_dies_and_comes_back_in_any_step_is_waited_for_or_not_missed(play, victim, step_index):
    async def scenario(fleet):
        await fleet.begin(2, 2, 2)
        rollout = await begin(fleet)
        await fleet.until_step(rollout.steps[step_index])
        fleet.node(victim).kill()
        await fleet.round()
        fleet.node(victim).restart()
        # One that has nothing yet when the rollout ends takes what is live by itself.
        await ended_in(fleet, "done", NEW, rounds_after=5)

    play(scenario)
