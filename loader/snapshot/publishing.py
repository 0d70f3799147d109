"""Publish a snapshot (check it, copy it into the store, put it on record) and delete versions that are not kept.

A copy works in the folder that an export of the same version would work in (`loader.snapshot.store`), so there is one
writer of a version at a time, and a copy that was killed goes on where it stopped. The record is written last.

A version is never dropped while what is wanted, a rollout or a node names it. It goes by one rename, then off the
record, then its files are deleted; killed anywhere, the next run ends what was begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from loader import errors
from loader.progress import Progress, no_progress
from loader.registry.fleet import FleetRegistry, PublishedVersion, WantedModel, delta_stream
from loader.rollout.plan import read_rollout
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import Manifest, ModelSpec
from loader.snapshot.reader import Snapshot, VerifyReport, verify_snapshot
from loader.snapshot.store import Store
from loader.stores import open_store
from loader.stores.cache import StorePlace

_QUOTED_PROBLEMS = 5

logger = logging.getLogger(__name__)


class Publication(NamedTuple):
    """The record, the version's folder or URL, whether it was copied there, is new on record, and what was checked."""

    record: PublishedVersion
    where: str
    copied: bool
    is_new: bool
    report: VerifyReport


async def publish(
    fleet: FleetRegistry,
    folder: Path,
    store: StorePlace,
    *,
    clock: Callable[[], float],
    verify: Callable[[Path], VerifyReport] = verify_snapshot,
    as_next: bool = False,
    progress: Progress = no_progress,
) -> Publication:
    """Check a snapshot in full, copy it into the store unless it is there, and put it on record.

    May be repeated after any interruption, and for a version that is published already. With `as_next` it becomes the
    store's next version, unless its number is higher, or it is one of the store's.

    Raises:
        SnapshotError: it must not be served, or the store has another snapshot of that version.
        ExportError: another process is writing that version, or the store's disk fails or is full.
        DeltaError: it does not continue the stream of deltas that it names.
        RegistryConflictError: another snapshot was published as that version.
    """
    # Its own path says model and version, whatever link leads to it.
    snapshot = await asyncio.to_thread(lambda: Snapshot.open(folder.resolve(), verify=False))
    if as_next:
        on_record = [record.version for record in await fleet.versions(snapshot.spec.model)]
        snapshot = await asyncio.to_thread(_renumbered, snapshot, open_store(store), max(on_record, default=0))
    await _check_published(fleet, snapshot)
    await _check_lineage(fleet, snapshot.manifest, store)
    target, copied, report = await asyncio.to_thread(_put_in_store, snapshot, store, verify, progress)
    record, is_new = await register(fleet, snapshot, clock=clock, store=store)
    return Publication(record, target, copied, is_new, report)


def _renumbered(snapshot: Snapshot, store: Store, last: int) -> Snapshot:
    """Return a snapshot as the version of the store that it is, or as one above all of the store and `last`."""
    model = snapshot.spec.model
    for version in store.versions(model):
        # A version that can't be read is another one.
        with contextlib.suppress(errors.SnapshotCorruptError):
            same, stored = snapshot.as_version(version), store.manifest(model, version)
            if stored is not None and stored[1] == same.identity:
                return same
    return snapshot.as_version(max(snapshot.version, store.next_version(model), last + 1))


async def register(
    fleet: FleetRegistry, snapshot: Snapshot, *, clock: Callable[[], float], store: StorePlace | None = None
) -> tuple[PublishedVersion, bool]:
    """Put a snapshot that lies in the store on record, as it is, and tell whether it is new. Raises as `publish`.

    `store` is by default the one that the snapshot's path is in.
    """
    if (known := await _check_published(fleet, snapshot)) is not None:
        # A registry that lost its last writes may have the one without the other.
        if await fleet.spec(known.model, known.version) is None:
            await fleet.put_spec(known.model, known.version, snapshot.spec.model_dump_json())
        return known, False
    store = await asyncio.to_thread(lambda: snapshot.path.resolve().parent.parent) if store is None else store
    await _check_lineage(fleet, snapshot.manifest, store)
    record = version_record(snapshot, clock())
    await fleet.put_spec(record.model, record.version, snapshot.spec.model_dump_json())
    await fleet.put_version(record)
    return record, True


def newest(address: StorePlace, model: str, below: int | None = None) -> Snapshot | None:
    """Open a store's highest version of a model, below another one, whose manifest and headers can be read.

    None if there is none; those that can't be read are named in the log.
    """
    store = open_store(address)
    for version in reversed(store.versions(model)):
        if below is None or version < below:
            try:
                with store.hold(model, version, with_rows=False, verify=False) as held:
                    return Snapshot.open(held.path, verify=False, rows_here=isinstance(address, Path))
            except errors.SnapshotResourceError:
                # It says nothing about the version.
                raise
            except errors.SnapshotError as error:
                logger.warning("version %d of %s is passed over: %s", version, model, error)
    return None


