"""Who holds a step up, who does not, and who was only out of sight."""

from __future__ import annotations

import pytest

from loader.registry.fleet import FleetRecord, NodeRecord, VersionReport
from loader.rollout.coverage import FleetView, RecentNodes, cannot_roll, refusals, step_blockers
from loader.rollout.plan import plan_steps, undone
from shardrank_testing.rollout_fleet import rollout_record

STEPS = plan_steps("beside", canary=True, bake=False)
BOTH = {1: "ready", 2: "ready"}


def in_step(step, *, steps=STEPS, **fields):
    return rollout_record(steps=steps, step_index=steps.index(step), **fields)


def node(name, states, *, shard=None, shards=2, live=None, applied=0, draining=False, **reported):
    """A node by its versions' states, such as {1: "ready"}; `reported` of each of them."""
    return NodeRecord(
        node_id=name,
        kind="serving" if shard is None else "shard",
        process_id=1,
        address="-",
        shard_index=shard,
        num_shards=shards,
        live={"m": live} if live else {},
        applied={"m": applied} if applied else {},
        versions=[VersionReport(model="m", version=number, state=states[number], **reported) for number in states],
        draining=draining,
    )


def texts(rollout, *nodes, num_shards=2, missing=(), settled=True):
    return [lag.text for lag in step_blockers(rollout, FleetView(num_shards, nodes, tuple(missing), settled), 5)]


SHARDS = (node("a", BOTH, shard=0), node("b", BOTH, shard=1))
NEW = node("s", BOTH, live=2, applied=5)


@pytest.mark.parametrize(
    ("step", "nodes", "expected"),
    [
        ("stage_shards", SHARDS, []),
        ("stage_shards", SHARDS[:1], ["shard 1: no node has version 2 ready"]),
        ("stage_shards", (*SHARDS, node("c", {2: "staging"}, shard=1)), ["c: version 2 is staging 0%"]),
        ("stage_shards", (*SHARDS, node("c", {1: "ready"}, shard=1)), ["c: does not have version 2 yet"]),
        ("stage_shards", (*SHARDS, node("c", {2: "staging"}, shard=1, draining=True)), []),
        # A process that just started holds no flip up, one that answers with the old version does.
        ("flip", (*SHARDS, NEW, node("t", {2: "staging"})), []),
        ("flip", (*SHARDS, NEW, node("t", BOTH, live=1)), ["t: answers with version 1"]),
        ("flip", (*SHARDS, NEW, node("t", {2: "ready"})), ["t: answers with version None"]),
        ("flip", (*SHARDS, node("t", {2: "staging"})), ["no serving process answers with version 2"]),
        ("retire_serving", (node("s", {2: "ready"}, live=2),), []),
    ],
)
def test_a_step_waits_for_those_that_lack_what_it_needs(step, nodes, expected):
    assert texts(in_step(step), *nodes) == expected
    assert texts(in_step("stage_shards"), num_shards=None) == ["no shard node is announced"]


@pytest.mark.parametrize(
    ("step", "nodes", "text", "staging"),
    [
        ("flip", (SHARDS[0], node("b", {1: "ready"}, shard=1), NEW), "shard 1: no node has version 2 ready", False),
        ("flip", (SHARDS[0], node("b", {2: "staging"}, shard=1), NEW), "shard 1: no node has version 2 ready", True),
        ("canary", (SHARDS[0], node("b", {1: "ready"}, shard=1), NEW), "shard 1: no node has version 2 ready", False),
        ("canary", (SHARDS[0], node("b", {2: "staging"}, shard=1), NEW), "shard 1: no node has version 2 ready", True),
        ("flip", (*SHARDS, node("t", {1: "ready", 2: "staging"}, live=1)), "t: answers with version 1", True),
    ],
)
def test_a_lost_new_version_is_not_waited_for_long(step, nodes, text, staging):
    """If the shard has the old one: only a shard that has neither, or a process, is given the time of staging."""
    assert [(lag.text, lag.staging) for lag in step_blockers(in_step(step), FleetView(2, nodes), 5)] == [
        (text, staging)
    ]


@pytest.mark.parametrize("state", ["ready", "draining"])
@pytest.mark.parametrize("draining", [False, True])
def test_the_old_version_retires_when_no_process_reports_it(state, draining):
    old = node("t", {1: state, 2: "ready"}, live=2, draining=draining, leases=3)
    # How many leases a version that drains has left is not announced.
    leases = ", with 3 leases" if state == "ready" else ""
    new = node("s", {2: "ready"}, live=2)
    assert texts(in_step("retire_serving"), new, old) == [f"t: version 1 is {state} still{leases}"]


def test_deltas_are_waited_for_on_nodes_that_have_the_version():
    step = in_step("replay", replay_until=7)
    done = [node(name, BOTH, shard=shard, delta_sequence=7) for shard, name in enumerate("ab")]
    assert texts(step, *SHARDS) == ["a: applied delta 0 of 7", "b: applied delta 0 of 7"]
    assert texts(step, *done, node("c", {1: "ready"}, shard=0)) == []
    assert texts(step, *done, node("s", {2: "ready"}, shards=None)) == []
    local = node("s", {2: "ready"}, shards=None, plan_digest="c" * 64)
    assert texts(step, local, num_shards=None) == ["s: applied delta 0 of 7"]
    assert texts(in_step("replay", replay_until=0), *SHARDS) == []


