"""The trainer's own id mapping, against the router's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.manifest import DenseModelSpec, FeatureSpec, ModelSpec, TableSpec, fingerprint_strings
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from serving.training.errors import TrainingError
from serving.training.row_mapping import map_feature
from shard_node.bags import KeyedBags

MAPPINGS = {
    "identity": {"kind": "identity"},
    "hash": {"kind": "hash", "seed": 7},
    "integers": {"kind": "vocabulary"},
    "strings": {"kind": "vocabulary", "id_type": "string"},
}
WORDS = ["doctor", "writer", "student"]
VOCABULARIES = {"integers": [9, 2, 5, 100], "strings": WORDS}


def table_of(mapping: str, unknown_id: str) -> TableSpec:
    return TableSpec.model_validate(
        {
            "name": "t",
            "num_embeddings": 12,
            "embedding_dim": 4,
            "feature_names": ["f"],
            "id_mapping": MAPPINGS[mapping],
            "unknown_id": unknown_id,
            "default_row": 11,
        }
    )


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(MAPPINGS)),
    st.sampled_from(["reject", "default_row", "skip"]),
    st.lists(
        st.lists(st.integers(0, 15) | st.sampled_from([100, 2**62, *fingerprint_strings(WORDS).tolist()]), max_size=5),
        max_size=6,
    ),
)
def test_rows_are_those_that_the_router_finds(mapping: str, unknown_id: str, bags: list[list[int]]) -> None:
    table = table_of(mapping, unknown_id)
    ids = np.array([one for bag in bags for one in bag], np.int64)
    lengths = np.array([len(bag) for bag in bags], np.int32)
    spec = ModelSpec(
        model="m",
        tables=(table,),
        features=(FeatureSpec(name="f", side="candidate"),),
        dense_model=DenseModelSpec(kind="mlp"),
    )
    known = {"integers": np.array(VOCABULARIES["integers"]), "strings": fingerprint_strings(WORDS)}
    mapper = IdMapper(FeatureSchema.of(spec), {"t": known[mapping]} if mapping in known else {})
    routed = mapper.map(KeyedBags.from_lengths(np.zeros(1, np.int32), np.array([len(bags)], np.int64), lengths, ids))
    if routed.rejected:
        with pytest.raises(TrainingError, match=r"feature 'f': id \d+ has no row in table 't' of 12 rows"):
            map_feature(table, VOCABULARIES.get(mapping), ids, lengths, "f")
        return
    rows, offsets = map_feature(table, VOCABULARIES.get(mapping), ids, lengths, "f")
    assert rows.tolist() == routed.bags.values.tolist()
    assert offsets.tolist() == routed.bags.offsets.tolist()


def test_a_vocabulary_table_without_its_vocabulary_is_refused() -> None:
    with pytest.raises(TrainingError, match="table 't': id mapping 'vocabulary' needs a vocabulary"):
        map_feature(table_of("integers", "skip"), None, np.array([1]), np.array([1], np.int32), "f")
