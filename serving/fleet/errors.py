"""The fleet's branch of the error tree.

```
ServingError
└── FleetError             500 INTERNAL     a fleet that can't be started or run
    └── ChildFailedError                    a child process that ended or stayed silent; carries its last log lines
```
"""

from __future__ import annotations

from serving.errors import ServingError


class FleetError(ServingError):
    """A fleet that can't be started: no port, no room for a socket path, a setting that makes no sense."""

    kind = "fleet"


class ChildFailedError(FleetError):
    """A child process ended, or did not become ready in time. The message carries its last log lines."""

    kind = "child_failed"
