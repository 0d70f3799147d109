"""Documents that do not fit their schema, and models that make no sense, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec, schema_errors

ITEMS = {"name": "items", "num_embeddings": 300, "embedding_dim": 4, "feature_names": ["item"]}
HALF = ITEMS | {"num_embeddings": 150}


def shop(*tables: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The document of a model with these tables, by default one; `fields` are put in place of its other keys."""
    model = {"model": "shop", "features": [{"name": "item", "side": "candidate"}]}
    return {**model, "tables": list(tables or [ITEMS]), "dense_model": {"kind": "mlp", "config": {}}, **fields}


def divided(*parts: dict[str, Any], dense_model: Any = None, **fields: Any) -> dict[str, Any]:
    """One whose table `items` is divided into `parts`, which are called p0, p1, and so on."""
    named = [part | {"name": f"p{number}"} for number, part in enumerate(parts)]
    table = {**ITEMS, "parts": [part["name"] for part in named], **fields}
    return shop(*named, divided=[table], **({} if dense_model is None else {"dense_model": dense_model}))


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
    document = shop(ITEMS | {"id_mapping": {"kind": "vocabulary"}})
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


EXPORTED = {"kind": "exported", "inputs": {"x": {"source": "pooled", "features": ["item"]}}, "outputs": {"click": {}}}
SLICED = ITEMS | {"embedding_dim": 32, "column_dims": [1] * 32}
BUCKETS = {"by": "quotient_remainder", "buckets": 10}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (shop(ITEMS | {"default_row": 300}), "'items': default_row 300 is not below num_embeddings 300"),
        (shop(ITEMS | {"dtype": "int4", "embedding_dim": 5}), "int4 rows need an even embedding_dim, got 5"),
        (shop(ITEMS | {"column_dims": [4]}), "at least 2 slices"),
        (shop(ITEMS | {"column_dims": [2, 3]}), "add up to 5, embedding_dim is 4"),
        (shop(ITEMS | {"column_dims": [4, 0]}), "greater than or equal to 1"),
        (shop(ITEMS | {"column_dims": [3, 1], "dtype": "int4"}), "even number of columns"),
        (shop(ITEMS | {"column_dims": [1] * 33, "embedding_dim": 33}), "at most 32"),
        (shop(ITEMS | {"column_dims": [2, 2], "name": "t" * 126}), "pass 128 characters"),
        (shop(*({**SLICED, "name": f"t{number}"} for number in range(129))), "make 4128 stored tables; at most 4096"),
        (shop(ITEMS | {"feature_names": ["item", "x"]}), r"feature_names that are not in features: \['x'\]"),
        (
            shop(ITEMS | {"pooling": "mean"}, features=[{"name": "item", "side": "candidate", "weighted": True}]),
            "feature 'item': weights need pooling sum",
        ),
        (divided(HALF, HALF, default_row=300), "'items': default_row 300 is not below its 300 rows"),
        (divided(HALF, HALF, HALF, **BUCKETS), "by quotient_remainder it has 2 parts and nothing pruned"),
        (divided(HALF, HALF, pruned=1, **BUCKETS), "by quotient_remainder it has 2 parts and nothing pruned"),
        (divided(HALF, HALF, **BUCKETS), r"parts of \[150, 150\] rows; 10 buckets need \[30, 10\]"),
        (divided(HALF, HALF | {"id_mapping": {"kind": "hash"}}), "part 'p1' must have the identity mapping"),
        (divided(HALF, HALF | {"feature_names": ["x"]}), r"part 'p1' must have its features \['item'\]"),
        (divided(HALF, HALF | {"embedding_dim": 8}), "part 'p1' has 8 columns, embedding_dim is 4"),
        (divided(HALF, HALF | {"embedding_dim": 2}, dense_model=EXPORTED), r"\['p1'\]: an exported program can't"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused_by_name(document, message):
    with pytest.raises(ValidationError, match=message):
        ModelSpec.model_validate(document)
