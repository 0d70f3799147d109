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
from shard_node.cuda.batch import check_runs
from shard_node.cuda.kernel_params import MODES
from shardrank_testing.card_ranking import DENSE, SHOP_LEVERS, shop_levers, shop_spec

PARTS = SHOP_LEVERS | {
    "films": {"id_mapping": {"kind": "quotient_remainder", "buckets": 20}},
    "tags": {"id_mapping": {"kind": "quotient_remainder", "buckets": 20, "combine": "multiply"}},
}
CLASSES = st.builds(BatchClass.of, st.integers(1, 300), st.integers(1, 20), st.integers(0, 5000))


def layout_of(kind: str, dense: tuple[int, int] = (2, 3), dtype: torch.dtype = torch.float32) -> CardLayout:
    spec = shop_spec(kind, dense=dense)
    return CardLayout(spec, FeatureSchema.of(spec), dtype)


@given(st.integers(1, 1 << 20))
def test_candidates_are_rounded_up_by_a_quarter_at_most(count):
    rounded = rounded_candidates(count)
    assert count <= rounded < max(count + MIN_CANDIDATES, 1.25 * count + 1)
    assert rounded % MIN_CANDIDATES == 0
    assert rounded_candidates(rounded) == rounded
    assert rounded <= rounded_candidates(count + 1)


@pytest.mark.parametrize("kind", DENSE)
@given(most=CLASSES)
def test_every_element_of_the_output_is_written_by_one_bag_at_most(kind, most):
    layout = layout_of(kind)
    runs, size = layout.runs(most), layout.size(most)
    features = FeatureSchema.of(shop_spec(kind))
    check_runs(features.layout, runs, size)
    written = np.zeros(runs.out_elements, np.int8)
    for key, table in enumerate(runs.tables.tolist()):
        bags = most.num_values if runs.modes[key] == MODES["none"] else int(size.bags_per_key[key])
        bag = runs.out_offsets[key] + np.arange(bags) * runs.out_strides[key]
        written[bag[:, None] + np.arange(features.layout.tables[table].embedding_dim)] += 1
    assert written.max() == 1
    places, shapes = layout.output_places(most), layout.shapes
    for first, rows, side in (
        (0, most.num_candidates, shapes.candidate),
        (places.areas[1], most.num_requests, shapes.context),
    ):
        matrix = written[first : first + rows * side.padded_width].reshape(rows, side.padded_width)
        # Embeddings are pooled into place; dense inputs are copied there, and what is behind them stays zero.
        assert matrix[:, : side.embedding_width].all()
        assert not matrix[:, side.embedding_width :].any()


@given(most=CLASSES)
def test_scratch_of_parts_is_written_by_one_bag_at_most_and_every_column_of_the_inputs_comes_from_somewhere(most):
    spec = shop_levers(shop_spec("target_attention"), PARTS).compiled()
    schema = FeatureSchema.of(spec)
    layout = CardLayout(spec, schema, torch.float32)
    runs, size = layout.runs(most), layout.size(most)
    check_runs(schema.layout, runs, size)
    assert runs.keys is None
    in_two = {feature.name for feature, count in zip(schema.features, layout.values_per_id, strict=True) if count == 2}
    assert in_two == {"film", "seen", "history", "tag", "liked"}
    written = np.zeros(runs.out_elements, np.int8)
    for key, table in enumerate(runs.tables.tolist()):
        bag = runs.out_offsets[key] + np.arange(int(size.bags_per_key[key])) * runs.out_strides[key]
        written[bag[:, None] + np.arange(schema.layout.tables[table].embedding_dim)] += 1
    assert written.max() == 1
    places = layout.output_places(most)
    areas = [
        written[first : first + area.count(most) * area.width].reshape(-1, area.width)
        for first, area in zip(places.areas, layout.areas, strict=True)
    ]
    for run, source, column, target in layout.sums:
        assert areas[source][:, column : column + run.count * run.dim].all()
        assert areas[source].shape[0] == areas[target].shape[0]
        areas[target][:, run.column : run.column + run.count * run.width] += not run.adds
    for one in layout.products:
        assert areas[one.source].all()
        areas[one.target][:, one.column : one.column + one.dim] += 1
    sides = (layout.shapes.candidate, layout.shapes.context)
    for matrix, width in zip(areas, [*(side.embedding_width for side in sides), 16], strict=False):
        assert (matrix[:, :width] == 1).all()
        assert not matrix[:, width:].any()


@pytest.mark.parametrize("dense", [(0, 0), (1, 0), (13, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_of_whole_16_bytes_begin_at_whole_16_bytes_whatever_the_dense_inputs(dense, dtype):
    layout = layout_of("dlrm", dense, dtype)
    runs = layout.runs(BatchClass.of(40, 3, 200))
    size = dtype.itemsize
    dims = [layout.shapes.dims[0] * size, *(np.array(runs.out_offsets) * size), *(np.array(runs.out_strides) * size)]
    assert all(one % ALIGNED_BYTES == 0 for one in dims)
