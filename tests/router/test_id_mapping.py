"""Ids become rows by each mapping, as the rules say and as a dictionary does it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.buckets import splitmix64
from loader.snapshot.tables import HashMapping, TableSpec, fingerprint_strings
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper, hashed_rows
from shard_node.bags import Bags
from shardrank_testing import bags as table_bags
from shardrank_testing.snapshots import model_of, table_of


def schema_of(*tables: TableSpec) -> FeatureSchema:
    return FeatureSchema.of(model_of(tables))


def table(name: str, rows: int = 10, **options) -> TableSpec:
    return table_of(f"t_{name}", rows, 4, *options.pop("features", (name,)), **options)


def bags_of(*per_feature: list[list[int]]) -> Bags:
    return table_bags.bags_of(dict(enumerate(per_feature)))


def test_splitmix64_gives_the_published_sequence():
    # The first outputs of the reference generator seeded with 1234567.
    states = [(1234567 + step * 0x9E3779B97F4A7C15) % 2**64 for step in range(3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(np.array(states, np.uint64)).tolist() == published
    (fingerprint,) = fingerprint_strings(["shop"]).tolist()
    assert HashMapping(seed=5, salt="per_feature").seed_of("shop") == 5 ^ fingerprint
    assert HashMapping(seed=5).seed_of("shop") == 5


def test_salted_features_share_rows_only_by_chance():
    ids, rows = list(range(20_000)), 100
    for salt, expected in (("none", 1.0), ("per_feature", 1 / rows)):
        mapping = HashMapping(seed=5, salt=salt)
        schema = schema_of(table("t", rows, features=("city", "shop"), id_mapping=mapping))
        mapped = IdMapper(schema, {}).map(bags_of([ids], [ids])).bags.values.reshape(2, -1)
        assert (mapped[0] == mapped[1]).mean() == pytest.approx(expected, abs=0.003)
        for feature, found in zip(("city", "shop"), mapped, strict=True):
            seed = mapping.seed_of(feature)
            alone = hashed_rows(np.array(ids), np.array([seed], np.uint64), np.array([rows], np.uint64))
            np.testing.assert_array_equal(found, alone)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1), st.integers(1, 2**32 - 1), st.integers(0, 2**63 - 1))
def test_hashed_rows_follow_the_documented_formula(ids, rows, seed):
    got = hashed_rows(np.array(ids, np.int64), np.array([seed], np.uint64), np.array([rows], np.uint64))
    for one, row in zip(ids, got.tolist(), strict=True):
        top = int(splitmix64(np.array([(one + seed) % 2**64], np.uint64))[0]) >> 32
        assert row == top * rows >> 32
        assert 0 <= row < rows


MAPPINGS = {
    "identity": {"kind": "identity"},
    "hash": {"kind": "hash", "seed": 7},
    "integers": {"kind": "vocabulary"},
    "strings": {"kind": "vocabulary", "id_type": "string"},
}
NUM_ROWS, DEFAULT_ROW = 12, 11
WORDS = fingerprint_strings(["doctor", "writer", "student"])
KNOWN = {"integers": np.array([9, 2, 5, 100]), "strings": WORDS}


def row_of(mapping: str, one: int) -> int | None:
    if mapping == "identity":
        return one if 0 <= one < NUM_ROWS else None
    if mapping == "hash":
        return int(hashed_rows(np.array([one]), np.array([7], np.uint64), np.array([NUM_ROWS], np.uint64))[0])
    return {known: row for row, known in enumerate(KNOWN[mapping].tolist())}.get(one)


IDS = st.integers(0, 15) | st.sampled_from([-1, 100, 2**63 - 1, *WORDS.tolist()])


@given(st.sampled_from(["reject", "default_row", "skip"]), st.data())
def test_rows_are_those_of_each_id_alone(unknown_id: str, data: st.DataObject) -> None:
    """Each feature of a batch has its mapping, and ids that are skipped take their weights with them."""
    options = {"unknown_id": unknown_id, "default_row": DEFAULT_ROW}
    tables = [table(name, NUM_ROWS, id_mapping=mapping, **options) for name, mapping in MAPPINGS.items()]
    mapper = IdMapper(schema_of(*tables), {f"t_{name}": known for name, known in KNOWN.items()})
    ids = [data.draw(st.lists(st.lists(IDS, max_size=5), max_size=4), name) for name in MAPPINGS]
    bags = bags_of(*ids)
    weights = np.arange(bags.num_values, dtype=np.float32)
    mapped = mapper.map(Bags(bags.keys, bags.bags_per_key, bags.offsets, bags.values, weights))
    unknown, rows, kept_weights, lengths = [], [], [], []
    weight = itertools.count()
    for key, (name, feature) in enumerate(zip(MAPPINGS, ids, strict=True)):
        for number, bag in enumerate(feature):
            found = [(row_of(name, one), next(weight)) for one in bag]
            unknown += [(key, number, one) for one, (row, _) in zip(bag, found, strict=True) if row is None][:1]
            kept = [(row, of) for row, of in found if row is not None or unknown_id != "skip"]
            # Of an id that is rejected the row does not matter, but there must be one.
            rows += [(DEFAULT_ROW if unknown_id == "default_row" else 0) if row is None else row for row, _ in kept]
            kept_weights += [of for _, of in kept]
            lengths.append(len(kept))
    rejected = mapped.rejected
    found = [*zip(rejected.feature.tolist(), rejected.bag.tolist(), rejected.id.tolist(), strict=True)]
    assert found == (unknown if unknown_id == "reject" else [])
    assert mapped.bags.values.tolist() == rows
    assert mapped.bags.weights.tolist() == kept_weights
    assert mapped.bags.lengths.tolist() == lengths
