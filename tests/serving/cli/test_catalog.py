"""The published models: their published sizes, and that each is a model that could be served."""

from __future__ import annotations

import pytest

from serving.cli.capacity import catalog_model
from serving.errors import ModelNotFoundError


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


def test_an_unknown_name_and_a_scale_out_of_range_are_refused():
    with pytest.raises(ModelNotFoundError, match="'dlrm' is not in the catalog; it has dlrm-v2, merlin-tiny"):
        catalog_model("dlrm")
    for scale in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            catalog_model("dlrm-v2", scale=scale)
