"""The random-gather ceiling reads the rows that it says, and all of what it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loadtest.gpu.ceiling import GATHER_KERNELS, SOURCE, GatheredRows, RandomGather, WrongCeilingError, rows_read
from shardrank_testing.device_compilers import ARCHITECTURES, resources
from shardrank_testing.emulated_cards import EmulatedCards

NUM_ROWS = 300


def gather(cards, table, rows, in_flight, num_reads=103, a_group=7):
    card = cards.cards[0]
    return RandomGather(cards, card, card.stream(), table, NUM_ROWS, rows, num_reads, 3, a_group, in_flight)


def table_of(cards, stride):
    memory = cards.cards[0].allocate(NUM_ROWS * stride)
    words = cards.cards[0].tensor(memory, 0, (NUM_ROWS, stride // 4), torch.int32)
    words.random_(-(2**31), 2**31 - 1, generator=torch.Generator().manual_seed(stride))
    return memory, words.numpy().view(np.uint32)


@pytest.mark.parametrize("in_flight", GATHER_KERNELS)
@pytest.mark.parametrize("rows", dict.fromkeys(GatheredRows.around(64) + GatheredRows.around(128)))
def test_the_checksum_is_that_of_the_rows_which_numpy_computes(rows, in_flight):
    cards = EmulatedCards(1)
    memory, words = table_of(cards, rows.stride)
    with gather(cards, memory, rows, in_flight) as made:
        made.check(2)
        made.launch(2)
        made.stream.synchronize()
        sums = cards.cards[0].tensor(made._sums, 0, (made._sums.size_bytes // 4,), torch.int32).numpy().view(np.uint32)
        read = words[rows_read(np.arange(103, dtype=np.uint64) + np.uint64(206), NUM_ROWS)]
        total = int(read[:, : 4 * rows.chunks].sum(dtype=np.uint64))
        if rows.tail_offset:
            total += rows.chunks * int(read[:, rows.tail_offset // 4 :][:, :2].sum(dtype=np.uint64))
        threads = -(-103 // 7) << made._lanes_log2
        assert int(sums[:threads].sum(dtype=np.uint32)) == total % 2**32


def test_another_row_is_found(monkeypatch):
    cards = EmulatedCards(1)
    rows = GatheredRows(80, 4, 64)
    memory, _ = table_of(cards, 80)
    with gather(cards, memory, rows, 4) as made:
        monkeypatch.setattr("loadtest.gpu.ceiling.rows_read", lambda reads, n: rows_read(reads + np.uint64(1), n))
        with pytest.raises(WrongCeilingError, match="gather_4"):
            made.check(0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_device_compiler_leaves_room_for_48_warps_and_spills_nothing(architecture, tmp_path):
    taken = resources("nvrtc", SOURCE, architecture, tmp_path)
    assert set(taken) == set(GATHER_KERNELS.values())
    for kernel in taken.values():
        assert kernel.local_bytes == 0
        assert kernel.registers <= 40


def test_the_layouts_of_int8_rows_have_the_strides_in_question():
    strides = [rows.stride for dim in (64, 128) for rows in GatheredRows.around(dim)]
    assert strides == [64, 80, 96, 128, 144, 160]
    assert [rows.sector_bytes for rows in GatheredRows.around(64)] == [64, 96, 96]


def test_reads_spread_over_the_table():
    counts = np.bincount(rows_read(np.arange(30_000, dtype=np.uint64), NUM_ROWS), minlength=NUM_ROWS)
    assert counts.min() > 50
    assert counts.max() < 160
