"""The router's branch of the error tree."""

from __future__ import annotations

from loader.errors import ShardrankError


class RouterError(ShardrankError):
    """Something about finding rows and bringing their sums together."""


class PlanError(RouterError, http_status=422, grpc_status="FAILED_PRECONDITION", kind="plan"):
    """The tables can't be divided as asked."""


class PlanMismatchError(RouterError, http_status=503, grpc_status="UNAVAILABLE", kind="plan_mismatch"):
    """A shard node holds another shard, was loaded by another plan, or from another snapshot of that version."""


class ShardUnavailableError(RouterError, http_status=503, grpc_status="UNAVAILABLE", kind="shard_unavailable"):
    """No replica of a shard answered. The message says what each one said."""


class ReplicaLagsError(RouterError, http_status=503, grpc_status="UNAVAILABLE", kind="replica_lags"):
    """A replica's rows are older than the dense weights need that they are ranked with; another one is asked."""


class HotRowsError(RouterError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="hot_rows"):
    """A tier of hot rows that can't be as it is asked for."""


class FittingError(RouterError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="fitting"):
    """Sizes that can't be found: a limit out of range, or counts that are of another table."""
