"""What a batch's lookups cost on N cards: bytes from each memory, and the time that they take at least. Pure.

The plan says which share of each table's lookups goes to which tier; the row format says how many 32-byte sectors a row
is read in; a `CardSystem` says how fast each way is, in 10^9 bytes a second of one direction of one card.
docs/nvlink.md derives the formulas, and has the sources of the rates, which are not measured. Caches are left out: what
the L2 cache saves on hot rows makes a real batch faster than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal, TypeAlias

import numpy as np
from pydantic import Field

from loader.snapshot.tables import Frozen
from shard_node.cuda.kernel_params import CHUNK_BYTES, RowFormat
from shard_node.planning.card_plan import CARD, HOST, HOT, NUM_TIERS, CardPlan
from shard_node.planning.hotness import Float64Array

SECTOR_BYTES = 32
ROWS_IN_FLIGHT = 4
"""Of one bag, as in `kernels.cu`: a bag of h ids waits h / 4 times for rows."""
INDEX_BYTES = 4
"""Of an id, and of an offset."""
SUM_ITEM_BYTES = 2
"""Of one element of a pooled sum: bf16 or float16."""
BYTES_PER_US = 1e3
"""Of 1 GB/s."""

Bound: TypeAlias = Literal["latency", "card memory", "peers", "host link"]
COPY_SHARE = 0.9
"""Of a card's memory bandwidth, what a device-to-device copy reaches: 3.0 of the H100's 3.35 TB/s."""


class Link(Frozen):
    """A way from one card to memory that is not its own."""

    # Line rate of one direction.
    gb_per_s: float = Field(gt=0)
    # Payload of one packet at most, and what is sent in addition; a read across such a boundary needs another packet.
    packet_bytes: int = Field(default=128, ge=32)
    header_bytes: int = Field(ge=0)
    # From the request for a row to its arrival, unloaded.
    latency_us: float = Field(ge=0)

    def copied_bytes(self, size_bytes: float) -> float:
        """Return the bytes on the line of a copy of so many bytes in one piece."""
        return size_bytes * (1 + self.header_bytes / self.packet_bytes)


class CardSystem(Frozen):
    """One node: cards alike, each linked to every other and to the host."""

    name: str
    cards: int = Field(ge=1)
    card_memory_gb: float = Field(gt=0)
    # What a copy within a card reaches, bytes read and written; and of a random read, with its address translation.
    hbm_gb_per_s: float = Field(gt=0)
    hbm_latency_us: float = Field(default=0.7, ge=0)
    # To the other cards, all of them together, and to the host's memory, which all cards share.
    peer: Link
    host: Link
    host_memory_gb_per_s: float = Field(gt=0)
    # Of one kernel, for the host.
    launch_us: float = Field(default=4.0, ge=0)


# A completion of PCIe has a header of 12 bytes, framing of 4 and a checksum of 4.
_PCIE_4, _PCIE_5 = (Link(gb_per_s=rate, header_bytes=20, latency_us=2.5) for rate in (31.5, 63))
_C2C = Link(gb_per_s=450, header_bytes=32, latency_us=1.5)
SYSTEMS: dict[str, CardSystem] = {
    name: CardSystem(
        name=name,
        cards=cards,
        card_memory_gb=card_gb,
        hbm_gb_per_s=hbm * COPY_SHARE,
        # 25 GB/s of a link carry about 20 GB/s of 128-byte payloads, so each has 32 bytes in addition.
        peer=Link(gb_per_s=nvlink, header_bytes=32, latency_us=1.5),
        host=host,
        host_memory_gb_per_s=2 * ddr,
    )
    for name, cards, card_gb, hbm, nvlink, host, ddr in (
        ("a100", 8, 80, 2039, 300, _PCIE_4, 204.8),
        ("h100", 8, 80, 3350, 450, _PCIE_5, 307.2),
        ("h200", 8, 141, 4800, 450, _PCIE_5, 307.2),
        ("gb200", 4, 186, 8000, 900, _C2C, 512),
    )
}
"""By name. `gb200` is a compute tray of an NVL72: two Grace CPUs with two cards each."""


@lru_cache(maxsize=1024)
def mean_pieces(row: RowFormat, piece_bytes: int) -> float:
    """Return how many aligned pieces of memory a read of one row touches, the mean over rows.

    The kernel loads whole chunks of codes, then the tail. Rows begin at multiples of the stride, so the offsets within
    a piece repeat after a few rows.
    """
    offsets = np.arange(piece_bytes // gcd(row.stride, piece_bytes)) * row.stride % piece_bytes
    read_bytes = max(row.chunks * CHUNK_BYTES, row.tail_offset + row.tail_bytes)
    return float(np.mean(-(-(offsets + read_bytes) // piece_bytes)))


def sector_bytes(row: RowFormat) -> float:
    """Return the bytes of the 32-byte sectors that reading one row takes, in the mean."""
    return SECTOR_BYTES * mean_pieces(row, SECTOR_BYTES)


def tier_shares(plan: CardPlan, missed: Sequence[Float64Array] | None = None) -> Float64Array:
    """Return which share of each table's lookups goes to which card's part of which tier.

    `missed`, of each table float64 [levels], is the share of each level's lookups that reach the shard at all, where
    hot rows at the router answer others.

    Returns float64 [tables, cards, 3] in the order hot, card, host. A table's shares add up to 1, or to less where
    other shards, or the router, have some of its rows. Of a level that a tier's bound cuts, every row counts alike.
    """
    shares = np.zeros((len(plan.hotness), plan.num_cards, NUM_TIERS))
    for table, rows in enumerate(plan.hotness):
        lookups = rows.lookups if rows.lookups.any() else np.ones_like(rows.lookups)
        total = float(lookups @ rows.rows())
        lookups = lookups if missed is None else lookups * missed[table]
        for card in range(plan.num_cards):
            of_card = plan.level_rows[table][:, card]
            ranks = np.concatenate([[0], np.cumsum(of_card)])
            sums = np.concatenate([[0.0], np.cumsum(lookups * of_card)])
            bounds = np.concatenate([[0], np.cumsum(plan.tier_rows[table, card])])
            shares[table, card] = np.diff(np.interp(bounds, ranks, sums)) / total
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What one batch moves, by the card that pools it: float64 [cards] but for what is said otherwise."""

    # Lookups that go to a card's copies of hot rows, to its own rows, to other cards, and to pinned memory.
    hot: Float64Array
    local: Float64Array
    peer: Float64Array
    host: Float64Array
    # Read and written in the card's own memory: sectors of rows and places, ids, offsets, sums.
    hbm_bytes: Float64Array
    # [cards, cards], sectors of rows that the first pools and the second owns; 0 of itself. Then the same with packets'
    # headers, all owners together.
    peer_bytes: Float64Array
    peer_line_bytes: Float64Array
    # Of rows in pinned memory.
    host_bytes: Float64Array
    host_line_bytes: Float64Array
    # Ids and offsets, over the link to the host.
    upload_bytes: float
    # For the longest bags: their rows come one after the other, a few at a time.
    chain_us: Float64Array
    # Kernels of a batch, one for each arena that it reads.
    launches: int

    @classmethod
    def of(
        cls, plan: CardPlan, loads: Float64Array, system: CardSystem, missed: Sequence[Float64Array] | None = None
    ) -> Traffic:
        """Return what a batch moves on a shard.

        `loads`, float64 [tables, 3], are the ids, bags, and ids of the longest bag of each table, on all shards
        together; means over batches need not be whole numbers. `missed` is as of `tier_shares`.
        """
        # A table that is at one owner has no places to be read.
        has_places = np.array([places.rows > 0 for places in plan.places])
        layout, shares = plan.layout, tier_shares(plan, missed)
        tables, num_cards = layout.tables, shares.shape[1]
        values, bags, longest = loads.T
        rows = [RowFormat.of(table.dtype, table.embedding_dim) for table in tables]
        sectors = np.array([sector_bytes(row) for row in rows])
        on_shard = shares.sum(axis=(1, 2))
        # [tables, cards]: of each table's lookups, those that the card finds in each place.
        hot, host = (np.repeat(shares[:, :, tier].sum(axis=1)[:, None], num_cards, axis=1) for tier in (HOT, HOST))
        local = shares[:, :, CARD]
        peer = local.sum(axis=1, keepdims=True) - local
        ids_bytes = float((INDEX_BYTES * (values * on_shard + bags)).sum())
        dims = np.array([table.embedding_dim for table in tables])
        fixed = ids_bytes + float(SECTOR_BYTES * ((values * has_places) @ on_shard) + SUM_ITEM_BYTES * (bags @ dims))
        peer_bytes = np.repeat(((values * sectors) @ local)[None, :], num_cards, axis=0)
        np.fill_diagonal(peer_bytes, 0.0)
        # Bytes of a row on each link: its sectors, and a header for each packet.
        peer_line, host_line = (
            sectors + link.header_bytes * np.array([mean_pieces(row, link.packet_bytes) for row in rows])
            for link in (system.peer, system.host)
        )
        return cls(
            hot=values @ hot,
            local=values @ local,
            peer=values @ peer,
            host=values @ host,
            hbm_bytes=fixed + (values * sectors) @ (hot + local),
            peer_bytes=peer_bytes,
            peer_line_bytes=(values * peer_line) @ peer,
            host_bytes=(values * sectors) @ host,
            host_line_bytes=(values * host_line) @ host,
            upload_bytes=ids_bytes,
            chain_us=_chain_us(longest, on_shard, peer, host, system),
            launches=sum(bool(values[group.first_table : group.end_table].any()) for group in layout.groups),
        )


