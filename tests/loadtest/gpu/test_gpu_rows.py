"""What the GPU bench measures on: its table, its ids, the bytes it counts, and the check that finds wrong answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loader.snapshot.codecs import codec_for
from loadtest.gpu.pooling import predicted_us, system_with
from loadtest.gpu.rows import (
    ZIPF_EXPONENT,
    Bags,
    RowsOnCard,
    WrongPoolingError,
    asked_bytes,
    draw,
    draw_split,
    share_of_distinct,
)
from shard_node.cuda.kernel_params import NOT_HERE, owners_of, pinned_owner, slots_of
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.rows_on_cards import restored


@pytest.fixture
def rows():
    cards = EmulatedCards(1)
    with RowsOnCard(cards, cards.cards[0], 16, table_bytes=24 * 320, host_bytes=32 * 100) as made:
        yield made


def upload_values(rows: RowsOnCard, values: np.ndarray):
    return rows.upload(values.astype(np.uint32).tobytes())


def test_the_table_is_as_large_as_asked_and_splits_evenly(rows):
    assert rows.card_rows == 320
    assert rows.host_rows == 100
    assert rows.stride == 32


@pytest.mark.parametrize("num_cards", [1, 2, 4, 8])
def test_every_row_has_a_slot_of_its_own_with_its_owner(rows, num_cards):
    memory = rows.placed(num_cards).places
    places = rows.card.tensor(memory, 0, (420,), torch.int32).numpy().view(np.uint32)
    owners, slots = owners_of(places, num_cards), slots_of(places, num_cards)
    np.testing.assert_array_equal(owners[:320], np.arange(320) % num_cards)
    np.testing.assert_array_equal(slots[:320], np.arange(320) // num_cards)
    assert set(owners[320:].tolist()) == {pinned_owner(num_cards)}
    np.testing.assert_array_equal(slots[320:], np.arange(100))


@pytest.mark.parametrize("num_cards", [1, 4])
def test_the_reference_is_the_codecs_sum_of_the_stored_rows(rows, num_cards):
    bags = np.random.default_rng(0).integers(0, 420, (7, 5))
    stored = restored(rows.format, rows.stored(bags.reshape(-1), num_cards))
    expected = codec_for("int8", 16).decode(stored).astype(np.float64).reshape(7, 5, 16).sum(axis=1)
    np.testing.assert_allclose(rows.reference(bags, num_cards), expected, rtol=1e-6, atol=1e-6)


def test_rows_differ_from_each_other_and_pinned_rows_from_the_first_ones(rows):
    stored = rows.stored(np.arange(420), 1)
    assert len({row.tobytes() for row in stored[:320]}) == 320
    assert not (stored[320:] == stored[:100]).all(axis=1).any()


@pytest.mark.parametrize("out_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("num_cards", [1, 2, 8])
def test_the_kernels_answer_passes_the_check(rows, num_cards, out_dtype):
    values = upload_values(rows, np.random.default_rng(1).integers(0, 420, 3 * 100 * 5))
    with Bags(rows, values, batch=100, hotness=5, num_sets=3, out_dtype=out_dtype) as bags:
        assert bags.check(num_cards, 2) <= 1e-2


def test_a_wrong_place_is_found(rows):
    values = upload_values(rows, np.zeros(10))
    with Bags(rows, values, batch=2, hotness=5, num_sets=1) as bags:
        bags.check(2, 0)
        rows.card.tensor(rows.placed(2).places, 0, (1,), torch.int32).fill_(1 << 3)  # Row 0 is now slot 1 of card 0.
        with pytest.raises(WrongPoolingError, match=r"dim 16, hotness 5, batch 2, 2 cards: a bag is .* off"):
            bags.check(2, 0)


def test_a_row_that_is_taken_for_missing_is_found(rows):
    values = upload_values(rows, np.zeros(10))
    with Bags(rows, values, batch=2, hotness=5, num_sets=1) as bags:
        place = np.array([NOT_HERE], np.uint32).view(np.int32)
        rows.card.tensor(rows.placed(1).places, 0, (1,), torch.int32).copy_(torch.from_numpy(place))
        with pytest.raises(WrongPoolingError, match="0 values taken for out of range, 10 for not here"):
            bags.check(1, 0)


def test_elements_that_are_not_written_are_found(rows):
    values = upload_values(rows, np.zeros(10))
    with Bags(rows, values, batch=2, hotness=5, num_sets=1) as bags:
        bags._grid = (1, 1)
        rows.card.tensor(bags._runs, 8, (1,), torch.int32).fill_(1)  # The run has one bag instead of two.
        with pytest.raises(WrongPoolingError, match="16 elements not finite"):
            bags.check(1, 0)


def test_uniform_ids_cover_the_table():
    drawn = draw("uniform", 50, 5000, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.int32
    assert drawn.unique().tolist() == list(range(50))


def test_zipf_ids_follow_the_power_law_and_are_scattered():
    num_rows, count = 1000, 200_000
    drawn = draw("zipf", num_rows, count, torch.Generator().manual_seed(0))
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < num_rows
    found = drawn.bincount(minlength=num_rows).sort(descending=True).values.double() / count
    edges = torch.arange(1, num_rows + 2, dtype=torch.float64) ** (1 - ZIPF_EXPONENT)
    expected = edges.diff() / (edges[-1] - 1)
    torch.testing.assert_close(found[:20], expected[:20], rtol=0.05, atol=0)
    hottest = drawn.bincount(minlength=num_rows).topk(2).indices
    assert int((hottest[0] - hottest[1]).abs()) > 1


def test_the_share_of_lookups_on_the_card_is_as_asked():
    drawn = draw_split(1000, 100, 0.9, 100_000, torch.Generator().manual_seed(0))
    assert float((drawn < 1000).double().mean()) == pytest.approx(0.9, abs=0.01)
    assert int(drawn.max()) == 1099
    assert int(draw_split(1000, 100, 0.0, 1000, torch.Generator().manual_seed(0)).min()) >= 1000


def test_distinct_rows_are_counted_once():
    assert share_of_distinct(torch.tensor([3, 3, 5, 7], dtype=torch.int32)) == 0.75


@pytest.mark.parametrize(("dim", "row_bytes"), [(128, 160), (64, 96), (16, 32)])
def test_a_row_counts_as_the_sectors_that_it_touches(dim, row_bytes):
    cards = EmulatedCards(1)
    with RowsOnCard(cards, cards.cards[0], dim, 1000, 0) as rows:
        asked = asked_bytes(rows, hotness=20, batch=10)
    assert asked["rows"] == 200 * row_bytes
    assert asked["places"] == 200 * 32
    assert asked["ids_and_offsets"] == 4 * 200 + 4 * 11
    assert asked["pooled"] == 10 * dim * 4
    assert asked["all"] == sum(asked[name] for name in ("rows", "places", "ids_and_offsets", "pooled"))


def test_the_prediction_of_a_large_batch_is_its_bytes_by_the_bandwidth():
    system = system_with(copy_gb_per_s=2000.0, bus_gb_per_s=50.0)
    cards = EmulatedCards(1)
    with RowsOnCard(cards, cards.cards[0], 128, 1000, 0) as rows:
        asked = asked_bytes(rows, hotness=20, batch=65536)["all"]
    assert predicted_us(system, 128, 20, 65536) == pytest.approx(asked / 2000e3, rel=1e-3)
    on_host = predicted_us(system, 128, 20, 65536, share_on_card=0.0)
    assert on_host > 20 * 65536 * 160 / 50e3
    assert predicted_us(system, 128, 20, 65536, 0.5) == pytest.approx(on_host / 2, rel=1e-3)
