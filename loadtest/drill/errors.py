"""The drills' branch of the error tree: a drill that can't be run to its end. What a drill finds is no error."""

from __future__ import annotations

from loader.errors import ShardrankError


class DrillError(ShardrankError, kind="drill"):
    """A drill can't be run to its end."""


class LoadProcessError(DrillError, kind="drill_load"):
    """A process of the drill has ended by itself, or did not begin in time."""


class RolloutTimeoutError(DrillError, kind="drill_rollout_timeout"):
    """A rollout did not end in the time it was given. The message has its state and who lags."""