def _chain_us(
    longest: Float64Array, local: Float64Array, peer: Float64Array, host: Float64Array, system: CardSystem
) -> Float64Array:
    """float64 [cards]: ids and places of the first rows, then a wait for every few rows of the longest bag.

    Each wait is for the slowest of its rows, so a far row counts with the chance that at least one of them is far.
    `longest` and `local` are [tables], `peer` and `host` [tables, cards], shares of each table's lookups as `local`.
    """
    peer, host = (
        np.divide(part, local[:, None], out=np.zeros(part.shape), where=local[:, None] > 0) for part in (peer, host)
    )
    rounds = np.ceil(longest * local / ROWS_IN_FLIGHT)[:, None]
    at_once = np.clip(longest * local, 1, ROWS_IN_FLIGHT)[:, None]
    any_far = 1 - np.clip(1 - peer - host, 0, 1) ** at_once
    any_host = 1 - np.clip(1 - host, 0, 1) ** at_once
    wait = (
        system.hbm_latency_us
        + any_far * max(0.0, system.peer.latency_us - system.hbm_latency_us)
        + any_host * max(0.0, system.host.latency_us - system.peer.latency_us)
    )
    chains = np.where(rounds > 0, 2 * system.hbm_latency_us + rounds * wait, 0.0)
    return np.asarray(chains.max(axis=0))


