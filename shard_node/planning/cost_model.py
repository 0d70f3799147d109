"""What a batch's lookups cost on N cards: bytes from each memory, and the time that they take at least. Pure.

The plan says which share of each table's lookups goes to which tier; the row format says how many 32-byte sectors a row
is read in; a `CardSystem` says how fast each way is. docs/nvlink.md derives the formulas. Caches are left out: what the
L2 cache saves on hot rows makes a real batch faster than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from loader.snapshot.manifest import RowDtype
from shard_node.cuda.kernel_params import CHUNK_BYTES
from shard_node.cuda.places import CARD, HOST, HOT, NUM_TIERS
from shard_node.cuda.row_format import RowFormat
from shard_node.errors import InvalidBagsError
from shard_node.planning.card_plan import PLACE_BYTES, CardPlan
from shard_node.planning.card_systems import CardSystem, Link
from shard_node.planning.hotness import Float64Array

SECTOR_BYTES = 32
ROWS_IN_FLIGHT = 4
"""Of one bag, as in `kernels.cu`: a bag of h ids waits h / 4 times for rows."""
VALUE_BYTES = 4
OFFSET_BYTES = 4


class TableSizes(NamedTuple):
    """Bytes of a table's rows: codes or elements alone, as stored with scale and bias, on cards, and of its places."""

    codes: int
    stored: int
    on_cards: int
    places: int


class BagLoad(NamedTuple):
    """What a batch asks of one table: ids, bags, and ids of the longest bag; means over batches need not be whole."""

    values: float
    bags: float
    longest_bag: float


def table_sizes(num_rows: int, embedding_dim: int, dtype: RowDtype) -> TableSizes:
    """What so many rows take."""
    one = RowFormat.of(dtype, embedding_dim)
    return TableSizes(
        num_rows * one.code_bytes, num_rows * one.row_bytes, num_rows * one.stride, num_rows * PLACE_BYTES
    )


