"""The router's errors. That no replica of a shard answers is an UnavailableError of the kind `shard_unavailable`."""

from __future__ import annotations

from loader.errors import ShardrankError


class PlanError(ShardrankError, http_status=422, grpc_status="FAILED_PRECONDITION", kind="plan"):
    """The tables can't be divided as asked."""


class UnfitReplicaError(ShardrankError, http_status=503, grpc_status="UNAVAILABLE"):
    """A replica that has not what a lookup needs.

    `plan_mismatch`: it holds another shard, was loaded by another plan, or from another snapshot of that version.
    `replica_lags`: its rows are older than the dense weights need that they are ranked with, or forked.
    `rows_stale`: they are older than the lookup's bound.
    """


class HotRowsError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="hot_rows"):
    """A tier of hot rows that can't be as it is asked for."""


class FittingError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="fitting"):
    """Sizes that can't be found: a limit out of range, or counts that are of another table."""
