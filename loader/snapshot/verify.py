"""Check a snapshot in full: everything that `Snapshot.open` checks, and every row of every table."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from loader.errors import SnapshotError, SnapshotResourceError
from loader.progress import Progress, no_progress
from loader.snapshot.codecs import codec_for
from loader.snapshot.layout import row_at_position
from loader.snapshot.manifest import FileEntry, TableFiles, TableSpec, read_manifest
from loader.snapshot.reader import Snapshot

_BLOCK_BYTES = 16 << 20


class VerifyReport(BaseModel):
    """What `verify_snapshot` found.

    Attributes:
        path: the snapshot's folder.
        ok: whether there are no problems.
        problems: each names the file, or the table and row, and the reason. Damage that keeps the snapshot from being
            opened ends the check, so it is then the only one.
        checks: what was checked and found right.
        files: the files that the manifest names, right or not; empty if it can't be read.
        model, version: what the manifest says, likewise; None if it can't be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    ok: bool
    problems: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    files: tuple[FileEntry, ...] = ()
    model: str | None = None
    version: int | None = None


def verify_snapshot(path: str | Path, *, threads: int = 2, progress: Progress = no_progress) -> VerifyReport:
    """Checks a snapshot in full and reports; a bad one raises nothing.

    Args:
        path: its folder.
        threads: how many files are hashed at a time.
        progress: told bytes hashed, then rows checked.

    Raises:
        SnapshotResourceError: file descriptors or memory ran out, which says nothing about the snapshot.
    """
    try:
        snapshot = Snapshot.open(path, verify=True, threads=threads, progress=progress)
    except SnapshotResourceError:
        raise
    except SnapshotError as error:
        return _unopened(Path(path), error)
    checks = ["manifest, paths, sizes, SHA-256, dtypes, shapes, vocabularies and golden requests of every file"]
    problems: list[str] = []
    for table, files in zip(snapshot.spec.tables, snapshot.manifest.tables, strict=True):
        found = _check_rows(snapshot, table, files, progress)
        problems.extend(found)
        if not found:
            checks.append(f"table {table.name!r}: all {table.num_embeddings} rows decode to finite values")
    for name, tensor in snapshot.dense_tensors().items():
        if not bool(tensor.isfinite().all()):
            problems.append(f"{snapshot.manifest.dense.path}: tensor {name!r} holds NaN or inf")
    if not problems:
        checks.append("dense tensors: all values are finite")
    return VerifyReport(
        path=str(path),
        ok=not problems,
        problems=tuple(problems),
        checks=tuple(checks),
        files=snapshot.manifest.files(),
        model=snapshot.spec.model,
        version=snapshot.version,
    )


def _unopened(path: Path, error: SnapshotError) -> VerifyReport:
    """Returns the report of a snapshot that can't be opened: why, and what its manifest says if that can be read."""
    report = VerifyReport(path=str(path), ok=False, problems=(f"{error.kind}: {error}",))
    try:
        manifest, _ = read_manifest(path)
    except SnapshotError:
        return report
    stated = {"files": manifest.files(), "model": manifest.spec.model, "version": manifest.version}
    return report.model_copy(update=stated)


def _check_rows(snapshot: Snapshot, table: TableSpec, files: TableFiles, progress: Progress) -> list[str]:
    """One problem per file with a bad row: its first one, by number."""
    codec = codec_for(table.dtype, table.embedding_dim)
    block_rows = max(1, _BLOCK_BYTES // codec.row_bytes)
    problems, done = [], 0
    for file_index, entry in enumerate(files.rows):
        stored = snapshot.rows_file(table.name, file_index)
        for start in range(0, len(stored), block_rows):
            bad = codec.first_non_finite(stored[start : start + block_rows])
            if bad is not None:
                row = row_at_position(table, files.rows_per_file, file_index, start + bad)
                problems.append(f"{entry.path}: table {table.name!r}, row {row}: decodes to NaN or inf")
                break
        done += len(stored)
        progress(f"checking rows of {table.name}", done, table.num_embeddings)
    return problems
