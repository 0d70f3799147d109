"""The drills' branch of the error tree: a drill that can't be run to its end. What a drill finds is no error."""

from __future__ import annotations

from loader.errors import ShardrankError


class DrillError(ShardrankError):
    """A drill can't be run to its end."""

    kind = "drill"


class LoadProcessError(DrillError):
    """A process of the drill has ended by itself, or did not begin in time."""

    kind = "drill_load"


class RolloutTimeoutError(DrillError):
    """A rollout did not end in the time it was given. The message has its state and who lags."""

    kind = "drill_rollout_timeout"
