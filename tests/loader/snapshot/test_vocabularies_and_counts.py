"""Files with one value a row: vocabularies and access counts."""

from __future__ import annotations

import re

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ExportError
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import VocabularyMapping, fingerprint_strings
from loader.snapshot.vocabularies_and_counts import vocabulary_tensors
from shardrank_testing.snapshots import one_table_spec, write_snapshot


def counts_of(num_rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, num_rows, np.uint32)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64, np.int32, ">u4"])
def test_counts_come_back_in_row_order(tmp_path, dtype):
    counts = counts_of(300) >> np.uint32(1)
    path, _ = write_snapshot(tmp_path, one_table_spec(300), access_counts={"items": counts.astype(dtype)})
    read = Snapshot.open(path).access_counts("items")
    assert read.dtype == np.uint32
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, counts)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros(299, np.uint32), r"expected integers \[300\], got uint32 \[299\]"),
        (np.zeros((300, 1), np.uint32), r"got uint32 \[300, 1\]"),
        (np.zeros(300), r"got float64 \[300\]"),
        (np.zeros(300, bool), r"got bool \[300\]"),
        (np.arange(300) - 1, r"row 0 has -1, which is not in \[0, 2\^32\)"),
        (np.where(np.arange(300) == 7, 2**32, 0), "row 7 has 4294967296, which is not"),
        (np.full(300, 2**64 - 1, np.uint64), "row 0 has 18446744073709551615"),
    ],
)
def test_what_is_no_count_of_each_row_is_refused_at_export(tmp_path, counts, message):
    with pytest.raises(ExportError, match=f"table 'items': access counts: .*{message}"):
        write_snapshot(tmp_path, one_table_spec(300), access_counts={"items": counts})


def exported(tmp_path, id_type, ids) -> Snapshot:
    """A snapshot of a table of 300 rows with a vocabulary."""
    spec = one_table_spec(300, id_mapping=VocabularyMapping(id_type=id_type))
    return Snapshot.open(write_snapshot(tmp_path, spec, vocabularies={"items": ids})[0])


@given(strings=st.lists(st.text(), max_size=20))
def test_a_fingerprint_is_xxh3_of_utf8_without_the_top_bit(strings):
    fingerprints = fingerprint_strings(strings)
    assert fingerprints.dtype == np.int64
    assert fingerprints.tolist() == [xxhash.xxh3_64_intdigest(text.encode("utf-8")) % 2**63 for text in strings]


def test_the_fingerprint_of_a_known_string_never_changes():
    # XXH3_64bits("") is 0x2D06800538D394C2 in the reference implementation's test vectors.
    assert fingerprint_strings([""]).tolist() == [0x2D06800538D394C2]


@pytest.mark.parametrize("given_as", [list, np.array, lambda ids: np.array(ids, np.uint32)])
def test_integer_ids_come_back_in_row_order(tmp_path, given_as):
    ids = np.random.default_rng(0).permutation(10_000)[:250].tolist()
    snapshot = exported(tmp_path, "integer", given_as(ids))
    assert snapshot.vocabulary("items").dtype == np.int64
    assert snapshot.vocabulary("items").tolist() == ids
    assert snapshot.vocabulary_strings("items") is None


@pytest.mark.parametrize("given_as", [list, np.array])
def test_strings_come_back_in_row_order_with_fingerprints(tmp_path, given_as):
    strings = ["", "a", "é" * 40, "映画", "a b\n", *(f"film-{number}" for number in range(200))]
    snapshot = exported(tmp_path, "string", given_as(strings))
    assert snapshot.vocabulary_strings("items") == strings
    np.testing.assert_array_equal(snapshot.vocabulary("items"), fingerprint_strings(strings))


@pytest.mark.parametrize(
    ("id_type", "ids", "message"),
    [
        ("integer", [], "vocabulary of 0 ids"),
        ("integer", range(301), "vocabulary of 301 ids; allowed: 1 to num_embeddings 300"),
        ("integer", [4, 7, 9, 7], "rows 1 and 3 have the same id 7"),
        ("integer", [4, -1], r"id -1 is not in \[0, 2\^63\)"),
        ("integer", np.array([2**63], np.uint64), r"id 9223372036854775808 is not in"),
        ("integer", [2**70], "expected integers"),
        ("integer", [1.5], "expected integers"),
        ("integer", ["a"], "expected integers"),
        ("integer", np.array([True]), "expected integers"),
        ("integer", [[1], [2]], "expected integers"),
        ("integer", [[1], [2, 3]], "vocabulary"),
        ("string", ["a", 1], "expected strings"),
        ("string", ["a", "b", "a"], "rows 0 and 2 have the same id 'a'"),
        ("string", ["ok", "\ud800"], "not valid Unicode"),
        ("string", ["ok", "é" * 513], "an id of 1026 bytes of UTF-8; at most 1024"),
    ],
)
def test_a_vocabulary_that_maps_no_rows_to_ids_is_refused(id_type, ids, message):
    table = one_table_spec(300, id_mapping=VocabularyMapping(id_type=id_type)).tables[0]
    with pytest.raises(ExportError, match=f"table 'items': .*{message}"):
        vocabulary_tensors(table, ids)


def test_two_strings_whose_fingerprints_collide_are_refused(monkeypatch):
    # No colliding pair of XXH3-64 is at hand, so the fingerprint is cut to 8 bits.
    monkeypatch.setattr(
        "loader.snapshot.vocabularies_and_counts.fingerprint_strings",
        lambda strings: fingerprint_strings(strings) & 0xFF,
    )
    table = one_table_spec(300, id_mapping=VocabularyMapping(id_type="string")).tables[0]
    strings = [f"s{number}" for number in range(300)]
    message = r"rows (\d+) and (\d+) \('s\1' and 's\2'\) have the same fingerprint"
    with pytest.raises(ExportError, match=message) as caught:
        vocabulary_tensors(table, strings)
    first, second = re.search(message, str(caught.value)).groups()
    assert first != second
    assert len(set(fingerprint_strings([f"s{first}", f"s{second}"]) & 0xFF)) == 1
