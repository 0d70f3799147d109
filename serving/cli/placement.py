"""Which tables a fleet holds whole on every shard and which it divides, in one line."""

from __future__ import annotations

from router.plan import REPLICATED, Plan

_QUOTED_TABLES = 8


def placement_line(plan: Plan) -> str:
    """`on every shard: genre, city; split over 2 shards: user, film`.

    Args:
        plan: of the fleet.
    """
    if plan.num_shards == 1:
        return f"one shard holds every table: {_quoted([table.name for table in plan.layout.tables])}"
    whole: list[str] = []
    rest: list[str] = []
    for table, owners in zip(plan.layout.tables, plan.shard_of_bucket, strict=True):
        (whole if owners[0] == REPLICATED else rest).append(table.name)
    how = "whole on one shard each" if plan.sharding == "table" else f"split over {plan.num_shards} shards"
    return f"on every shard: {_quoted(whole)}; {how}: {_quoted(rest)}"


def _quoted(names: list[str]) -> str:
    shown = ", ".join(names[:_QUOTED_TABLES]) or "none"
    return f"{shown} and {len(names) - _QUOTED_TABLES} more" if len(names) > _QUOTED_TABLES else shown
