"""From a snapshot's folder to a version that may be rolled out: checked, copied into the store, on record.

A copy works in the folder that an export of the same version would work in (`loader.export_folder`), so there is one
writer of a version at a time, a copy that was killed goes on where it stopped, and what readers see is all or nothing.
The record is written last: a version that the registry names lies in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loader.codecs import codec_for
from loader.errors import (
    DeltaBaseError,
    DeltaGapError,
    ExportError,
    RegistryConflictError,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotFormatError,
    file_error,
)
from loader.export_folder import open_export_folder
from loader.manifest import Manifest, ModelSpec
from loader.manifest_file import CHECKSUM_NAME, MANIFEST_NAME, read_manifest
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from loader.registry.keys import delta_stream
from loader.registry.records import PublishedVersion
from loader.registry.typed import FleetRegistry
from loader.snapshot_paths import snapshot_file
from loader.verify import verify_snapshot

_CHUNK_BYTES = 4 << 20
_QUOTED_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Publication:
    """What `publish` did.

    Attributes:
        record: what the registry says of the version.
        folder: where it lies in the store.
        copied: whether it had to be copied there.
        is_new: whether the registry did not know it yet.
    """

    record: PublishedVersion
    folder: Path
    copied: bool
    is_new: bool


async def publish(
    fleet: FleetRegistry,
    folder: Path,
    store: Path,
    *,
    clock: Callable[[], float],
    threads: int = 2,
    progress: Progress = no_progress,
) -> Publication:
    """Checks a snapshot in full, copies it into the store unless it lies there, and puts it on record.

    May be repeated after any interruption, and for a version that is published already.

    Args:
        fleet: where the record goes.
        folder: the snapshot's, named `<model>/<version>`.
        store: the store that the fleet's processes read; made if it is not there.
        clock: seconds since the epoch.
        threads: how many files are hashed at a time.
        progress: told bytes hashed, rows checked and bytes copied.

    Raises:
        SnapshotError: it must not be served, or the store has another snapshot of that version.
        ExportError: another process is writing that version, or the store's disk fails or is full. What was copied is
            kept for the next try.
        DeltaError: it does not continue the stream of deltas that it names.
        RegistryConflictError: another snapshot was published as that version.
    """
    snapshot = await asyncio.to_thread(_open, folder)
    await _check_published(fleet, snapshot)
    await _check_lineage(fleet, snapshot.manifest)
    target, copied = await asyncio.to_thread(_put_in_store, snapshot, store, threads, progress)
    record, is_new = await register(fleet, snapshot, clock=clock)
    return Publication(record, target, copied, is_new)


async def register(
    fleet: FleetRegistry, snapshot: Snapshot, *, clock: Callable[[], float]
) -> tuple[PublishedVersion, bool]:
    """Puts a snapshot that lies in the store on record, as it is. Idempotent.

    Args:
        fleet: where the record goes.
        snapshot: the store's.
        clock: seconds since the epoch.

    Returns:
        The record, and whether it is new.

    Raises:
        DeltaError, RegistryConflictError: as `publish`.
    """
    if (known := await _check_published(fleet, snapshot)) is not None:
        # A registry that lost its last writes may have the one without the other.
        if await fleet.spec(known.model, known.version) is None:
            await fleet.put_spec(known.model, known.version, snapshot.spec.model_dump_json())
        return known, False
    await _check_lineage(fleet, snapshot.manifest)
    delta_base, last_delta = snapshot.manifest.delta_start
    record = PublishedVersion(
        model=snapshot.spec.model,
        version=snapshot.version,
        identity=snapshot.identity,
        delta_base=delta_base,
        last_delta=last_delta,
        rows_bytes=rows_bytes_of(snapshot.spec),
        published_at=clock(),
    )
    await fleet.put_spec(record.model, record.version, snapshot.spec.model_dump_json())
    await fleet.put_version(record)
    return record, True


def rows_bytes_of(spec: ModelSpec) -> int:
    """Bytes of all rows of one copy."""
    return sum(codec_for(one.dtype, one.embedding_dim).row_bytes * one.num_embeddings for one in spec.tables)


async def stream_end(fleet: FleetRegistry, model: str, delta_base: int) -> int:
    """The last delta that is known of a stream; 0 if there is none.

    A registry that lost its streams is outlived by the nodes that applied them, and by the versions that contain them.
    """
    bounds = await fleet.registry.bounds(delta_stream(model, delta_base))
    known = await fleet.versions(model)
    of_base = {one.version: one.last_delta for one in known if one.delta_base == delta_base}
    applied = (
        report.delta_sequence
        for node in await fleet.nodes()
        for report in node.versions
        if report.model == model and report.version in of_base
    )
    return max(bounds.last, *of_base.values(), *applied, 0)


async def _check_published(fleet: FleetRegistry, snapshot: Snapshot) -> PublishedVersion | None:
    model, version = snapshot.spec.model, snapshot.version
    known = await fleet.version(model, version)
    if known is not None and known.identity != snapshot.identity:
        raise RegistryConflictError(
            f"version {version} of {model!r} is published with identity {known.identity}, {snapshot.path} has "
            f"{snapshot.identity}: a version is immutable, export this one with another number"
        )
    return known


async def _check_lineage(fleet: FleetRegistry, manifest: Manifest) -> None:
    """Raises DeltaError for a version that no replay could bring up to date."""
    model = manifest.spec.model
    base, last_delta = manifest.delta_start
    where = f"version {manifest.version} of {model!r}: last_delta {last_delta} of delta_base {base}"
    # A stream that a version begins may begin at any number.
    if base != manifest.version and last_delta > (end := await stream_end(fleet, model, base)):
        raise DeltaBaseError(f"{where} lies beyond the end of that stream, {end}: is this the registry it came from?")
    first = (await fleet.registry.bounds(delta_stream(model, base))).first
    if last_delta + 1 < first:
        raise DeltaGapError(f"{where}: the stream begins with {first}, what came between is gone")


def _open(folder: Path) -> Snapshot:
    # Its own path says model and version, whatever link leads to it.
    return Snapshot.open(folder.resolve(), verify=False)


def _put_in_store(snapshot: Snapshot, store: Path, threads: int, progress: Progress) -> tuple[Path, bool]:
    """The folder in the store, and whether it had to be copied there. Raises as `publish`."""
    source, target = snapshot.path, store.resolve() / snapshot.spec.model / str(snapshot.version)
    if target.exists():
        _, identity = read_manifest(target)
        if identity != snapshot.identity:
            raise SnapshotExistsError(
                f"{target} has identity {identity}, {source} has {snapshot.identity}: a version is immutable"
            )
        _verify(target, threads, progress)
        return target, False
    _verify(source, threads, progress)
    _copy(source, target, snapshot, progress)
    return target, True


def _verify(folder: Path, threads: int, progress: Progress) -> None:
    report = verify_snapshot(folder, threads=threads, progress=progress)
    if not report.ok:
        more = len(report.problems) - _QUOTED_PROBLEMS
        told = "; ".join(report.problems[:_QUOTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise SnapshotCorruptError(f"{folder} must not be served: {told}")


def _copy(source: Path, target: Path, snapshot: Snapshot, progress: Progress) -> None:
    texts = _manifest_texts(source, snapshot.identity)
    entries = snapshot.manifest.files()
    done, total = 0, sum(entry.size_bytes for entry in entries)

    def copier(relative_path: str, before: int) -> Callable[[Path], None]:
        def produce(path: Path) -> None:
            copied = before
            with snapshot_file(source, relative_path).open("rb") as read, path.open("wb") as written:
                while chunk := read.read(_CHUNK_BYTES):
                    written.write(chunk)
                    copied += len(chunk)
                    progress("copying into the store", min(copied, total), total)

        return produce

    try:
        with open_export_folder(target, snapshot.identity, progress) as work:
            for entry in entries:
                work.write(entry.path, copier(entry.path, done), entry)
                done += entry.size_bytes
                progress("copying into the store", done, total)
            work.publish(texts)
    except OSError as error:
        raise ExportError(f"{source} can't be copied to {target}: {error}") from error


def _manifest_texts(source: Path, identity: str) -> dict[str, str]:
    """The manifest and its checksum, byte for byte. Raises SnapshotCorruptError if it changed since it was read."""
    try:
        texts = {name: snapshot_file(source, name).read_bytes() for name in (MANIFEST_NAME, CHECKSUM_NAME)}
        if hashlib.sha256(texts[MANIFEST_NAME]).hexdigest() != identity:
            raise SnapshotCorruptError(f"{source / MANIFEST_NAME}: changed while it was published")
        return {name: text.decode("utf-8") for name, text in texts.items()}
    except UnicodeDecodeError as error:
        raise SnapshotFormatError(f"{source / MANIFEST_NAME}: not UTF-8: {error}") from error
    except OSError as error:
        raise file_error(source, "read", error) from error
