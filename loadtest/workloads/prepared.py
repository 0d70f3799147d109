"""A workload's model, brought into a store."""

from __future__ import annotations

from pathlib import Path

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import Bucketing, ModelSpec
from loadtest.workloads.export import write_random_snapshot
from loadtest.workloads.films import FilmsWorkload
from loadtest.workloads.opened import open_workload
from serving.training.dataset import with_bucketing
from serving.training.version import train_version


def prepare_workload(
    text: str,
    store: Path,
    *,
    context_features: int = 0,
    movielens: Path | None = None,
    seed: int = 0,
    epochs: int | None = None,
    bucketing: Bucketing = "hash",
    progress: Progress = no_progress,
) -> tuple[Path, ModelSpec]:
    """Writes the next version of a workload's model.

    `films` is trained on its ratings; any other model gets random rows and weights.

    Args:
        text: the workload's name, as `open_workload` reads it.
        store: the store's folder; made if it is not there.
        context_features: as `open_workload` takes it.
        movielens: as `open_workload` takes it.
        seed: of rows and weights, or of the split and the training.
        epochs: for `films`, passes over the training part; None for the trainer's default.
        bucketing: how rows lie in their files; sharding `range` needs `range`.
        progress: told how far it is.

    Returns:
        The snapshot's folder and the model.

    Raises:
        WorkloadError, TrainingError, ExportError: as `open_workload`, `train_version` and `write_random_snapshot`.
    """
    workload = open_workload(text, context_features=context_features, movielens=movielens, split_seed=seed)
    spec = with_bucketing(workload.spec, bucketing)
    if isinstance(workload, FilmsWorkload):
        trained = train_version(
            workload.interactions,
            store,
            seed=seed,
            epochs=epochs,
            options=workload.options,
            bucketing=bucketing,
            progress=progress,
        )
        return trained.folder, spec
    return write_random_snapshot(spec, store, seed=seed, progress=progress), spec