async def fall_back(fleet: FleetRegistry, store: StorePlace, wanted: WantedModel, reason: str) -> int | None:
    """Have the next older version that may be served take the place of a live one that no process serves; return it.

    None if there is none: then no version is wanted. Raises SnapshotResourceError, StoreError and RegistryError.
    """
    model, by = wanted.model, wanted.live
    while (older := await asyncio.to_thread(newest, store, model, by)) is not None:
        by = older.version
        try:
            await register(fleet, older, clock=time.time, store=store)
            break
        except (errors.RegistryConflictError, errors.DeltaError) as error:
            logger.warning("version %d of %s is passed over: %s", by, model, error)
    by = None if older is None else by
    instead = "no version" if by is None else f"version {by}"
    logger.warning("version %s of %s is refused, %s is wanted instead: %s", wanted.live, model, instead, reason)
    await fleet.update_wanted(model, lambda now: now and now.replaced(wanted.live, by, reason))
    return by


def version_record(snapshot: Snapshot, published_at: float) -> PublishedVersion:
    """Return what is put on record of a version; `published_at` is in seconds since the epoch."""
    delta_base, last_delta = snapshot.manifest.delta_start
    return PublishedVersion(
        model=snapshot.spec.model,
        version=snapshot.version,
        identity=snapshot.identity,
        delta_base=delta_base,
        last_delta=last_delta,
        rows_bytes=rows_bytes_of(snapshot.spec),
        published_at=published_at,
    )


def rows_bytes_of(spec: ModelSpec) -> int:
    """Return the bytes of all rows of one copy, and of keys: as many as there may be."""
    stored = ((table, RowCodec(table.dtype, table.embedding_dim)) for table in spec.stored_tables)
    return sum((codec.row_bytes + table.key_bytes) * table.num_embeddings for table, codec in stored)


async def stream_end(fleet: FleetRegistry, model: str, delta_base: int) -> int:
    """Return the last delta that is known of a stream; 0 if there is none.

    Nodes that applied deltas, and versions that contain them, outlive a registry that lost its streams.
    """
    bounds = await fleet.registry.bounds(delta_stream(model, delta_base))
    known = await fleet.versions(model)
    of_base = {record.version: record.last_delta for record in known if record.delta_base == delta_base}
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
        raise errors.RegistryConflictError(
            f"version {version} of {model!r} is published with identity {known.identity}, {snapshot.path} has "
            f"{snapshot.identity}: a version is immutable; `publish --next` makes a new one of it"
        )
    return known


async def _check_lineage(fleet: FleetRegistry, manifest: Manifest, store: StorePlace) -> None:
    model = manifest.spec.model
    base, last_delta = manifest.delta_start
    where = f"version {manifest.version} of {model!r}: last_delta {last_delta} of delta_base {base}"
    # A stream that a version begins may begin at any number.
    if base != manifest.version and last_delta > (end := await stream_end(fleet, model, base)):
        raise errors.DeltaError(
            f"{where} lies beyond the end of that stream, {end}: is this the registry it came from?", kind="delta_base"
        )
    first = (await fleet.registry.bounds(delta_stream(model, base))).first
    if last_delta + 1 < first:
        raise errors.DeltaError(f"{where}: the stream begins with {first}, what came between is gone", kind="delta_gap")
    if base == manifest.version:
        return
    # Rows of divided tables must be where the stream's deltas, which are of rows of the parts, were made for.
    known = {record.version: record for record in await fleet.versions(model)}
    # Each version of the stream was compared with one before it, so any will do.
    others = [base, *sorted((record.version for record in known.values() if record.delta_base == base), reverse=True)]

    def read_other() -> Manifest | None:
        opened = open_store(store)
        for version in others:
            stored = None if version == manifest.version else opened.manifest(model, version)
            if stored is not None and (version not in known or known[version].identity == stored[1]):
                return stored[0]
        return None

    other, divided = await asyncio.to_thread(read_other), _row_addresses(manifest)
    if other is None and divided:
        raise errors.DeltaError(
            f"{where}: tables {sorted(divided)} are divided, and {store} has no version of that stream any more that "
            "tells where its deltas' rows lie: leave delta_base out to begin a stream",
            kind="delta_base",
        )
    if other is not None and divided != (before := _row_addresses(other)):
        differ = sorted(name for name in divided.keys() | before.keys() if divided.get(name) != before.get(name))
        raise errors.DeltaError(
            f"{where}: rows of tables {differ} lie elsewhere than in version {other.version} of that stream, so that "
            "its deltas would be written to other rows: divide them alike, or leave delta_base out to begin a stream",
            kind="delta_base",
        )


