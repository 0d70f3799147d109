"""Workloads by their names on the command line."""

from __future__ import annotations

import re
from pathlib import Path

from loadtest.workloads.candidates import parse_candidates
from loadtest.workloads.catalog import catalog_workload
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.films import PROFILE, movielens_workload
from loadtest.workloads.ids import parse_ids
from loadtest.workloads.workload import Workload

CATALOG_WORKLOADS = ("dlrm-v2", "merlin-tiny")
WORKLOADS_TEXT = "dlrm-v2[:SCALE], merlin-tiny[:SCALE], films[:profile]"
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?")


def open_workload(
    text: str,
    *,
    ids: str | None = None,
    candidates: str | None = None,
    context_features: int = 0,
    movielens: Path | None = None,
    split_seed: int = 0,
    varied: bool = True,
) -> Workload:
    """The workload of that name.

    Args:
        text: `dlrm-v2` or `merlin-tiny`, with the share of the rows such as `dlrm-v2:0.01`; `films`, or `films:profile`
            for a model trained with `--profile`.
        ids: as `parse_ids` reads it; None for the workload's own.
        candidates: as `parse_candidates` reads it; None for the workload's own.
        context_features: of dlrm-v2 and merlin-tiny, how many features come once a request.
        movielens: folder with the files of MovieLens 100K, for `films`.
        split_seed: of its ratings; the trainer's.
        varied: whether dlrm-v2 and merlin-tiny have ragged bags and 50 to 500 candidates, where `candidates` is None;
            not, their bags and numbers of candidates are the published ones. Requests of films are always as they were.

    Raises:
        WorkloadError: naming what is not known or does not belong together.
        DatasetError, TrainingError: as `movielens_workload`.
    """
    name, _, rest = text.partition(":")
    counts = None if candidates is None else parse_candidates(candidates)
    if name in CATALOG_WORKLOADS:
        return catalog_workload(
            name,
            _scale(text, rest) if ":" in text else 1.0,
            ids=None if ids is None else parse_ids(ids),
            candidates=counts,
            context_features=context_features,
            varied=varied,
        )
    if text in ("films", f"films:{PROFILE}"):
        if ids is not None or context_features:
            raise WorkloadError(f"workload {text!r}: its ids and features are those of its ratings; none can be chosen")
        if movielens is None:
            raise WorkloadError(f"workload {text!r}: it needs a folder with the files of MovieLens 100K (--movielens)")
        return movielens_workload(movielens, profile=rest == PROFILE, candidates=counts, split_seed=split_seed)
    raise WorkloadError(f"workload: {text!r} is not one of {WORKLOADS_TEXT}")


def _scale(text: str, rest: str) -> float:
    if not _NUMBER.fullmatch(rest):
        raise WorkloadError(f"workload: {text!r}: the scale {rest!r} is not a number above 0 and at most 1")
    return float(rest)
