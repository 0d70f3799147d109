"""Find snapshots in a store, `<store>/<model>/<version>/`, and make a new one in it, durably.

A version is made in a folder beside it, by one writer at a time; nothing is visible before all is on the disk:

```
<store>/<model>/.export-<version>/
    lock                   held (flock) by the export that runs
    export-state.jsonl     the journal: one line for the digest of the inputs, then one per finished file, each fsynced
    snapshot/              becomes <store>/<model>/<version>/ by one rename
```

An interrupted export leaves this folder. The same export, run again, keeps the files whose size and SHA-256 are still
those on record and writes only the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from loader import errors
from loader.errors import ExportError, SnapshotCorruptError, SnapshotExistsError, SnapshotNotFoundError, file_errors
from loader.progress import Progress, counting, no_progress
from loader.snapshot import manifest as manifests
from loader.snapshot.manifest import MANIFEST_NAME, FileEntry, Manifest

# Small enough for malloc to hand it out again: a thread's own heap keeps what was once taken from it.
_HASH_CHUNK_BYTES = 1 << 20
# The convention of TF-Serving and Triton: positive integers, no leading zeros. Anything else is not a version.
_VERSION_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
WORK_FOLDER_PREFIX = ".export-"
"""Before the version in the name of the folder in which an export works."""
TRASH_PREFIX = ".trash-"
"""Before the version in the name of a folder that is being deleted."""

_log = logging.getLogger(__name__)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, work: Path, *, durable: bool = True) -> None:
    """Put a file in place at once, by way of `work`, which no other writer may use meanwhile."""
    make_folders(path.parent)
    work.write_bytes(content)
    if durable:
        fsync_path(work)
    rename(work, path, durable=durable)


def rename(source: Path, target: Path, *, durable: bool = True) -> None:
    """Rename a file or folder within its folder."""
    source.rename(target)
    if durable:
        fsync_path(target.parent)


def try_lock(file: IO[Any]) -> bool:
    """Lock a file until it is closed, unless it is locked; return whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class HeldSnapshot(AbstractContextManager["HeldSnapshot"]):
    """A version's folder, which stays until it is closed, which may be repeated.

    `is_checked`: every file in it was compared with its SHA-256 just now.
    """

    path: Path
    close: Callable[[], None] = field(default=lambda: None)
    is_checked: bool = False

    def __exit__(self, *error: object) -> None:
        self.close()


