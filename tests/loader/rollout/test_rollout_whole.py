"""A rollout from start to end, on a directory and on Redis: every way it can end, in exactly one of two versions."""

from __future__ import annotations

import pytest

from loader.errors import RolloutError
from loader.registry import open_registry
from loader.rollout.guards import GuardLimits
from loader.rollout.requests import read_fleet, reshard
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, Clock, PlayedFleet, PlayedNode, published, stats


async def test_a_version_replaces_another_and_is_rolled_back(url):
    clock = Clock()
    registry = open_registry(url, clock=clock)
    fleet = PlayedFleet(registry, clock)
    await fleet.begin(2, 2, 2)
    await fleet.start(canary_share=0.05)
    done = await fleet.ends("done", NEW)
    middle = ("replay", "canary", "flip")
    assert done.steps == ("stage_shards", "stage_serving", *middle, "retire_serving", "retire_shards")
    await fleet.roll_back()
    back = await fleet.ends("done", OLD)
    assert (back.from_version, back.to_version, back.rollback_target) == (NEW, OLD, NEW)
    await registry.close()


async def test_the_abort_of_a_models_first_version_leaves_nothing(fleet):
    await fleet.begin(2, 1, 2, live=None)
    await fleet.start()
    await fleet.until_step("replay")
    await fleet.abort()
    await fleet.ends("aborted", None)
    assert "bake" not in (await fleet.start(bake_s=60.0)).steps
    await fleet.until_step("flip")
    with pytest.raises(RolloutError, match="in step 'flip': there is no version to go back to"):
        await fleet.abort()
    await fleet.ends("done", NEW)


async def test_by_replica_no_node_must_hold_two_versions(fleet):
    await fleet.begin(2, 3, 2)
    rollout = await fleet.start(strategy="by-replica", canary_share=0.1)
    assert rollout.groups == tuple((f"shard-0-{replica}", f"shard-1-{replica}") for replica in range(3))
    assert (rollout.steps[0], rollout.steps[-3:]) == ("roll:0", ("roll:2", "retire_serving", "retire_shards"))

    def has_ended(rollout, wanted):
        assert all(len(wanted.held_by(node.node_id)) == 1 for node in fleet.shard_nodes())
        return not rollout.active

    await fleet.until(has_ended)
    await fleet.ends("done", NEW)


async def test_a_version_moves_to_more_shards_and_so_does_its_rollback(fleet):
    await fleet.begin(2, 2, 2)
    two = fleet.shard_nodes()
    await reshard(fleet.fleet, 4)
    four = [PlayedNode(f"shard-{shard}-of-4", shard=shard, num_shards=4) for shard in range(4)]
    fleet.nodes += four

    async def division():
        held = [{version for node in nodes for version in node.held} for nodes in (two, four)]
        return held, (await fleet.wanted()).num_shards

    await fleet.round(times=4)
    assert (await division())[0] == [{OLD}, set()]
    with pytest.raises(RolloutError, match="version 1 is divided over 2 shards, the next one is to be over 4"):
        await fleet.start(strategy="by-replica")
    await fleet.start()
    with pytest.raises(RolloutError, match="is running: the number of shards is 4 until it has ended"):
        await reshard(fleet.fleet, 2)
    await fleet.until_step("flip")
    assert (await division())[0] == [{OLD}, {NEW}]
    await fleet.abort()
    await fleet.until_ended()
    assert await division() == ([{OLD}, set()], {OLD: 2})
    await fleet.start(canary_share=0.1)
    await fleet.until_ended()
    assert await division() == ([set(), {NEW}], {NEW: 4})
    for node in two:
        node.kill()
    await fleet.roll_back()
    await fleet.ends("done", OLD)
    assert await division() == ([set(), {OLD}], {OLD: 4})


@pytest.mark.parametrize("strategy", ["beside", "by-replica"])
@pytest.mark.parametrize("step_index", range(6))
async def test_an_abort_before_the_old_version_retires_ends_in_it(fleet, strategy, step_index):
    await fleet.begin(2, 2, 2)
    rollout = await fleet.start(strategy=strategy, bake_s=5.0)
    step = rollout.steps[step_index]
    await fleet.until_step(step, written=step_index % 2 == 0)
    if step in ("retire_serving", "roll:1"):
        with pytest.raises(RolloutError, match="version 1 is being retired; once it is done, use rollback"):
            await fleet.abort()
        await fleet.ends("done", NEW)
        return
    assert (await fleet.roll_back()).state == "undoing"
    ended = await fleet.ends("aborted", OLD)
    assert ended.reason == "rolled back by hand"
    assert ended.steps[step_index:] == (step, "unflip", "retire_serving", "retire_shards")


async def test_a_version_that_one_node_refuses_is_undone_everywhere(fleet):
    await fleet.begin(2, 2, 2)
    fleet.node("serve-1").refuses[NEW] = "golden scores differ by 0.2, allowed is 0.001"
    await fleet.start()
    ended = await fleet.ends("refused", OLD)
    assert ended.reason == "serve-1: golden scores differ by 0.2, allowed is 0.001"
    fleet.node("serve-1").refuses.clear()
    await fleet.start()
    await fleet.ends("done", NEW)


