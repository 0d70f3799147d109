"""Which nodes serve which shard of which version, as the registry last reported; read by threads without a lock."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import ValidationError

from loader.errors import ConfigError
from loader.registry.fleet import FleetRecord, NodeRecord
from shard_node.wire.address import Address

logger = logging.getLogger(__name__)

FORGET_AFTER_S: Final = 10.0
_Key: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _View:
    epoch: int
    replicas: Mapping[_Key, tuple[Address, ...]]
    topology: FleetRecord | None


@dataclass(slots=True)
class _Node:
    record: NodeRecord
    address: Address
    topology: FleetRecord | None
    missing_since: float | None = None


class ReplicaDirectory:
    """The shard nodes of a fleet. Thread-safe; reading is one access of a dictionary.

    A node that is not announced any more is kept for `forget_after_s`: its lease may have run out because the
    registry lost it, not because it is gone. For the same reason a shard's last known nodes are never forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, forget_after_s: float = FORGET_AFTER_S) -> None:
        self._clock = clock
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._unusable: dict[str, str] = {}
        self._view = _View(0, {}, None)

    def update(self, nodes: Iterable[NodeRecord]) -> None:
        """Replace the announced nodes; those that are no shard nodes are passed over.

        An announcement that can't be used, of another release perhaps, is logged and counts as missing.
        """
        announced: dict[str, _Node] = {}
        unusable: dict[str, str] = {}
        for record in nodes:
            if record.kind == "shard" and record.shard_index is not None:
                division = {name: getattr(record, name) for name in FleetRecord.model_fields}
                try:
                    topology = None if None in division.values() else FleetRecord.model_validate(division)
                    announced[record.node_id] = _Node(record, Address.parse(record.address), topology)
                except (ConfigError, ValidationError) as error:
                    unusable[record.node_id] = str(error)
        with self._lock:
            for node_id, reason in unusable.items():
                if self._unusable.get(node_id) != reason:
                    logger.warning("shard node %s: its announcement can't be used: %s", node_id, reason)
            self._unusable = unusable
            self._forget_missing(announced)
            known = [node for _, node in sorted(self._nodes.items())]
            # A node that was restarted under another name may still be announced under its old one: addresses once.
            addresses: dict[_Key, dict[Address, None]] = defaultdict(dict)
            for node in known:
                if node.record.draining or node.record.shard_index is None:
                    continue
                for report in node.record.versions:
                    if report.state == "ready":
                        addresses[report.model, report.version, node.record.shard_index][node.address] = None
            replicas = {key: tuple(of_key) for key, of_key in addresses.items()}
            topologies = {node.topology for node in known if node.topology is not None}
            topology = topologies.pop() if len(topologies) == 1 else None
            if (replicas, topology) != (self._view.replicas, self._view.topology):
                self._view = _View(self._view.epoch + 1, replicas, topology)

    def current(self, model: str, version: int, shard_index: int) -> tuple[int, tuple[Address, ...]]:
        """Return an epoch, and where nodes are that report this version of this shard `ready`, and do not drain.

        The epoch counts up whenever any addresses change.
        """
        view = self._view
        return view.epoch, view.replicas.get((model, version, shard_index), ())

    def topology(self) -> FleetRecord | None:
        """Return how the announced nodes divide rows; None if there are none, or they do not agree."""
        return self._view.topology

    def _forget_missing(self, announced: Mapping[str, _Node]) -> None:
        now = self._clock()
        for node_id, node in self._nodes.items():
            if node_id not in announced and node.missing_since is None:
                node.missing_since = now
                logger.warning("shard node %s is gone", node_id)
        for node_id, node in announced.items():
            if node_id not in self._nodes or self._nodes[node_id].missing_since is not None:
                logger.info("shard node %s is there, at %s", node_id, node.address)
        self._nodes |= announced
        present = {node.record.shard_index for node in self._nodes.values() if node.missing_since is None}
        for node_id, node in list(self._nodes.items()):
            is_over = node.missing_since is not None and now - node.missing_since >= self._forget_after_s
            if is_over and node.record.shard_index in present:
                logger.debug("shard node %s is forgotten", node_id)
                del self._nodes[node_id]
