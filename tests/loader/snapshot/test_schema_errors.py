"""What a document that does not fit its schema is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.schema_errors import schema_errors
from loader.snapshot.tables import TableSpec

DOCUMENT: dict[str, Any] = {
    "model": "shop",
    "tables": [
        {
            "name": "items",
            "num_embeddings": 300,
            "embedding_dim": 4,
            "feature_names": ["item"],
            "id_mapping": {"kind": "vocabulary"},
        }
    ],
    "features": [{"name": "item", "side": "candidate"}],
    "dense_model": {"kind": "mlp", "config": {}},
}


def errors_after(*path: str | int, value: Any) -> list[str]:
    document = copy.deepcopy(DOCUMENT)
    node = document
    for part in path[:-1]:
        node = node[part]  # type: ignore[index]
    node[path[-1]] = value  # type: ignore[index]
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate(document)
    return [str(one) for one in schema_errors(caught.value, [ModelSpec])]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (("tabels",), list(ModelSpec.model_fields)),
        (("tables", 0, "dim"), list(TableSpec.model_fields)),
        (("features", 0, "typ"), list(FeatureSpec.model_fields)),
        (("dense_model", "hidden"), ["kind", "config"]),
        (("tables", 0, "id_mapping", "salt"), ["kind", "id_type"]),
    ],
)
def test_an_unknown_key_is_named_with_those_that_are_allowed_and_nothing_else_is(
    path: tuple[str | int, ...], allowed: list[str]
) -> None:
    (error,) = errors_after(*path, value=1)
    place, _, problem = error.partition(": ")
    assert place.startswith(".".join(map(str, path[:-1])))
    assert problem == f"unknown key {path[-1]!r}; allowed are {allowed}"
