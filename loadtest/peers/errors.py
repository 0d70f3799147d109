"""The peers' branch of the error tree.

```
ShardrankError
└── PeersError                  500 INTERNAL             the comparison can't be made
    ├── PeerEnvironmentError                             a peer is not installed, or can't be
    └── PeerServerError                                  a peer does not serve, or its scores are not the model's
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class PeersError(ShardrankError):
    """The comparison can't be made."""

    kind = "peers"


class PeerEnvironmentError(PeersError):
    """A peer's virtual environment is not there, or pip could not make it."""

    kind = "peers_environment"


class PeerServerError(PeersError):
    """A peer has ended, does not serve in time, or answers with other scores than the model's."""

    kind = "peers_server"
