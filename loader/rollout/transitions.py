"""How a rollout's record changes. Pure: each takes a record and gives the next one, with its epoch counted up."""

from __future__ import annotations

from collections.abc import Mapping

from loader.errors import RolloutError
from loader.registry.records import cut_reason
from loader.rollout.record import MAX_EVENTS, Event, NodeBaseline, Outcome, Rollout
from loader.rollout.steps import RETIRE_SHARDS, UNDO_STEPS


def noted(rollout: Rollout, now: float, text: str) -> Rollout:
    """With one more event, of the step that it is in."""
    return _changed(rollout, now, text)


def advanced(rollout: Rollout, now: float, wanted_epoch: int, text: str) -> Rollout:
    """In its next step, or ended.

    Args:
        rollout: in a step that is covered.
        now: seconds since the epoch.
        wanted_epoch: of the wanted record as it is now; the next step's write follows it.
        text: the event that says how the step was done.
    """
    if rollout.step == RETIRE_SHARDS:
        return _changed(rollout, now, text, state=rollout.outcome if rollout.state == "undoing" else "done")
    return _changed(
        rollout,
        now,
        text,
        step_index=rollout.step_index + 1,
        step_began_at=now,
        base_epoch=wanted_epoch,
        bake_began_at=None,
        baseline={},
    )


def rebased(rollout: Rollout, now: float, wanted_epoch: int, text: str) -> Rollout:
    """In the same step, which is to be done again after the wanted record's epoch as it is now."""
    return _changed(rollout, now, text, base_epoch=wanted_epoch)


def forwarded(rollout: Rollout, now: float, step_index: int, wanted_epoch: int, text: str) -> Rollout:
    """In a later step that is wanted already: this record is older than the wanted one."""
    return _changed(rollout, now, text, step_index=step_index, step_began_at=now, base_epoch=wanted_epoch - 1)


def replaying(rollout: Rollout, now: float, last_delta: int) -> Rollout:
    """With the delta on record up to which the new version is to be brought."""
    return _changed(rollout, now, f"deltas are replayed up to {last_delta}", replay_until=last_delta)


def given_up(rollout: Rollout, now: float, reason: str) -> Rollout:
    """Ended where it is, since somebody else has taken over what is wanted."""
    return _changed(rollout, now, reason, state="aborted", outcome="aborted", reason=cut_reason(reason))


def undone(rollout: Rollout, now: float, outcome: Outcome, reason: str) -> Rollout:
    """On its way back, to end as `outcome`. Its steps are those begun so far, then those of undoing.

    Raises:
        RolloutError: it has ended, is undone already, or there is no way back any more.
    """
    name = f"{rollout.model}: the rollout of version {rollout.to_version}"
    if not rollout.active:
        raise RolloutError(f"{name} is not running: it is {rollout.state}")
    if rollout.state == "undoing":
        raise RolloutError(f"{name} is being undone already: {rollout.outcome}: {rollout.reason}")
    if rollout.committed:
        old = rollout.from_version
        why = "there is no version to go back to" if old is None else f"version {old} is being retired"
        raise RolloutError(f"{name} can't be undone in step {rollout.step!r}: {why}; once it is done, use rollback")
    begun = rollout.steps[: rollout.step_index + 1]
    return _changed(
        rollout,
        now,
        f"{outcome}: {reason}",
        state="undoing",
        outcome=outcome,
        reason=cut_reason(reason),
        steps=(*begun, *UNDO_STEPS),
        step_index=len(begun),
        undo_index=len(begun),
        step_began_at=now,
    )


def baking(rollout: Rollout, now: float, baseline: Mapping[str, NodeBaseline]) -> Rollout:
    """With its bake begun, and what the serving processes had counted by then."""
    text = f"bake of {rollout.bake_s:g} s begins on {len(baseline)} serving processes"
    return _changed(rollout, now, text, bake_began_at=now, baseline=dict(baseline))


def _changed(rollout: Rollout, now: float, text: str, **change: object) -> Rollout:
    event = Event(at=now, step=rollout.step, text=cut_reason(text))
    update = {"epoch": rollout.epoch + 1, "events": (*rollout.events, event)[-MAX_EVENTS:], **change}
    # Not model_copy: what comes out must be a record that can be read again.
    return Rollout.model_validate({**dict(rollout), **update})
