"""A rollout from start to end, on a directory and on Redis: every way it can end, in exactly one of two versions."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from loader.errors import RolloutError
from loader.registry.opening import open_registry
from loader.rollout.requests import abort_rollout, reshard, roll_back, start_rollout
from shardrank_testing.registries import REGISTRY_KINDS, registry_of
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, Clock, PlayedFleet, PlayedNode, published, stats


async def begin(fleet, version=NEW, **asked):
    return await start_rollout(
        fleet.fleet, MODEL, version, clock=fleet.clock, rollout_id=secrets.token_hex(16), **asked
    )


async def ended_in(fleet, state, version):
    """Rounds until the rollout has ended; then everything is in one version."""
    rollout = await fleet.until_ended()
    assert rollout.state == state, (rollout.reason, [event.text for event in rollout.events])
    fleet.assert_all_in(version, wanted=await fleet.fleet.wanted_model(MODEL))
    return rollout


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_a_version_replaces_another_on_every_kind_of_registry_and_is_rolled_back_to(kind, tmp_path):
    async def scenario(url):
        clock = Clock()
        registry = open_registry(url, clock=clock)
        try:
            fleet = PlayedFleet(registry, clock)
            await fleet.begin(2, 2, 2)
            await begin(fleet, canary_share=0.05)
            done = await ended_in(fleet, "done", NEW)
            assert done.steps == (
                *("stage_shards", "stage_serving", "replay", "canary", "flip", "retire_serving", "retire_shards"),
            )
            await roll_back(fleet.fleet, MODEL, clock=clock, rollout_id=secrets.token_hex(16))
            back = await ended_in(fleet, "done", OLD)
            assert (back.from_version, back.to_version, back.rollback_target) == (NEW, OLD, NEW)
        finally:
            await registry.close()

    with registry_of(kind, tmp_path) as url:
        asyncio.run(scenario(url))


def test_a_models_first_version_is_rolled_out_and_its_abort_leaves_nothing(play):
    async def scenario(fleet):
        await fleet.begin(2, 1, 2, live=None)
        await begin(fleet)
        await fleet.until_step("replay")
        await abort_rollout(fleet.fleet, MODEL, "not yet", clock=fleet.clock)
        await ended_in(fleet, "aborted", None)
        assert "bake" not in (await begin(fleet, bake_s=60.0)).steps
        await fleet.until_step("flip")
        with pytest.raises(RolloutError, match="in step 'flip': there is no version to go back to"):
            await abort_rollout(fleet.fleet, MODEL, "not now", clock=fleet.clock)
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_by_replica_no_node_ever_holds_two_versions(play):
    async def scenario(fleet):
        await fleet.begin(2, 3, 2)
        rollout = await begin(fleet, strategy="by-replica", canary_share=0.1)
        assert rollout.groups == tuple((f"shard-0-{one}", f"shard-1-{one}") for one in range(3))
        assert rollout.steps[0] == "roll:0"
        assert rollout.steps[-3:] == ("roll:1", "roll:2", "retire_shards")
        for _ in range(200):
            await fleet.round()
            wanted = await fleet.fleet.wanted_model(MODEL)
            assert all(len(wanted.held_by(node.node_id)) == 1 for node in fleet.shard_nodes())
            if not (await fleet.rollout()).active:
                break
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_a_version_is_divided_over_more_shards_than_the_one_before_it_and_a_rollback_goes_there_too(play):
    async def scenario(fleet):
        await fleet.begin(2, 2, 2)
        two = fleet.shard_nodes()
        await reshard(fleet.fleet, 4)
        four = [PlayedNode(f"shard-{shard}-of-4", shard=shard, num_shards=4) for shard in range(4)]
        fleet.nodes += four

        def held():
            return [{version for node in nodes for version in node.held} for nodes in (two, four)]

        for _ in range(4):
            await fleet.round()
        assert held() == [{OLD}, set()]
        with pytest.raises(RolloutError, match="version 1 is divided over 2 shards, the next one is to be over 4"):
            await begin(fleet, strategy="by-replica")
        await begin(fleet)
        with pytest.raises(RolloutError, match="is running: the number of shards is 4 until it has ended"):
            await reshard(fleet.fleet, 2)
        await fleet.until_step("flip")
        assert held() == [{OLD}, {NEW}]
        await abort_rollout(fleet.fleet, MODEL, "once more", clock=fleet.clock)
        await fleet.until_ended()
        assert (held(), (await fleet.fleet.wanted_model(MODEL)).num_shards) == ([{OLD}, set()], {OLD: 2})
        await begin(fleet, canary_share=0.1)
        await fleet.until_ended()
        assert (held(), (await fleet.fleet.wanted_model(MODEL)).num_shards) == ([set(), {NEW}], {NEW: 4})
        for node in two:
            node.kill()
        await roll_back(fleet.fleet, MODEL, clock=fleet.clock, rollout_id=secrets.token_hex(16))
        await ended_in(fleet, "done", OLD)
        assert (await fleet.fleet.wanted_model(MODEL)).num_shards == {OLD: 4}

    play(scenario)


@pytest.mark.parametrize("strategy", ["beside", "by-replica"])
@pytest.mark.parametrize("step_index", range(6))
def test_an_abort_in_any_step_before_the_old_version_is_retired_ends_in_the_old_one(play, strategy, step_index):
    async def scenario(fleet):
        await fleet.begin(2, 2, 2)
        rollout = await begin(fleet, strategy=strategy, bake_s=5.0)
        step = rollout.steps[step_index]
        await fleet.until_step(step, written=step_index % 2 == 0)
        if step == "retire_serving":
            with pytest.raises(RolloutError, match="version 1 is being retired; once it is done, use rollback"):
                await abort_rollout(fleet.fleet, MODEL, "late", clock=fleet.clock)
            await ended_in(fleet, "done", NEW)
            return
        turned = await roll_back(fleet.fleet, MODEL, clock=fleet.clock, rollout_id=secrets.token_hex(16))
        assert turned.state == "undoing"
        ended = await ended_in(fleet, "aborted", OLD)
        assert ended.reason == "rolled back by hand"
        assert ended.steps[step_index:] == (step, "unflip", "retire_serving", "retire_shards")

    play(scenario)


def test_a_version_that_one_node_refuses_is_taken_back_everywhere_with_its_reason(play):
    async def scenario(fleet):
        await fleet.begin(2, 2, 2)
        fleet.node("serve-1").refuses[NEW] = "golden scores differ by 0.2, allowed is 0.001"
        await begin(fleet)
        ended = await ended_in(fleet, "refused", OLD)
        assert ended.reason == "serve-1: golden scores differ by 0.2, allowed is 0.001"
        fleet.node("serve-1").refuses.clear()
        await begin(fleet)
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_after_the_old_version_began_to_retire_lateness_is_only_noted(play):
    async def scenario(fleet):
        await fleet.begin(1, 1, 2)
        fleet.node("serve-0").stuck.add(OLD)
        await begin(fleet)
        await fleet.until_step("retire_serving")
        for _ in range(250):
            await fleet.round()
        rollout = await fleet.rollout()
        assert (rollout.state, rollout.step) == ("running", "retire_serving")
        assert "serve-0: version 1 is draining still" in rollout.events[-1].text
        assert OLD in fleet.node("shard-0-0").held
        fleet.node("serve-0").stuck.clear()
        await ended_in(fleet, "done", NEW)

    play(scenario)


def test_deltas_published_by_then_are_applied_before_the_flip(play):
    async def scenario(fleet):
        await fleet.begin(2, 1, 1)
        await fleet.fleet.put_version(published(5, delta_base=OLD, last_delta=3))
        for sequence in range(1, 8):
            await fleet.registry.append(f"deltas/{MODEL}/{OLD}", sequence, b"-")
        for node in fleet.shard_nodes():
            node.delta_sequence[5] = 3
        await begin(fleet, version=5)
        rollout = await fleet.until_step("replay")
        assert (await fleet.fleet.wanted_model(MODEL)).follow == (OLD, 5)
        fleet.node("shard-0-0").delta_sequence[5] = 7
        fleet.node("shard-1-0").delta_sequence[5] = 6
        for _ in range(10):
            await fleet.round()
        rollout = await fleet.rollout()
        assert (rollout.step, rollout.replay_until) == ("replay", 7)
        # What is published while it is replayed is not waited for: the version follows from here on.
        await fleet.registry.append(f"deltas/{MODEL}/{OLD}", 8, b"-")
        fleet.node("shard-1-0").delta_sequence[5] = 7
        await ended_in(fleet, "done", 5)

    play(scenario)


def test_a_canary_that_fails_more_often_is_rolled_back_with_the_numbers(play):
    async def scenario(fleet):
        await fleet.begin(1, 2, 2)
        for node in fleet.serving():
            node.stats[OLD] = stats(10_000, errors=9_000)
        await begin(fleet, canary_share=0.1, bake_s=30.0)
        await fleet.until_bake()
        assert (await fleet.fleet.wanted_model(MODEL)).canary.share == 0.1
        # Only what was counted during the bake is compared, over a restart too.
        fleet.node("serve-0").stats = {OLD: stats(10_900, errors=9_001), NEW: stats(100, errors=20)}
        await fleet.round()
        ended = await ended_in(fleet, "rolled_back", OLD)
        assert "guard: error rate 20.00%, allowed is the live version's plus 1.00%" in ended.reason
        assert "live: 900 requests, 1 errors" in ended.reason
        assert "new: 100 requests, 20 errors" in ended.reason

    play(scenario)


def test_a_canary_that_does_as_well_passes_after_its_bake_and_not_before(play):
    async def scenario(fleet):
        await fleet.begin(1, 2, 2)
        await begin(fleet, canary_share=0.1, bake_s=30.0)
        await fleet.until_bake()
        began = fleet.clock.now
        for node in fleet.serving():
            node.stats = {OLD: stats(1000), NEW: stats(100)}
        await fleet.until_step("flip", written=False, max_rounds=200)
        assert fleet.clock.now - began >= 30.0
        ended = await ended_in(fleet, "done", NEW)
        text = next(event.text for event in ended.events if event.step == "canary" and "done after" in event.text)
        assert "within the limits (live: 2000 requests, 0 errors" in text

    play(scenario)
