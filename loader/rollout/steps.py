"""The steps of a rollout, and what is wanted of a fleet in each. Pure.

What is wanted in a step follows from the rollout's record alone, never from what was wanted before: a step may be done
twice, and a registry that lost everything can be written anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loader.registry.records import Canary, WantedModel
from loader.rollout.record import Rollout, Strategy

STAGE_SHARDS = "stage_shards"
STAGE_SERVING = "stage_serving"
REPLAY = "replay"
CANARY = "canary"
FLIP = "flip"
BAKE = "bake"
UNFLIP = "unflip"
RETIRE_SERVING = "retire_serving"
RETIRE_SHARDS = "retire_shards"
ROLL = "roll:"
UNDO_STEPS = (UNFLIP, RETIRE_SERVING, RETIRE_SHARDS)


def plan_steps(
    strategy: Strategy, *, canary: bool, bake: bool, early_groups: int = 0, groups: int = 0
) -> tuple[str, ...]:
    """Names of a rollout's steps in order.

    Args:
        strategy: of `Rollout`.
        canary: whether a share of the requests goes first; the bake is part of that step then.
        bake: whether the flipped version is held against the one it replaced.
        early_groups: how many groups of shard nodes are rolled before the flip.
        groups: how many there are.
    """
    early: tuple[str, ...] = (STAGE_SHARDS,)
    late: tuple[str, ...] = ()
    if strategy == "by-replica":
        early = tuple(f"{ROLL}{group}" for group in range(early_groups))
        late = tuple(f"{ROLL}{group}" for group in range(early_groups, groups))
    return (
        *early,
        STAGE_SERVING,
        REPLAY,
        *((CANARY,) if canary else ()),
        FLIP,
        *((BAKE,) if bake and not canary else ()),
        RETIRE_SERVING,
        *late,
        RETIRE_SHARDS,
    )


def replica_groups(nodes_by_shard: Mapping[int, Sequence[str]]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Groups of shard nodes to roll together, at most one of each shard in a group.

    Of each shard, half of its nodes (at least one, by id) are in the groups that come before the flip and the rest in
    those after it, so that both versions have a node of each shard in between.

    Returns:
        The groups, and how many come before the flip.
    """
    early = {shard: max(1, len(nodes) // 2) for shard, nodes in nodes_by_shard.items()}
    num_early = max(early.values(), default=0)
    num_late = max((len(nodes) - early[shard] for shard, nodes in nodes_by_shard.items()), default=0)
    groups: list[list[str]] = [[] for _ in range(num_early + num_late)]
    for shard, nodes in sorted(nodes_by_shard.items()):
        for rank, node_id in enumerate(sorted(nodes)):
            groups[rank if rank < early[shard] else num_early + rank - early[shard]].append(node_id)
    return tuple(tuple(group) for group in groups), num_early


def group_of(rollout: Rollout, step: str) -> tuple[str, ...]:
    """The node ids that a `roll:` step rolls; empty for other steps."""
    return rollout.groups[int(step.removeprefix(ROLL))] if step.startswith(ROLL) else ()


def wanted_in_step(rollout: Rollout, epoch: int) -> WantedModel:
    """What is wanted of the fleet in the step that a rollout is in."""
    if rollout.undo_index is None:
        return _forward(rollout, rollout.step_index, epoch)
    begun, undone = rollout.steps[: rollout.undo_index], rollout.steps[rollout.undo_index : rollout.step_index + 1]
    old = _versions(rollout.from_version)
    # Before serving processes were told of the new version, shard nodes can let go of it at once. They must: the last
    # step that was begun may never have been written, because it would have taken away a shard's last node.
    if RETIRE_SHARDS in undone or STAGE_SERVING not in begun:
        return WantedModel(
            model=rollout.model,
            epoch=epoch,
            live=rollout.from_version,
            hold=old,
            serve=old,
            follow=old if rollout.from_followed else (),
        )
    wanted = _forward(rollout, rollout.undo_index - 1, epoch)
    change: dict[str, object] = {"live": rollout.from_version, "canary": None}
    if RETIRE_SERVING in undone:
        change["serve"] = old
    return wanted.model_copy(update=change)


def same_wish(one: WantedModel, other: WantedModel) -> bool:
    """Whether two records want the same, whatever their epochs."""
    return one.model_copy(update={"epoch": other.epoch}) == other


def _forward(rollout: Rollout, step_index: int, epoch: int) -> WantedModel:
    begun = rollout.steps[: step_index + 1]
    old, new = _versions(rollout.from_version), _versions(rollout.to_version)
    followed = old if rollout.from_followed else ()
    ended = RETIRE_SHARDS in begun
    rolled = [node_id for step in begun for node_id in group_of(rollout, step)]
    in_canary = begun[-1] == CANARY and rollout.canary_share is not None
    hold = new if ended else (*old, *new) if STAGE_SHARDS in begun else old
    return WantedModel(
        model=rollout.model,
        epoch=epoch,
        live=rollout.to_version if FLIP in begun else rollout.from_version,
        hold=hold,
        serve=new if RETIRE_SERVING in begun else (*old, *new) if STAGE_SERVING in begun else old,
        follow=new if ended else (*followed, *new) if REPLAY in begun else followed,
        canary=Canary(version=rollout.to_version, share=rollout.canary_share or 0.0) if in_canary else None,
        node_hold={} if ended else dict.fromkeys(rolled, new),
    )


def _versions(version: int | None) -> tuple[int, ...]:
    return () if version is None else (version,)
