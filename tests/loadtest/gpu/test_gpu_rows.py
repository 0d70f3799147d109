"""The bench's table, the sums and the random reads of it, and the checks that find wrong answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loader.snapshot.codecs import RowCodec
from loadtest.gpu.rows import (
    GATHER_KERNELS,
    SOURCE,
    WITHOUT_PLACES,
    CardBags,
    RandomGather,
    RowsOnCard,
    WrongAnswerError,
    rows_read,
)
from shard_node.cuda.kernel_params import NOT_HERE
from shardrank_testing.card_bytes import restored
from shardrank_testing.device_compilers import ARCHITECTURES, resources
from shardrank_testing.emulated_cards import EmulatedCards


@pytest.fixture
def rows():
    with RowsOnCard(EmulatedCards(1), 16, table_bytes=24 * 320) as rows:
        yield rows


def uploaded(rows: RowsOnCard, ids: np.ndarray):
    return rows.upload(ids.astype(np.uint32).tobytes())


@pytest.mark.parametrize("num_cards", [WITHOUT_PLACES, 1, 4])
def test_reference_is_the_codecs_sum(rows, num_cards):
    """Row r is in slot r div n of card r mod n, of equal stretches."""
    assert rows.count == 320
    bags = np.random.default_rng(0).integers(0, 320, (7, 5))
    owners = max(1, num_cards)
    slots = (bags % owners * (320 // owners) + bags // owners).reshape(-1)
    stored = restored(rows.format, rows.stored(0, 320)[0].numpy()[slots])
    expected = RowCodec("int8", 16).decode(stored).astype(np.float64).reshape(7, 5, 16).sum(axis=1)
    np.testing.assert_allclose(rows.reference(torch.from_numpy(bags), num_cards), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "place",
    # Slot 1 of card 0; and a row that is missing, which is pooled as zeros.
    [1 << 3, np.uint32(NOT_HERE).astype(np.int32).item()],
)
def test_a_wrong_place_is_found(rows, monkeypatch, place):
    memory = rows._places(2)
    rows.card.tensor(memory, 0, (1,), torch.int32).fill_(place)
    monkeypatch.setattr(rows, "_places", lambda num_cards: memory)
    bags = CardBags(rows, uploaded(rows, np.zeros(10)), batch=2, hotness=5)
    with bags, pytest.raises(WrongAnswerError, match=r"dim 16, 2 bags of 5, 2 cards: a bag is .* off"):
        bags.check(2, 0)


def test_unwritten_elements_are_found(rows):
    with CardBags(rows, uploaded(rows, np.zeros(10)), batch=2, hotness=5) as bags:
        rows.card.tensor(bags._runs, 8, (1,), torch.int32).zero_()  # The first run has no bag instead of one.
        with pytest.raises(WrongAnswerError, match="a bag is nan off"):
            bags.check(1, 0)


@pytest.mark.parametrize("in_flight", GATHER_KERNELS)
@pytest.mark.parametrize("dim", [64, 128])
def test_random_reads_pass_the_check(dim, in_flight):
    with RowsOnCard(EmulatedCards(1), dim, 40_000) as rows, RandomGather(rows, 103, 7, in_flight) as gather:
        gather.check(2)


def test_a_read_of_another_row_is_found(rows, monkeypatch):
    monkeypatch.setattr("loadtest.gpu.rows.rows_read", lambda reads, count: rows_read(reads + 1, count))
    with RandomGather(rows, 103, 7, 4) as gather, pytest.raises(WrongAnswerError, match="gather_4"):
        gather.check(0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_compiler_leaves_room_for_48_warps_and_spills_nothing(architecture):
    kernels = resources(SOURCE, architecture)
    assert set(kernels) == set(GATHER_KERNELS.values())
    for kernel in kernels.values():
        assert kernel.local_bytes == 0
        assert kernel.registers <= 40
