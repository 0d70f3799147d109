"""Which published versions are kept, and how the others go: out of sight by one rename, then off the record, then gone.

A version is never dropped while anything names it: what is wanted, a rollout (also the last one, to whose origin a
rollback returns), or a node that holds it. Killed anywhere, the next run ends what was begun.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from loader.durable import fsync_path
from loader.registry.keys import delta_stream
from loader.registry.records import PublishedVersion
from loader.registry.typed import FleetRegistry
from loader.rollout.requests import read_rollout
from loader.store import Store

logger = logging.getLogger(__name__)

TRASH_PREFIX = ".trash-"
"""Before the version in the name of a folder that is being deleted."""
GONE_SUFFIX = ".gone"
"""After it, once files are missing."""
LOCK_NAME = ".retention-lock"


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention left, and what it dropped; versions ascending."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]


async def retain(fleet: FleetRegistry, store: Path, model: str, keep: int) -> Retained:
    """Drops all published versions of a model but the `keep` highest and those that are in use. Idempotent.

    Snapshots in the store that were never published are left alone. Deltas that every kept version contains are
    trimmed from their streams.

    Args:
        fleet: the registry that the versions were published in.
        store: where they lie.
        model: whose versions.
        keep: how many of the highest versions stay; at least 1.

    Raises:
        ValueError: `keep` is below 1.
        RegistryError: it does not answer, or a record in it can't be read. Nothing more is dropped then.
        OSError: a folder can't be renamed or deleted.
    """
    if keep < 1:
        raise ValueError(f"keep: {keep}, but at least 1 version is kept")
    folder = Store(store).path / model
    lock = await asyncio.to_thread(_take_lock, folder)
    try:
        published = await fleet.versions(model)
        began = await _staying(fleet, model, published, keep)
        await asyncio.to_thread(_end_what_was_begun, folder, began)
        staying = await _staying(fleet, model, published, keep)
        for record in published:
            if record.version not in staying:
                await _drop(fleet, folder, record)
        await asyncio.to_thread(_end_what_was_begun, folder, staying)
        kept = await fleet.versions(model)
        numbers = {record.version for record in kept}
        dropped = [record for record in published if record.version not in numbers]
        await _trim(fleet, model, kept, dropped)
    finally:
        lock.close()
    return Retained(tuple(sorted(numbers)), tuple(sorted(record.version for record in dropped)))


async def versions_in_use(fleet: FleetRegistry, model: str) -> set[int]:
    """Versions that what is wanted, the last rollout or a node names. Raises RegistryError."""
    on_record = await read_rollout(fleet, model)
    used = set() if on_record is None else set(on_record.rollout.named())
    if (wanted := await fleet.wanted_model(model)) is not None:
        used |= wanted.named()
    for node in await fleet.nodes():
        used |= {report.version for report in node.versions if report.model == model}
        if (live := node.live.get(model)) is not None:
            used.add(live)
    return used


async def _staying(fleet: FleetRegistry, model: str, published: Iterable[PublishedVersion], keep: int) -> set[int]:
    highest = sorted(record.version for record in published)[-keep:]
    return {*highest, *await versions_in_use(fleet, model)}


def _take_lock(folder: Path) -> IO[str]:
    """Waits for other runs over the same folder; a lock ends with its process, or when it is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK_NAME).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except BaseException:
        file.close()
        raise
    return file


async def _drop(fleet: FleetRegistry, folder: Path, record: PublishedVersion) -> None:
    """Takes a version out of sight and off the record; puts it back if somebody began to use it meanwhile."""
    version = folder / str(record.version)
    trash = folder / f"{TRASH_PREFIX}{record.version}"
    if version.exists():
        _rename(version, trash)
    await fleet.drop_version(record.model, record.version)
    # From here on no rollout of it can be started.
    if record.version in await versions_in_use(fleet, record.model):
        logger.warning("version %d of %r came into use: it is kept", record.version, record.model)
        await fleet.put_version(record)
        if trash.exists():
            _rename(trash, version)


def _end_what_was_begun(folder: Path, staying: Collection[int]) -> None:
    """Deletes what is out of sight; what is to stay after all comes back into it."""
    # Those that a run has begun to delete are no snapshots any more.
    for gone in folder.glob(f"{TRASH_PREFIX}*{GONE_SUFFIX}"):
        shutil.rmtree(gone)
    for trash in folder.glob(f"{TRASH_PREFIX}*"):
        version = folder / trash.name.removeprefix(TRASH_PREFIX)
        if version.name.isdecimal() and int(version.name) in staying and not version.exists():
            _rename(trash, version)
        else:
            gone = trash.with_name(trash.name + GONE_SUFFIX)
            _rename(trash, gone)
            shutil.rmtree(gone)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    fsync_path(target.parent)


async def _trim(
    fleet: FleetRegistry, model: str, kept: Iterable[PublishedVersion], dropped: Iterable[PublishedVersion]
) -> None:
    """Trims each stream below what the kept versions still have to replay, and to its end if none continues it."""
    lowest: dict[int, int] = {}
    for record in kept:
        lowest[record.delta_base] = min(record.last_delta, lowest.get(record.delta_base, record.last_delta))
    for delta_base in {record.delta_base for record in dropped} | lowest.keys():
        stream = delta_stream(model, delta_base)
        bounds = await fleet.registry.bounds(stream)
        before = min(lowest.get(delta_base, bounds.last), bounds.last) + 1
        if bounds.first < before:
            await fleet.registry.trim(stream, before)
