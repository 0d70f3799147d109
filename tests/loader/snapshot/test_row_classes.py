"""Which part of a divided table a row lies in, and as which row there: a mapping, a file, and what is refused of it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loader.errors import SnapshotCorruptError
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.row_classes import RowClasses
from shardrank_testing.deltas import all_divisions
from shardrank_testing.snapshots import restate_file, rewrite_manifest

CLASSES = "tables/item/row-classes.safetensors"
MADE = all_divisions(0)
ITEM = MADE.spec.table_of("f_item")
ROWS = ITEM.num_embeddings
HOT, COLD, PRUNED = ITEM.class_rows(MADE.spec.parts(ITEM))


@st.composite
def row_classes(draw):
    """The class of each row, uint8 [n], and how many classes there are; some may be empty, and one may have all."""
    size = draw(st.sampled_from([1, 2, 511, 512, 513, 1023, 1025, 3000]))
    num_classes = draw(st.integers(2, 5))
    weights = np.array(draw(st.lists(st.integers(0, 3), min_size=num_classes, max_size=num_classes)), np.float64)
    weights[draw(st.integers(0, num_classes - 1))] += 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.choice(num_classes, size, p=weights / weights.sum()).astype(np.uint8), num_classes


@given(row_classes(), st.integers(0, 2**32))
def test_a_rows_place_counts_the_rows_of_its_class_before_it(made, seed):
    classes, num_classes = made
    found = RowClasses.of(classes, num_classes)
    np.testing.assert_array_equal(found.classes(), classes)
    # In any order, and some twice.
    rows = np.random.default_rng(seed).integers(0, classes.size, 700)
    places = np.empty(classes.size, np.int64)
    for number in range(num_classes):
        is_of = classes == number
        places[is_of] = np.cumsum(is_of)[is_of] - 1
    which, place = found.find(rows)
    np.testing.assert_array_equal(which, classes[rows])
    np.testing.assert_array_equal(place, places[rows])
    left = classes
    for number, bitmap in enumerate(found.bitmaps):
        assert bitmap.num_ones == np.count_nonzero(left == number)
        left = left[left != number]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A snapshot of a table in two parts, half of whose rows are pruned."""
    return MADE.export(tmp_path_factory.mktemp("store")).path


def test_a_snapshot_has_the_classes_that_it_was_exported_with(exported):
    snapshot = Snapshot.open(exported)
    classes = np.empty(ROWS, np.uint8)
    classes[np.argsort(-MADE.counts["item"], kind="stable")] = np.repeat(np.arange(3), [HOT, COLD, PRUNED])
    for name in ("item", "item.b0", "item.b1"):
        np.testing.assert_array_equal(snapshot.row_classes(name).classes(), classes)
    counts = [MADE.counts["item"][classes == number] for number in (0, 1)]
    np.testing.assert_array_equal(snapshot.access_counts("item.b0"), counts[0])
    np.testing.assert_array_equal(snapshot.access_counts("item.b1"), [*counts[1], 0])
    assert verify_snapshot(exported).ok
    bits = 8 * sum(one.words.nbytes + one.ranks.nbytes for one in snapshot.row_classes("item").bitmaps)
    assert bits == 1.0625 * 512 * (-(-ROWS // 512) + -(-(ROWS - HOT) // 512))


@pytest.fixture
def damaged(exported, tmp_path):
    """Make a copy whose file of row classes has other tensors, stated as a forger would."""

    def made(change):
        copy = shutil.copytree(exported, tmp_path / MADE.spec.model / "1")
        tensors = load_file(copy / CLASSES)
        change(tensors)
        save_file(tensors, copy / CLASSES)
        restate_file(copy, CLASSES)
        return copy

    return made


def flip_a_bit(tensors):
    tensors["bits.0"][7] ^= 1


def wrong_rank(tensors):
    tensors["ranks.1"][1] += 1


def move_a_bit(ones: slice, zeros: slice):
    """A change that clears the first set bit in a range, and sets the first other one in another range."""

    def change(tensors):
        bits = np.unpackbits(tensors["bits.0"], bitorder="little")
        one, zero = ones.start + np.argmax(bits[ones]), zeros.start + np.argmin(bits[zeros])
        bits[[one, zero]] = bits[[zero, one]]
        tensors["bits.0"][:] = np.packbits(bits, bitorder="little")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_bit, f"bitmap 0 does not count the {HOT} rows of its class"),
        # As many ones as before in the table, not in each block; and then one behind the table's end.
        (move_a_bit(slice(0, 512), slice(512, ROWS)), "bitmap 0 does not count"),
        (move_a_bit(slice(512, ROWS), slice(ROWS, ROWS + 1)), "bitmap 0 does not count"),
        (wrong_rank, f"bitmap 1 does not count the {COLD} rows"),
    ],
)
def test_classes_that_do_not_count_right_are_refused_by_file(damaged, change, message):
    copy = damaged(change)
    with pytest.raises(SnapshotCorruptError, match=rf"item/row-classes.safetensors: {message}"):
        Snapshot.open(copy)
    # Who trusts the store is told when they are read.
    with pytest.raises(SnapshotCorruptError, match=message):
        Snapshot.open(copy, verify=False).row_classes("item")
    with pytest.raises(SnapshotCorruptError, match=message):
        Snapshot.open(copy, files="other")
    Snapshot.open(copy, files="rows")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda one: one["tables"][0].pop("row_classes"), "row classes go with the first part"),
        (lambda one: one["tables"][1].update(row_classes=one["tables"][0]["row_classes"]), "row classes go with the"),
        (lambda one: one["spec"]["divided"][0].update(pruned=PRUNED - 1), f"num_embeddings is {ROWS}"),
        (lambda one: one["spec"]["divided"][0].update(parts=["item.b0", "item.b9"]), r"parts \['item.b9'\] are no"),
        (lambda one: one["spec"]["divided"][0].update(parts=["item.b0", "item.b0"]), "duplicate part of a divided"),
        (lambda one: one["spec"]["divided"][0].update(name="item.b0"), "that of a table which is not its only part"),
        (lambda one: one["spec"]["divided"][0].update(parts=["item.b0"] * 9), "at most 8"),
        (
            lambda one: one["spec"]["divided"][0].update(combine="multiply"),
            "combine: Input should be 'add'",
        ),
        (lambda one: one["spec"]["divided"][0].update(by="quotient_remainder"), "buckets go with"),
    ],
)
def test_a_manifest_that_divides_unlike_its_parts_is_refused(damaged, edit, message):
    copy = damaged(lambda tensors: None)
    rewrite_manifest(copy, edit)
    with pytest.raises(SnapshotCorruptError, match=message):
        Snapshot.open(copy)
