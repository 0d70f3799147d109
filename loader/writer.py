"""Writes a snapshot: float32 rows in, one immutable version out, in bounded memory and resumable file by file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from loader.errors import ExportError
from loader.export_folder import open_export_folder
from loader.export_inputs import (
    DENSE_PATH,
    GOLDEN_PATH,
    Tensors,
    check_rows,
    inputs_digest,
    rows_per_file_of,
    small_files,
    vocabulary_path,
)
from loader.golden import GoldenRequests
from loader.manifest import FileEntry, GoldenEntry, Manifest, ModelSpec, TableFiles
from loader.manifest_file import manifest_texts
from loader.progress import Progress, no_progress
from loader.row_files import write_row_files
from loader.row_source import RowSource
from loader.store import Store
from loader.vocabulary import Vocabulary

DEFAULT_GOLDEN_TOLERANCE = 0.05


def utc_now() -> datetime:
    """The time of day, the default clock."""
    return datetime.now(UTC)


def export_snapshot(
    store_path: str | Path,
    spec: ModelSpec,
    *,
    rows: Mapping[str, RowSource],
    dense: Mapping[str, torch.Tensor],
    vocabularies: Mapping[str, Vocabulary] | None = None,
    golden: GoldenRequests | None = None,
    golden_tolerance: float = DEFAULT_GOLDEN_TOLERANCE,
    version: int | None = None,
    metadata: Mapping[str, str] | None = None,
    rows_per_file: int | None = None,
    clock: Callable[[], datetime] = utc_now,
    progress: Progress = no_progress,
) -> Path:
    """Writes the next version of a model into a store.

    Run again after an interruption, the same export goes on where it stopped. "The same": spec, version, rows per file,
    dense tensors, vocabularies, golden requests. Rows are too large to compare; dense tensors tell training runs apart.

    Args:
        store_path: the store's folder; made if it is not there.
        spec: what the model is made of.
        rows: a source for every table, by name.
        dense: the dense model's tensors. Floats are stored as float32, whole numbers and bools as they are.
        vocabularies: for every table with vocabulary mapping, its ids in row order.
        golden: requests with the scores that training computed.
        golden_tolerance: largest |served - expected| that a server may accept.
        version: the version's number; by default the next free one.
        metadata: free text about the training run, kept in the manifest.
        rows_per_file: of all tables, a power of two of at least 256; by default files have at most 256 MiB.
        clock: gives the time of creation.
        progress: told the rows written per table.

    Returns:
        The snapshot's folder.

    Raises:
        ExportError: an input does not fit the spec, or the disk fails.
        NonFiniteRowError: a row holds NaN, inf, or values that its dtype can't hold.
        SnapshotExistsError: the version exists.
    """
    store = Store(store_path)
    version = store.next_version(spec.model) if version is None else version
    if not 1 <= version < 2**63:
        raise ExportError(f"version: {version} is not in [1, 2^63)")
    if not 0 < golden_tolerance < math.inf:
        raise ExportError(f"golden_tolerance: {golden_tolerance} is not a positive number")
    check_rows(spec, rows)
    file_rows = {table.name: rows_per_file_of(table, rows_per_file) for table in spec.tables}
    files = small_files(spec, dense, vocabularies or {}, golden)
    target = store.path / spec.model / str(version)
    digest = inputs_digest(spec, version, file_rows, files)
    try:
        with open_export_folder(target, digest, progress) as folder:
            tables = [write_row_files(folder, t, rows[t.name], file_rows[t.name], progress) for t in spec.tables]
            entries = {path: folder.write(path, _saver(tensors)) for path, tensors in files.items()}
            manifest = Manifest(
                spec=spec,
                version=version,
                created_at=clock().astimezone(UTC).isoformat(timespec="seconds"),
                tables=_with_vocabularies(tables, entries),
                dense=entries[DENSE_PATH],
                golden=golden and _golden_entry(entries[GOLDEN_PATH], golden, golden_tolerance),
                metadata=dict(metadata or {}),
            )
            folder.publish(manifest_texts(manifest))
    except (OSError, SafetensorError) as error:
        raise ExportError(f"export of {spec.model!r} version {version}: {error}") from error
    return target


def _saver(tensors: Tensors) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        values: dict[str, Any] = dict(tensors)
        if all(isinstance(value, torch.Tensor) for value in values.values()):
            safetensors.torch.save_file(values, path)
        else:
            safetensors.numpy.save_file(values, path)

    return save


def _with_vocabularies(tables: list[TableFiles], entries: Mapping[str, FileEntry]) -> tuple[TableFiles, ...]:
    return tuple(files.model_copy(update={"vocabulary": entries.get(vocabulary_path(files.table))}) for files in tables)


def _golden_entry(file: FileEntry, golden: GoldenRequests, tolerance: float) -> GoldenEntry:
    return GoldenEntry(
        file=file, tolerance=tolerance, num_requests=golden.num_requests, num_candidates=len(golden.scores)
    )
