"""The model that every peer serves: its weights in one file, in shardrank's own form, and reckoned by NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from loader.snapshot.row_source import TensorRows
from loader.snapshot.writer import export_snapshot
from loadtest.workloads.catalog import BENCH_SEED, BenchShape, bench_spec, bench_workload
from loadtest.workloads.payloads import candidate_arrays
from loadtest.workloads.prepare import random_dense
from loadtest.workloads.workload import WorkloadRequest
from shard_node.bags import Float32Array

ROWS = "rows"
# Rows are this wide, so that scores differ by much more than a tolerance.
ROW_DEVIATION = 0.3


def random_tensors(shape: BenchShape, seed: int) -> dict[str, torch.Tensor]:
    """Draw the table (`rows`) and the MLP (`mlp.layers.<i>.weight` and `.bias`), float32, by name."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn((shape.rows, shape.embedding_dim), generator=draw) * ROW_DEVIATION
    return {ROWS: rows, **random_dense(bench_spec(shape, "mlp"), seed)}


def write_weights(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write one safetensors file, which peers map."""
    save_file(tensors, file)


def write_snapshot(shape: BenchShape, tensors: dict[str, torch.Tensor], store: Path) -> Path:
    """Export the same weights for shardrank, rows in int8. Returns the snapshot's folder. Raises ExportError."""
    dense = {name: tensor for name, tensor in tensors.items() if name != ROWS}
    rows = {ROWS: TensorRows(tensors[ROWS])}
    return export_snapshot(store, bench_spec(shape, "mlp"), rows=rows, dense=dense)


def drawn_requests(shape: BenchShape, hotness: int, count: int) -> list[WorkloadRequest]:
    """Draw the first requests of the pool, which is the same for every server."""
    made, rng = bench_workload(shape, "mlp", hotness), np.random.default_rng(BENCH_SEED)
    return [made.request(rng) for _ in range(count)]


def reference_scores(tensors: dict[str, torch.Tensor], request: WorkloadRequest) -> Float32Array:
    """Compute float32 [candidates] by NumPy: what every server must answer, as far as rounding goes."""
    ids, lengths, dense = candidate_arrays(request)
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
