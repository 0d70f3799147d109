"""Which nodes serve which shard of which version, as the registry last told; read by many threads without a lock."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from loader.registry.records import FleetRecord, NodeRecord
from shard_node.address import Address
from shard_node.errors import AddressError

logger = logging.getLogger(__name__)

FORGET_AFTER_S: Final = 10.0
_Key: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _View:
    """What readers see: replaced as a whole. Addresses by model, version and shard."""

    epoch: int
    replicas: Mapping[_Key, tuple[Address, ...]]
    topology: FleetRecord | None


@dataclass(slots=True)
class _Known:
    record: NodeRecord
    missing_since: float | None = None


class ReplicaDirectory:
    """The shard nodes of a fleet. Thread-safe; reading is one look into a dictionary.

    A node that is not announced any more is still asked for `forget_after_s`: its lease may have run out because the
    registry lost it, not because it is gone, and a node that is gone costs a router one refused connection. For the
    same reason a shard's last known nodes are never forgotten.

    Args:
        clock: monotonic seconds.
        forget_after_s: how long a node is kept that is not announced any more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, forget_after_s: float = FORGET_AFTER_S) -> None:
        self._clock = clock
        self._forget_after_s = forget_after_s
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._view = _View(0, {}, None)

    def update(self, nodes: Iterable[NodeRecord]) -> None:
        """Takes in the whole list of announced nodes; those that are no shard nodes are passed over."""
        announced = {node.node_id: node for node in nodes if node.kind == "shard" and node.shard_index is not None}
        with self._lock:
            now = self._clock()
            for node_id, known in self._known.items():
                if node_id not in announced and known.missing_since is None:
                    known.missing_since = now
            self._known |= {node_id: _Known(record) for node_id, record in announced.items()}
            self._forget(now)
            records = [self._known[node_id].record for node_id in sorted(self._known)]
            replicas, topology = _replicas(records), _topology(records)
            if (replicas, topology) != (self._view.replicas, self._view.topology):
                self._view = _View(self._view.epoch + 1, replicas, topology)

    @property
    def epoch(self) -> int:
        """Counts up whenever an answer of `replicas` changes."""
        return self._view.epoch

    def replicas(self, model: str, version: int, shard_index: int) -> tuple[Address, ...]:
        """Where nodes are that report this version of this shard `ready`, and do not drain."""
        return self._view.replicas.get((model, version, shard_index), ())

    def current(self, model: str, version: int, shard_index: int) -> tuple[int, Sequence[Address]]:
        """The epoch together with `replicas` of the same moment."""
        view = self._view
        return view.epoch, view.replicas.get((model, version, shard_index), ())

    def topology(self) -> FleetRecord | None:
        """How the announced nodes divide rows; None if there are none, or they do not agree."""
        return self._view.topology

    def _forget(self, now: float) -> None:
        present = {one.record.shard_index for one in self._known.values() if one.missing_since is None}
        for node_id, known in list(self._known.items()):
            if known.missing_since is None or now - known.missing_since < self._forget_after_s:
                continue
            if known.record.shard_index in present:
                logger.info("shard node %s is forgotten", node_id)
                del self._known[node_id]


def _replicas(records: Sequence[NodeRecord]) -> dict[_Key, tuple[Address, ...]]:
    found: dict[_Key, list[Address]] = defaultdict(list)
    for record in records:
        if record.draining or record.shard_index is None:
            continue
        try:
            address = Address.parse(record.address)
        except AddressError as error:
            logger.warning("shard node %s is not asked: %s", record.node_id, error)
            continue
        for report in record.versions:
            addresses = found[report.model, report.version, record.shard_index]
            # A node that was restarted under another name may still be announced under its old one.
            if report.state == "ready" and address not in addresses:
                addresses.append(address)
    return {key: tuple(addresses) for key, addresses in found.items() if addresses}


def _topology(records: Sequence[NodeRecord]) -> FleetRecord | None:
    told = {
        (one.num_shards, one.sharding, one.replicate_bytes)
        for one in records
        if one.num_shards is not None and one.sharding is not None and one.replicate_bytes is not None
    }
    if len(told) != 1:
        return None
    num_shards, sharding, replicate_bytes = told.pop()
    return FleetRecord.model_validate(
        {"num_shards": num_shards, "sharding": sharding, "replicate_bytes": replicate_bytes}
    )
