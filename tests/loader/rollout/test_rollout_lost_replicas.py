"""Replicas that are lost in a rollout take neither the live version's last node nor the way out with them."""

from __future__ import annotations

import secrets

import pytest

from loader.rollout.requests import abort_rollout, start_rollout
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, PlayedFleet


async def begin(fleet: PlayedFleet, **asked):
    return await start_rollout(fleet.fleet, MODEL, NEW, clock=fleet.clock, rollout_id=secrets.token_hex(16), **asked)


async def forget(fleet: PlayedFleet, *node_ids: str) -> None:
    """Kills nodes, and lets what they announced expire before anybody looks."""
    for node_id in node_ids:
        fleet.node(node_id).kill()
    for _ in range(8):
        fleet.clock.now += 0.5
        await fleet.react()


@pytest.mark.parametrize("ending", ["abort", "timeout"])
def test_a_group_that_could_not_be_taken_out_is_not_taken_out_by_undoing_either(play, ending):
    async def scenario(fleet):
        await fleet.begin(2, 2, 1)
        await begin(fleet, strategy="by-replica")
        await forget(fleet, "shard-1-1")
        last = fleet.node("shard-1-0")
        for _ in range(5):
            await fleet.round()
        assert (await fleet.rollout()).step == "roll:0"
        if ending == "abort":
            await abort_rollout(fleet.fleet, MODEL, "it hangs", clock=fleet.clock)
        for _ in range(60):
            await fleet.round(0.3 if ending == "abort" else 15.0)
            assert OLD in last.ready()
            if not (rollout := await fleet.rollout()).active:
                break
        assert rollout.state == ("aborted" if ending == "abort" else "rolled_back")
        assert ending == "abort" or "shard 1 would be left without a node that has version 1 ready" in rollout.reason
        fleet.assert_all_in(OLD, wanted=await fleet.fleet.wanted_model(MODEL))

    play(scenario)


def test_a_shard_that_loses_its_node_with_the_new_version_is_healed_by_those_that_still_have_the_old_one(play):
    async def scenario(fleet):
        await fleet.begin(2, 2, 2)
        await begin(fleet, strategy="by-replica")
        rollout = await fleet.until_step("retire_serving")
        while (await fleet.rollout()).step == "retire_serving":
            await fleet.round()
        assert rollout.groups[1] == ("shard-0-1", "shard-1-1")
        await forget(fleet, "shard-1-0")
        rollout = await fleet.until_ended()
        assert rollout.state == "done"
        fleet.assert_all_in(NEW, wanted=await fleet.fleet.wanted_model(MODEL))

    play(scenario)


@pytest.mark.parametrize("step", ["canary", "flip", "bake"])
def test_the_old_version_is_not_let_go_of_while_a_shard_has_lost_the_new_one(play, step):
    async def scenario(fleet):
        await fleet.begin(2, 2, 1)
        await begin(fleet, strategy="by-replica", canary_share=0.1 if step == "canary" else None, bake_s=2.0)
        await fleet.until_step(step)
        await forget(fleet, "shard-1-0")
        for _ in range(20):
            await fleet.round()
        assert (await fleet.rollout()).step == step
        fleet.node("shard-1-0").restart()
        rollout = await fleet.until_ended()
        assert rollout.state == "done"
        fleet.assert_all_in(NEW, wanted=await fleet.fleet.wanted_model(MODEL))

    play(scenario)
