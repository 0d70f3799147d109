"""The demo's branch of the error tree.

```
ServingError
└── DemoError               500 INTERNAL
    ├── RankCallError       a request that was not answered with scores
    └── DemoStoppedError    the demo was asked to stop while it measured
```
"""

from __future__ import annotations

from serving.errors import ServingError


class DemoError(ServingError):
    """Something that went wrong on the demo's own side of the API."""

    kind = "demo"


class RankCallError(DemoError):
    """A request that was not answered with scores. The message has the status and what the server said."""

    kind = "rank_call"


class DemoStoppedError(DemoError):
    """The demo was asked to stop while it measured."""

    kind = "demo_stopped"
