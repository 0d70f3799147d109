"""Where a batch's rows go on a card: nothing overlaps, nothing lies outside, and every column has its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router.feature_schema import FeatureSchema
from serving.cards.layout import (
    ALIGNED_BYTES,
    MIN_CANDIDATES,
    BatchClass,
    CardLayout,
    rounded_candidates,
)
from shard_node.cuda.kernel_params import MODES
from shardrank_testing.card_ranking import DENSE, SHOP_LEVERS, shop_levers, shop_spec

PARTS = SHOP_LEVERS | {
    "films": {"id_mapping": {"kind": "quotient_remainder", "buckets": 20}},
    "tags": {"id_mapping": {"kind": "quotient_remainder", "buckets": 20}},
}
CLASSES = st.builds(BatchClass.of, st.integers(1, 300), st.integers(1, 20), st.integers(0, 5000))


@given(st.integers(1, 1 << 20))
def test_candidates_are_rounded_up_by_a_quarter_at_most(count):
    rounded = rounded_candidates(count)
    assert count <= rounded < max(count + MIN_CANDIDATES, 1.25 * count + 1)
    assert rounded % MIN_CANDIDATES == 0
    assert rounded_candidates(rounded) == rounded
    assert rounded <= rounded_candidates(count + 1)


@pytest.mark.parametrize(("kind", "levers"), [*((kind, {}) for kind in DENSE), ("target_attention", PARTS)])
@given(most=CLASSES)
def test_every_column_of_the_inputs_comes_from_one_place(kind, levers, most):
    """Of embeddings; dense inputs are copied behind them, and padding stays zero. No bag overlaps another."""
    spec = shop_levers(shop_spec(kind), levers).compiled()
    schema = FeatureSchema.of(spec)
    layout = CardLayout(spec, schema, torch.float32)
    runs, size = layout.runs(most), layout.size(most)
    read_twice = {feature.name for feature, n in zip(schema.features, layout.values_per_id, strict=True) if n == 2}
    assert read_twice == ({"film", "seen", "history", "tag", "liked", "genre"} if levers else set())
    written = np.zeros(runs.out_elements, np.int8)
    for key, table in enumerate(runs.tables.tolist()):
        bags = most.num_values if runs.modes[key] == MODES["none"] else int(size.bags_per_key[key])
        bag = runs.out_offsets[key] + np.arange(bags) * runs.out_strides[key]
        written[bag[:, None] + np.arange(schema.layout.tables[table].embedding_dim)] += 1
    assert written.max() == 1
    areas = [
        written[first : first + most[area.rows] * area.width].reshape(-1, area.width)
        for first, area in zip(layout.area_starts(most)[0], layout.areas, strict=True)
    ]
    for run, source, column, target in layout.sums:
        assert areas[source][:, column : column + run.num_lookups * run.dim].all()
        assert areas[source].shape[0] == areas[target].shape[0]
        areas[target][:, run.column : run.column + run.num_lookups * run.width] += not run.adds
    widths = [side.embedding_width for side in (layout.shapes.candidate, layout.shapes.context)]
    for matrix, width in zip(areas, [*widths, *(dim for _, _, dim in layout.sequences)], strict=False):
        assert (matrix[:, :width] == 1).all()
        assert not matrix[:, width:].any()


@pytest.mark.parametrize("dense", [(0, 0), (1, 0), (13, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_aligned_whatever_the_dense_inputs(dense, dtype):
    spec = shop_spec("dlrm", dense=dense)
    layout = CardLayout(spec, FeatureSchema.of(spec), dtype)
    runs = layout.runs(BatchClass.of(40, 3, 200))
    size = dtype.itemsize
    dims = [
        layout.shapes.columns["user"].stop * size,
        *(np.array(runs.out_offsets) * size),
        *(np.array(runs.out_strides) * size),
    ]
    assert all(one % ALIGNED_BYTES == 0 for one in dims)
