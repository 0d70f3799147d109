"""Every id mapping and every policy for unknown ids, against rows found one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec, TableSpec, fingerprint_strings
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper, hashed_rows
from shard_node.bags import KeyedBags

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


@settings(max_examples=80, deadline=None)
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