@dataclass(frozen=True, slots=True)
class BatchTime:
    """What one batch takes, in microseconds. All are floors: nothing is slower than its slowest part for no reason."""

    # Ids and offsets to the card.
    upload_us: float
    launch_us: float
    # The card's own memory, rows of other cards, and rows in pinned memory over the link to the host.
    hbm_us: float
    peer_us: float
    host_us: float
    # The longest bag's rows, one after the other.
    latency_us: float
    # Upload, launches and the longest of the parts that overlap, on the slowest card of an idle node; which part it is.
    alone_us: float
    bound: Bound
    # Of the node's most loaded part for each batch of each card, while every card pools such batches all the time;
    # latencies and uploads overlap.
    busy_us: float
    busy_bound: Bound
    # Of the node, all cards busy.
    batches_per_s: float
    lookups_per_s: float


def batch_time(traffic: Traffic, system: CardSystem) -> BatchTime:
    """Return the time that traffic takes on a system.

    A card's memory serves its own batch and, with all cards busy, what its peers read of it. A link's two directions
    are separate, so the busier of them counts. The host's memory is shared by all cards.
    """
    # What leaves an owner has the same headers for each byte as what arrives.
    served = traffic.peer_bytes.sum(axis=0)
    arriving = traffic.peer_bytes.sum(axis=1)
    header_factor = traffic.peer_line_bytes.sum() / arriving.sum() if arriving.sum() else 1.0
    peer = traffic.peer_line_bytes / (system.peer.gb_per_s * BYTES_PER_US)
    host_lines = traffic.host_line_bytes / (system.host.gb_per_s * BYTES_PER_US)
    host_memory = traffic.host_bytes / (system.host_memory_gb_per_s * BYTES_PER_US)
    upload_us = system.host.copied_bytes(traffic.upload_bytes) / (system.host.gb_per_s * BYTES_PER_US)
    alone: dict[Bound, float] = {
        "latency": float(traffic.chain_us.max()),
        "card memory": float(traffic.hbm_bytes.max()) / (system.hbm_gb_per_s * BYTES_PER_US),
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
    batches_per_s = traffic.hot.size * 1e6 / busy[busy_bound] if busy[busy_bound] else 0.0
    lookups = float(traffic.hot[0] + traffic.local[0] + traffic.peer[0] + traffic.host[0])
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
