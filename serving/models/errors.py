"""What a ranking model refuses.

```
ShardrankError
└── RankingModelError    422 FAILED_PRECONDITION   a dense model that does not fit its description or this machine
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class RankingModelError(ShardrankError):
    """A config, a tensor or a number format that the ranking model can't be built with."""

    http_status = 422
    grpc_status = "FAILED_PRECONDITION"
    kind = "bad_model"
