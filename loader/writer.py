"""Writes a snapshot: float32 rows in, one immutable version out, in bounded memory and resumable file by file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from loader.errors import ExportError, SnapshotFormatError
from loader.export_folder import open_export_folder
from loader.export_inputs import (
    DENSE_PATH,
    GOLDEN_PATH,
    Tensors,
    access_counts_path,
    check_rows,
    inputs_digest,
    rows_per_file_of,
    small_files,
    vocabulary_path,
)
from loader.golden import GoldenRequests
from loader.manifest import FileEntry, GoldenEntry, Manifest, ModelSpec, TableFiles
from loader.manifest_file import MAX_MANIFEST_BYTES, manifest_texts, parse_manifest, quoted_errors
from loader.progress import Progress, no_progress
from loader.row_files import rows_paths, write_row_files
from loader.row_source import RowSource
from loader.store import Store
from loader.vocabulary import Vocabulary

DEFAULT_GOLDEN_TOLERANCE = 0.05
# From the time of creation and every file by its path.
MakeManifest = Callable[[str, Mapping[str, FileEntry]], Manifest]


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
    access_counts: Mapping[str, npt.NDArray[Any]] | None = None,
    golden: GoldenRequests | None = None,
    golden_tolerance: float = DEFAULT_GOLDEN_TOLERANCE,
    version: int | None = None,
    metadata: Mapping[str, str] | None = None,
    last_delta: int | None = None,
    delta_base: int | None = None,
    rows_per_file: int | None = None,
    clock: Callable[[], datetime] = utc_now,
    progress: Progress = no_progress,
) -> Path:
    """Writes the next version of a model into a store.

    Run again after an interruption, the same export (all that shapes a file, rows by `loader.row_fingerprint`) goes on.

    Args:
        store_path: the store's folder; made if it is not there.
        spec: what the model is made of.
        rows: a source for every table, by name.
        dense: the dense model's tensors. Floats are stored as float32, whole numbers and bools as they are.
        vocabularies: for every table with vocabulary mapping, its ids in row order.
        access_counts: for any of the tables, how often each row was looked up: whole numbers [num_embeddings].
        golden: requests with the scores that training computed.
        golden_tolerance: largest |served - expected| that a server may accept.
        version: the version's number; by default the next free one.
        metadata: free text about the training run, kept in the manifest.
        last_delta: sequence number of the last delta whose rows are in `rows` already, kept in the manifest.
        delta_base: the version that began the stream in which `last_delta` counts; by default this one.
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
    _check_numbers(version, golden_tolerance)
    check_rows(spec, rows)
    file_rows = {table.name: rows_per_file_of(table, rows_per_file) for table in spec.tables}
    files = small_files(spec, dense, vocabularies or {}, golden, access_counts or {})
    deltas = (last_delta, delta_base)
    make_manifest = _manifest_maker(spec, version, file_rows, golden, golden_tolerance, metadata or {}, deltas)
    _check_manifest(make_manifest, [*files, *(path for t in spec.tables for path in rows_paths(t, file_rows[t.name]))])
    target = store.path / spec.model / str(version)
    try:
        digest = inputs_digest(spec, version, file_rows, files, rows, *deltas)
        with open_export_folder(target, digest, progress) as folder:
            entries: dict[str, FileEntry] = {}
            for t in spec.tables:
                entries |= write_row_files(folder, t, rows[t.name], file_rows[t.name], progress)
            entries |= {path: folder.write(path, _saver(tensors)) for path, tensors in files.items()}
            created_at = clock().astimezone(UTC).isoformat(timespec="seconds")
            folder.publish(manifest_texts(make_manifest(created_at, entries)))
    except (OSError, SafetensorError) as error:
        raise ExportError(f"export of {spec.model!r} version {version}: {error}") from error
    return target


def _check_numbers(version: int, golden_tolerance: float) -> None:
    if not 1 <= version < 2**63:
        raise ExportError(f"version: {version} is not in [1, 2^63)")
    if not 0 < golden_tolerance < math.inf:
        raise ExportError(f"golden_tolerance: {golden_tolerance} is not a positive number")


def _saver(tensors: Tensors) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        values: dict[str, Any] = dict(tensors)
        if all(isinstance(value, torch.Tensor) for value in values.values()):
            safetensors.torch.save_file(values, path)
        else:
            safetensors.numpy.save_file(values, path)

    return save


def _manifest_maker(
    spec: ModelSpec,
    version: int,
    file_rows: Mapping[str, int],
    golden: GoldenRequests | None,
    golden_tolerance: float,
    metadata: Mapping[str, str],
    deltas: tuple[int | None, int | None],
) -> MakeManifest:
    """What gives the manifest of these inputs, once the time and the files' sizes and checksums are known."""

    def make(created_at: str, entries: Mapping[str, FileEntry]) -> Manifest:
        tables = tuple(
            TableFiles(
                table=table.name,
                rows_per_file=file_rows[table.name],
                rows=tuple(entries[path] for path in rows_paths(table, file_rows[table.name])),
                vocabulary=entries.get(vocabulary_path(table.name)),
                access_counts=entries.get(access_counts_path(table.name)),
            )
            for table in spec.tables
        )
        return Manifest(
            spec=spec,
            version=version,
            created_at=created_at,
            tables=tables,
            dense=entries[DENSE_PATH],
            golden=golden and _golden_entry(entries[GOLDEN_PATH], golden, golden_tolerance),
            metadata=dict(metadata),
            last_delta=deltas[0],
            delta_base=deltas[1],
        )

    return make


def _check_manifest(make_manifest: MakeManifest, paths: list[str]) -> None:
    """Raises ExportError if no reader would take the manifest, found out by a draft before the rows are written."""
    unknown = {path: FileEntry(path=path, size_bytes=2**63 - 1, sha256="0" * 64) for path in paths}
    try:
        text = make_manifest(datetime.max.replace(tzinfo=UTC).isoformat(timespec="seconds"), unknown).to_json()
        parse_manifest("manifest", text.encode())
    except ValidationError as error:
        raise ExportError(f"manifest: {quoted_errors(error)}") from error
    except SnapshotFormatError as error:
        raise ExportError(str(error)) from error
    if len(text.encode()) > MAX_MANIFEST_BYTES:
        raise ExportError(f"manifest: {len(text.encode())} bytes for {len(paths)} files; at most {MAX_MANIFEST_BYTES}")


def _golden_entry(file: FileEntry, golden: GoldenRequests, tolerance: float) -> GoldenEntry:
    return GoldenEntry(
        file=file, tolerance=tolerance, num_requests=golden.num_requests, num_candidates=len(golden.scores)
    )
