"""The loader's check of a snapshot's files, and after it the scores of the version that was loaded from them."""

from __future__ import annotations

from pathlib import Path

from loader.errors import ShardrankError
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from loader.verify import VerifyReport, verify_snapshot
from serving.loading import ModelSource, load_served_model
from serving.service import RankingService


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
        golden: also load it here and compare the golden scores.
        threads: how many files are hashed at a time.
        progress: told bytes hashed, rows checked and bytes loaded.
    """
    report = verify_snapshot(folder, threads=threads, progress=progress)
    fields = report.model_dump()
    if not (report.ok and golden):
        return Verification(**fields)
    entry = Snapshot.open(folder, verify=False).manifest.golden
    if entry is None:
        return Verification(**{**fields, "checks": (*report.checks, "there are no golden requests")})
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
    return Verification(**{**fields, "checks": (*report.checks, check), "golden_checked": True})