@lru_cache(maxsize=1024)
def mean_pieces(stride: int, size_bytes: int, piece_bytes: int) -> float:
    """Aligned pieces of memory that a read of a row's first `size_bytes` touches: the mean over rows.

    Rows begin at multiples of the stride, so the offsets within a piece repeat after a few rows.
    """
    offsets = np.arange(piece_bytes // gcd(stride, piece_bytes)) * stride % piece_bytes
    return float(np.mean(-(-(offsets + size_bytes) // piece_bytes)))


def read_bytes(row: RowFormat) -> int:
    """Bytes from a row's begin to the last that the kernel loads of it: whole chunks of codes, then the tail."""
    return max(row.chunks * CHUNK_BYTES, row.tail_offset + row.tail_bytes)


def sector_bytes(row: RowFormat) -> float:
    """Bytes of the 32-byte sectors that reading one row takes, in the mean."""
    return SECTOR_BYTES * mean_pieces(row.stride, read_bytes(row), SECTOR_BYTES)


def line_bytes(row: RowFormat, link: Link) -> float:
    """Bytes that reading one row takes on a link: its sectors, and a header for each packet."""
    return sector_bytes(row) + link.header_bytes * mean_pieces(row.stride, read_bytes(row), link.packet_bytes)


def tier_shares(plan: CardPlan) -> Float64Array:
    """Which share of each table's lookups goes to which card's part of which tier.

    Returns:
        float64 [tables, cards, 3] in the order hot, card, host. A table's shares add up to 1, or to less where
        other shards hold some of its rows. Of a level that a tier's bound cuts, every row counts alike.
    """
    shares = np.zeros((len(plan.hotness), plan.num_cards, NUM_TIERS))
    for table, rows in enumerate(plan.hotness):
        lookups = rows.lookups if rows.lookups.any() else np.ones_like(rows.lookups)
        total = float(lookups @ rows.rows_by_bucket().sum(axis=1))
        for card in range(plan.num_cards):
            here = plan.level_rows[table][:, card]
            ranks = np.concatenate([[0], np.cumsum(here)])
            sums = np.concatenate([[0.0], np.cumsum(lookups * here)])
            bounds = np.concatenate([[0], np.cumsum(plan.tier_rows[table, card])])
            shares[table, card] = np.diff(np.interp(bounds, ranks, sums)) / total
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What one batch moves, by the card that pools it: float64 [cards] but for what is said otherwise.

    Attributes:
        hot, own, peer, host: lookups that go to a card's copies of hot rows, to its own rows, to other cards, and to
            pinned memory.
        hbm_bytes: read and written in the card's own memory: sectors of rows and places, ids, offsets, sums.
        peer_bytes: float64 [cards, cards], sectors of rows that the first pools and the second owns; 0 of itself.
        peer_line_bytes: the same with packets' headers, all owners together.
        host_bytes, host_line_bytes: of rows in pinned memory.
        upload_bytes: ids and offsets, over the link to the host.
        chain_us: for the longest bags: their rows come one after the other, a few at a time.
        launches: kernels of a batch, one for each arena that it reads.
    """

    hot: Float64Array
    own: Float64Array
    peer: Float64Array
    host: Float64Array
    hbm_bytes: Float64Array
    peer_bytes: Float64Array
    peer_line_bytes: Float64Array
    host_bytes: Float64Array
    host_line_bytes: Float64Array
    upload_bytes: float
    chain_us: Float64Array
    launches: int

    @classmethod
    def of(cls, plan: CardPlan, loads: Sequence[BagLoad], system: CardSystem, sum_item_bytes: int = 2) -> Traffic:
        """Reckons a batch.

        Args:
            plan: where rows are.
            loads: what the batch asks of each table, in layout order, on all shards together.
            system: packets and latencies.
            sum_item_bytes: of one element of a pooled sum: 2 for bf16 and fp16, 4 for fp32.

        Raises:
            InvalidBagsError: as many loads as tables are needed.
        """
        tables = plan.layout.tables
        if len(loads) != len(tables):
            raise InvalidBagsError(f"{len(loads)} loads for {len(tables)} tables")
        shares = tier_shares(plan)
        values, bags, longest = np.array(loads, np.float64).reshape(len(tables), 3).T
        rows = [RowFormat.of(table.dtype, table.embedding_dim) for table in tables]
        sectors = np.array([sector_bytes(row) for row in rows])
        here = shares.sum(axis=(1, 2))
        # [tables, cards]: of each table's lookups, those that the card finds in each place.
        hot = np.repeat(shares[:, :, HOT].sum(axis=1)[:, None], plan.num_cards, axis=1)
        own = shares[:, :, CARD]
        peer = own.sum(axis=1, keepdims=True) - own
        host = np.repeat(shares[:, :, HOST].sum(axis=1)[:, None], plan.num_cards, axis=1)
        ids_bytes = float((VALUE_BYTES * values * here + OFFSET_BYTES * bags) @ np.ones(len(tables)))
        dims = np.array([table.embedding_dim for table in tables])
        fixed = ids_bytes + float(SECTOR_BYTES * (values @ here) + sum_item_bytes * (bags @ dims))
        by_owner = (values * sectors) @ own
        peer_bytes = np.repeat(by_owner[None, :], plan.num_cards, axis=0)
        np.fill_diagonal(peer_bytes, 0.0)
        return cls(
            hot=values @ hot,
            own=values @ own,
            peer=values @ peer,
            host=values @ host,
            hbm_bytes=fixed + (values * sectors) @ (hot + own),
            peer_bytes=peer_bytes,
            peer_line_bytes=(values * _line_bytes(rows, system.peer)) @ peer,
            host_bytes=(values * sectors) @ host,
            host_line_bytes=(values * _line_bytes(rows, system.host)) @ host,
            upload_bytes=ids_bytes,
            chain_us=_chain_us(longest * here, _share_of(peer, here[:, None]), _share_of(host, here[:, None]), system),
            launches=sum(bool(values[group.first_table : group.end_table].any()) for group in plan.layout.groups),
        )


def _share_of(part: Float64Array, whole: Float64Array) -> Float64Array:
    return np.divide(part, whole, out=np.zeros(np.broadcast_shapes(part.shape, whole.shape)), where=whole > 0)


def _line_bytes(rows: Sequence[RowFormat], link: Link) -> Float64Array:
    return np.array([line_bytes(row, link) for row in rows])


def _chain_us(longest: Float64Array, peer: Float64Array, host: Float64Array, system: CardSystem) -> Float64Array:
    """float64 [cards]: ids and places of the first rows, then a wait for every few rows of the longest bag.

    Each wait is for the slowest of its rows, so a far row counts with the chance that at least one of them is far.
    """
    rounds = np.ceil(longest / ROWS_IN_FLIGHT)[:, None]
    at_once = np.clip(longest, 1, ROWS_IN_FLIGHT)[:, None]
    any_far = 1 - np.clip(1 - peer - host, 0, 1) ** at_once
    any_host = 1 - np.clip(1 - host, 0, 1) ** at_once
    wait = (
        system.hbm_latency_us
        + any_far * max(0.0, system.peer.latency_us - system.hbm_latency_us)
        + any_host * max(0.0, system.host.latency_us - system.peer.latency_us)
    )
    chains = np.where(rounds > 0, 2 * system.hbm_latency_us + rounds * wait, 0.0)
    longest_chain: Float64Array = chains.max(axis=0)
    return longest_chain
