"""The kernels against NumPy, alone: on emulated cards everywhere, on real ones with `-m gpu`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.codecs import RowCodec
from shard_node.cuda.kernel_params import NOT_HERE
from shardrank_testing.card_engines import CardFactory, card_factory
from shardrank_testing.card_plans import slots_of
from shardrank_testing.kernel_arena import KernelArena, LaunchShape, Run

DTYPES = ["int8", "int4", "fp16", "fp32"]
# From one chunk to several column tiles; odd multiples of 4, and what fills no chunk.
DIMS = [4, 12, 16, 36, 68, 128, 132, 260, 512]
ODD_DIMS = {"int8": [1, 7, 17], "int4": [2, 6, 34], "fp16": [1, 5, 15], "fp32": [1, 3, 7]}
ROW_COUNTS = (1, 7, 300, 200)


@pytest.fixture(params=["emulated", pytest.param("logical", marks=pytest.mark.gpu)])
def cards(request) -> CardFactory:
    """What kernels compute does not depend on when they run, nor on how cards are dealt to devices."""
    return card_factory(request.param)


def make_arena(cards, dtype, dim, rng, row_counts=ROW_COUNTS, lost=0.0) -> KernelArena:
    tables = [rng.standard_normal((count, dim)).astype(np.float32) for count in row_counts]
    return KernelArena(cards, dtype, tables, rng, lost)


def random_runs(rng, arena, max_bags, max_hotness, weighted) -> list[Run]:
    runs = []
    for table in rng.permutation(len(arena.owners)).tolist() * 2:
        lengths = rng.integers(0, max_hotness + 1, rng.integers(0, max_bags + 1))
        lengths[rng.random(lengths.size) < 0.2] = 0
        bags = [rng.integers(0, arena.owners[table].size, length) for length in lengths]
        weights = [rng.standard_normal(length).astype(np.float32) for length in lengths] if weighted else None
        runs.append(Run(table, bags, rng.choice(["sum", "mean", "none"]), weights))
    return runs


def assert_pooled(arena, pooled, runs, hotness) -> None:
    assert pooled.out.shape == arena.expected(runs).shape
    np.testing.assert_allclose(pooled.out, arena.expected(runs), rtol=1e-5, atol=3e-5 * max(1, hotness))


@pytest.mark.parametrize(
    ("dtype", "dim"), [(dtype, dim) for dtype in DTYPES for dim in sorted([*DIMS, *ODD_DIMS[dtype]])]
)
def test_every_dtype_and_dim_pools_as_numpy_does(cards, dtype, dim):
    rng = np.random.default_rng(dim * 10 + DTYPES.index(dtype))
    arena = make_arena(cards(int(rng.integers(1, 5))), dtype, dim, rng)
    for weighted in (False, True):
        runs = random_runs(rng, arena, 8, 12, weighted)
        card = int(rng.integers(arena.num_cards))
        pooled = arena.pool(card, runs, LaunchShape(rotation=card))
        assert_pooled(arena, pooled, runs, 12)
        assert (pooled.outside, pooled.not_here) == (0, 0)


@pytest.mark.parametrize("num_cards", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["int8", "fp16"])
def test_every_card_pools_the_same(cards, dtype, num_cards):
    rng = np.random.default_rng(num_cards)
    arena = make_arena(cards(num_cards), dtype, 64, rng, lost=0.2)
    runs = random_runs(rng, arena, 20, 6, weighted=True)
    first = arena.pool(0, runs)
    assert_pooled(arena, first, runs, 6)
    for card in range(1, num_cards):
        np.testing.assert_array_equal(arena.pool(card, runs).raw, first.raw)
    for rotation in (1, 7, 1000, 2**32 - 1):
        turned = arena.pool(0, runs, LaunchShape(rotation=rotation, idle_blocks=3))
        np.testing.assert_array_equal(turned.raw, first.raw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_alone_is_its_stored_numbers(cards, dtype):
    rng = np.random.default_rng(1)
    arena = make_arena(cards(4), dtype, 24, rng)
    runs = [Run(table, [np.arange(one.size)], "none") for table, one in enumerate(arena.owners)]
    expected = np.concatenate([arena.decoded(table) for table in range(len(arena.owners))])
    # code * scale is added to 0 and then to the bias, on a card in one rounding each.
    np.testing.assert_allclose(arena.pool(2, runs).out, expected, rtol=1e-6, atol=1e-6)


def test_every_stored_number_is_read_exactly(cards):
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    rows = bits[np.isfinite(bits)].astype(np.float32).reshape(-1, 64)
    arena = KernelArena(cards(2), "fp16", [rows], np.random.default_rng(1))
    np.testing.assert_array_equal(arena.pool(0, [Run(0, [np.arange(len(rows))], "none")]).out, rows)
    for dtype, codes in (("int8", 256), ("int4", 16)):
        # Natural numbers have scale 1 and bias 0.
        rows = np.stack([np.roll(np.arange(codes), shift) for shift in range(codes)]).astype(np.float32)
        np.testing.assert_array_equal(RowCodec(dtype, codes).decode(RowCodec(dtype, codes).encode(rows)), rows)
        arena = KernelArena(cards(3), dtype, [rows], np.random.default_rng(1))
        np.testing.assert_array_equal(arena.pool(0, [Run(0, [np.arange(codes)], "none")]).out, rows)


def test_all_numbers_are_rounded_as_torch_rounds_them(cards):
    rng = np.random.default_rng(3)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float().numpy()
    every = np.sort(every[np.isfinite(every)])
    # Each number, halfway to the next, and just beside halfway; and all sizes that a float can have.
    middle = ((every[:-1].astype(np.float64) + every[1:]) / 2).astype(np.float32)
    sizes = np.ldexp(rng.uniform(1, 2, 4096), rng.integers(-149, 127, 4096)).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(side) * np.inf) for side in (-1, 1)]
    numbers = np.concatenate([every, middle, *beside, sizes, -sizes, [65519.996, 65520.0, 65536.0]])
    numbers = numbers[: numbers.size // 64 * 64].astype(np.float32).reshape(-1, 64)
    arena = KernelArena(cards(1), "fp32", [numbers], rng)
    pooled = arena.pool(0, [Run(0, [np.arange(len(numbers))], "none")], LaunchShape(out_dtype="bf16"))
    np.testing.assert_array_equal(pooled.out, torch.from_numpy(numbers).to(torch.bfloat16).float().numpy())


@pytest.mark.parametrize("num_rows", [1, 300])
def test_values_outside_their_table_pool_as_zeros(cards, num_rows):
    rng = np.random.default_rng(num_rows)
    arena = make_arena(cards(2), "int8", 128, rng, row_counts=(7, num_rows, 7))
    outside = np.array([num_rows, num_rows + 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    bags = [np.concatenate([outside, rng.integers(0, num_rows, 5)]), outside[:1], outside[:4], outside]
    for bag in bags:
        rng.shuffle(bag)
    for mode in ("sum", "mean", "none"):
        runs = [Run(1, bags, mode), Run(0, [np.arange(7)], mode)]
        pooled = arena.pool(1, runs, LaunchShape(lanes_log2=1))
        assert_pooled(arena, pooled, runs, 11)
        assert (pooled.outside, pooled.not_here) == (17, 0)


@pytest.mark.parametrize(("dtype", "dim"), [("int8", 132), ("int4", 260), ("fp16", 100), ("fp32", 4096)])
def test_lanes_and_column_tiles_change_no_bit(cards, dtype, dim):
    rng = np.random.default_rng(dim)
    arena = make_arena(cards(2), dtype, dim, rng, row_counts=(5, 40), lost=0.1)
    runs = random_runs(rng, arena, 5, 9, weighted=True)
    first = arena.pool(0, runs)
    assert_pooled(arena, first, runs, 9)
    for lanes_log2 in range(6):
        pooled = arena.pool(0, runs, LaunchShape(lanes_log2=lanes_log2))
        np.testing.assert_array_equal(pooled.raw, first.raw)
        assert pooled.not_here == first.not_here


@given(data=st.data())
def test_any_batch_over_any_cards_pools_as_numpy_does(data):
    """Nothing between bags is written; rows of other nodes are zeros, and counted; short outputs are rounded."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_cards = data.draw(st.integers(1, 8))
    dtype = data.draw(st.sampled_from(DTYPES))
    dim = data.draw(st.integers(1, 70)) * (2 if dtype == "int4" else 1)
    row_counts = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    lost = data.draw(st.sampled_from([0.0, 0.3]))
    arena = make_arena(card_factory("emulated")(num_cards), dtype, dim, rng, row_counts, lost)
    runs = random_runs(rng, arena, 6, data.draw(st.integers(0, 20)), data.draw(st.booleans()))
    shape = LaunchShape(
        rotation=data.draw(st.integers(0, 9)),
        lanes_log2=data.draw(st.one_of(st.none(), st.integers(0, 5))),
        first=data.draw(st.integers(0, 8)),
        gap=data.draw(st.integers(0, 8)),
    )
    card = data.draw(st.integers(0, num_cards - 1))
    pooled = arena.pool(card, runs, shape)
    assert_pooled(arena, pooled, runs, 20)
    not_here = sum((arena.places[run.table][bag] == NOT_HERE).sum() for run in runs for bag in run.bags)
    assert (pooled.outside, pooled.not_here) == (0, not_here)
    narrow = arena.pool(card, runs, replace(shape, out_dtype="bf16"))
    np.testing.assert_array_equal(narrow.out, torch.from_numpy(pooled.out).to(torch.bfloat16).float().numpy())


