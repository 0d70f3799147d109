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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from loader.errors import ExportError, SnapshotCorruptError, SnapshotExistsError, SnapshotNotFoundError
from loader.progress import Progress
from loader.snapshot.manifest import FileEntry

# Small enough for malloc to hand it out again: a thread's own heap keeps what was once taken from it.
_HASH_CHUNK_BYTES = 1 << 20
# The convention of TF-Serving and Triton: positive integers, no leading zeros. Anything else is not a version.
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
WORK_FOLDER_PREFIX = ".export-"
"""Before the version in the name of the folder in which an export works."""

_log = logging.getLogger(__name__)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Store:
    """Finds snapshots by model and version. Holds nothing open and caches nothing: each call looks at the folder."""

    def __init__(self, path: str | Path) -> None:
        """Open a store at `path`, which needs not exist yet."""
        self.path = Path(path)

    def check_exists(self) -> None:
        """Raise SnapshotNotFoundError if there is no such folder, or no version of any model in it."""
        if not self.path.is_dir():
            raise SnapshotNotFoundError(f"store {self.path}: there is no such folder")
        if not self.models():
            raise SnapshotNotFoundError(f"store {self.path} has no model{self._told_unfinished()}")

    def unfinished(self) -> list[tuple[str, int]]:
        """Return (model, version) of each export that was interrupted, or is still running."""
        return [
            (model, int(version))
            for model in _folders(self.path)
            if _MODEL.fullmatch(model)
            for name in _folders(self.path / model)
            if _VERSION.fullmatch(version := name.removeprefix(WORK_FOLDER_PREFIX)) and version != name
        ]

    def models(self) -> list[str]:
        """Return the names of the models that have at least one version, sorted."""
        return [name for name in _folders(self.path) if _MODEL.fullmatch(name) and self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """List a model's versions, ascending; empty if it has no such model. Unfinished exports do not count."""
        if not _MODEL.fullmatch(model):
            return []
        numbers = (int(name) for name in _folders(self.path / model) if _VERSION.fullmatch(name))
        return sorted(number for number in numbers if number < 2**63)

    def latest(self, model: str) -> int:
        """Return the highest version. Raises SnapshotNotFoundError if there is none."""
        versions = self.versions(model)
        if not versions:
            self.check_exists()
            raise SnapshotNotFoundError(
                f"store {self.path} has no model {model!r}; it has {self.models()}{self._told_unfinished(model)}"
            )
        return versions[-1]

    def next_version(self, model: str) -> int:
        """Return the first free version above all present ones; 1 for a new model."""
        return max(self.versions(model), default=0) + 1

    def snapshot_path(self, model: str, version: int | None = None) -> Path:
        """Return the folder of a version, by default the latest. Raises SnapshotNotFoundError, naming what exists."""
        latest = self.latest(model)
        if version is None:
            version = latest
        if version not in (versions := self.versions(model)):
            raise SnapshotNotFoundError(
                f"store {self.path} has no version {version} of model {model!r}; it has {versions}"
            )
        return self.path / model / str(version)

    def _told_unfinished(self, model: str | None = None) -> str:
        """Return the end of a message about what is not there."""
        names = [f"{name}/{version}" for name, version in self.unfinished() if model in (None, name)]
        if not names:
            return ""
        return f"; not finished: the export of {', '.join(names)}, which goes on when it is run again"


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 (hex) of a file, in bounded memory; `on_bytes` is told the bytes done since its last call."""
    digest = hashlib.sha256()
    buffer = bytearray(_HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            on_bytes(count)
    return digest.hexdigest()


class ExportFolder:
    """The files of one snapshot in the making. Made by `open_export_folder`."""

    def __init__(self, target: Path, work: Path, journal: IO[str], finished: dict[str, FileEntry]) -> None:
        self._target = target
        self._files = work / "snapshot"
        self._journal = journal
        self._finished = finished

    def is_finished(self, relative_path: str) -> bool:
        """Tells whether an earlier run wrote that file."""
        return relative_path in self._finished

    def write(self, relative_path: str, produce: Callable[[Path], None], stated: FileEntry | None = None) -> FileEntry:
        """Make a file that `produce` writes durable, and put it on record; a finished one is kept as it is.

        Raises SnapshotCorruptError if it is not what is `stated`; then it is not put on record.
        """
        if (entry := self._finished.get(relative_path)) is not None and stated in (None, entry):
            return entry
        path = self._files / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        produce(path)
        fsync_path(path)
        entry = FileEntry(path=relative_path, size_bytes=path.stat().st_size, sha256=hash_file(path))
        if stated not in (None, entry):
            raise SnapshotCorruptError(f"{path}: SHA-256 {entry.sha256} is not the one that is stated, {stated.sha256}")
        _append_line(self._journal, entry.model_dump_json())
        self._finished[relative_path] = entry
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
            if path.is_file() and relative not in self._finished and relative not in texts:
                path.unlink()
        for folder, _, _ in os.walk(self._files):
            fsync_path(Path(folder))
        if self._target.exists():
            raise SnapshotExistsError(f"{self._target} exists, and a version is immutable")
        self._files.rename(self._target)
        fsync_path(self._target.parent)


@contextmanager
def open_export_folder(target: Path, inputs_digest: str, progress: Progress) -> Iterator[ExportFolder]:
    """Locks the folder in which `target` (`<store>/<model>/<version>`) is made; a failure leaves it for a later run.

    `inputs_digest` is the SHA-256 (hex) of all inputs that shape the files; a folder of other inputs is started over.
    Raises SnapshotExistsError if the version exists, ExportError if another export of it is running.
    """
    work = target.parent / f"{WORK_FOLDER_PREFIX}{target.name}"
    _remove_leftovers(target.parent)
    make_folders(work)
    with _lock(work):
        if target.exists():
            shutil.rmtree(work, ignore_errors=True)
            raise SnapshotExistsError(f"{target} exists, and a version is immutable")
        finished = _recover(work, inputs_digest, progress)
        (work / "snapshot").mkdir(exist_ok=True)
        with _new_journal(work, inputs_digest, finished) as journal:
            yield ExportFolder(target, work, journal, finished)
        # Errors are ignored because the version is already in place, and another export may just look for our lock.
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


def _remove_leftovers(model_folder: Path) -> None:
    """Remove the work folders of versions that exist: their exports died between the rename and the cleaning up."""
    for work in model_folder.glob(f"{WORK_FOLDER_PREFIX}*"):
        if (model_folder / work.name.removeprefix(WORK_FOLDER_PREFIX)).exists():
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _lock(work: Path) -> Iterator[None]:
    path = work / "lock"
    busy = ExportError(f"another export works in {work}; one export of a version runs at a time")
    try:
        file = path.open("w")
    except FileNotFoundError as error:
        raise busy from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The export that held the lock may have finished and removed this folder since we opened the file.
            still_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError) as error:
            raise busy from error
        if not still_there:
            raise busy
        yield


def _recover(work: Path, inputs_digest: str, progress: Progress) -> dict[str, FileEntry]:
    """Return the files of an interrupted export that can be kept; empty the folder if its inputs were others."""
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
    entries: list[FileEntry] = []
    for line in lines[1:-1]:  # what follows the last newline is empty, or a line that was not written to its end
        try:
            entries.append(FileEntry.model_validate_json(line))
        except ValidationError:
            _log.warning("%s: a damaged line is ignored", journal)
    finished: dict[str, FileEntry] = {}
    done, total = 0, sum(entry.size_bytes for entry in entries)
    for entry in entries:
        path = work / "snapshot" / entry.path
        if path.is_file() and path.stat().st_size == entry.size_bytes and hash_file(path) == entry.sha256:
            finished[entry.path] = entry
        else:
            _log.warning("%s is not what was recorded: it is written again", path)
        done += entry.size_bytes
        progress("checking finished files", done, total)
    _log.info("%s: resuming, %d files are finished", work, len(finished))
    return finished


@contextmanager
def _new_journal(work: Path, inputs_digest: str, finished: dict[str, FileEntry]) -> Iterator[IO[str]]:
    """Yield a journal that starts with what is known, put in place of the old one in one step."""
    fresh = work / "export-state.jsonl.new"
    with fresh.open("w", encoding="utf-8") as journal:
        header = json.dumps({"inputs_sha256": inputs_digest})
        _append_line(journal, "\n".join([header, *(entry.model_dump_json() for entry in finished.values())]))
        fresh.replace(work / "export-state.jsonl")
        fsync_path(work)
        yield journal


def _append_line(journal: IO[str], line: str) -> None:
    journal.write(line + "\n")
    journal.flush()
    os.fsync(journal.fileno())