class Store:
    """Finds snapshots by model and version. Caches nothing: each call reads the folder.

    A store at a URL has the same methods (`loader.stores`). `name` is for people.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a store at `path`, which needs not exist yet."""
        self.path = Path(path)
        self.name = str(self.path)

    def check_exists(self) -> None:
        """Raise SnapshotNotFoundError if there is no such folder, or no version of any model in it."""
        if not self.path.is_dir():
            raise SnapshotNotFoundError(errors.no_path("store", self.path))
        if not self.models():
            raise SnapshotNotFoundError(f"store {self.name} has no model{self._unfinished_text()}")

    def unfinished(self) -> list[tuple[str, int]]:
        """Return (model, version) of each export that was interrupted, or is still running."""
        numbers = {name: version_numbers(self._version_names(name), WORK_FOLDER_PREFIX) for name in self._model_names()}
        return [(model, version) for model, versions in numbers.items() for version in versions]

    def models(self) -> list[str]:
        """Return the names of the models that have at least one version, sorted."""
        return [name for name in self._model_names() if self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """List a model's versions, ascending; empty if it has no such model. Unfinished exports do not count."""
        return version_numbers(self._version_names(model))

    def latest(self, model: str) -> int:
        """Return the highest version. Raises SnapshotNotFoundError if there is none."""
        if not (versions := self.versions(model)):
            self.check_exists()
            raise SnapshotNotFoundError(
                f"store {self.name} has no model {model!r}; it has {errors.nearest(model, self.models())}"
                f"{self._unfinished_text(model)}"
            )
        return versions[-1]

    def next_version(self, model: str) -> int:
        """Return the first version above all that exist or are set aside; an interrupted export's is free."""
        return max(self.versions(model) + self._set_aside_versions(model), default=0) + 1

    def no_version(self, model: str, version: int) -> SnapshotNotFoundError:
        """Make the error that names what exists in place of a version."""
        problem = f"no version {version} of model {model!r}; it has {self.versions(model)}"
        return SnapshotNotFoundError(f"store {self.name} has {problem}")

    def hold(
        self,
        model: str,
        version: int | None = None,
        *,
        identity: str | None = None,
        with_rows: bool = True,
        verify: bool = True,
        progress: Progress = no_progress,
    ) -> HeldSnapshot:
        """Return a version, by default the latest, that stays until it is closed. Raises SnapshotError.

        For a folder that is all; other arguments are of stores at URLs: `identity` is what it must have, as far as
        that is known; without `with_rows` row files are not fetched; `verify` compares files that were fetched before
        with their SHA-256; `progress` gets bytes, and ends the fetch by raising.
        """
        latest = self.latest(model)
        version = latest if version is None else version
        if version not in self.versions(model):
            raise self.no_version(model, version)
        return HeldSnapshot(self.path / model / str(version))

    def manifest(self, model: str, version: int) -> tuple[Manifest, str] | None:
        """Read a version's manifest and its identity; None if there is no such version. Raises as `read_manifest`."""
        folder = self.path / model / str(version)
        return manifests.read_manifest(folder) if (folder / MANIFEST_NAME).exists() else None

    def put(
        self, source: Path, identity: str, progress: Progress = no_progress, renumbered: Manifest | None = None
    ) -> tuple[str, bool]:
        """Copy a snapshot of that identity into the store. Return where it is, and whether it was not there before.

        An interrupted copy goes on at the next try. Raises SnapshotError if a file is not what the manifest says, or
        the store has another snapshot of that version, ExportError if another process writes that version, or the disk
        fails. A `renumbered` manifest, of that identity, is put in place of the folder's.
        """
        manifest, texts = stated_by(source, identity, renumbered)
        target = self.path.resolve() / manifest.spec.model / str(manifest.version)
        entries = manifest.files()
        add_done = counting(progress, "copying into the store", sum(entry.size_bytes for entry in entries))
        try:
            with open_export_folder(target, identity, progress) as work:
                for entry in entries:
                    work.write(entry.path, partial(shutil.copyfile, manifests.snapshot_file(source, entry.path)), entry)
                    add_done(entry.size_bytes)
                work.publish(texts)
        except OSError as error:
            raise ExportError(f"{source} can't be copied to {target}: {error}") from error
        return str(target), True

    @contextmanager
    def retaining(self, model: str) -> Iterator[None]:
        """Wait for others who delete versions of a model; a lock ends with its process."""
        folder = self.path / model
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".retention-lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def set_aside(self, model: str, version: int) -> None:
        """Take a version out of sight, if it is there."""
        folder = self.path / model / str(version)
        if folder.exists():
            rename(folder, folder.with_name(f"{TRASH_PREFIX}{version}"))

    def bring_back(self, model: str, version: int) -> None:
        """Let a version that was set aside be seen again, unless its files are being deleted."""
        folder = self.path / model / str(version)
        trash = folder.with_name(f"{TRASH_PREFIX}{version}")
        if (trash / MANIFEST_NAME).exists() and not folder.exists():
            rename(trash, folder)

    def delete_set_aside(self, model: str, staying: Collection[int]) -> None:
        """Delete the versions that were set aside; those that are to stay after all come back into sight."""
        for version in self._set_aside_versions(model):
            if version in staying:
                self.bring_back(model, version)
            if (trash := self.path / model / f"{TRASH_PREFIX}{version}").exists():
                # The manifest goes first: without it the others are no version.
                (trash / MANIFEST_NAME).unlink(missing_ok=True)
                fsync_path(trash)
                shutil.rmtree(trash)

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """Read a small file. Raises SnapshotError if it can't be read, with what the file system says as cause."""
        return manifests.read_bounded(self.path / path, max_bytes)

    def write_file(self, path: str, content: bytes) -> None:
        """Write a small file durably, in one step. Raises SnapshotError if the store can't be written."""
        target = self.path / path
        unfinished = target.with_name(f".{target.name}-{os.getpid()}")
        with file_errors(target, "written"):
            try:
                replace_file(target, content, unfinished)
            finally:
                with suppress(OSError):
                    unfinished.unlink()

    def list_files(self, folder: str) -> dict[str, float]:
        """Return the age, in seconds, of a folder's finished small files by path. Raises SnapshotError."""
        now = time.time()
        with file_errors(self.path / folder, "read"):
            files = [file for file in (self.path / folder).glob("[!.]*") if file.is_file()]
            return {f"{folder}/{file.name}": now - file.stat().st_mtime_ns / 1e9 for file in files}

    def delete_files(self, paths: Iterable[str]) -> None:
        """Delete small files; what is gone already is no error. Raises SnapshotError if the store can't be written."""
        for path in paths:
            with file_errors(self.path / path, "deleted"):
                (self.path / path).unlink(missing_ok=True)

    def _set_aside_versions(self, model: str) -> list[int]:
        """List the versions that are out of sight, ascending; they may come back until they are deleted."""
        return version_numbers(self._version_names(model), TRASH_PREFIX)

    def _model_names(self) -> list[str]:
        return _folders(self.path)

    def _version_names(self, model: str) -> list[str]:
        return _folders(self.path / model) if MODEL_NAME.fullmatch(model) else []

    def _unfinished_text(self, model: str | None = None) -> str:
        names = [f"{name}/{version}" for name, version in self.unfinished() if model in (None, name)]
        return f"; not finished: the export of {', '.join(names)}, which goes on when it is run again" if names else ""


def version_numbers(names: Iterable[str], prefix: str = "") -> list[int]:
    """Return the versions, ascending, of the names that are one with that prefix."""
    texts = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return sorted(int(text) for text in texts if _VERSION_NUMBER.fullmatch(text) and int(text) < 2**63)


def _folders(path: Path) -> list[str]:
    with file_errors(path, "read"):
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def stated_by(source: Path, identity: str, renumbered: Manifest | None) -> tuple[Manifest, dict[str, str]]:
    """Read the manifest, byte for byte, unless there is another one; return it and its `manifest_texts`.

    Raises SnapshotError if it can't be read, or changed since it was read.
    """
    if renumbered is not None:
        return renumbered, manifests.manifest_texts(renumbered)
    path = manifests.snapshot_file(source, MANIFEST_NAME)
    content = manifests.read_bounded(path, manifests.MAX_MANIFEST_BYTES)
    if hashlib.sha256(content).hexdigest() != identity:
        raise SnapshotCorruptError(f"{path}: changed while it was published")
    return manifests.parse_manifest(str(path), content), {
        MANIFEST_NAME: content.decode(),
        manifests.CHECKSUM_NAME: manifests.checksum_line(identity),
    }


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 (hex) of a file, in bounded memory; `on_bytes` gets the bytes done since its last call."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()


class ExportFolder:
    """The files of one snapshot in the making, `finished` by path. Made by `open_export_folder`."""

    def __init__(self, target: Path, work: Path, journal: IO[str], finished: dict[str, FileEntry]) -> None:
        self._target = target
        self._files = work / "snapshot"
        self._journal = journal
        self.finished = finished

    def path(self, relative_path: str) -> Path:
        """Return where a file of it is, until it is published."""
        return self._files / relative_path

    def write(self, relative_path: str, produce: Callable[[Path], None], stated: FileEntry | None = None) -> FileEntry:
        """Make a file that `produce` writes durable, and put it on record; a finished one is kept as it is.

        Raises SnapshotCorruptError if it is not what is `stated`; then it is not put on record.
        """
        if (entry := self.finished.get(relative_path)) is not None and stated in (None, entry):
            return entry
        path = self.path(relative_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        produce(path)
        fsync_path(path)
        entry = FileEntry(path=relative_path, size_bytes=path.stat().st_size, sha256=hash_file(path))
        if stated not in (None, entry):
            raise SnapshotCorruptError(f"{path}: SHA-256 {entry.sha256} is not the one that is stated, {stated.sha256}")
        _append_line(self._journal, entry.model_dump_json())
        self.finished[relative_path] = entry
        return entry

    def publish(self, texts: dict[str, str]) -> None:
        """Write these last small files and move everything to its place, durably and at once.

        Raises SnapshotExistsError if the version appeared meanwhile.
        """
        for name, text in texts.items():
            (self._files / name).write_text(text, encoding="utf-8")
            fsync_path(self._files / name)
        # What an earlier run with another file layout, or one killed in mid-file, left behind.
        for path in self._files.rglob("*"):
            relative = path.relative_to(self._files).as_posix()
            if path.is_file() and relative not in self.finished and relative not in texts:
                path.unlink()
        for folder, _, _ in os.walk(self._files):
            fsync_path(Path(folder))
        if self._target.exists():
            raise SnapshotExistsError(f"{self._target} exists, and a version is immutable")
        rename(self._files, self._target)


@contextmanager
def open_export_folder(target: Path, inputs_digest: str, progress: Progress) -> Iterator[ExportFolder]:
    """Lock the folder in which `target` (`<store>/<model>/<version>`) is made; a failure leaves it for a later run.

    `inputs_digest` is the SHA-256 (hex) of all inputs that shape the files; a folder of other inputs is started over.
    Raises SnapshotExistsError if the version exists, ExportError if another export of it is running.
    """
    work = target.parent / f"{WORK_FOLDER_PREFIX}{target.name}"
    for leftover in target.parent.glob(f"{WORK_FOLDER_PREFIX}*"):
        # Its export died between the rename and the cleaning up.
        if (target.parent / leftover.name.removeprefix(WORK_FOLDER_PREFIX)).exists():
            shutil.rmtree(leftover, ignore_errors=True)
    make_folders(work)
    busy, path = ExportError(f"another export works in {work}; one export of a version runs at a time"), work / "lock"
    try:
        lock = path.open("w")
    except FileNotFoundError as error:
        raise busy from error
    with lock:
        # The export that held the lock may have finished and removed this folder since we opened the file.
        if not (try_lock(lock) and path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):
            raise busy
        if target.exists():
            shutil.rmtree(work, ignore_errors=True)
            raise SnapshotExistsError(f"{target} exists, and a version is immutable")
        finished = _recover(work, inputs_digest, progress)
        (work / "snapshot").mkdir(exist_ok=True)
        # A journal of what is known replaces the old one in one step.
        fresh = work / "export-state.jsonl.new"
        with fresh.open("w", encoding="utf-8") as journal:
            lines = [json.dumps({"inputs_sha256": inputs_digest})]
            _append_line(journal, "\n".join([*lines, *(entry.model_dump_json() for entry in finished.values())]))
            rename(fresh, work / "export-state.jsonl")
            yield ExportFolder(target, work, journal, finished)
        # Errors are ignored because the version is already in place, and another export may just check for our lock.
        shutil.rmtree(work, ignore_errors=True)


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, each durable before the next: a rename can't be without."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def _recover(work: Path, inputs_digest: str, progress: Progress) -> dict[str, FileEntry]:
    """Return the files that an earlier run of the same export has finished, by path."""
    journal = work / "export-state.jsonl"
    lines = journal.read_text(encoding="utf-8").split("\n") if journal.exists() else []
    recorded = None
    with suppress(ValueError, AttributeError):  # a line that was not written to its end
        recorded = json.loads(lines[0]).get("inputs_sha256") if lines else None
    if recorded != inputs_digest:
        if lines:
            _log.warning("%s was left by an export of other inputs: starting over", work)
        shutil.rmtree(work / "snapshot", ignore_errors=True)
        return {}
    finished: dict[str, FileEntry] = {}
    for line in lines[1:-1]:  # what follows the last newline is empty, or a line that was not written to its end
        try:
            entry = FileEntry.model_validate_json(line)
            finished[entry.path] = entry
        except ValidationError:
            _log.warning("%s: a damaged line is ignored", journal)
    for entry in missing_files(work / "snapshot", list(finished.values()), True, progress):
        del finished[entry.path]
    _log.info("%s: resuming, %d files are finished", work, len(finished))
    return finished


def missing_files(
    folder: Path, entries: Sequence[FileEntry], verify: bool = False, progress: Progress = no_progress
) -> list[FileEntry]:
    """Return the files that a folder does not have in the stated size; with `verify`, and SHA-256."""
    missing, on_bytes = [], counting(progress, "checking SHA-256", sum(entry.size_bytes for entry in entries))
    for entry in entries:
        path = folder / entry.path
        has_size = path.is_file() and path.stat().st_size == entry.size_bytes
        if has_size and (not verify or hash_file(path, on_bytes) == entry.sha256):
            continue
        missing.append(entry)
        if path.is_file():
            _log.warning("%s is not what it was: it is written again", path)
            path.unlink(missing_ok=True)  # another process may have read the same
    return missing


def _append_line(journal: IO[str], line: str) -> None:
    journal.write(line + "\n")
    journal.flush()
    os.fsync(journal.fileno())
