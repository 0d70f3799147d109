"""Keys are found exactly, as a dict would find them, by NumPy and by compiled code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_node.engine.key_index import ABSENT, KeyIndex, native_find, num_entries

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
KEYS = st.one_of(st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1), st.integers(-40, 40))
CAPACITY = 60
FACTOR = 0x9E3779B97F4A7C15
NATIVE = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(native_find() is None, reason="there is no C compiler"))],
    ids=["numpy", "compiled"],
)


def key_with_home(home: int, size: int, number: int) -> int:
    """The number-th key whose search begins at an entry: the hash inverted."""
    top = -(-(home << 32) // size) + number
    assert (top * size) >> 32 == home
    mixed = (top << 32 | number) * pow(FACTOR, -1, 2**64) % 2**64
    key = mixed ^ (mixed >> 32)
    return key - 2**64 if key >= 2**63 else key


def find(index: KeyIndex, tables: dict[int, list[int]]) -> list[int]:
    keys = [np.array(keys, np.int64) for keys in tables.values()]
    counts = np.array([of_table.size for of_table in keys], np.int64)
    return index.find(np.array(list(tables), np.int32), counts, np.concatenate(keys)).tolist()


@NATIVE
@settings(deadline=None)
@given(st.data())
def test_keys_are_found_as_a_dict_finds_them(native, data):
    """Inserted, removed, inserted again, in tables that share the arrays; some collide by design."""
    index, tables = KeyIndex([CAPACITY, 1, CAPACITY], native=native), ({}, {}, {})
    planted = [key_with_home(num_entries(CAPACITY) - 1, num_entries(CAPACITY), number) for number in range(12)]
    some_keys = st.lists(st.one_of(KEYS, st.sampled_from(planted)), unique=True, max_size=20)
    next_slot = 0
    for _ in range(data.draw(st.integers(1, 6))):
        table = data.draw(st.sampled_from([0, 2]))
        kept, keys = tables[table], data.draw(some_keys)
        removed = [key for key in keys if key in kept]
        if data.draw(st.booleans()) and removed:
            index.remove(table, np.array(removed, np.int64))
            for key in removed:
                del kept[key]
        else:
            new = [key for key in keys if key not in kept][: CAPACITY - len(kept)]
            index.insert(table, np.array(new, np.int64), np.arange(next_slot, next_slot + len(new)))
            kept |= {key: next_slot + place for place, key in enumerate(new)}
            next_slot += len(new)
        sought = {number: [*data.draw(some_keys), *tables[number]] for number in (0, 1, 2)}
        expected = [tables[number].get(key, ABSENT) for number, keys in sought.items() for key in keys]
        assert find(index, sought) == expected


@NATIVE
def test_a_table_that_is_full_finds_all_its_keys_and_no_other(native):
    rng = np.random.default_rng(1)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 60_000))[:50_000]
    index = KeyIndex([keys.size], native=native)
    index.insert(0, keys, np.arange(keys.size))
    table, count = np.zeros(1, np.int32), np.array([keys.size])
    np.testing.assert_array_equal(index.find(table, count, keys), np.arange(keys.size))
    assert (index.find(table, count, keys + 1) == np.where(np.isin(keys + 1, keys), 0, ABSENT)).all()
    index.remove(0, keys[::2])
    np.testing.assert_array_equal(index.find(table, count, keys)[1::2], np.arange(keys.size)[1::2])
    assert (index.find(table, count, keys)[::2] == ABSENT).all()


@NATIVE
def test_a_thousand_keys_with_one_home_are_found(native):
    size = num_entries(1000)
    keys = np.array([key_with_home(size // 2, size, number) for number in range(1000)], np.int64)
    index = KeyIndex([1000], native=native)
    index.insert(0, keys, np.arange(1000))
    index.remove(0, keys[:500])
    assert find(index, {0: keys.tolist()}) == [ABSENT] * 500 + list(range(500, 1000))


def test_an_index_takes_20_bytes_for_a_key():
    assert KeyIndex([1_000_000], native=False).size_bytes / 1_000_000 == pytest.approx(20, abs=0.1)
