"""What a document that does not fit its schema is told."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.schema_errors import schema_errors
from loader.snapshot.tables import TableSpec

ITEMS = {"name": "items", "num_embeddings": 300, "embedding_dim": 4, "feature_names": ["item"]}


@pytest.mark.parametrize(
    ("place", "key", "allowed"),
    [
        ("", "tabels", list(ModelSpec.model_fields)),
        ("tables.0", "dim", list(TableSpec.model_fields)),
        ("features.0", "typ", list(FeatureSpec.model_fields)),
        ("dense_model", "hidden", ["kind", "config"]),
        ("tables.0.id_mapping", "salt", ["kind", "id_type"]),
    ],
)
def test_an_unknown_key_is_named_with_those_that_are_allowed(place, key, allowed):
    """And nothing else is."""
    document = {
        "model": "shop",
        "tables": [{**ITEMS, "id_mapping": {"kind": "vocabulary"}}],
        "features": [{"name": "item", "side": "candidate"}],
        "dense_model": {"kind": "mlp", "config": {}},
    }
    node = document
    for part in filter(None, place.split(".")):
        node = node[int(part) if part.isdigit() else part]
    node[key] = 1
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate(document)
    (error,) = schema_errors(caught.value, [ModelSpec])
    found, _, problem = str(error).partition(": ")
    assert found.startswith(place)
    assert problem == f"unknown key {key!r}; allowed are {allowed}"
