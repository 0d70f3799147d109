"""From the bytes of a batch to its time: alone on a node, and while all cards pool such batches. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from loader.snapshot.manifest import Frozen
from shard_node.planning.card_systems import CardSystem
from shard_node.planning.cost_model import Traffic

BYTES_PER_US = 1e3
"""Of 1 GB/s."""

Bound: TypeAlias = Literal["latency", "card memory", "peers", "host link"]


class BatchTime(Frozen):
    """What one batch takes, in microseconds. All are floors: nothing is slower than its slowest part for no reason.

    Attributes:
        upload_us: ids and offsets to the card.
        launch_us: of all its kernels.
        hbm_us: the card's own memory.
        peer_us: rows of other cards.
        host_us: rows in pinned memory, over the link to the host.
        latency_us: the longest bag's rows, one after the other.
        alone_us: upload, launches and the longest of the parts that overlap, on the slowest card of an idle node.
        bound: which part that is.
        busy_us: of the node's most loaded part for each batch of each card, while every card pools such batches all
            the time; latencies and uploads overlap.
        busy_bound: which part that is.
        batches_per_s: of the node, all cards busy.
        lookups_per_s: the same in lookups.
    """

    upload_us: float
    launch_us: float
    hbm_us: float
    peer_us: float
    host_us: float
    latency_us: float
    alone_us: float
    bound: Bound
    busy_us: float
    busy_bound: Bound
    batches_per_s: float
    lookups_per_s: float


def batch_time(traffic: Traffic, system: CardSystem) -> BatchTime:
    """The time that traffic takes on a system.

    A card's memory serves its own batch and, with all cards busy, what its peers read of it. A link's two directions
    are separate, so the busier of them counts. The host's memory is shared by all cards.
    """
    num_cards = traffic.hot.size
    lines = traffic.peer_line_bytes
    # What leaves an owner has the same headers for each byte as what arrives.
    served = traffic.peer_bytes.sum(axis=0)
    arriving = traffic.peer_bytes.sum(axis=1)
    header_factor = lines.sum() / arriving.sum() if arriving.sum() else 1.0
    hbm = traffic.hbm_bytes / (system.hbm_gb_per_s * BYTES_PER_US)
    peer = lines / (system.peer.gb_per_s * BYTES_PER_US)
    host_lines = traffic.host_line_bytes / (system.host.gb_per_s * BYTES_PER_US)
    host_memory = traffic.host_bytes / (system.host_memory_gb_per_s * BYTES_PER_US)
    upload_us = system.host.copied_bytes(traffic.upload_bytes) / (system.host.gb_per_s * BYTES_PER_US)
    alone: dict[Bound, float] = {
        "latency": float(traffic.chain_us.max()),
        "card memory": float(hbm.max()),
        "peers": float(peer.max()),
        "host link": float(np.maximum(host_lines, host_memory).max()),
    }
    busy: dict[Bound, float] = {
        "card memory": float((traffic.hbm_bytes + served).max()) / (system.hbm_gb_per_s * BYTES_PER_US),
        "peers": max(float(peer.max()), float(served.max() * header_factor) / (system.peer.gb_per_s * BYTES_PER_US)),
        # Ids come over the same link, in the same direction, as rows in pinned memory.
        "host link": max(float(host_lines.max()) + upload_us, float(host_memory.sum())),
    }
    launch_us = traffic.launches * system.launch_us
    bound, busy_bound = max(alone, key=alone.__getitem__), max(busy, key=busy.__getitem__)
    batches_per_s = num_cards * 1e6 / busy[busy_bound] if busy[busy_bound] else 0.0
    lookups = float(traffic.hot[0] + traffic.own[0] + traffic.peer[0] + traffic.host[0])
    return BatchTime(
        upload_us=upload_us + system.host.latency_us,
        launch_us=launch_us,
        hbm_us=alone["card memory"],
        peer_us=alone["peers"],
        host_us=alone["host link"],
        latency_us=alone["latency"],
        alone_us=upload_us + system.host.latency_us + launch_us + alone[bound],
        bound=bound,
        busy_us=busy[busy_bound],
        busy_bound=busy_bound,
        batches_per_s=batches_per_s,
        lookups_per_s=batches_per_s * lookups,
    )
