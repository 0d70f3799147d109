"""The snapshot that all arms serve."""

from __future__ import annotations

from pathlib import Path

from loader.manifest import ModelSpec
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from loader.store import Store
from loadtest.compare.errors import CompareStoreError
from loadtest.load.config import LoadConfig
from loadtest.workloads.opened import open_workload
from loadtest.workloads.prepared import prepare_workload


def compared_snapshot(load: LoadConfig, store: Path, progress: Progress = no_progress) -> Path:
    """The folder of the workload's model in a store: its latest version there, or else one that is written.

    Args:
        load: names the workload.
        store: its folder; made if it is not there.
        progress: told how far the writing is.

    Raises:
        CompareStoreError: the store's model of that name has other tables or features.
        ShardrankError: as `prepare_workload`, `open_workload` and `Snapshot.open`.
    """
    spec = open_workload(
        load.workload, context_features=load.context_features, movielens=load.movielens, seed=load.seed
    ).spec
    if not Store(store).versions(spec.model):
        folder, _ = prepare_workload(
            load.workload,
            store,
            context_features=load.context_features,
            movielens=load.movielens,
            seed=load.seed,
            progress=progress,
        )
        return folder.resolve()
    folder = Store(store).snapshot_path(spec.model).resolve()
    _check_same(folder, Snapshot.open(folder, verify=False).spec, spec, load.workload)
    return folder


def _check_same(folder: Path, found: ModelSpec, wanted: ModelSpec, workload: str) -> None:
    for what in ("tables", "features"):
        there, asked = getattr(found, what), getattr(wanted, what)
        if there != asked:
            different = sorted({one.name for one in (*there, *asked) if one not in there or one not in asked})
            raise CompareStoreError(
                f"{folder}: its {what} {different[:5]} are not those of the workload {workload!r}; name another "
                "--store, or the workload and --context-features that it was prepared with"
            )
