"""Who is there. A registry that has just come back knows of nobody, and that must not pass for an empty fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loader.registry.records import FleetRecord, NodeRecord


@dataclass(frozen=True, slots=True)
class FleetView:
    """What is known of a fleet's nodes at one moment.

    Attributes:
        num_shards: how the fleet divides rows; None if no shard node was ever there.
        nodes: what is announced.
        missing: what was announced a moment ago, and did not say that it would go.
        settled: nodes were listened to for long enough that each one that lives was heard of.
    """

    num_shards: int | None
    nodes: tuple[NodeRecord, ...]
    missing: tuple[NodeRecord, ...] = ()
    settled: bool = True

    @classmethod
    def of(cls, nodes: Sequence[NodeRecord], fleet: FleetRecord | None) -> FleetView:
        """What is announced now. A fleet whose record is lost is divided as its shard nodes say."""
        told = [node.num_shards for node in nodes if node.kind == "shard" and node.num_shards is not None]
        return cls(fleet.num_shards if fleet is not None else max(told, default=None), tuple(nodes))

    def for_model(self, model: str) -> FleetView:
        """Without the nodes that are for other models."""
        nodes = tuple(node for node in self.nodes if node.is_for(model))
        return replace(self, nodes=nodes, missing=tuple(node for node in self.missing if node.is_for(model)))

    def shard_nodes(self) -> tuple[NodeRecord, ...]:
        """Shard nodes that take requests."""
        return tuple(node for node in self.nodes if node.kind == "shard" and not node.draining)

    def serving(self) -> tuple[NodeRecord, ...]:
        """Serving processes that take requests."""
        return tuple(node for node in self.nodes if node.kind == "serving" and not node.draining)

    def needs_shards(self) -> bool:
        """Whether rows lie on shard nodes. Not if there are none and each serving process holds its own."""
        if self.shard_nodes():
            return True
        serving = self.serving()
        return not serving or any(node.num_shards is not None for node in serving)


class Roster:
    """Remembers for `settle_s` seconds who was there.

    It is longer than the pause between two announcements of a node, and shorter than a rollout's patience.
    """

    def __init__(self, settle_s: float) -> None:
        """Has seen nobody."""
        self._settle_s = settle_s
        self._since: float | None = None
        self._seen: dict[str, tuple[float, NodeRecord]] = {}

    def observe(self, nodes: Sequence[NodeRecord], fleet: FleetRecord | None, now: float) -> FleetView:
        """What is announced at `now` (seconds), with who was there a moment ago."""
        # A clock that was set back would keep everybody missing for that long.
        if self._since is None or now < self._since:
            self._since = now
        self._seen.update({node.node_id: (now, node) for node in nodes})
        self._seen = {key: (at, node) for key, (at, node) in self._seen.items() if 0 <= now - at <= self._settle_s}
        there = {node.node_id for node in nodes}
        missing = [node for key, (_, node) in self._seen.items() if key not in there and not node.draining]
        settled = now - self._since >= self._settle_s
        return replace(FleetView.of(nodes, fleet), missing=tuple(missing), settled=settled)

    def lose_sight(self) -> None:
        """The registry did not answer, or somebody else looked: nodes are listened to from the start again."""
        self._since = None
