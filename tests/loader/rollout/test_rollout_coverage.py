"""Who holds a step up, who does not, and who was only out of sight."""

from __future__ import annotations

import pytest

from loader.registry.fleet import FleetRecord, NodeRecord, VersionReport
from loader.rollout.coverage import FleetView, Roster, cannot_roll, lags, refusals
from loader.rollout.plan import Rollout, plan_steps, undone

STEPS = plan_steps("beside", canary=True, bake=False)


def in_step(step, *, steps=STEPS, **fields):
    return Rollout(
        model="m",
        epoch=1,
        rollout_id="a" * 32,
        from_version=1,
        to_version=2,
        delta_base=2,
        last_delta=0,
        steps=steps,
        step_index=steps.index(step),
        started_at=1.0,
        step_began_at=1.0,
        **fields,
    )


def node(name, states, *, shard=None, shards=2, live=None, applied=0, **fields):
    """A node by its versions' states, such as {1: "ready"}."""
    reports = [VersionReport(model="m", version=version, state=state) for version, state in states.items()]
    return NodeRecord(
        node_id=name,
        kind="serving" if shard is None else "shard",
        process_id=1,
        address="-",
        shard_index=shard,
        num_shards=shards,
        live={"m": live} if live else {},
        applied={"m": applied} if applied else {},
        versions=tuple(reports),
        **fields,
    )


def leased(record):
    """With three leases on each version."""
    versions = tuple(one.model_copy(update={"leases": 3}) for one in record.versions)
    return record.model_copy(update={"versions": versions})


def told(rollout, *nodes, num_shards=2, missing=(), settled=True, epoch=5):
    view = FleetView(num_shards, nodes, tuple(missing), settled)
    return [lag.text for lag in lags(rollout, view, epoch)]


BOTH = {1: "ready", 2: "ready"}
SHARDS = (node("a", BOTH, shard=0), node("b", BOTH, shard=1))


def test_each_shard_needs_a_node_that_is_ready_and_each_node_that_is_there_must_be():
    step = in_step("stage_shards")
    assert told(step, *SHARDS) == []
    assert told(step, SHARDS[0]) == ["shard 1: no node has version 2 ready"]
    late = node("c", {1: "ready", 2: "staging"}, shard=1)
    assert told(step, *SHARDS, late) == ["c: version 2 is staging 0%"]
    assert told(step, *SHARDS, late.model_copy(update={"draining": True})) == []
    assert told(step, num_shards=None) == ["no shard node is announced"]


def test_a_process_that_just_started_holds_no_flip_up_but_one_that_answers_with_the_old_version_does():
    step = in_step("flip")
    new, fresh = node("s", BOTH, live=2), node("t", {2: "staging"})
    assert told(step, *SHARDS, new, fresh) == []
    assert told(step, *SHARDS, new, node("t", BOTH, live=1)) == ["t: answers with version 1"]
    assert told(step, *SHARDS, new, node("t", {2: "ready"})) == ["t: answers with version None"]
    assert told(step, *SHARDS, fresh) == ["no serving process answers with version 2"]
    slow = FleetView(2, (*SHARDS, node("t", {1: "ready", 2: "staging"}, live=1)))
    assert [lag.staging for lag in lags(step, slow, 5)] == [True]


@pytest.mark.parametrize("step", ["canary", "flip"])
def test_a_shard_that_lost_the_new_version_is_waited_for_and_not_long_if_the_old_one_is_there(step):
    serving = node("s", BOTH, live=2, applied=5)
    old_only = FleetView(2, (SHARDS[0], node("b", {1: "ready"}, shard=1), serving))
    found = lags(in_step(step), old_only, 5)
    assert [(lag.text, lag.staging) for lag in found] == [("shard 1: no node has version 2 ready", False)]
    neither = FleetView(2, (SHARDS[0], node("b", {2: "staging"}, shard=1), serving))
    assert [lag.staging for lag in lags(in_step(step), neither, 5)] == [True]


@pytest.mark.parametrize("state", ["ready", "draining"])
@pytest.mark.parametrize("draining", [False, True])
def test_the_old_version_is_retired_when_no_process_reports_it_at_all(state, draining):
    step = in_step("retire_serving")
    new = node("s", {2: "ready"}, live=2)
    assert told(step, new) == []
    old = node("t", {1: state, 2: "ready"}, live=2, draining=draining)
    # How many leases a version that drains has left is not announced.
    told_leases = ", with 3 leases" if state == "ready" else ""
    assert told(step, new, leased(old)) == [f"t: version 1 is {state} still{told_leases}"]