async def test_once_the_old_version_retires_lateness_is_only_noted(fleet):
    await fleet.begin(1, 1, 2)
    fleet.node("serve-0").stuck.add(OLD)
    await fleet.start()
    await fleet.until_step("retire_serving")
    await fleet.round(times=250)
    rollout = await fleet.rollout()
    assert (rollout.state, rollout.step) == ("running", "retire_serving")
    assert "serve-0: version 1 is draining still" in rollout.events[-1].text
    assert OLD in fleet.node("shard-0-0").held
    fleet.node("serve-0").stuck.clear()
    await fleet.ends("done", NEW)


async def test_deltas_published_by_then_are_applied_before_the_flip(fleet):
    await fleet.begin(2, 1, 1)
    await fleet.fleet.put_version(published(5, delta_base=OLD, last_delta=3))
    for sequence in range(1, 8):
        await fleet.registry.append(f"deltas/{MODEL}/{OLD}", sequence, b"-")
    for node in fleet.shard_nodes():
        node.delta_sequence[5] = 3
    await fleet.start(5)
    await fleet.until_step("replay")
    assert (await fleet.wanted()).follow == (OLD, 5)
    fleet.node("shard-0-0").delta_sequence[5] = 7
    fleet.node("shard-1-0").delta_sequence[5] = 6
    await fleet.round(times=10)
    rollout = await fleet.rollout()
    assert (rollout.step, rollout.replay_until) == ("replay", 7)
    # What is published while it is replayed is not waited for: the version follows from here on.
    await fleet.registry.append(f"deltas/{MODEL}/{OLD}", 8, b"-")
    fleet.node("shard-1-0").delta_sequence[5] = 7
    await fleet.ends("done", 5)


async def test_a_canary_that_fails_more_often_is_rolled_back(fleet):
    await fleet.begin(1, 2, 2)
    for node in fleet.serving():
        node.stats[OLD] = stats(10_000, errors=9_000)
    await fleet.start(canary_share=0.1, bake_s=30.0)
    await fleet.until_bake()
    assert (await fleet.wanted()).canary.share == 0.1
    # Only what was counted during the bake is compared, over a restart too.
    fleet.node("serve-0").stats = {OLD: stats(10_900, errors=9_001), NEW: stats(100, errors=20)}
    await fleet.round()
    ended = await fleet.ends("rolled_back", OLD)
    assert "guard: error rate 20.00%, allowed is the live version's plus 1.00%" in ended.reason
    assert "live: 900 requests, 1 errors" in ended.reason
    assert "new: 100 requests, 20 errors" in ended.reason


async def test_a_good_canary_passes_after_its_bake_and_not_before(fleet):
    await fleet.begin(1, 2, 2)
    await fleet.start(canary_share=0.1, bake_s=30.0)
    await fleet.until_bake()
    began = fleet.clock.now
    for node in fleet.serving():
        node.stats = {OLD: stats(1000), NEW: stats(100)}
    await fleet.until_step("flip", written=False)
    assert fleet.clock.now - began >= 30.0
    ended = await fleet.ends("done", NEW)
    text = next(event.text for event in ended.events if event.step == "canary" and "done after" in event.text)
    assert "within the limits (live: 2000 requests, 0 errors" in text


@pytest.mark.parametrize(("answered", "state", "version"), [(50, "done", NEW), (49, "rolled_back", OLD)])
@pytest.mark.parametrize(("few", "other"), [(NEW, OLD), (OLD, NEW)])
async def test_a_bake_waits_for_min_requests_or_is_undone(fleet, few, other, answered, state, version):
    """Both versions must answer that many in time, or nothing is compared; the status says how many are missing."""
    await fleet.begin(1, 2, 1)
    await fleet.start(canary_share=0.1, bake_s=3.0, guards=GuardLimits())
    began = (await fleet.until_bake()).bake_began_at
    fleet.node("serve-0").stats = {other: stats(1000), few: stats(49)}
    await fleet.round(times=20)
    status = (await read_fleet(fleet.fleet)).status(MODEL)
    assert (status.step, status.guards.missing) == ("canary", 1)
    assert status.waiting_for == ("1 of 50 requests to each version, until the bake has lasted 30 s",)
    fleet.node("serve-0").stats[few] = stats(answered)
    ended = await fleet.ends(state, version)
    assert (fleet.clock.now - began >= 30.0) == (state == "rolled_back")
    assert ("guard: min_requests is 50, 1 are missing after 30 s" in ended.reason) == (state == "rolled_back")


async def test_a_version_that_is_lost_before_a_node_knows_it_is_put_on_record_again(fleet):
    """With its spec, as after a failover right after `publish`: nodes would wait for it until the step's timeout."""
    await fleet.begin(1, 2, 1)
    await fleet.fleet.put_spec(MODEL, NEW, "{}")
    await fleet.start()
    await fleet.coordinator.tick()
    there = await fleet.fleet.version(MODEL, NEW)
    await fleet.fleet.drop_version(MODEL, NEW)
    await fleet.coordinator.tick()
    assert (await fleet.fleet.version(MODEL, NEW), await fleet.fleet.spec(MODEL, NEW)) == (there, "{}")


async def test_a_bake_does_not_count_what_the_write_of_its_beginning_took(fleet, monkeypatch):
    await fleet.begin(1, 1, 1)
    await fleet.start(canary_share=0.5, bake_s=3.0)
    put = fleet.registry.put

    async def put_slowly(*arguments):
        fleet.clock.now += 1.0
        return await put(*arguments)

    monkeypatch.setattr(fleet.registry, "put", put_slowly)
    await fleet.until_bake()
    began = fleet.clock.now
    await fleet.until_step("flip", written=False)
    assert fleet.clock.now - 1.0 - began >= 3.0