def with_rows(arena: KernelArena, before: np.ndarray, owner: int, table: int, rows: np.ndarray, relaid: np.ndarray):
    """What an owner's bytes have to be after rows were written."""
    after = before.copy()
    start = int(arena.placer.starts(arena.arena.group)[table, owner])
    slots, stride = slots_of(arena.places[table], arena.num_cards), arena.arena.format.stride
    for row, content in zip(rows.tolist(), relaid, strict=True):
        if arena.owners[table][row] == owner:
            at = start + int(slots[row]) * stride
            after[at : at + stride] = content
    return after


@pytest.mark.parametrize("writes_host", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), [("int8", 64), ("int8", 5), ("int4", 36), ("fp16", 100), ("fp32", 1)])
def test_a_card_writes_its_rows_and_hot_copies(cards, dtype, dim, writes_host):
    rng = np.random.default_rng(dim)
    arena = make_arena(cards(3), dtype, dim, rng, (3, 90, 40), lost=0.2)
    rows = rng.permutation(90)[:70]
    relaid = rng.integers(0, 256, (rows.size, arena.arena.format.stride)).astype(np.uint8)
    expected = arena.contents()
    arena.write(1, 1, rows, relaid, writes_host)
    for card, owner in [(1, 1), (1, 3), *([(0, 4)] if writes_host else [])]:
        expected[card, owner] = with_rows(arena, expected[card, owner], owner, 1, rows, relaid)
    for place, content in arena.contents().items():
        np.testing.assert_array_equal(content, expected[place], err_msg=str(place))


def test_rows_not_here_or_outside_are_not_written(cards):
    arena = make_arena(cards(1), "fp32", 8, np.random.default_rng(1), (40,), lost=0.5)
    before = arena.contents()
    rows = np.array([*np.flatnonzero(arena.places[0] == NOT_HERE), 40, 41, 2**31, 2**32 - 1])
    assert rows.size > 10
    arena.write(0, 0, rows, np.full((rows.size, 32), 7, np.uint8), True)
    for place, content in arena.contents().items():
        np.testing.assert_array_equal(content, before[place])
