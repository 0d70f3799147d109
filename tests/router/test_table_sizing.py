"""Collisions are what a dictionary counts and what chance gives; the smallest size is one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.access_counts import AccessCounts
from loader.description import ModelDescription, TableDescription
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec
from loader.snapshot.tables import HashMapping, VocabularyMapping
from loader.traces import count_values
from router.errors import FittingError
from router.id_mapping import hashed_rows
from router.table_sizing import RowLookups, TableIds, fitted, measure, smallest_size


def table(rows: int | str = 10, *features: str, **options) -> TableDescription:
    return TableDescription(
        name="t", num_embeddings=rows, embedding_dim=4, feature_names=features or ("item",), **options
    )


def counts_of(ids: list[int]) -> AccessCounts:
    return count_values("here", np.array(ids, np.int64))


def asked_for(ids: np.ndarray, counts: np.ndarray, seed: int = 0) -> TableIds:
    return TableIds(ids, counts, np.array([seed], np.uint64))


@pytest.mark.parametrize("seed", [0, 12_345])
def test_a_million_ids_collide_as_by_chance(seed: int) -> None:
    ids, hashed = 1_000_000, table(10_000_000, id_mapping=HashMapping(seed=seed))
    asked = TableIds.of(hashed, {"item": AccessCounts(np.arange(ids), np.ones(ids, np.int64))})
    found = measure(hashed, 160_000_000, asked.rows(hashed), asked)
    assert found.expected_rows_used == pytest.approx(0.9516 * ids, rel=1e-4)
    assert found.expected_ids_alone_share == pytest.approx(np.exp(-0.1), rel=1e-6)
    assert found.rows_used / ids == pytest.approx(0.9516, abs=0.001)
    assert found.ids_alone_share == pytest.approx(0.9048, abs=0.001)
    assert found.lookups_colliding_share == pytest.approx(1 - 0.9048, abs=0.001)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=80),
    st.lists(st.integers(0, 50), max_size=80),
    st.integers(1, 60),
    st.sampled_from(["none", "per_feature"]),
)
def test_collisions_are_what_a_dictionary_counts(items: list[int], shops: list[int], rows: int, salt: str) -> None:
    mapping = HashMapping(seed=3, salt=salt)
    hashed = table(rows, "item", "shop", id_mapping=mapping)
    asked = TableIds.of(hashed, {"item": counts_of(items), "shop": counts_of(shops)})
    lookups = Counter((mapping.seed_of(name), one) for name, ids in (("item", items), ("shop", shops)) for one in ids)

    def row_of(seed: int, one: int) -> int:
        return int(hashed_rows(np.array([one]), np.array([seed], np.uint64), np.array([rows], np.uint64))[0])

    row_lookups, ids_of_row = Counter[int](), Counter[int]()
    for (seed, one), times in lookups.items():
        row_lookups[row_of(seed, one)] += times
        ids_of_row[row_of(seed, one)] += 1
    found = asked.rows(hashed)
    assert found.lookups.tolist() == sorted(row_lookups.values(), reverse=True)
    assert found.ids_sharing == sum(ids for ids in ids_of_row.values() if ids > 1)
    assert found.colliding == sum(row_lookups[row] for row, ids in ids_of_row.items() if ids > 1)
    kept = len(row_lookups) // 2
    assert found.changed(kept) == found.lookups[kept:].sum() + found.lookups[:kept][found.is_shared[:kept]].sum()


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.97])
def test_the_smallest_size_is_enough_and_a_row_less_is_not(share: float) -> None:
    rng = np.random.default_rng(1)
    asked = asked_for(np.arange(3000), rng.zipf(1.5, 3000), seed=9)

    def colliding(rows: int) -> float:
        found = asked.rows(table(rows, id_mapping=HashMapping(seed=9)))
        return found.colliding / found.total

    size = smallest_size(asked, share)
    assert colliding(size) <= share < colliding(size - 1)
    assert smallest_size(asked, share) == size


def test_impossible_sizes_are_refused() -> None:
    asked = asked_for(np.arange(3), np.ones(3, np.int64))
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(FittingError, match="must be above 0 and below 1"):
            smallest_size(asked, share)
    with pytest.raises(FittingError, match="no id of the table is in the trace"):
        smallest_size(asked_for(np.zeros(0, np.int64), np.zeros(0, np.int64)), 0.1)
    assert smallest_size(asked_for(np.ones(1, np.int64), np.ones(1, np.int64)), 0.01) == 1
    # Two ids whose hashes have the same top 32 bits share a row in every table.
    ids = np.arange(400_000)
    top = hashed_rows(ids, np.zeros(1, np.uint64), np.array([2**32 - 1], np.uint64))
    order = np.argsort(top)
    same = order[np.flatnonzero(np.diff(top[order]) == 0)[0] :][:2]
    with pytest.raises(FittingError, match="even 4294967295 rows, the most of a table, are too few for 2 ids"):
        smallest_size(asked_for(ids[same], np.ones(2, np.int64)), 0.5)


def test_a_trace_of_another_table_is_refused() -> None:
    trace = {"item": counts_of([3, 9, 10])}
    with pytest.raises(FittingError, match=r"table 't': id 10 of features \['item'\] is not below num_embeddings 10"):
        TableIds.of(table(10), trace)
    skipping = TableIds.of(table(10, unknown_id="skip"), trace)
    assert skipping.ids.tolist() == [3, 9]
    assert TableIds.of(table(10), {"user": counts_of([1])}) is None
    short = table(2, id_mapping=VocabularyMapping())
    asked = TableIds.of(short, trace)
    with pytest.raises(FittingError, match="3 different ids, num_embeddings is 2"):
        asked.rows(short)


def test_a_table_is_measured_by_its_hottest_rows() -> None:
    lookups = np.concatenate([[500, 300, 100], np.ones(100, np.int64)])
    found = measure(table(1030), 1030 * 12, RowLookups.alone(np.random.default_rng(0).permutation(lookups)))
    assert (found.lookups, found.rows_used, found.distinct_ids, found.lookups_colliding_share) == (1000, 103, None, 0)
    assert found.rows_unused_share == pytest.approx(0.9)
    assert [(one.rows, one.share_of_lookups) for one in found.head] == [(2, 0.8), (11, pytest.approx(0.908))]
    rows_only = RowLookups.alone(lookups, of_ids=False)
    assert measure(table(1030), 1030 * 12, rows_only).ids_alone_share is None


def test_lookups_of_unseen_rows_are_estimated() -> None:
    chance = np.arange(1, 20_001) ** -1.1
    chance /= chance.sum()
    seen = np.bincount(np.random.default_rng(2).choice(20_000, 50_000, p=chance), minlength=20_000)
    found = measure(table(20_000), 20_000 * 12, RowLookups.alone(seen))
    assert found.unseen_share == pytest.approx(chance[seen == 0].sum(), abs=0.006)
    assert found.unseen_share > 0.03


def test_auto_becomes_the_smallest_size_for_the_ids_that_come() -> None:
    auto = table("auto", id_mapping=HashMapping(), max_collision_share=0.1, default_row=70)
    described = ModelDescription(
        model="m",
        tables=(auto, table(5, "user").model_copy(update={"name": "u"})),
        features=(FeatureSpec(name="item", side="candidate"), FeatureSpec(name="user", side="candidate")),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    trace = {"item": counts_of([1, 2])}
    found = fitted(described, trace)
    size = found.tables[0].num_embeddings
    asked = TableIds.of(found.tables[0], trace)
    assert size == smallest_size(asked, 0.1)
    assert found.tables[1] == described.tables[1]
    found.compiled()
    with pytest.raises(FittingError, match=r"table 't': num_embeddings auto needs a trace of the ids of .*\['item'\]"):
        fitted(described, {})
