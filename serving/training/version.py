"""From ratings to a version in a store, and how good it is: what `shardrank train` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import Bucketing, RowDtype
from loader.snapshot.row_source import rows_of
from loader.snapshot.writer import export_snapshot
from serving.training.dataset import (
    FilmsDataset,
    FilmsOptions,
    LabelledRequests,
    evaluation_requests,
    films_spec,
    with_bucketing,
)
from serving.training.interactions import Interactions, TrainingError, generate_interactions, read_movielens
from serving.training.trainer import DEFAULT_EPOCHS, TrainedModel, float32_scores, train
from shard_node.bags import Float32Array, Int64Array

GOLDEN_REQUESTS = 32
# At least twice the largest difference measured over all kinds of ranking model, on MovieLens 100K and on generated
# data: a dense part in bfloat16 gives 0.012, int8 rows 0.013, int4 rows 0.17, and they add up.
GOLDEN_TOLERANCES: Mapping[RowDtype, float] = {"fp32": 0.03, "fp16": 0.03, "int8": 0.06, "int4": 0.4}


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVersion:
    """A version in the store, and the training that it came from."""

    dataset: FilmsDataset
    trained: TrainedModel
    folder: Path


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What served answers to the test part's requests are compared with.

    Attributes:
        scores: float32 [N], of the float32 model in this process; `auc_fp32` is theirs.
        auc_item_mean: of the baseline that scores a film by its mean training label.
    """

    labelled: LabelledRequests
    scores: Float32Array
    auc_fp32: float
    auc_item_mean: float


def read_interactions(movielens: Path | None, ratings: int, seed: int) -> Interactions:
    """Read MovieLens from a folder, or generate ratings. Raises DatasetError."""
    return generate_interactions(ratings, seed=seed) if movielens is None else read_movielens(movielens)


def train_version(
    interactions: Interactions,
    store: Path,
    *,
    seed: int,
    epochs: int | None = None,
    options: FilmsOptions | None = None,
    bucketing: Bucketing = "hash",
    on_stage: Callable[[str], None] = lambda stage: None,
    progress: Progress = no_progress,
) -> TrainedVersion:
    """Trains a model and writes it as the next version into a store.

    The seed is that of the split and the training; `bucketing` is how rows lie in their files; `on_stage` is told the
    end of the stages `train` and `export`.

    Raises:
        TrainingError, ExportError: as `FilmsDataset.split`, `train` and `export_snapshot`.
    """
    dataset = FilmsDataset.split(interactions, seed=seed)
    spec = with_bucketing(films_spec(interactions, options), bucketing)
    trained = train(dataset, spec, seed=seed, epochs=epochs or DEFAULT_EPOCHS, progress=progress)
    on_stage("train")
    metadata = {"source": interactions.source, "seed": str(seed)}
    folder = export_trained(trained, dataset, store, metadata=metadata, progress=progress)
    on_stage("export")
    return TrainedVersion(dataset, trained, folder)


def export_trained(
    trained: TrainedModel,
    dataset: FilmsDataset,
    store: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the next version of a model into a store; return the snapshot's folder.

    Its golden requests are the first of the test part with the scores of the float32 model, and the scores that a
    server gives may differ by as much as its coarsest row format needs.
    """
    requests = evaluation_requests(dataset, trained.spec, GOLDEN_REQUESTS).requests
    return export_snapshot(
        store,
        trained.spec,
        rows={name: rows_of(rows) for name, rows in trained.tables.items()},
        dense=trained.dense,
        vocabularies=trained.vocabularies,
        golden=replace(requests, scores=float32_scores(trained, requests)),
        golden_tolerance=max(GOLDEN_TOLERANCES[table.dtype] for table in trained.spec.tables),
        metadata=metadata,
        progress=progress,
    )


def expectation(version: TrainedVersion) -> Expectation:
    """Ranks the test part with the float32 model in this process, and with the baseline."""
    labelled = evaluation_requests(version.dataset, version.trained.spec)
    scores = float32_scores(version.trained, labelled.requests)
    baseline = film_mean_scores(version.dataset, labelled.samples)
    return Expectation(labelled, scores, auc(labelled.labels, scores), auc(labelled.labels, baseline))


def film_mean_scores(dataset: FilmsDataset, samples: Int64Array) -> Float32Array:
    """Scores samples, int64 [n], by the mean training label of their film; a film without one gets the overall mean."""
    films, labels = dataset.interactions.film_index, dataset.labels[dataset.train]
    num_films = dataset.interactions.films.ids.size
    counts = np.bincount(films[dataset.train], minlength=num_films)
    sums = np.bincount(films[dataset.train], labels, num_films)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), labels.mean())
    return means[films[samples]].astype(np.float32)


def auc(labels: npt.NDArray[Any], scores: npt.NDArray[np.floating]) -> float:
    """Return the share of pairs of a label above 0.5 and another in which the first scores higher; a tie counts half.

    Raises:
        TrainingError: if a score is not finite, or one of the two classes is not there.
    """
    if not np.isfinite(scores).all():
        raise TrainingError("auc: scores hold NaN or inf")
    positive, negative = scores[labels > 0.5], np.sort(scores[labels <= 0.5])
    if not positive.size or not negative.size:
        raise TrainingError(f"auc: {positive.size} positive and {negative.size} negative labels; both are needed")
    # Twice the negatives below each positive, ties counting once.
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.sum()) / (2 * positive.size * negative.size)