def test_deltas_are_waited_for_on_every_node_that_has_the_version():
    step = in_step("replay", replay_until=7)
    behind = SHARDS[0].versions[1].model_copy(update={"delta_sequence": 7})
    done = [one.model_copy(update={"versions": (one.versions[0], behind)}) for one in SHARDS]
    assert told(step, *SHARDS) == ["a: applied delta 0 of 7", "b: applied delta 0 of 7"]
    assert told(step, *done) == []
    assert told(step, *done, node("c", {1: "ready"}, shard=0)) == []
    asking = node("s", {2: "ready"}, shards=None)
    assert told(step, *done, asking) == []
    rows = asking.versions[0].model_copy(update={"plan_digest": "c" * 64})
    local = asking.model_copy(update={"versions": (rows,)})
    assert told(step, local, num_shards=None) == ["s: applied delta 0 of 7"]
    assert told(in_step("replay", replay_until=0), *SHARDS) == []


def test_a_node_that_refuses_is_told_with_its_reason_unless_it_is_leaving():
    refusing = VersionReport(model="m", version=2, state="refused", reason="checksum")
    bad = node("c", {}, shard=0).model_copy(update={"versions": (refusing,)})
    step = in_step("stage_shards")
    assert refusals(step, FleetView(2, (*SHARDS, bad))) == "c: checksum"
    assert refusals(step, FleetView(2, (*SHARDS, bad.model_copy(update={"draining": True})))) == ""


def test_undone_every_node_must_have_the_old_version_back_but_those_that_refuse_it():
    rollout = undone(in_step("stage_serving"), 2.0, "aborted", "x")
    last = rollout.model_copy(update={"step_index": len(rollout.steps) - 1})
    back = (node("a", {1: "ready"}, shard=0), node("b", {1: "ready"}, shard=1))
    assert told(last, *back) == []
    assert told(last, back[0], SHARDS[1]) == ["b: version 2 is ready still, with 0 leases"]
    assert told(last, *back, node("c", {1: "staging"}, shard=1)) == ["c: version 1 is staging 0%"]
    assert told(last, *back, node("c", {1: "refused"}, shard=1)) == []
    assert told(last, back[0], node("c", {1: "refused"}, shard=1)) == ["shard 1: no node has version 1 ready"]


def rolling(step):
    groups = (("a", "b"), ("c", "d"))
    steps = plan_steps("by-replica", canary=False, bake=False, early_groups=1, groups=2)
    return in_step(step, steps=steps, strategy="by-replica", groups=groups, early_groups=1)


def test_a_group_is_taken_out_only_while_another_node_of_each_shard_has_the_live_version():
    others = (node("c", {1: "ready"}, shard=0), node("d", {1: "ready"}, shard=1))
    first = rolling("roll:0")
    assert cannot_roll(first, FleetView(2, (*SHARDS, *others))) == ()
    found = cannot_roll(first, FleetView(2, (*SHARDS, others[0])))
    assert [lag.text for lag in found] == ["shard 1 would be left without a node that has version 1 ready"]
    assert cannot_roll(first, FleetView(2, (*SHARDS, *others), settled=False)) != ()
    # After the flip nobody asks for the old version: that group may be all that can heal a shard.
    last = rolling("roll:1")
    assert cannot_roll(last, FleetView(2, (*SHARDS, *others))) == ()
    assert cannot_roll(last, FleetView(2, others)) == ()


def test_who_was_there_a_moment_ago_is_waited_for_and_then_forgotten():
    roster, fleet = Roster(2.0), FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0)
    assert not roster.observe(SHARDS, fleet, 10.0).settled
    assert roster.observe(SHARDS, fleet, 12.0).settled
    view = roster.observe(SHARDS[:1], fleet, 13.0)
    assert [one.node_id for one in view.missing] == ["b"]
    assert told(in_step("retire_shards"), *view.nodes, missing=view.missing)[0] == "b: not heard of for a moment"
    assert roster.observe(SHARDS[:1], fleet, 15.0).missing == ()
    roster.lose_sight()
    view = roster.observe(SHARDS, fleet, 16.0)
    assert not view.settled
    assert told(in_step("retire_shards"), *view.nodes, settled=False) == ["nodes are listened to first"]
