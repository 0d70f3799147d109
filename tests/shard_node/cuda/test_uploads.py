"""A buffer on the way up is packed again only after what was sent has been used, and grows when it must."""

from __future__ import annotations

import numpy as np
import pytest

from shard_node.cuda.uploads import SMALLEST_BYTES, Upload, capacity_for
from shard_node.errors import MemoryBudgetError
from shardrank_testing.emulated_cards import EmulatedCards


def test_each_upload_arrives_as_packed(cards):
    made = cards(1)
    card = made.cards[0]
    stream = card.stream()
    buffer = Upload(made, [(card, stream)])
    sent, arrived = [], []
    for number, size in enumerate([16, 4096, 4096, 3 * SMALLEST_BYTES, 16, 5 * SMALLEST_BYTES]):
        content = np.random.default_rng(number).integers(0, 256, size).astype(np.uint8)
        buffer.reserve(size)[:] = content
        address = buffer.send(0, 0, size)
        down = made.allocate_pinned(size)
        card.copy_to_host(down, 0, address, size, stream)
        buffer.used(0)
        sent.append(content)
        arrived.append(down)
    stream.synchronize()
    for content, down in zip(sent, arrived, strict=True):
        np.testing.assert_array_equal(down.array[: content.size], content)
        down.free()
    buffer.free()
    buffer.free()


def test_capacities_are_powers_of_two():
    sizes = (0, 1, SMALLEST_BYTES, SMALLEST_BYTES + 1, 10**6)
    assert [capacity_for(size) for size in sizes] == [*[SMALLEST_BYTES] * 3, 2 * SMALLEST_BYTES, 1 << 20]


def test_a_refused_size_leaves_the_buffer_usable():
    cards = EmulatedCards(1, total_bytes=4 * SMALLEST_BYTES)
    before = cards.free_bytes()
    buffer = Upload(cards, [(cards.cards[0], cards.cards[0].stream())])
    with pytest.raises(ValueError, match="nothing was reserved"):
        buffer.send(0, 0, 4)
    for _ in range(3):
        with pytest.raises(MemoryBudgetError):
            buffer.reserve(5 * SMALLEST_BYTES)
        assert cards.free_bytes() == before
        buffer.reserve(2 * SMALLEST_BYTES)
        buffer.free()
