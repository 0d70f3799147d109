"""What two versions answered during a bake, summed over serving processes and over their restarts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from loader.registry.records import NodeRecord, VersionStats
from loader.rollout.record import NodeBaseline, Rollout
from loader.rollout.steps import BAKE

NOTHING = VersionStats()


def baseline_of(nodes: Iterable[NodeRecord], rollout: Rollout) -> dict[str, NodeBaseline]:
    """What serving processes have counted by now, by node id."""
    return {
        node.node_id: NodeBaseline(
            process_id=node.process_id,
            live=_stats(node, rollout.model, rollout.from_version) or NOTHING,
            new=_stats(node, rollout.model, rollout.to_version) or NOTHING,
        )
        for node in nodes
        if node.kind == "serving"
    }


class BakeTally:
    """Follows one bake of one model.

    What a process had counted when it died is remembered here, and so is lost only if the coordinator ends as well.
    """

    def __init__(self) -> None:
        """Follows nothing yet."""
        self._bake: tuple[str, float] | None = None
        self._last: dict[tuple[str, int], tuple[VersionStats, VersionStats]] = {}

    def totals(self, rollout: Rollout, nodes: Sequence[NodeRecord]) -> tuple[VersionStats, VersionStats]:
        """What the live and the new version answered since the bake began, as far as `nodes` and earlier ones tell.

        After a flip the old version answers no more: all that it answered before stands for it then.
        """
        bake = (rollout.rollout_id, rollout.bake_began_at or 0.0)
        if bake != self._bake:
            self._bake = bake
            self._last = {(key, one.process_id): (one.live, one.new) for key, one in rollout.baseline.items()}
        for node in nodes:
            if node.kind != "serving":
                continue
            key = (node.node_id, node.process_id)
            live, new = self._last.get(key, (NOTHING, NOTHING))
            self._last[key] = (
                _stats(node, rollout.model, rollout.from_version) or live,
                _stats(node, rollout.model, rollout.to_version) or new,
            )
        live_parts, new_parts = [], []
        for (node_id, process_id), (live, new) in self._last.items():
            base = rollout.baseline.get(node_id)
            same = base is not None and base.process_id == process_id
            live_parts.append(since(live, base.live) if same and base and rollout.step != BAKE else live)
            new_parts.append(since(new, base.new) if same and base else new)
        return added(live_parts), added(new_parts)


def since(now: VersionStats, then: VersionStats) -> VersionStats:
    """What was counted between two moments; all of `now` if the counts began anew in between."""
    counts = tuple(late - early for late, early in zip_longest(now.latency_counts, then.latency_counts, fillvalue=0))
    difference = VersionStats(
        requests=now.requests - then.requests,
        errors=now.errors - then.errors,
        latency_counts=counts,
        score_count=now.score_count - then.score_count,
        score_sum=now.score_sum - then.score_sum,
        score_square_sum=now.score_square_sum - then.score_square_sum,
    )
    began_anew = min(difference.requests, difference.errors, difference.score_count, *counts, 0) < 0
    return now if began_anew else difference


def added(parts: Iterable[VersionStats]) -> VersionStats:
    """The sum of counts."""
    listed = list(parts)
    columns = zip_longest(*(part.latency_counts for part in listed), fillvalue=0)
    return VersionStats(
        requests=sum(part.requests for part in listed),
        errors=sum(part.errors for part in listed),
        latency_counts=tuple(sum(column) for column in columns),
        score_count=sum(part.score_count for part in listed),
        score_sum=sum(part.score_sum for part in listed),
        score_square_sum=sum(part.score_square_sum for part in listed),
    )


def _stats(node: NodeRecord, model: str, version: int | None) -> VersionStats | None:
    report = None if version is None else node.report(model, version)
    return report.stats if report is not None else None
