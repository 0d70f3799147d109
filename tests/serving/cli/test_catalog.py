"""The published models: their published sizes, and that each is a model that could be served."""

from __future__ import annotations

import pytest

from serving.cli.capacity import CATALOG, catalog_model
from serving.errors import ModelNotFoundError
from serving.models.config import parse_dense_model


def float32_bytes(name):
    return sum(4 * one.num_embeddings * one.embedding_dim for one in catalog_model(name, "fp32").spec.tables)


@pytest.mark.parametrize(
    ("name", "tables", "gibibytes"),
    [
        ("dlrm-v2", 26, 97.4),
        ("merlin-tiny", 55, 4.2),
        ("merlin-small", 107, 26.3),
        ("merlin-medium", 311, 206.2),
        ("merlin-large", 612, 773.8),
        ("merlin-jumbo", 1022, 3109.5),
        ("merlin-colossal", 2002, 22327.4),
        ("textbook", 1, 953.7),
    ],
)
def test_a_published_model_has_its_published_size(name, tables, gibibytes):
    assert len(catalog_model(name).spec.tables) == tables
    assert round(float32_bytes(name) / 2**30, 1) == gibibytes


@pytest.mark.parametrize("name", CATALOG)
def test_every_model_could_be_served(name):
    found = catalog_model(name)
    parse_dense_model(found.spec)
    assert found.spec.model == name
    assert {one.dtype for one in found.spec.tables} == {"int8"}
    assert found.hotness.keys() == {feature.name for feature in found.spec.features}
    assert min(found.hotness.values()) >= 1


def test_a_sample_of_dlrm_v2_has_214_ids_and_the_longest_bag_100():
    hotness = catalog_model("dlrm-v2").hotness.values()
    assert (len(hotness), sum(hotness), max(hotness)) == (26, 214, 100)


def test_a_shared_table_of_merlins_has_two_features():
    spec = catalog_model("merlin-tiny").spec
    assert [len(one.feature_names) for one in spec.tables[:4]] == [2, 2, 2, 1]
    assert [catalog_model("merlin-tiny").hotness[name] for name in spec.tables[0].feature_names] == [1, 10]


def test_a_scale_shortens_every_table_but_leaves_it_a_row():
    rows = [one.num_embeddings for one in catalog_model("dlrm-v2", scale=0.001).spec.tables]
    assert rows[:6] == [40_000, 39, 17, 7, 20, 1]


def test_an_unknown_name_and_a_scale_out_of_range_are_refused():
    with pytest.raises(ModelNotFoundError, match="'dlrm' is not in the catalog; it has dlrm-v2, merlin-tiny"):
        catalog_model("dlrm")
    for scale in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            catalog_model("dlrm-v2", scale=scale)
