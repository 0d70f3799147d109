"""Inputs assembled from real lookups, against loops over requests, candidates and features."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Embeddings, Router
from serving.models.inputs import InputAssembler, RankingInputs, padded_sequence
from serving.models.layers import Steps
from shard_node.bags import Bags
from shard_node.node import LoadedTables, LocalShard, ShardNode
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import random_rows


def spec_of(features: list[tuple[str, str, int]], dense: tuple[int, int] = (0, 0)) -> ModelSpec:
    """A float32 table for each feature: (side, pooling, dim)."""
    return ModelSpec(
        model="m",
        tables=tuple(
            TableSpec(
                name=f"t{i}",
                num_embeddings=20,
                embedding_dim=dim,
                feature_names=(f"f{i}",),
                pooling=pooling,
                dtype="fp32",
            )
            for i, (_, pooling, dim) in enumerate(features)
        ),
        features=tuple(FeatureSpec(name=f"f{i}", side=side) for i, (side, _, _) in enumerate(features)),
        dense_inputs=DenseInputs(context=dense[0], candidate=dense[1]),
        dense_model=DenseModelSpec(kind="mlp"),
    )


def look_up(spec: ModelSpec, candidates: list[int], max_hotness: int, rng: np.random.Generator) -> Embeddings:
    """A random batch through router and node, all in this process."""
    schema, plan = FeatureSchema.of(spec), Plan.make(spec, 1, "hash")
    tables = {table.name: random_rows(rng, table.num_embeddings, table.embedding_dim) for table in spec.tables}
    node = ShardNode(plan.identity(0))
    node.generations.stage("m", 1, LoadedTables(ReferenceEngine(spec, tables), "identity", plan.digest))
    node.generations.flip("m", 1)
    bags_per_key = np.where(schema.is_context, len(candidates), sum(candidates)).astype(np.int64)
    lengths = rng.integers(0, max_hotness + 1, int(bags_per_key.sum()))
    keys, rows = np.arange(len(schema.features), dtype=np.int32), rng.integers(0, 20, int(lengths.sum()))
    router = Router(schema, IdMapper(schema, {}), plan, [LocalShard(node)])
    bags = Bags.from_lengths(keys, bags_per_key, lengths, rows)
    return asyncio.run(router.lookup("m", 1, bags, math.inf))


def assemble(
    spec: ModelSpec, embeddings: Embeddings, candidates: list[int], rng: np.random.Generator, dtype: torch.dtype
) -> tuple[RankingInputs, np.ndarray, np.ndarray, np.ndarray]:
    owner = np.repeat(np.arange(len(candidates)), candidates)
    context = rng.normal(size=(len(candidates), spec.dense_inputs.context)).astype(np.float32)
    candidate = rng.normal(size=(owner.size, spec.dense_inputs.candidate)).astype(np.float32)
    assembler = InputAssembler(spec, embeddings.schema, dtype)
    inputs = assembler.assemble(embeddings, owner, context, candidate, assembler.buffer(), {})
    return inputs, owner, context, candidate


def test_a_shared_buffer_changes_no_batch():
    spec = spec_of([("candidate", "sum", 4), ("context", "sum", 4), ("candidate", "mean", 3)], (2, 1))
    rng, buffer = np.random.default_rng(6), None
    for candidates in ([2, 3], [1], [4, 4, 4], [2]):
        embeddings = look_up(spec, candidates, 3, rng)
        assembler = InputAssembler(spec, embeddings.schema, torch.float32)
        buffer = buffer or assembler.buffer()
        own, owner, context, candidate = assemble(spec, embeddings, candidates, rng, torch.float32)
        shared = assembler.assemble(embeddings, owner, context, candidate, buffer, {})
        for side, found, expected in (
            (assembler.shapes.context, shared.context, own.context),
            (assembler.shapes.candidate, shared.candidates, own.candidates),
        ):
            assert torch.equal(found, expected)
            assert not found[:, side.width :].any()
            # What a batch leaves is of no later one.
            found[:, : side.width] = float("nan")


def test_codes_are_those_of_the_numbers():
    spec = spec_of([("candidate", "sum", 4), ("context", "sum", 4), ("candidate", "mean", 3)], (2, 3))
    rng = np.random.default_rng(9)
    embeddings = look_up(spec, [5, 9], 3, rng)
    plain = InputAssembler(spec, embeddings.schema, torch.float32)
    step = torch.full((plain.shapes.candidate.padded_width,), 2.0**-4)
    step[4:7], step[8] = 2.0**-5, 2.0**-2
    steps = Steps(step, 128)
    coded = InputAssembler(spec, embeddings.schema, torch.float32, steps)
    dense = rng.normal(size=(2, 2)).astype(np.float32), rng.normal(size=(14, 3)).astype(np.float32)
    owner = np.repeat([0, 1], [5, 9])
    numbers, codes = (one.assemble(embeddings, owner, *dense, one.buffer(), {}) for one in (plain, coded))
    assert torch.equal(codes.context, numbers.context)
    # Padding is 0, and so not beyond the codes.
    assert torch.equal(codes.candidates, steps.codes(numbers.candidates))


def expected_columns(spec: ModelSpec, embeddings: Embeddings, side: str, dense: np.ndarray) -> np.ndarray:
    rows = []
    for number, floats in enumerate(dense):
        row = []
        for feature in spec.features:
            if feature.side == side and spec.pooling_of(feature.name) != "none":
                row.extend(embeddings.feature(embeddings.schema.index[feature.name])[number])
        rows.append([*row, *floats])
    return np.array(rows, np.float32)


FEATURES = st.lists(
    st.tuples(st.sampled_from(["context", "candidate"]), st.sampled_from(["sum", "mean"]), st.sampled_from([4, 8]))
    | st.tuples(st.just("context"), st.just("none"), st.sampled_from([4, 8])),
    min_size=1,
    max_size=14,
)


@given(
    FEATURES,
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**32 - 1),
)
def test_every_column_holds_its_own_feature_of_its_own_request(features, candidates, dense, dtype, seed) -> None:
    spec, rng = spec_of(features, dense), np.random.default_rng(seed)
    embeddings = look_up(spec, candidates, 3, rng)
    inputs, owner, context, candidate = assemble(spec, embeddings, candidates, rng, dtype)
    for side, matrix, floats in (("context", inputs.context, context), ("candidate", inputs.candidates, candidate)):
        expected = torch.from_numpy(expected_columns(spec, embeddings, side, floats)).to(dtype).reshape(len(floats), -1)
        rows, carried = expected.shape
        assert matrix.dtype == dtype
        assert matrix.shape[1] % 32 == 0
        assert torch.equal(matrix[:rows, :carried], expected)
        assert not matrix[:, carried:].any()
        assert not matrix[rows:].any()
    assert len(inputs.context) == len(candidates)
    assert len(inputs.candidates) == 8 * -(-len(owner) // 8)
    last = len(candidates) - 1
    assert inputs.request_of_candidate.tolist() == owner.tolist() + [last] * (len(inputs.candidates) - len(owner))
    assert set(inputs.sequences) == {f"f{i}" for i, (_, pooling, _) in enumerate(features) if pooling == "none"}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_sequences_are_laid_out_side_by_side_and_end_in_zeros(lengths: list[int]) -> None:
    rows = np.random.default_rng(0).normal(size=(sum(lengths), 3)).astype(np.float32)
    sequence = padded_sequence(rows, np.array(lengths), torch.float32)
    assert sequence.rows.shape == (len(lengths), max(lengths), 3)
    parts = np.split(rows, np.cumsum(lengths)[:-1])
    for request, (length, part) in enumerate(zip(lengths, parts, strict=True)):
        assert sequence.mask[request].tolist() == [True] * length + [False] * (max(lengths) - length)
        assert torch.equal(sequence.rows[request, :length], torch.from_numpy(part))
        assert not sequence.rows[request, length:].any()