def _row_addresses(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    """Return, by divided table, all that says in which part, and where there, its rows are."""
    classes = {files.table: files.row_classes and files.row_classes.sha256 for files in manifest.tables}
    return {
        table.name: (table.num_embeddings, table.by, table.buckets, table.pruned, table.parts, classes[table.parts[0]])
        for table in manifest.spec.divided
    }


def _put_in_store(
    snapshot: Snapshot, address: StorePlace, verify: Callable[[Path], VerifyReport], progress: Progress
) -> tuple[str, bool, VerifyReport]:
    source, store = snapshot.path, open_store(address)
    stored = store.manifest(snapshot.spec.model, snapshot.version)
    if stored is None or not isinstance(address, Path):
        report = _servable(verify(source))
        renumbered = None if source.name == str(snapshot.version) else snapshot.manifest
        return *store.put(source, snapshot.identity, progress, renumbered), report
    target = address.resolve() / snapshot.spec.model / str(snapshot.version)
    if stored[1] != snapshot.identity:
        problem = f"{target} has identity {stored[1]}, {source} has {snapshot.identity}: a version is immutable"
        raise errors.SnapshotExistsError(f"{problem}; `publish --next` makes a new one of it")
    return str(target), False, _servable(verify(target))


def _servable(report: VerifyReport) -> VerifyReport:
    if not report.ok:
        more = len(report.problems) - _QUOTED_PROBLEMS
        quoted = "; ".join(report.problems[:_QUOTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise errors.SnapshotCorruptError(f"{report.path} must not be served: {quoted}")
    return report


class Retained(NamedTuple):
    """Versions that retention left and dropped, ascending."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]


async def retain(fleet: FleetRegistry, store: StorePlace, model: str, keep: int) -> Retained:
    """Drop all published versions of a model but the `keep` highest and those that are in use. Idempotent.

    Snapshots in the store that were never published are left alone. Deltas that every kept version contains are
    trimmed from their streams.

    Raises ValueError for a `keep` below 1; RegistryError if the registry does not answer, or a record in it can't be
    read, and then drops nothing more; OSError if a folder can't be renamed or deleted.
    """
    if keep < 1:
        raise ValueError(f"keep: {keep}, but at least 1 version is kept")
    opened = open_store(store)
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, opened.retaining(model))
        published = await fleet.versions(model)
        highest = set(sorted(record.version for record in published)[-keep:])
        staying = highest | await versions_in_use(fleet, model)
        await asyncio.to_thread(opened.delete_set_aside, model, staying)
        staying = highest | await versions_in_use(fleet, model)
        for record in published:
            if record.version not in staying:
                # Out of sight and off the record; put back if somebody began to use it meanwhile.
                await asyncio.to_thread(opened.set_aside, record.model, record.version)
                await fleet.drop_version(record.model, record.version)
                # From here on no rollout of it can be started.
                if record.version in await versions_in_use(fleet, record.model):
                    logger.warning("version %d of %r came into use: it is kept", record.version, record.model)
                    await fleet.put_version(record)
                    await asyncio.to_thread(opened.bring_back, record.model, record.version)
        await asyncio.to_thread(opened.delete_set_aside, model, staying)
        kept = await fleet.versions(model)
        numbers = {record.version for record in kept}
        dropped = [record for record in published if record.version not in numbers]
        # Below what the kept versions still have to replay, and to the end of a stream that none continues.
        lowest: dict[int, int] = {}
        for record in kept:
            lowest[record.delta_base] = min(record.last_delta, lowest.get(record.delta_base, record.last_delta))
        for delta_base in {record.delta_base for record in dropped} | lowest.keys():
            stream = delta_stream(model, delta_base)
            bounds = await fleet.registry.bounds(stream)
            before = min(lowest.get(delta_base, bounds.last), bounds.last) + 1
            if bounds.first < before:
                await fleet.registry.trim(stream, before)
    return Retained(tuple(sorted(numbers)), tuple(sorted(record.version for record in dropped)))


async def versions_in_use(fleet: FleetRegistry, model: str) -> set[int]:
    """Return the versions that what is wanted, the last rollout or a node names. Raises RegistryError."""
    on_record = await read_rollout(fleet, model)
    used = set() if on_record is None else set(on_record.rollout.named())
    if (wanted := await fleet.wanted_model(model)) is not None:
        used |= wanted.named()
    # Read last.
    for node in await fleet.nodes():
        used |= {report.version for report in node.versions if report.model == model}
        if (live := node.live.get(model)) is not None:
            used.add(live)
    return used
