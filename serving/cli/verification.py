"""The loader's check of a snapshot's files, and after it the scores of the version that was loaded from them."""

from __future__ import annotations

from pathlib import Path

from loader.errors import CheckpointError, ShardrankError, SnapshotError
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from loader.verify import VerifyReport, verify_snapshot
from serving.cli.dense_check import check_dense_model
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model


class Verification(VerifyReport):
    """A `VerifyReport` that knows of golden scores.

    Attributes:
        golden_checked: whether the golden requests were scored again.
    """

    golden_checked: bool = False


def verify_served(
    folder: Path, *, golden: bool = True, threads: int = 2, progress: Progress = no_progress
) -> Verification:
    """Checks a snapshot; raises nothing for a bad one.

    Args:
        folder: the snapshot's.
        golden: also rank its golden requests here and compare the scores; the dense model is built in any case.
        threads: how many files are hashed at a time.
        progress: told bytes hashed, rows checked and bytes loaded.
    """
    report = verify_snapshot(folder, threads=threads, progress=progress)
    if not report.ok:
        return Verification(**report.model_dump())
    snapshot = Snapshot.open(folder, verify=False)
    tensors = snapshot.dense_tensors()
    try:
        check_dense_model(snapshot.spec, tensors, tensors.keys())
    except CheckpointError as error:
        problem = f"{SnapshotError.kind}: {snapshot.manifest.dense.path}: {error}"
        return Verification(**{**report.model_dump(), "ok": False, "problems": (problem,)})
    checks = (*report.checks, f"dense model: {snapshot.spec.dense_model.kind} is built from its {len(tensors)} tensors")
    fields = {**report.model_dump(), "checks": checks}
    entry = snapshot.manifest.golden
    if not golden:
        return Verification(**fields)
    if entry is None:
        return Verification(**{**fields, "checks": (*checks, "there are no golden requests")})
    service = RankingService()
    try:
        # In float32, so that what is measured is the rows' quantisation alone; a server checks its own dtype as well.
        load_served_model(ModelSource(snapshot=folder, verify=False, dtype="float32"), service, progress).close()
    except ShardrankError as error:
        problem = f"{error.kind}: {error}"
        return Verification(**{**fields, "ok": False, "problems": (problem,), "golden_checked": True})
    finally:
        service.close()
    check = (
        f"golden requests: {entry.num_requests} with {entry.num_candidates} candidates, "
        f"every score within {entry.tolerance:g}"
    )
    return Verification(**{**fields, "checks": (*checks, check), "golden_checked": True})
