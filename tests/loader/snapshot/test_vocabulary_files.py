"""Vocabularies at export and when read back; fingerprints of strings."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import ExportError
from loader.snapshot import per_row
from loader.snapshot.manifest import VocabularyMapping, fingerprint_strings
from loader.snapshot.per_row import vocabulary_tensors
from loader.snapshot.reader import Snapshot
from shardrank_testing.snapshots import one_table_spec, write_snapshot


def table(id_type="integer", num_embeddings=300):
    return one_table_spec(num_embeddings, id_mapping=VocabularyMapping(id_type=id_type)).tables[0]


@settings(deadline=None)
@given(strings=st.lists(st.text(), max_size=20))
def test_a_fingerprint_is_xxh3_of_the_utf8_bytes_without_the_top_bit(strings):
    fingerprints = fingerprint_strings(strings)
    assert fingerprints.dtype == np.int64
    assert fingerprints.tolist() == [xxhash.xxh3_64_intdigest(text.encode("utf-8")) % 2**63 for text in strings]


def test_the_fingerprint_of_a_known_string_never_changes():
    # XXH3_64bits("") is 0x2D06800538D394C2 in the reference implementation's test vectors.
    assert fingerprint_strings([""]).tolist() == [0x2D06800538D394C2]


@pytest.mark.parametrize("given_as", [list, np.array, lambda ids: np.array(ids, np.uint32)])
def test_integer_ids_come_back_in_row_order(tmp_path, given_as):
    ids = np.random.default_rng(0).permutation(10_000)[:250].tolist()
    spec = one_table_spec(300, id_mapping=VocabularyMapping())
    path, _ = write_snapshot(tmp_path, spec, vocabularies={"items": given_as(ids)})
    snapshot = Snapshot.open(path)
    assert snapshot.vocabulary("items").dtype == np.int64
    assert snapshot.vocabulary("items").tolist() == ids
    assert snapshot.vocabulary_strings("items") is None


@pytest.mark.parametrize("given_as", [list, np.array])
def test_strings_come_back_in_row_order_with_their_fingerprints(tmp_path, given_as):
    strings = ["", "a", "é" * 40, "映画", "a b\n", *(f"film-{number}" for number in range(200))]
    spec = one_table_spec(300, id_mapping=VocabularyMapping(id_type="string"))
    path, _ = write_snapshot(tmp_path, spec, vocabularies={"items": given_as(strings)})
    snapshot = Snapshot.open(path)
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
def test_a_vocabulary_that_is_no_map_from_rows_to_ids_is_refused(id_type, ids, message):
    with pytest.raises(ExportError, match=f"table 'items': .*{message}"):
        vocabulary_tensors(table(id_type), ids)


def test_two_strings_whose_fingerprints_collide_are_refused_by_name(monkeypatch):
    # No colliding pair of XXH3-64 is at hand, so the fingerprint is cut to 8 bits.
    monkeypatch.setattr(per_row, "fingerprint_strings", lambda strings: fingerprint_strings(strings) & 0xFF)
    strings = [f"s{number}" for number in range(300)]
    short = [int(value) & 0xFF for value in fingerprint_strings(strings)]
    with pytest.raises(ExportError, match=r"\('s\d+' and 's\d+'\) have the same fingerprint") as caught:
        vocabulary_tensors(table("string"), strings)
    first, second = (int(part) for part in str(caught.value).split("rows ")[1].split(" (")[0].split(" and "))
    assert first != second
    assert short[first] == short[second]


def test_a_vocabulary_goes_with_the_vocabulary_mapping_and_only_with_it(tmp_path):
    with pytest.raises(ExportError, match=r"vocabularies: missing for tables \['items'\]"):
        write_snapshot(tmp_path, one_table_spec(300, id_mapping=VocabularyMapping()))
