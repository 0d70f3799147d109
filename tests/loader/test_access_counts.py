"""Access counts: adding them up, a counter of bounded memory, and the file, which nothing else is taken for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from loader.access_counts import FORMAT, AccessCounter, AccessCounts, read_access_counts, write_access_counts
from loader.errors import ExportError
from shardrank_testing.snapshots import make_spec

KEYS = st.lists(st.integers(0, 30), max_size=40)


def counted(counts: AccessCounts) -> dict[int, float]:
    assert np.all(np.diff(counts.keys) > 0)
    return dict(zip(counts.keys.tolist(), counts.counts.tolist(), strict=True))


@given(st.lists(KEYS, max_size=6), st.integers(1, 50))
def test_a_counter_with_room_is_exact(batches, min_queued):
    counter = AccessCounter(31, min_queued)
    for keys in batches:
        counter.add(np.array(keys, np.int64), 2)
        if counter.is_full:
            counter.fold()
    everything = Counter(key for keys in batches for key in keys)
    assert counted(counter.fold()) == {key: 2 * count for key, count in everything.items()}
    assert (counter.total, counter.is_exact) == (2 * everything.total(), True)


def test_the_most_frequent_keys_keep_their_counts():
    counter = AccessCounter(3, 1)
    for keys in ([5, 5, 5, 9], [9, 9, 7, 7], [1, 2]):
        counter.add(np.array(keys))
        counter.fold()
    counts = counter.fold()
    assert {key: count for key, count in counted(counts).items() if count > 2} == {5: 3, 9: 3}
    assert (counts.keys.size, counter.total, counter.is_exact) == (3, 10, False)
    assert counts.hottest_first()[:2].tolist() == [5, 9]


def test_a_count_weighs_half_after_the_half_life():
    counter = AccessCounter(10, 1, half_life=4)
    counter.add(np.array([3]), 8)
    counter.fold()
    counter.add(np.array([4, 4, 4, 4]))
    assert counted(counter.fold()) == {3: 4.0, 4: 4.0}


def test_counts_read_like_an_array_of_all_rows():
    counts = AccessCounts.from_rows(np.array([0, 3, 0, 2.6, 2**33]))
    assert (counts.shape, counts.total) == ((5,), 2**33 + 6)
    assert counts[:].tolist() == [0, 3, 0, 3, 2**32 - 1]
    assert counts[2:4].tolist() == [0, 3]
    assert counts[9:].size == 0


def test_lookups_that_are_written_are_read_as_whole_counts(tmp_path):
    file = tmp_path / "counts.safetensors"
    lookups = {
        "user": AccessCounts(np.array([0, 7]), np.array([0.2, 12.6]), 1000),
        "film": AccessCounts(np.zeros(0, np.int64), np.zeros(0), 777),
    }
    write_access_counts(file, lookups)
    assert [path.name for path in tmp_path.iterdir()] == ["counts.safetensors"]
    found = read_access_counts([file], make_spec())
    assert {name: counted(table) for name, table in found.items()} == {"user": {0: 1, 7: 13}, "film": {}}
    twice = read_access_counts([file, file], make_spec())
    assert counted(twice["user"]) == {0: 2, 7: 26}


def test_counts_that_are_too_large_are_all_divided_alike(tmp_path):
    lookups = {name: AccessCounts(np.array([1]), np.array([count]), size) for name, count, size in
               (("user", 2.0**34, 1000), ("film", 2.0**33, 777))}  # fmt: skip
    write_access_counts(tmp_path / "counts", lookups)
    found = read_access_counts([tmp_path / "counts"], make_spec())
    assert [counted(found[name]) for name in lookups] == [{1: 2**32 - 1}, {1: 2**31}]


ROWS, SEEN, SIZE = np.array([1, 2], np.uint32), np.array([5, 6], np.uint32), np.array([300])


def city(**changed: np.ndarray) -> dict[str, np.ndarray]:
    tensors = {"rows": ROWS, "counts": SEEN, "num_embeddings": SIZE} | changed
    return {f"city/{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"no access counts; the model's tables are"),
        ({f"nobody/{name}": city()[f"city/{name}"] for name in ("rows", "counts", "num_embeddings")}, r"\['nobody'\]"),
        ({"city": SEEN}, r"has the tensors \['city'\], which are not three for each table"),
        ({"city/rows": ROWS, "city/counts": SEEN}, "not three for each table"),
        (city(counts=SEEN[:1]), "table 'city': rows and counts are not uint32"),
        (city(rows=ROWS.astype(np.int64)), "table 'city': rows and counts are not uint32"),
        (city(rows=ROWS + np.uint32(298)), "table 'city': rows must ascend below num_embeddings 300"),
        (city(rows=ROWS[::-1].copy()), "table 'city': rows must ascend"),
        (city(counts=SEEN * np.uint32(0)), "each with a count of 1 or more"),
        (city(num_embeddings=ROWS), "table 'city': num_embeddings is no number"),
        (city(num_embeddings=SIZE + 1), "table 'city' whose num_embeddings was 301; here it is 300"),
    ],
)
def test_a_file_of_counts_that_fit_no_table_is_refused(tmp_path, tensors, message):
    safetensors.numpy.save_file(tensors, tmp_path / "counts", {"format": FORMAT})
    with pytest.raises(ExportError, match=message):
        read_access_counts([tmp_path / "counts"], make_spec())


def test_files_of_other_formats_are_refused_by_name(tmp_path):
    with pytest.raises(ExportError, match=r"no longer from a folder of \.npy: `shardrank counts`"):
        read_access_counts([tmp_path], make_spec())
    for metadata, message in ((None, "has no format: of an earlier release"), ({"format": "other"}, "format other")):
        safetensors.numpy.save_file(city(), tmp_path / "counts", metadata)
        with pytest.raises(ExportError, match=f"{message}.*docs/snapshot-format.md"):
            read_access_counts([tmp_path / "counts"], make_spec())
    (tmp_path / "counts").write_text("{}")
    with pytest.raises(ExportError, match="counts: "):
        read_access_counts([tmp_path / "counts"], make_spec())
