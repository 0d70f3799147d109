"""What lies on cards, read back byte by byte: every copy of every row, and the places by which kernels find them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_rows import ArenaOnCards
from shard_node.cuda.cards import Cards
from shard_node.cuda.kernel_params import NOT_HERE, RowFormat, owners_of, slots_of
from shard_node.cuda.places import Placer
from shard_node.planning.card_plan import CardPlan
from shardrank_testing.card_bytes import fetch_at
from shardrank_testing.snapshots import plain_buckets

ByteArray = npt.NDArray[np.uint8]


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
    places = Placer(engine.plan).places(number)
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
