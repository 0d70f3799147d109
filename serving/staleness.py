"""How old the rows of a model may be: what its shards tell of the deltas that they follow."""

from __future__ import annotations

from collections.abc import Sequence

from shard_node.node import ServedVersion


def staleness_s(told: ServedVersion, now: float) -> float | None:
    """How old the newest change may be that a node has not applied, in seconds; None while it does not know.

    It is 0 at the moment at which a node finds everything applied, and grows until it looks again. So it stays small
    while nothing is published, and grows while the registry can't be reached.

    Args:
        told: one version of a node.
        now: seconds since the epoch.
    """
    return None if told.delta_fresh_at is None else max(0.0, now - told.delta_fresh_at)


def degraded_reason(told: Sequence[ServedVersion], max_staleness_s: float, now: float) -> str:
    """Why a version's rows are older than they may be; "" if they are not.

    Args:
        told: what each node of its shards told of it, at least one.
        max_staleness_s: the limit.
        now: seconds since the epoch.
    """
    version = told[0].version
    ages = [staleness_s(one, now) for one in told]
    known = [age for age in ages if age is not None]
    if len(known) < len(ages):
        return f"{len(ages) - len(known)} of {len(ages)} nodes with version {version} have not looked for deltas"
    if max(known) <= max_staleness_s:
        return ""
    late = sum(age > max_staleness_s for age in known)
    return (
        f"rows of version {version} are {max(known):.1f} s behind on {late} of {len(known)} nodes; "
        f"max_staleness_s = {max_staleness_s:g}"
    )
