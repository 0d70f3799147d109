"""The router's branch of the error tree."""

from __future__ import annotations

from loader.errors import ShardrankError


class RouterError(ShardrankError):
    """Something about finding rows and bringing their sums together."""


class PlanError(RouterError):
    """The tables can't be divided as asked."""

    http_status = 422
    grpc_status = "FAILED_PRECONDITION"
    kind = "plan"


class PlanMismatchError(RouterError):
    """A shard node holds another shard, was loaded by another plan, or from another snapshot of that version."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "plan_mismatch"


class ShardUnavailableError(RouterError):
    """No replica of a shard answered. The message says what each one said."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "shard_unavailable"
