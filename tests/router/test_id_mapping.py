"""Ids become rows by each mapping, as the rules say and as a dictionary does it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import HashMapping, TableSpec, VocabularyMapping, fingerprint_strings
from router.feature_schema import FeatureSchema
from router.id_mapping import UNKNOWN, IdMapper, VocabularyIndex, hashed_rows, splitmix64
from shard_node.bags import KeyedBags


def schema_of(**tables: TableSpec) -> FeatureSchema:
    spec = ModelSpec(
        model="m",
        tables=tuple(tables.values()),
        features=tuple(FeatureSpec(name=name, side="candidate") for name in tables),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    return FeatureSchema.of(spec)


def table(name: str, rows: int = 10, **options) -> TableSpec:
    return TableSpec(name=f"t_{name}", num_embeddings=rows, embedding_dim=4, feature_names=(name,), **options)


def bags_of(*per_feature: list[list[int]]) -> KeyedBags:
    lengths = [len(bag) for feature in per_feature for bag in feature]
    values = [one for feature in per_feature for bag in feature for one in bag]
    return KeyedBags.from_lengths(
        np.arange(len(per_feature), dtype=np.int32),
        np.array([len(feature) for feature in per_feature], np.int64),
        np.array(lengths, np.int64),
        np.array(values, np.int64),
    )


def test_splitmix64_gives_the_published_sequence():
    # The first outputs of the reference generator seeded with 1234567.
    states = [(1234567 + step * 0x9E3779B97F4A7C15) % 2**64 for step in range(3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(np.array(states, np.uint64)).tolist() == published
    (fingerprint,) = fingerprint_strings(["shop"]).tolist()
    assert HashMapping(seed=5, salt="per_feature").seed_of("shop") == 5 ^ fingerprint
    assert HashMapping(seed=5).seed_of("shop") == 5


def shared_table(rows: int, salt: str) -> FeatureSchema:
    mapping = HashMapping(seed=5, salt=salt)
    shared = TableSpec(
        name="t", num_embeddings=rows, embedding_dim=4, feature_names=("city", "shop"), id_mapping=mapping
    )
    features = tuple(FeatureSpec(name=name, side="candidate") for name in ("city", "shop"))
    return FeatureSchema.of(
        ModelSpec(model="m", tables=(shared,), features=features, dense_model=DenseModelSpec(kind="mlp"))
    )


def test_salted_features_share_rows_only_by_chance():
    ids, rows = list(range(20_000)), 100
    for salt, expected in (("none", 1.0), ("per_feature", 1 / rows)):
        schema = shared_table(rows, salt)
        mapped = IdMapper(schema, {}).map(bags_of([ids], [ids])).bags.values.reshape(2, -1)
        assert (mapped[0] == mapped[1]).mean() == pytest.approx(expected, abs=0.003)
        for feature, found in zip(("city", "shop"), mapped, strict=True):
            seed = HashMapping(seed=5, salt=salt).seed_of(feature)
            alone = hashed_rows(np.array(ids), np.array([seed], np.uint64), np.array([rows], np.uint64))
            np.testing.assert_array_equal(found, alone)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1), st.integers(1, 2**32 - 1), st.integers(0, 2**63 - 1))
def test_hashed_rows_follow_the_documented_formula(ids, rows, seed):
    got = hashed_rows(np.array(ids, np.int64), np.array([seed], np.uint64), np.array([rows], np.uint64))
    for one, row in zip(ids, got.tolist(), strict=True):
        top = int(splitmix64(np.array([(one + seed) % 2**64], np.uint64))[0]) >> 32
        assert row == top * rows >> 32
        assert 0 <= row < rows


@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=50), max_size=4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**63 - 1)), max_size=50),
)
def test_the_vocabulary_index_finds_what_a_dictionary_finds(vocabularies, strangers):
    index = VocabularyIndex({key: np.array(ids, np.int64) for key, ids in vocabularies.items()})
    expected = {(key, one): row for key, ids in vocabularies.items() for row, one in enumerate(ids)}
    wanted = list(expected) + strangers
    tables = np.array([key for key, _ in wanted], np.int32)
    ids = np.array([one for _, one in wanted], np.int64)
    assert index.rows(tables, ids).tolist() == [expected.get(one, UNKNOWN) for one in wanted]


def test_rejected_ids_are_reported_once_for_each_bag():
    mapper = IdMapper(schema_of(a=table("a"), b=table("b", rows=5)), {})
    bags = bags_of([[0, 9], []], [[3]])
    assert mapper.map(bags).bags.values is bags.values
    mapped = mapper.map(bags_of([[0], [10, 11], [2]], [[4], [5], [2**63 - 1], [-1]]))
    rejected = mapped.rejected
    assert rejected.feature.tolist() == [0, 1, 1, 1]
    assert rejected.bag.tolist() == [1, 1, 2, 3]
    assert rejected.id.tolist() == [10, 5, 2**63 - 1, -1]
    assert mapped.bags.values.tolist() == [0, 0, 0, 2, 4, 0, 0, 0]


def test_each_feature_of_a_batch_has_its_mapping():
    mapper = IdMapper(
        schema_of(
            a=table("a", unknown_id="default_row", default_row=7),
            b=table("b", unknown_id="skip"),
            c=table("c", rows=100, id_mapping=HashMapping(seed=5)),
            d=table("d", id_mapping=VocabularyMapping(), unknown_id="default_row", default_row=9),
        ),
        {"t_d": np.array([70, 50, 60], np.int64)},
    )
    ids = [123456789, 0, 2**63 - 1]
    bags = bags_of([[1, 99], [98]], [[99, 2, 97], [96], [3]], [ids], [[50, 60, 1, 70]])
    weights = np.arange(bags.num_values, dtype=np.float32)
    mapped = mapper.map(KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, bags.values, weights))
    hashed = hashed_rows(np.array(ids, np.int64), np.array([5], np.uint64), np.array([100], np.uint64)).tolist()
    assert len(mapped.rejected) == 0
    assert mapped.bags.values.tolist() == [1, 7, 7, 2, 3, *hashed, 1, 2, 9, 0]
    assert mapped.bags.lengths.tolist() == [2, 1, 1, 0, 1, 3, 4]
    # Skipped ids take their weights with them.
    assert mapped.bags.weights.tolist() == [0, 1, 2, 4, 7, 8, 9, 10, 11, 12, 13, 14]


MAPPINGS = {
    "identity": {"kind": "identity"},
    "hash": {"kind": "hash", "seed": 7},
    "integers": {"kind": "vocabulary"},
    "strings": {"kind": "vocabulary", "id_type": "string"},
}
NUM_ROWS, DEFAULT_ROW = 12, 11
WORDS = ["doctor", "writer", "student"]
KNOWN = {"integers": np.array([9, 2, 5, 100]), "strings": fingerprint_strings(WORDS)}


def row_of(mapping: str, one: int) -> int | None:
    if mapping == "identity":
        return one if one < NUM_ROWS else None
    if mapping == "hash":
        return int(hashed_rows(np.array([one]), np.array([7], np.uint64), np.array([NUM_ROWS], np.uint64))[0])
    return {known: row for row, known in enumerate(KNOWN[mapping].tolist())}.get(one)


def spec_of(mapping: str, unknown_id: str) -> ModelSpec:
    table = TableSpec.model_validate(
        {
            "name": "t",
            "num_embeddings": NUM_ROWS,
            "embedding_dim": 4,
            "feature_names": ["f"],
            "id_mapping": MAPPINGS[mapping],
            "unknown_id": unknown_id,
            "default_row": DEFAULT_ROW,
        }
    )
    feature = FeatureSpec(name="f", side="candidate")
    return ModelSpec(model="m", tables=(table,), features=(feature,), dense_model=DenseModelSpec(kind="mlp"))


@given(
    st.sampled_from(sorted(MAPPINGS)),
    st.sampled_from(["reject", "default_row", "skip"]),
    st.lists(
        st.lists(st.integers(0, 15) | st.sampled_from([100, 2**62, *fingerprint_strings(WORDS).tolist()]), max_size=5),
        max_size=6,
    ),
)
def test_rows_are_those_of_each_id_alone(mapping: str, unknown_id: str, bags: list[list[int]]) -> None:
    mapper = IdMapper(FeatureSchema.of(spec_of(mapping, unknown_id)), {"t": KNOWN[mapping]} if mapping in KNOWN else {})
    ids = np.array([one for bag in bags for one in bag], np.int64)
    lengths = np.array([len(bag) for bag in bags], np.int32)
    mapped = mapper.map(KeyedBags.from_lengths(np.zeros(1, np.int32), np.array([len(bags)], np.int64), lengths, ids))
    rows = [[(one, row_of(mapping, one)) for one in bag] for bag in bags]
    unknown = [[one for one, row in bag if row is None] for bag in rows]
    if unknown_id == "reject" and any(unknown):
        assert mapped.rejected.bag.tolist() == [number for number, bag in enumerate(unknown) if bag]
        assert mapped.rejected.id.tolist() == [bag[0] for bag in unknown if bag]
        return
    assert not mapped.rejected
    if unknown_id == "skip":
        expected = [[row for _, row in bag if row is not None] for bag in rows]
    else:
        expected = [[DEFAULT_ROW if row is None else row for _, row in bag] for bag in rows]
    assert mapped.bags.values.tolist() == [row for bag in expected for row in bag]
    assert mapped.bags.lengths.tolist() == [len(bag) for bag in expected]
