"""A description's levers: what they are compiled to, how rows are divided, and what is refused by name."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loader import divided_rows
from loader.description import ModelDescription, TableDescription
from loader.divided_rows import divide_rows, kept_rows
from loader.errors import ExportError
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.row_source import ArrayRows, RowSource
from loader.snapshot.tables import DividedTable

ROWS = 100
BLOCKS = [{"share": 0.05, "dtype": "fp16"}, {"share": 0.25, "dim": 4}, {"dim": 2}]
HOT_AND_COLD = {"hot": "fp16", "cold": "int4", "hot_share": 0.1}
COMPOSED = {"kind": "quotient_remainder", "buckets": 7}


def table(**fields: Any) -> TableDescription:
    base = {"name": "item", "num_embeddings": ROWS, "embedding_dim": 8, "feature_names": ["item"], "dtype": "fp32"}
    return TableDescription.model_validate({**base, **fields})


def spec_of(kept: int | None = None, **fields: Any) -> ModelSpec:
    model = {
        "model": "m",
        "tables": [table(**fields).model_dump()],
        "features": [{"name": "item", "side": "candidate"}],
        "dense_model": {"kind": "mlp"},
    }
    return ModelDescription.model_validate(model).compiled(None if kept is None else {"item": kept})


@pytest.mark.parametrize(
    ("fields", "kept", "expected"),
    [
        ({"blocks": BLOCKS}, None, [("item.b0", 5, 8, "fp16"), ("item.b1", 25, 4, "fp32"), ("item.b2", 70, 2, "fp32")]),
        # Shares are of the rows that are left, and the last part has a row more, which all that are pruned read.
        ({"blocks": BLOCKS}, 60, [("item.b0", 3, 8, "fp16"), ("item.b1", 15, 4, "fp32"), ("item.b2", 43, 2, "fp32")]),
        ({"dtype": HOT_AND_COLD}, None, [("item.b0", 10, 8, "fp16"), ("item.b1", 90, 8, "int4")]),
        ({"project_to": 32}, None, [("item", 100, 8, "fp32")]),
        ({}, 80, [("item", 81, 8, "fp32")]),
        ({"id_mapping": COMPOSED}, None, [("item.q", 15, 8, "fp32"), ("item.r", 7, 8, "fp32")]),
        # With more buckets than ids the remainder is the id.
        ({"id_mapping": {**COMPOSED, "buckets": 200}}, None, [("item.q", 1, 8, "fp32"), ("item.r", 100, 8, "fp32")]),
    ],
)
def test_a_lever_becomes_stored_tables(fields, kept, expected):
    spec = spec_of(kept, **fields)
    assert [(one.name, one.num_embeddings, one.embedding_dim, one.dtype) for one in spec.tables] == expected
    (divided,) = spec.logical_tables
    assert isinstance(divided, DividedTable)
    assert (divided.name, divided.num_embeddings, divided.parts) == ("item", 100, tuple(one[0] for one in expected))
    assert divided.pruned == (0 if kept is None else 100 - kept)
    assert divided.embedding_dim == fields.get("project_to", 8)
    assert ModelSpec.model_validate_json(spec.model_dump_json(), strict=True) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": {**HOT_AND_COLD, "hot_share": 2}}, r"hot_share\n.*less than 1"),
        ({"dtype": {**HOT_AND_COLD, "cold": "int2"}}, r"cold\n.*'int8', 'int4', 'fp16' or 'fp32'"),
        ({"id_mapping": {**COMPOSED, "buckets": 0}}, r"buckets\n.*greater than or equal to 1"),
        ({"id_mapping": {**COMPOSED, "combine": "max"}}, r"combine\n.*'add'"),
        ({"id_mapping": {**COMPOSED, "combine": "multiply"}}, "combine\n  Input should be 'add'"),
        ({"bucketing": "hash"}, "bucketing\n  Input should be 'mixed' or 'range'"),
        ({"blocks": [{"share": 0.5}]}, "every block but the last needs a share, the last has what is left"),
        ({"blocks": [{"dim": 4}, {"dim": 2}]}, "every block but the last needs a share"),
        ({"blocks": [{"share": 0.5}, {"share": 0.5}, {}]}, "blocks have 1 of the rows without the last"),
        ({"blocks": [{"share": 1.5}, {}]}, r"blocks.0.share\n.*less than 1"),
        ({"blocks": [{"share": 0.5, "dim": 9}, {}]}, "a block has 9 columns, features get 8"),
        ({"blocks": [{"share": 0.01}] * 8 + [{}]}, "at most 8"),
        ({"blocks": BLOCKS, "dtype": HOT_AND_COLD}, "blocks have dtypes of their"),
        ({"project_to": 8}, "project_to 8 is not above embedding_dim 8"),
        ({"num_embeddings": "auto", "id_mapping": {"kind": "vocabulary"}}, "auto goes with id_mapping hash, not voc"),
        ({"num_embeddings": "many"}, r"num_embeddings.*\n.*should be 'auto'"),
        ({"column_dims": (5, 3), "blocks": BLOCKS}, "stored whole, not with blocks"),
        ({"column_dims": (5, 3), "id_mapping": COMPOSED}, "not with id_mapping quotient_remainder"),
        ({"blocks": BLOCKS, "id_mapping": COMPOSED}, "quotient_remainder does not go with blocks"),
        ({"project_to": 16, "id_mapping": COMPOSED}, "quotient_remainder does not go with project_to"),
        ({"share": 0.5}, r"share\n.*not permitted"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused_by_name(fields, message):
    with pytest.raises(ValidationError, match=message):
        table(**fields)


@pytest.mark.parametrize(
    ("kept", "fields", "message"),
    [
        (None, {"num_embeddings": "auto", "id_mapping": {"kind": "hash"}}, "num_embeddings is auto: give a trace"),
        (101, {}, "101 rows are kept; allowed is 1 to num_embeddings 100"),
        (0, {}, "0 rows are kept"),
        (2, {"blocks": BLOCKS}, "3 blocks of 2 rows: the last would have 0"),
        (50, {"column_dims": (5, 3)}, "column_dims goes with a table that is stored whole, not pruned"),
        (50, {"id_mapping": COMPOSED}, "by quotient_remainder a row is of many ids: none is pruned"),
    ],
)
def test_what_can_not_be_compiled_is_refused_by_name(kept, fields, message):
    with pytest.raises(ExportError, match=f"'item': {message}"):
        spec_of(kept, **fields)


def test_the_fewest_rows_with_a_share_of_lookups_are_kept():
    counts = np.array([0, 70, 0, 20, 9, 1])
    shares = (0.5, 0.7, 0.71, 0.9, 0.99, 0.995, 1)
    assert [kept_rows("item", counts, share) for share in shares] == [1, 1, 2, 2, 3, 4, 4]
    big = np.full(3, 2**32 - 1, np.uint32)
    assert kept_rows("item", big, 0.5) == 2


@pytest.mark.parametrize(
    ("counts", "share", "message"),
    [
        (np.zeros(5, np.int64), 1.0, "no row of it was looked up: pruned, it would be empty"),
        (np.ones(5, np.int64), 0.0, "keep_share: 0 is not above 0 and at most 1"),
        (np.ones(5, np.int64), 1.5, "keep_share: 1.5"),
        (np.array([3, -1]), 1.0, "row 1 has count -1, which is below 0"),
        (np.ones(5), 1.0, r"counts are float64 \[5\], expected whole numbers \[5\]"),
        (np.ones((5, 1), np.int64), 1.0, r"counts are int64 \[5, 1\]"),
    ],
)
def test_counts_that_can_not_prune_are_refused(counts, share, message):
    with pytest.raises(ExportError, match=message):
        kept_rows("item", counts, share)


def read(source: RowSource, max_rows: int) -> np.ndarray:
    """All rows of a source, requested in pieces, as an export does."""
    starts = range(0, source.num_embeddings, max_rows)
    return np.concatenate([block for first in starts for block in source.blocks(first, max_rows)])


def memmap(rows: np.ndarray) -> np.memmap:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, np.float32, shape=rows.shape)
    mapped[:] = rows
    return mapped


@given(
    data=st.data(),
    size=st.integers(20, 300),
    given_as=st.sampled_from([np.asarray, np.float64, torch.from_numpy, memmap]),
)
def test_parts_have_the_rows_of_their_class_and_a_default(data, size, given_as):
    """In order; and the last part has the counts of the pruned rows, too."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = rng.standard_normal((size, 8)).astype(np.float32)
    counts = rng.integers(0, 4, size)
    counts[0] += 1
    kept = max(kept_rows("item", counts), 4)
    spec = spec_of(kept, num_embeddings=size, blocks=[{"share": 0.2}, {"share": 0.3}, {"dtype": "fp16"}])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(divided_rows, "_CHUNK_ROWS", data.draw(st.sampled_from([1, 7, 64, 1 << 16])))
        division = divide_rows(spec, {"item": ArrayRows(given_as(rows))}, {"item": counts})
        step = data.draw(st.sampled_from([1, 5, 33, 1000]))
        made = [read(division.rows[part.name], step) for part in spec.tables]
    pruned = size - kept
    classes = np.empty(size, np.uint8)
    sizes = [part.num_embeddings for part in spec.tables]
    sizes[-1] -= pruned > 0
    classes[np.argsort(-counts, kind="stable")] = np.repeat(np.arange(4), [*sizes, pruned])
    np.testing.assert_array_equal(division.row_classes["item"].classes(), classes)
    part_counts = [division.access_counts[part.name] for part in spec.tables]
    if pruned:
        is_pruned = classes == 3
        default = rows[is_pruned].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(made[-1][-1], default, rtol=0, atol=1e-6)
        assert part_counts[-1][-1] == counts[is_pruned].sum()
        made[-1], part_counts[-1] = made[-1][:-1], part_counts[-1][:-1]
    for number in range(3):
        np.testing.assert_array_equal(made[number], rows[classes == number])
        np.testing.assert_array_equal(part_counts[number], counts[classes == number])


