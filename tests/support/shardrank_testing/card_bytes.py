"""Bytes on their way to cards and back, and a launch that copies, for tests of cards themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_rows import ArenaOnCards, Placer
from shard_node.cuda.kernel_params import (
    CHUNK_BYTES,
    NOT_HERE,
    THREADS_PER_BLOCK,
    WRITE_KERNEL,
    ArenaParams,
    RowFormat,
    TableParams,
    WriteParams,
    owner_bits,
    owners_of,
)
from shard_node.planning.card_plan import CardPlan
from shardrank_testing.card_plans import places_of, slots_of
from shardrank_testing.snapshots import plain_buckets

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Card, Cards, Memory, Stream

ByteArray = npt.NDArray[np.uint8]


def pinned_with(cards: Cards, array: npt.NDArray[Any]) -> Memory:
    """Pinned memory that holds the bytes of an array."""
    content = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    pinned = cards.allocate_pinned(content.nbytes)
    pinned.array[:] = content
    return pinned


def send(cards: Cards, card: Card, array: npt.NDArray[Any], stream: Stream | None = None) -> Memory:
    """Return memory of a card that holds the bytes of an array."""
    stream = stream or card.stream()
    memory, pinned = card.allocate(array.nbytes), pinned_with(cards, array)
    card.copy_to_card(memory.address, pinned, 0, array.nbytes, stream)
    stream.synchronize()
    return memory


def fetch_at(cards: Cards, card: Card, address: int, size_bytes: int, stream: Stream | None = None) -> ByteArray:
    """Return the bytes at an address as a card sees them, after all that is on the stream."""
    stream = stream or card.stream()
    pinned = cards.allocate_pinned(size_bytes)
    card.copy_to_host(pinned, 0, address, size_bytes, stream)
    stream.synchronize()
    content = pinned.array.copy()
    pinned.free()
    return content


def fetch(cards: Cards, card: Card, memory: Memory, stream: Stream | None = None) -> ByteArray:
    """Return all bytes of memory of a card."""
    return fetch_at(cards, card, memory.address, memory.size_bytes, stream)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """float32 [count], random."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@dataclass
class KernelCopy:
    """A launch of `write_rows` that copies `size_bytes`, a multiple of 16, on a card.

    Attributes:
        params: what the kernel takes.
        held: memory on the card that the launch reads.
    """

    size_bytes: int
    params: tuple[ArenaParams, WriteParams]
    held: list[Memory]

    @classmethod
    def of(cls, cards: Cards, card: Card, source: int, target: int, size_bytes: int) -> KernelCopy:
        """Copies between two addresses; either may be on another card, or on the host."""
        num_rows = size_bytes // CHUNK_BYTES
        rows = np.arange(num_rows, dtype=np.uint32)
        table = np.frombuffer(bytes(TableParams(num_rows=num_rows)), np.uint8)
        held = [
            send(cards, card, array)
            for array in (rows << np.uint32(owner_bits(1)), table, np.zeros(3, np.uint64), rows)
        ]
        places, tables, starts, numbers = (memory.address for memory in held)
        arena = ArenaParams(
            places=places,
            tables=tables,
            starts=starts,
            num_tables=1,
            num_cards=1,
            owner_bits=owner_bits(1),
            row_stride=CHUNK_BYTES,
            embedding_dim=CHUNK_BYTES // 4,
        )
        arena.rows[0] = target
        return cls(size_bytes, (arena, WriteParams(numbers=numbers, stored=source, num_rows=num_rows)), held)

    def launch(self, card: Card, stream: Stream) -> None:
        """Puts it on a stream of the card."""
        blocks = -(-self.size_bytes // (CHUNK_BYTES * THREADS_PER_BLOCK))
        card.launch(WRITE_KERNEL, (blocks, 1), self.params, stream)


def rows_on_cards(engine: CardEngine, number: int) -> ByteArray:
    """The stored rows of a table, uint8 [num_embeddings, row_bytes]; zeros where this engine has none.

    Asserts that all cards have the same places, those of the plan, and that all copies of a hot row are the same.

    Args:
        engine: no rows may be on their way to it.
        number: of the table.
    """
    cards, num_cards = engine.card_set.cards, engine.plan.num_cards
    arena = next(one for one in engine._arenas if one.group.first_table <= number < one.group.end_table)
    local = number - arena.group.first_table
    places = places_of(engine.plan, number)
    assert_places(engine.plan, cards, arena, local, places)
    starts = Placer(engine.plan).starts(arena.group)[local].astype(int)
    owner, slots = owners_of(places, num_cards), slots_of(places, num_cards)
    relaid = np.zeros((places.size, arena.format.stride), np.uint8)
    for one in range(num_cards + 2):
        rows = np.flatnonzero(owner == one)
        if not rows.size:
            continue
        first, size = int(starts[one]), (int(slots[rows].max()) + 1) * arena.format.stride
        copies = [
            fetch_at(cards, cards.cards[card], int(params.rows[one]) + first, size)
            for card, params in enumerate(arena.params)
            if one == num_cards or card == (one if one < num_cards else 0)
        ]
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
        relaid[rows] = copies[0].reshape(-1, arena.format.stride)[slots[rows]]
    return restored(arena.format, relaid)


def assert_places(
    plan: CardPlan, cards: Cards, arena: ArenaOnCards, table: int, places: npt.NDArray[np.uint32]
) -> None:
    """Every card has these places of one of the arena's tables, as far as it has any."""
    number = arena.group.first_table + table
    found, spec = plan.places[number], plan.layout.tables[number]
    if found.only_owner is not None:
        assert (owners_of(places, plan.num_cards) == found.only_owner).all()
        assert (slots_of(places, plan.num_cards) == np.arange(places.size)).all()
        return
    expected = places
    if found.buckets:
        rows = np.flatnonzero(places != NOT_HERE)
        expected = places[rows[np.lexsort((rows, plain_buckets(spec, rows)))]]
        assert expected.size <= found.rows
    for card in cards.cards if expected.size else ():
        there = fetch_at(cards, card, arena.places_address(card.number, table), expected.nbytes)
        np.testing.assert_array_equal(there.view(np.uint32), expected)


def restored(fmt: RowFormat, relaid: ByteArray) -> ByteArray:
    """The stored rows, uint8 [n, row_bytes], of rows as on a card, uint8 [n, stride]."""
    tail = relaid[:, fmt.tail_offset : fmt.tail_offset + fmt.tail_bytes]
    return np.concatenate([relaid[:, : fmt.code_bytes], tail], axis=1)
