"""A trained model as a snapshot, with golden requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loader.golden import GoldenRequests
from loader.manifest import ModelSpec, RowDtype
from loader.progress import Progress, no_progress
from loader.row_source import rows_of
from loader.writer import export_snapshot
from serving.training.dataset import FilmsDataset
from serving.training.float32_ranker import Float32Ranker
from serving.training.requests import evaluation_requests, first_requests
from serving.training.trainer import TrainedModel

DEFAULT_GOLDEN_REQUESTS = 32
# At least twice the largest difference measured over all kinds of ranking model, on MovieLens 100K and on generated
# data: a dense part in bfloat16 gives 0.012, int8 rows 0.013, int4 rows 0.17, and they add up.
GOLDEN_TOLERANCES: Mapping[RowDtype, float] = {"fp32": 0.03, "fp16": 0.03, "int8": 0.06, "int4": 0.4}


def golden_requests(
    trained: TrainedModel, dataset: FilmsDataset, num_requests: int = DEFAULT_GOLDEN_REQUESTS
) -> GoldenRequests:
    """The first requests of the test part with the scores of the float32 model."""
    requests = first_requests(evaluation_requests(dataset, trained.spec).requests, trained.spec, num_requests)
    return replace(requests, scores=Float32Ranker(trained).score(requests))


def export_trained(
    trained: TrainedModel,
    store_path: str | Path,
    *,
    golden: GoldenRequests | None = None,
    golden_tolerance: float | None = None,
    version: int | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Writes the next version of the model into a store.

    Args:
        trained: the model.
        store_path: the store's folder.
        golden: requests with their scores, as `golden_requests` makes them.
        golden_tolerance: largest |served - expected| that a server may accept; None chooses by the row formats.
        version: the version's number; by default the next free one.
        metadata: free text about the training run.
        progress: told the rows written per table.

    Returns:
        The snapshot's folder.

    Raises:
        ExportError, SnapshotExistsError: as `loader.writer.export_snapshot`.
    """
    return export_snapshot(
        store_path,
        trained.spec,
        rows={name: rows_of(rows) for name, rows in trained.tables.items()},
        dense=trained.dense,
        vocabularies=trained.vocabularies,
        golden=golden,
        golden_tolerance=default_tolerance(trained.spec) if golden_tolerance is None else golden_tolerance,
        version=version,
        metadata=metadata,
        progress=progress,
    )


def default_tolerance(spec: ModelSpec) -> float:
    """The golden tolerance of the coarsest row format in the model."""
    return max(GOLDEN_TOLERANCES[table.dtype] for table in spec.tables)
