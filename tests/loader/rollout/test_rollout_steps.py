"""What is wanted in each step follows from the plan alone, and never takes away what is answered with."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import RegistryRecordError, RolloutError
from loader.rollout.plan import (
    MAX_EVENTS,
    advanced,
    changed,
    decode_rollout,
    plan_steps,
    replica_groups,
    undone,
    wanted_in_step,
)
from shardrank_testing.rollout_fleet import rollout_record

GROUPS = (("a0", "b0"), ("a1", "b1"), ("a2",))


def a_rollout(strategy="beside", *, old=1, canary=False, bake=False):
    groups, early = (GROUPS, 1) if strategy == "by-replica" else ((), 0)
    return rollout_record(
        from_version=old,
        from_followed=True,
        strategy=strategy,
        canary_share=0.1 if canary else None,
        bake_s=5.0 if bake else 0.0,
        steps=plan_steps(strategy, canary=canary, bake=bake, early_groups=early, groups=len(groups)),
        groups=groups,
        early_groups=early,
    )


def to_the_end(rollout, undo_in=None):
    """(record, what is wanted) of every step, undone when a step of that index has been done."""
    found, epoch = [], 0
    while rollout.active:
        epoch += 1
        found.append((rollout, wanted_in_step(rollout, epoch)))
        if rollout.state == "running" and rollout.step_index == undo_in:
            rollout = undone(rollout, 2.0, "aborted", "because")
        else:
            rollout = advanced(rollout, 2.0, epoch, "done")
    return found, rollout


@pytest.mark.parametrize(
    ("canary", "bake", "middle"),
    [
        (False, False, ("flip",)),
        (True, False, ("canary", "flip")),
        (True, True, ("canary", "flip")),
        (False, True, ("flip", "bake")),
    ],
)
def test_the_steps_are_those_that_were_asked_for(canary, bake, middle):
    beside = a_rollout(canary=canary, bake=bake).steps
    assert beside == ("stage_shards", "stage_serving", "replay", *middle, "retire_serving", "retire_shards")
    rolled = a_rollout("by-replica", canary=canary, bake=bake).steps
    start, end = ("roll:0", "stage_serving", "replay"), ("roll:1", "roll:2", "retire_serving", "retire_shards")
    assert rolled == (*start, *middle, *end)


def test_what_is_wanted_step_by_step():
    seen = [
        (wanted.hold, wanted.serve, wanted.follow, wanted.live, wanted.canary is not None)
        for _, wanted in to_the_end(a_rollout(canary=True))[0]
    ]
    assert seen == [
        ((1, 2), (1,), (1,), 1, False),
        ((1, 2), (1, 2), (1,), 1, False),
        ((1, 2), (1, 2), (1, 2), 1, False),
        ((1, 2), (1, 2), (1, 2), 1, True),
        ((1, 2), (1, 2), (1, 2), 2, False),
        ((1, 2), (2,), (1, 2), 2, False),
        ((2,), (2,), (2,), 2, False),
    ]


def test_by_replica_each_group_is_moved_over_in_its_step():
    seen = {record.step: wanted.node_hold for record, wanted in to_the_end(a_rollout("by-replica"))[0]}
    assert seen["roll:0"] == seen["flip"] == {"a0": (2,), "b0": (2,)}
    assert seen["roll:1"] == dict.fromkeys(("a0", "b0", "a1", "b1"), (2,))
    assert set(seen["roll:2"]) == {"a0", "b0", "a1", "b1", "a2"}
    assert seen["retire_shards"] == {}


def test_by_replica_the_old_version_is_the_fallback_until_it_retires():
    seen = {record.step: wanted for record, wanted in to_the_end(a_rollout("by-replica", canary=True))[0]}
    falling = [step for step, wanted in seen.items() if wanted.fallback is not None]
    assert falling == ["flip", "roll:1", "roll:2"]
    assert {(seen[step].fallback, seen[step].live, seen[step].serve) for step in falling} == {(1, 2, (1, 2))}
    plans = to_the_end(a_rollout("by-replica", bake=True), undo_in=4)[0] + to_the_end(a_rollout(bake=True))[0]
    assert {wanted.fallback for record, wanted in plans if record.state == "undoing" or not record.groups} == {None}


def test_a_plan_of_an_earlier_release_ends_as_it_began():
    """It retires the old version on serving processes before it rolls the late groups, which nothing can undo then."""
    plan = a_rollout("by-replica")
    *start, late, last, retire, end = plan.steps
    earlier = decode_rollout("m", plan.model_copy(update={"steps": (*start, retire, late, last, end)}).encode())
    found, ended = to_the_end(earlier)
    assert [record.step for record, _ in found if record.committed] == [retire, late, last, end]
    assert [record.step for record, wanted in found if wanted.fallback] == ["flip"]
    assert {wanted.serve for record, wanted in found if record.committed} == {(2,)}
    assert (ended.state, found[-1][1].hold) == ("done", (2,))


PLANS = st.builds(
    a_rollout,
    st.sampled_from(["beside", "by-replica"]),
    canary=st.booleans(),
    bake=st.booleans(),
) | st.builds(lambda canary: a_rollout(old=None, bake=canary), st.booleans())


@given(PLANS, st.integers(0, 9))
def test_what_is_live_or_canary_is_served_and_on_each_shard(plan, undo_in):
    last = "flip" if plan.from_version is None else "roll:1" if plan.groups else "retire_serving"
    too_late = plan.steps.index(last)
    undo_in = None if undo_in >= too_late else undo_in
    found, ended = to_the_end(plan, undo_in)
    assert ended.state == ("done" if undo_in is None else "aborted")
    nodes = {"a": ("a0", "a1", "a2"), "b": ("b0", "b1")}
    # What a node held in the step before, it surely has; what is wanted anew it may have or not.
    before = {node: {1} for shard in nodes.values() for node in shard}
    for _, wanted in found:
        assert wanted.fallback in (None, *wanted.serve)
        for version in {wanted.live, wanted.canary and wanted.canary.version} - {None}:
            assert version in wanted.serve
            for shard in nodes.values():
                is_held = any(version in before[node] and version in wanted.held_by(node) for node in shard)
                assert is_held or plan.from_version is None
        before = {node: set(wanted.held_by(node)) for shard in nodes.values() for node in shard}
    last = found[-1][1]
    kept = ended.to_version if ended.forward else ended.from_version
    left = () if kept is None else (kept,)
    assert (last.live, last.hold, last.serve, last.follow) == (kept, left, left, left)
    assert (last.canary, last.node_hold) == (None, {})


@given(PLANS, st.integers(0, 2))
def test_a_record_survives_being_written_and_read(plan, undo_in):
    for record, wanted in to_the_end(plan, undo_in)[0]:
        again = decode_rollout("m", record.encode())
        assert again == record
        assert wanted.wants_same(wanted_in_step(again, 99))


def test_every_change_counts_the_epoch_up():
    plan = a_rollout()
    records = [changed(plan, 2.0, "x"), advanced(plan, 2.0, 5, "x"), changed(plan, 2.0, "x", base_epoch=5)]
    records += [changed(plan, 2.0, "x", step_index=3, base_epoch=4), undone(plan, 2.0, "refused", "x")]
    assert [one.epoch for one in records] == [2] * 5
    assert [one.base_epoch for one in records] == [0, 5, 5, 4, 0]
    assert [one.step_index for one in records[:4]] == [0, 1, 0, 3]


def test_events_are_bounded_and_the_last_ones_stay():
    plan = a_rollout()
    for number in range(MAX_EVENTS + 50):
        plan = changed(plan, float(number), f"{number}" * 3000)
    assert len(plan.events) == MAX_EVENTS
    assert plan.events[-1].at == MAX_EVENTS + 49
    assert len(plan.encode()) < 1 << 20


@pytest.mark.parametrize(
    ("counts", "early", "sizes"),
    [
        ({0: 2, 1: 2}, 1, [2, 2]),
        ({0: 3, 1: 3}, 1, [2, 2, 2]),
        ({0: 4, 1: 4}, 2, [2, 2, 2, 2]),
        ({0: 2, 1: 5}, 2, [2, 1, 2, 1, 1]),
    ],
)
def test_groups_leave_a_node_of_each_shard_until_the_flip(counts, early, sizes):
    nodes = {shard: [f"{shard}-{replica}" for replica in range(count)] for shard, count in counts.items()}
    groups, num_early = replica_groups(nodes)
    assert (num_early, [len(group) for group in groups]) == (early, sizes)
    assert sorted(itertools.chain(*groups)) == sorted(itertools.chain(*nodes.values()))
    for group in groups:
        assert len({node.split("-")[0] for node in group}) == len(group)
    for shard in nodes:
        rolled = [node for group in groups[:num_early] for node in group if node.startswith(f"{shard}-")]
        assert 0 < len(rolled) < counts[shard]


def test_undoing_ends_with_the_old_version_and_is_done_once():
    found, ended = to_the_end(a_rollout())
    committed = next(record for record, _ in found if record.step == "retire_serving")
    for rollout, problem in (
        (committed, "version 1 is being retired; once it is done, use rollback"),
        (ended, "is not running: it is done"),
        (undone(a_rollout(), 2.0, "aborted", "first"), "is being undone already: aborted: first"),
    ):
        with pytest.raises(RolloutError, match=problem):
            undone(rollout, 2.0, "aborted", "x")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"{", "rollouts/m: not a rollout: document: Invalid JSON"),
        (b"{}", "rollouts/m: not a rollout: model: Field required"),
        (a_rollout().encode().replace(b'"m"', b'"n"'), "rollouts/m: is of model 'n'"),
        (a_rollout().encode().replace(b'"step_index":0', b'"step_index":9'), "step_index: 9, but there are 6"),
        (a_rollout().encode().replace(b'"from_version":1', b'"from_version":2'), "to_version: 2"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_key(value, problem):
    with pytest.raises(RegistryRecordError, match=problem):
        decode_rollout("m", value)
