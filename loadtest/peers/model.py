"""The model that every peer serves: its weights in one file, in shardrank's own form, and reckoned by NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from loader.snapshot.row_source import TensorRows
from loader.snapshot.writer import export_snapshot
from loadtest.serving_cost.shape import Shape, model_spec
from loadtest.workloads.export import random_dense
from loadtest.workloads.workload import WorkloadRequest
from shard_node.bags import Float32Array, Int32Array, Int64Array

ROWS = "rows"
# Rows are this wide, so that scores differ by much more than a tolerance.
ROW_DEVIATION = 0.3


def random_tensors(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """The table (`rows`) and the MLP (`mlp.layers.<i>.weight` and `.bias`), float32, by name."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn((shape.rows, shape.embedding_dim), generator=draw) * ROW_DEVIATION
    return {ROWS: rows, **random_dense(model_spec(shape, "mlp"), seed)}


def write_weights(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """One safetensors file, which peers map."""
    save_file(tensors, file)


def write_snapshot(shape: Shape, tensors: dict[str, torch.Tensor], store: Path) -> Path:
    """The same weights as shardrank serves them, rows in int8. Returns the snapshot's folder. Raises ExportError."""
    dense = {name: tensor for name, tensor in tensors.items() if name != ROWS}
    rows = {ROWS: TensorRows(tensors[ROWS])}
    return export_snapshot(store, model_spec(shape, "mlp"), rows=rows, dense=dense)


def request_arrays(request: WorkloadRequest) -> tuple[Int32Array, Int64Array, Float32Array]:
    """A request whose features are all of candidates, candidate by candidate, as peers want it.

    Returns:
        (the number of ids in each bag, int32 [candidates, features]; the ids, int64 [their sum]; dense inputs, float32
        [candidates, dense]).
    """
    bags, candidates = request.bags, request.num_candidates
    lengths = bags.lengths.reshape(-1, candidates)
    candidate = np.repeat(np.tile(np.arange(candidates), len(lengths)), bags.lengths)
    ids = bags.values[np.argsort(candidate, kind="stable")]
    return np.ascontiguousarray(lengths.T, np.int32), ids, request.candidate_dense


def reference_scores(tensors: dict[str, torch.Tensor], request: WorkloadRequest) -> Float32Array:
    """float32 [candidates], by NumPy in float32: what every server must answer, as far as rounding goes."""
    lengths, ids, dense = request_arrays(request)
    rows = tensors[ROWS].numpy()
    pooled = np.zeros((lengths.size, rows.shape[1]), np.float32)
    np.add.at(pooled, np.repeat(np.arange(lengths.size), lengths.ravel()), rows[ids])
    x = np.concatenate([dense, pooled.reshape(len(dense), -1)], 1)
    last = sum(name.endswith(".weight") for name in tensors) - 1
    for number in range(last + 1):
        x = x @ tensors[f"mlp.layers.{number}.weight"].numpy().T + tensors[f"mlp.layers.{number}.bias"].numpy()
        if number < last:
            x = np.maximum(x, 0)
    scores: Float32Array = (1 / (1 + np.exp(-x[:, 0]))).astype(np.float32)
    return scores
