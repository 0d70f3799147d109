"""Bring a workload's model into a store, with random rows and weights, written in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.progress import Progress, no_progress
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_source import RowSource
from loader.snapshot.writer import export_snapshot
from loadtest.workloads.workload import Workload, scattered_ids
from serving.embedded import ModelSource, load_served_model
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.models.ranking_models import build_model
from serving.rank.ranking import merge
from serving.rank.service import RankingService
from shard_node.bags import Float32Array

# Sums of 100 such rows, and so logits, stay of the order of 1.
ROW_LIMIT = 0.08
BLOCK_BYTES = 4 << 20
GOLDEN_REQUESTS = 4
GOLDEN_TIMEOUT_S = 60.0


class RandomRows(RowSource):
    """A table of uniform numbers in ±ROW_LIMIT: the same rows for the same seed, whichever of them are asked for."""

    def __init__(self, seed: int, table: str, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self._seed = (seed, zlib.crc32(table.encode()))
        self._block_rows = max(1, BLOCK_BYTES // (4 * embedding_dim))

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield blocks of about 4 MiB, as `RowSource.blocks`."""
        last_row = min(first_row + max_rows, self.num_embeddings)
        while first_row < last_row:
            number, skipped = divmod(first_row, self._block_rows)
            rng = np.random.Generator(np.random.SFC64((*self._seed, number)))
            block = rng.random((self._block_rows, self.embedding_dim), dtype=np.float32)
            block -= np.float32(0.5)
            block *= np.float32(2 * ROW_LIMIT)
            yield (kept := block[skipped : skipped + last_row - first_row])
            first_row += kept.shape[0]

    def fingerprint(self) -> str:
        """Name what the rows are drawn from."""
        return f"random {self._seed} {ROW_LIMIT} {self._block_rows}"


def random_dense(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Draw weights by name that keep the size of what passes the layers and their ReLUs; biases are 0."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=draw) * (2 / tensor.shape[-1]) ** 0.5
        if tensor.ndim > 1
        else torch.zeros(tensor.shape)
        for name, tensor in build_model(spec).state_dict().items()
    }


def as_golden(schema: RequestSchema, requests: Sequence[RankRequest], scores: Float32Array) -> GoldenRequests:
    """Return requests with the scores, float32 [N], of all their candidates."""
    batch = merge(requests)
    bags, names, weights = batch.bags, schema.names, batch.bags.weights
    lengths, rows = (
        {name: slice(*ends) for name, ends in zip(names, itertools.pairwise(starts.tolist()), strict=True)}
        for starts in (bags.bag_starts(), bags.value_starts())
    )
    return GoldenRequests(
        num_candidates=np.array([request.num_candidates for request in requests], np.int32),
        values={name: bags.values[rows[name]] for name in names},
        lengths={name: bags.lengths[lengths[name]].astype(np.int32) for name in names},
        weights={} if weights is None else {name: weights[rows[name]] for name in schema.weighted_names},
        context_dense=batch.context_dense,
        candidate_dense=batch.candidate_dense,
        scores=scores,
    )


def golden_of(snapshot: Path, workloads: Sequence[Workload]) -> GoldenRequests:
    """Return some requests of each workload with the scores that a snapshot's model gives them in float32.

    Raises as `load_served_model`.
    """
    rng = np.random.default_rng(0)
    requests = [workload.request(rng) for workload in workloads for _ in range(GOLDEN_REQUESTS)]
    with contextlib.closing(RankingService()) as service:
        source = ModelSource(snapshot=snapshot, dtype="float32", verify=False)
        with contextlib.closing(load_served_model(source, service)) as served:
            deadline = time.monotonic() + GOLDEN_TIMEOUT_S
            scoring = served.on_each(lambda ranking: ranking.score(merge(requests), deadline))
            return as_golden(served.schema, requests, asyncio.run(scoring)[0].scores[0])


def write_random_snapshot(
    spec: ModelSpec,
    store: Path,
    *,
    seed: int = 0,
    workloads: Sequence[Workload] = (),
    access_counts: Mapping[str, npt.NDArray[np.uint32]] | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the next version of a model into a store, made if it is missing; return the snapshot's folder.

    Rows of tables with keys or a vocabulary are named by `scattered_ids`. With workloads it has golden requests of
    them; without scores it is the version before, too. Raises OSError: the store can't be written; the same export goes
    on with what it has written. ExportError.
    """
    store.mkdir(parents=True, exist_ok=True)
    tables = {table.name: (table.num_embeddings, table.embedding_dim) for table in spec.tables}
    rows = {name: RandomRows(seed, name, *shape) for name, shape in tables.items()}
    named = {"keys": [table for table in spec.tables if table.keys]}
    named["vocabularies"] = [table for table in spec.tables if table.id_mapping.kind == "vocabulary"]
    more: dict[str, Any] = {
        kind: {table.name: scattered_ids(np.arange(table.num_embeddings)) for table in tables}
        for kind, tables in named.items()
    }
    more |= {
        "access_counts": access_counts,
        "dense": random_dense(spec, seed),
        "metadata": {"source": "random rows", "seed": str(seed)},
    }
    export = partial(export_snapshot, store, spec, rows=rows, progress=progress, **more)
    return export(golden=golden_of(export(), workloads)) if workloads else export()