def test_a_part_that_was_trained_as_such_is_taken_as_it_is():
    rng = np.random.default_rng(0)
    spec, counts = spec_of(60, blocks=BLOCKS), rng.permutation(ROWS)
    parts = {one.name: rng.standard_normal((one.num_embeddings, one.embedding_dim)) for one in spec.tables}
    classes = RowClasses.of((np.arange(ROWS) % 10 // 6 * 3).astype(np.uint8), 4)  # of another training
    with pytest.raises(ExportError, match=r"classes of \(60, 0, 0, 40\) rows; its parts have \(3, 15, 42, 40\)"):
        divide_rows(spec, {name: ArrayRows(rows) for name, rows in parts.items()}, {}, row_classes={"item": classes})
    made = divide_rows(spec, {name: ArrayRows(rows) for name, rows in parts.items()}, {"item": counts})
    again = divide_rows(spec, {k: ArrayRows(v) for k, v in parts.items()}, {}, row_classes=made.row_classes)
    for name, rows in parts.items():
        np.testing.assert_array_equal(read(again.rows[name], 9), rows.astype(np.float32))
    assert again.access_counts == {}


ITEM = {"item": (ROWS, 8)}
PARTS = {"item.b0": (50, 8), "item.b1": (50, 8)}


@pytest.mark.parametrize(
    ("rows", "counts", "classes", "message"),
    [
        (ITEM, {}, {}, "divided by popularity: counts of its rows are needed"),
        (ITEM, {"items": ROWS}, {}, r"counts: unknown tables \['items'\]; the model has \['item'\]"),
        (ITEM, {"item": ROWS - 1}, {}, r"'item': counts are int64 \[99\], expected whole numbers \[100"),
        ({"item": (ROWS - 1, 8)}, {"item": ROWS}, {}, "'item': the source has 99 rows, num_embeddings is 100"),
        ({"item": (ROWS, 6)}, {"item": ROWS}, {}, r"missing for part 'item.b0', which is not cut out of 'item'"),
        ({}, {"item": ROWS}, {}, r"rows: missing for table 'item'; given are \[\]"),
        ({**ITEM, "other": (3, 8)}, {"item": ROWS}, {}, r"rows: \['other'\] are no tables of the model"),
        ({**ITEM, **PARTS}, {"item": ROWS}, {}, r"rows: \['item'\] are .*or their parts are given themselves"),
        (ITEM, {"item": ROWS}, {"other": ROWS}, r"row_classes: of tables \['other'\], which are not di"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(rows, counts, classes, message):
    spec = spec_of(blocks=[{"share": 0.5}, {}])
    with pytest.raises(ExportError, match=message):
        divide_rows(
            spec,
            {name: ArrayRows(np.zeros(shape, np.float32)) for name, shape in rows.items()},
            {name: np.arange(size) for name, size in counts.items()},
            row_classes={name: RowClasses.of(np.arange(size) % 2, 2) for name, size in classes.items()},
        )
