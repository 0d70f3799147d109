"""What can't be asked for is refused with the reason before anything is written; what is can be looked at."""

from __future__ import annotations

import json

import pytest

from loader.errors import RolloutError
from loader.rollout.plan import read_rollout
from loader.rollout.requests import RolloutStatus, read_fleet
from shardrank_testing.rollout_fleet import MODEL, NEW, OLD, stats


@pytest.mark.parametrize(
    ("shape", "options", "problem"),
    [
        ((1, 1, 1), {"version": 9}, r"films: version 9 is not published; published are \[1, 2, 3, 4\]"),
        ((1, 1, 1), {"version": OLD}, "films: version 1 is live already"),
        ((1, 1, 0), {}, "films: no serving process is announced"),
        ((1, 1, 1), {"strategy": "by-replica"}, "two nodes of each shard with version 1 ready; shard 0: 1"),
        ((0, 0, 1), {"strategy": "by-replica"}, "two nodes of each shard with version 1 ready; no shard nodes"),
        ((1, 1, 1), {"canary_share": 1.5}, "films: canary_share: Input should be less than 1"),
        ((1, 1, 1), {"bake_s": -1.0}, "films: bake_s: Input should be greater than or equal to 0"),
        ((1, 1, 1), {"bake_s": float("nan")}, "films: bake_s"),
        ((1, 1, 1), {"bake_s": 9.0, "bake_timeout_s": 8.0}, "bake_timeout_s: 8, allowed is bake_s = 9 or more"),
    ],
)
async def test_what_can_not_be_rolled_out_is_refused(fleet, shape, options, problem):
    await fleet.begin(*shape)
    with pytest.raises(RolloutError, match=problem):
        await fleet.start(**options)
    assert await read_rollout(fleet.fleet, MODEL) is None


async def test_a_shard_without_a_node_is_named_before_the_start(fleet):
    await fleet.begin(3, 1, 1)
    fleet.node("shard-1-0").kill()
    await fleet.fleet.withdraw_node("shard-1-0")
    with pytest.raises(RolloutError, match=r"no node is announced of shards \[1\]"):
        await fleet.start()


async def test_processes_that_were_started_for_other_models_are_named(fleet):
    await fleet.begin(2, 1, 1)
    for name in ("shard-1-0", "serve-0"):
        node = next(node for node in await fleet.fleet.nodes() if node.node_id == name)
        await fleet.fleet.announce_node(node.model_copy(update={"models": ("shop",)}), 60)
    restart = "started for other models are serve-0, shard-1-0: restart them with --model films too, or with none"
    with pytest.raises(RolloutError, match=f"films: no serving process is announced; {restart}"):
        await fleet.start()


async def test_a_models_first_version_has_nothing_to_compare_with(fleet):
    await fleet.begin(1, 2, 1, live=None)
    for call, problem in (
        (fleet.start(canary_share=0.1), "no version is live that a canary could be compared with"),
        (fleet.start(strategy="by-replica"), "no version is live that could be rolled by replica"),
        (fleet.roll_back(), "there is no earlier version to go back to"),
        (fleet.abort(), "no rollout is running"),
    ):
        with pytest.raises(RolloutError, match=problem):
            await call


async def test_after_a_failed_rollout_a_rollback_goes_further_back(fleet):
    await fleet.begin(1, 1, 1)
    await fleet.start(2)
    await fleet.ends("done", 2)
    await fleet.start(3)
    await fleet.abort()
    assert (await fleet.ends("aborted", 2)).rollback_target == OLD
    back = await fleet.roll_back()
    assert (back.from_version, back.to_version, back.strategy, back.canary_share) == (2, OLD, "beside", None)
    await fleet.ends("done", OLD)


@pytest.mark.parametrize(
    ("replicas", "strategy", "available", "warns"),
    [
        (2, "by-replica", 4_500_000_000, True),
        (2, "by-replica", 6_000_000_000, False),
        (3, "by-replica", 4_500_000_000, False),
        (2, "beside", 4_500_000_000, False),
    ],
)
async def test_what_a_lost_node_costs_is_said_before_the_start(fleet, replicas, strategy, available, warns):
    await fleet.begin(2, replicas, 1)
    for node in fleet.shard_nodes():
        node.told[OLD], node.machine = {"memory_bytes": 6_000_000_000}, {"memory_available_bytes": available}
    await fleet.react()
    said = (await fleet.start(strategy=strategy)).warnings
    assert said == (await read_fleet(fleet.fleet)).status(MODEL).warnings
    if not warns:
        assert said == ()
        return
    (warning,) = said
    assert warning.startswith("there are two replicas, and memory for one version: if a node is lost while the other ")
    assert warning.endswith("three replicas of each shard, or about 1.5 GB more memory for each node, avoid it")


async def test_the_status_shows_steps_nodes_and_who_is_waited_for(fleet):
    await fleet.begin(1, 2, 1)
    empty = (await read_fleet(fleet.fleet)).status(MODEL)
    assert (empty.state, empty.live, len(empty.nodes)) == (None, OLD, 3)
    fleet.node("shard-0-1").stage_rounds = 10
    await fleet.start(canary_share=0.1, bake_s=60.0)
    assert not (await read_fleet(fleet.fleet)).status(MODEL).written
    await fleet.until_step("stage_shards")
    await fleet.round(times=3)
    status = (await read_fleet(fleet.fleet)).status(MODEL)
    assert (status.state, status.step, status.written) == ("running", "stage_shards", True)
    assert [step.state for step in status.steps] == ["running", *["pending"] * 6]
    assert len(status.waiting_for) == 1
    assert status.waiting_for[0].startswith("shard-0-1: version 2 is staging ")
    late = next(node for node in status.nodes if node.node_id == "shard-0-1")
    assert [(one.version, one.state) for one in late.versions] == [(OLD, "ready"), (NEW, "staging")]
    await fleet.until_bake()
    fleet.node("serve-0").stats = {OLD: stats(1000), NEW: stats(100, errors=1)}
    await fleet.round(times=4)
    status = (await read_fleet(fleet.fleet)).status(MODEL)
    assert status.baked_s == pytest.approx(1.2)
    assert status.guards is not None
    assert (status.guards.compared, status.guards.live.requests, status.guards.new.requests) == (True, 1000, 100)
    assert RolloutStatus.model_validate_json(status.model_dump_json()) == status
    assert json.loads(status.model_dump_json())["steps"][3] == {"name": "canary", "state": "running"}
    await fleet.abort("seen enough")
    await fleet.until_ended()
    status = (await read_fleet(fleet.fleet)).status(MODEL)
    assert (status.state, status.outcome, status.reason) == ("aborted", "aborted", "seen enough")
    assert status.waiting_for == ()
    assert {step.state for step in status.steps} == {"done"}
