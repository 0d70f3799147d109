"""The drills' branch of the error tree.

```
ShardrankError
└── DrillError                  500 INTERNAL     a drill that can't be run to its end
    ├── LoadProcessError                         the process that asks and judges ended, or did not begin
    └── RolloutTimeoutError                      a rollout that did not end in the time it was given
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class DrillError(ShardrankError):
    """A drill can't be run to its end. What it finds is not an error but its result."""

    kind = "drill"


class LoadProcessError(DrillError):
    """The process that asks and judges has ended by itself, or did not begin in time."""

    kind = "drill_load"


class RolloutTimeoutError(DrillError):
    """A rollout did not end in the time it was given. The message has its state and who lags."""

    kind = "drill_rollout_timeout"
