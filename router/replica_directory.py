"""Which nodes serve which shard of which version, as the registry last told; read by many threads without a lock."""

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
class _Known:
    record: NodeRecord
    address: Address
    topology: FleetRecord | None
    missing_since: float | None = None


class ReplicaDirectory:
    """The shard nodes of a fleet. Thread-safe; reading is one look into a dictionary.

    A node that is not announced any more is still asked for `forget_after_s`: its lease may have run out because the
    registry lost it, not because it is gone. For the same reason a shard's last known nodes are never forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, forget_after_s: float = FORGET_AFTER_S) -> None:
        self._clock = clock
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._unusable: dict[str, str] = {}
        self._view = _View(0, {}, None)

    def update(self, nodes: Iterable[NodeRecord]) -> None:
        """Replace the announced nodes; those that are no shard nodes are passed over.

        An announcement that can't be used, of another release perhaps, is logged and counts as missing.
        """
        shard_nodes = [node for node in nodes if node.kind == "shard" and node.shard_index is not None]
        announced: dict[str, _Known] = {}
        unusable: dict[str, str] = {}
        for node in shard_nodes:
            try:
                announced[node.node_id] = _Known(node, Address.parse(node.address), _divided_by(node))
            except (ConfigError, ValidationError) as error:
                unusable[node.node_id] = str(error)
        with self._lock:
            for node_id in [one for one, reason in unusable.items() if self._unusable.get(one) != reason]:
                logger.warning("shard node %s: its announcement can't be used: %s", node_id, unusable[node_id])
            self._unusable = unusable
            now = self._clock()
            for node_id, known in self._known.items():
                if node_id not in announced and known.missing_since is None:
                    known.missing_since = now
            self._known |= announced
            present = {one.record.shard_index for one in self._known.values() if one.missing_since is None}
            for node_id, known in list(self._known.items()):
                if known.missing_since is None or now - known.missing_since < self._forget_after_s:
                    continue
                if known.record.shard_index in present:
                    logger.info("shard node %s is forgotten", node_id)
                    del self._known[node_id]
            in_order = [self._known[node_id] for node_id in sorted(self._known)]
            found: dict[_Key, list[Address]] = defaultdict(list)
            for member in in_order:
                record = member.record
                if record.draining or record.shard_index is None:
                    continue
                for report in record.versions:
                    addresses = found[report.model, report.version, record.shard_index]
                    # A node that was restarted under another name may still be announced under its old one.
                    if report.state == "ready" and member.address not in addresses:
                        addresses.append(member.address)
            replicas = {key: tuple(addresses) for key, addresses in found.items() if addresses}
            topologies = {known.topology for known in in_order if known.topology is not None}
            topology = topologies.pop() if len(topologies) == 1 else None
            if (replicas, topology) != (self._view.replicas, self._view.topology):
                self._view = _View(self._view.epoch + 1, replicas, topology)

    def replicas(self, model: str, version: int, shard_index: int) -> tuple[Address, ...]:
        """Return where nodes are that report this version of this shard `ready`, and do not drain."""
        return self.current(model, version, shard_index)[1]

    def current(self, model: str, version: int, shard_index: int) -> tuple[int, tuple[Address, ...]]:
        """Return `replicas` with the epoch of the same moment, which counts up whenever any of them change."""
        view = self._view
        return view.epoch, view.replicas.get((model, version, shard_index), ())

    def topology(self) -> FleetRecord | None:
        """Return how the announced nodes divide rows; None if there are none, or they do not agree."""
        return self._view.topology


def _divided_by(record: NodeRecord) -> FleetRecord | None:
    told = {"num_shards": record.num_shards, "sharding": record.sharding, "replicate_bytes": record.replicate_bytes}
    return None if None in told.values() else FleetRecord.model_validate(told)