@pytest.mark.parametrize(("draining", "expected"), [(False, "c: checksum"), (True, "")])
def test_a_refusal_counts_unless_the_node_is_leaving(draining, expected):
    bad = node("c", {2: "refused"}, shard=0, draining=draining, reason="checksum")
    assert refusals(in_step("stage_shards"), FleetView(2, (*SHARDS, bad))) == expected


def test_a_refusal_that_may_pass_holds_up_the_step_and_undoes_nothing():
    """Until the stage timeout; a committed rollout leaves such a node behind, by name."""
    unreadable = node("c", {2: "refused"}, shard=0, reason="EIO", passing=True)
    step, view = in_step("stage_shards"), FleetView(2, (*SHARDS, unreadable))
    assert refusals(step, view) == ""
    (blocker,) = step_blockers(step, view, 5)
    assert (blocker.text, blocker.staging) == ("c: version 2 is refused for now: EIO", True)
    assert refusals(rolling("roll:1"), view) == "c: EIO"


def test_undone_nodes_need_the_old_version_unless_they_refuse():
    rollout = undone(in_step("stage_serving"), 2.0, "aborted", "x")
    last = rollout.model_copy(update={"step_index": len(rollout.steps) - 1})
    back = (node("a", {1: "ready"}, shard=0), node("b", {1: "ready"}, shard=1))
    refusing = node("c", {1: "refused"}, shard=1)
    assert texts(last, *back) == texts(last, *back, refusing) == []
    assert texts(last, back[0], SHARDS[1]) == ["b: version 2 is ready still, with 0 leases"]
    assert texts(last, *back, node("c", {1: "staging"}, shard=1)) == ["c: version 1 is staging 0%"]
    assert texts(last, back[0], refusing) == ["shard 1: no node has version 1 ready"]


def rolling(step):
    groups = (("a", "b"), ("c", "d"))
    steps = plan_steps("by-replica", canary=False, bake=False, early_groups=1, groups=2)
    return in_step(step, steps=steps, strategy="by-replica", groups=groups, early_groups=1)


def test_a_group_rolls_while_others_have_the_live_version():
    others = (node("c", {1: "ready"}, shard=0), node("d", {1: "ready"}, shard=1))
    first = rolling("roll:0")
    assert cannot_roll(first, FleetView(2, (*SHARDS, *others))) == ()
    found = cannot_roll(first, FleetView(2, (*SHARDS, others[0])))
    assert [lag.text for lag in found] == ["shard 1 would be left without a node that has version 1 ready"]
    assert cannot_roll(first, FleetView(2, (*SHARDS, *others), settled=False)) != ()


def test_the_last_node_of_a_shard_is_not_rolled_after_the_flip():
    """It answers with the old version; where processes have let go of that, it may be all that can heal the shard."""
    rolled, old = (node("a", {2: "ready"}, shard=0), node("b", {2: "ready"}, shard=1)), {1: "ready"}
    others = (node("c", old, shard=0), node("d", old, shard=1))
    last = rolling("roll:1")
    assert cannot_roll(last, FleetView(2, (*rolled, *others))) == ()
    assert cannot_roll(last, FleetView(2, (rolled[1], *others, node("e", old, shard=0)))) == ()
    found = cannot_roll(last, FleetView(2, (rolled[1], *others)))
    assert [lag.text for lag in found] == ["shard 0 would be left without a node that has version 1 or 2 ready"]
    steps = (*last.steps[:-3], "retire_serving", "roll:1", "retire_shards")
    earlier = last.model_copy(update={"steps": steps, "step_index": len(steps) - 2})
    assert cannot_roll(earlier, FleetView(2, (rolled[1], *others))) == ()
    # The group refuses the new version, and who had it is away: the fallback is all that answers.
    refused = node("c", {1: "ready", 2: "refused"}, shard=0)
    assert texts(last, rolled[1], refused, others[1]) == [
        "d: does not have version 2 yet",
        "shard 0: no node has version 2 ready",
    ]


def test_a_node_just_lost_is_waited_for_and_then_forgotten():
    roster, fleet = RecentNodes(2.0), FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0)
    assert not roster.observe(SHARDS, fleet, 10.0).settled
    assert roster.observe(SHARDS, fleet, 12.0).settled
    view = roster.observe(SHARDS[:1], fleet, 13.0)
    assert [missing.node_id for missing in view.missing] == ["b"]
    assert texts(in_step("retire_shards"), *view.nodes, missing=view.missing)[0] == "b: not heard of for a moment"
    assert roster.observe(SHARDS[:1], fleet, 15.0).missing == ()
    roster.restart()
    assert not roster.observe(SHARDS, fleet, 16.0).settled
    assert texts(in_step("retire_shards"), *SHARDS, settled=False) == ["nodes are listened to first"]
