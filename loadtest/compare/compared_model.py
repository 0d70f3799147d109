"""The snapshot that all arms serve."""

from __future__ import annotations

from pathlib import Path

from loader.manifest import ModelSpec
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from loader.store import Store
from loadtest.compare.config import CompareConfig
from loadtest.compare.errors import CompareStoreError
from loadtest.load.config import LoadConfig
from loadtest.workloads.films import FilmsWorkload
from loadtest.workloads.opened import open_workload
from loadtest.workloads.prepared import prepare_workload
from router.plan import Plan
from serving.training.description import with_bucketing


def compared_snapshot(config: CompareConfig, load: LoadConfig, store: Path, progress: Progress = no_progress) -> Path:
    """The folder of the workload's model in a store: its latest version there, or else one that is written.

    Args:
        config: the arms, and how rows are divided over them.
        load: names the workload.
        store: its folder; made if it is not there.
        progress: told how far the writing is.

    Raises:
        CompareStoreError: the store's model of that name has other tables or features.
        PlanError: an arm can't divide the rows like this, since they are stored in another order.
        ShardrankError: as `prepare_workload`, `open_workload` and `Snapshot.open`.
    """
    workload = open_workload(
        load.workload, context_features=load.context_features, movielens=load.movielens, split_seed=load.split_seed
    )
    wanted = workload.spec
    if not Store(store).versions(wanted.model):
        folder, spec = prepare_workload(
            load.workload,
            store,
            context_features=load.context_features,
            movielens=load.movielens,
            # What is trained on ratings must not learn those that are asked for.
            seed=load.split_seed if isinstance(workload, FilmsWorkload) else load.seed,
            bucketing="range" if config.sharding == "range" else "hash",
            progress=progress,
        )
    else:
        folder = Store(store).snapshot_path(wanted.model)
        spec = Snapshot.open(folder, verify=False).spec
        _check_same(folder, spec, wanted, load.workload)
    for arm in config.arms:
        # What a server would refuse later.
        Plan.make(spec, arm.shards or 1, config.sharding, arm.cards, config.budgets.replicate_bytes)
    return folder.resolve()


def _check_same(folder: Path, found: ModelSpec, wanted: ModelSpec, workload: str) -> None:
    # Rows may lie in another order: which is right depends on the sharding.
    found, wanted = with_bucketing(found, "hash"), with_bucketing(wanted, "hash")
    for what in ("tables", "features"):
        there, asked = getattr(found, what), getattr(wanted, what)
        if there != asked:
            different = sorted({one.name for one in (*there, *asked) if one not in there or one not in asked})
            raise CompareStoreError(
                f"{folder}: its {what} {different[:5]} are not those of the workload {workload!r}; name another "
                "--store, or the workload and --context-features that it was prepared with"
            )
