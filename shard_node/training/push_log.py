"""The log and checkpoints of what is trained, in a folder that one process has: what was acknowledged is not lost.

`log-N` has the changes since `checkpoint-N.safetensors`; checkpoint 0 is the snapshot itself and has no file. A record:

    bytes 0..4    length of the payload, uint32, little-endian
    bytes 4..8    CRC-32 of the payload
    payload       its first byte is the kind: 0 what is trained and how, as JSON, the first of each log; 1 the body of
                  a PUSH frame; 2 a worker that has left, uint32

What follows the last whole record was being written when the process ended, and is cut off.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt
from safetensors.numpy import save_file

from loader.snapshot.store import fsync_path, make_folders, rename, try_lock
from loader.snapshot.tensor_files import load_numpy
from shard_node.errors import TrainingLogError

logger = logging.getLogger(__name__)

HEADER_KIND: Final = 0
PUSH_KIND: Final = 1
LEAVE_KIND: Final = 2
_RECORD = struct.Struct("<II")


class Record(NamedTuple):
    """A record's kind and what follows it."""

    kind: int
    content: memoryview


class PushLog:
    """A folder's newest checkpoint and the log that goes on from it. For one thread.

    `identity` says what is trained and how: a folder of something else is refused. Raises TrainingLogError, also where
    another process has the folder; OSError.

    Attributes:
        size_bytes: of the log.
    """

    def __init__(self, folder: Path, identity: bytes) -> None:
        make_folders(folder)
        self._folder, self._identity = folder, identity
        self._lock = (folder / "lock").open("a")
        if not try_lock(self._lock):
            self._lock.close()
            raise TrainingLogError(f"{folder}: another process trains in it")
        numbers = [int(path.stem.partition("-")[2]) for path in folder.glob("checkpoint-*.safetensors")]
        self._number = max(numbers, default=0)
        self._remove_others()
        self._file = self._log.open("ab")
        self.size_bytes = self._log.stat().st_size
        if not self.size_bytes:
            self.append(HEADER_KIND, identity)
            self.commit()

    @property
    def _log(self) -> Path:
        return self._folder / f"log-{self._number}"

    @property
    def _checkpoint(self) -> Path:
        return self._folder / f"checkpoint-{self._number}.safetensors"

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return what the checkpoint has; nothing for checkpoint 0. Raises SnapshotError."""
        return load_numpy(self._checkpoint) if self._number else {}

    def records(self) -> Iterator[Record]:
        """Yield the changes since the checkpoint, in order, and cut off what follows the last whole one."""
        data = memoryview(self._log.read_bytes())
        at, is_first = 0, True
        while (record := _record_at(data, at)) is not None:
            at += _RECORD.size + 1 + len(record.content)
            if is_first and (record.kind, bytes(record.content)) != (HEADER_KIND, self._identity):
                was = bytes(record.content).decode(errors="replace")
                raise TrainingLogError(f"{self._log} is of {was}, this process trains {self._identity.decode()}")
            if not is_first:
                yield record
            is_first = False
        if at < len(data):
            self._check_end(data, at)
            logger.warning("%s: %d bytes after its last whole record are cut off", self._log, len(data) - at)
            os.truncate(self._log, at)
            fsync_path(self._log)
            self.size_bytes = at
            if is_first:
                self.append(HEADER_KIND, self._identity)
                self.commit()

    def _check_end(self, data: memoryview, at: int) -> None:
        """Raise if whole records follow a damaged one: it was not being written when the process ended."""
        if at + _RECORD.size <= len(data):
            following = at + _RECORD.size + _RECORD.unpack_from(data, at)[0]
            if _record_at(data, following) is not None:
                raise TrainingLogError(f"{self._log}: the record at byte {at} is damaged, whole ones follow it")

    def append(self, kind: int, *content: bytes | memoryview) -> None:
        """Add a record, which is durable after `commit`."""
        crc, size = zlib.crc32(bytes([kind])), 1
        for part in content:
            crc, size = zlib.crc32(part, crc), size + len(part)
        self._file.write(_RECORD.pack(size, crc) + bytes([kind]))
        for part in content:
            self._file.write(part)
        self.size_bytes += _RECORD.size + size

    def commit(self) -> None:
        """Make what was appended durable."""
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def replace(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin anew with a checkpoint of all that was appended."""
        before, self._number = self._number, self._number + 1
        self._file.close()
        # First the log, so that a checkpoint always has one.
        self._file = self._log.open("wb")
        self.size_bytes = 0
        self.append(HEADER_KIND, self._identity)
        self.commit()
        fsync_path(self._folder)
        work = self._checkpoint.with_suffix(".new")
        save_file(dict(tensors), work)
        fsync_path(work)
        rename(work, self._checkpoint)
        logger.info("checkpoint %d replaces %d", self._number, before)
        self._remove_others()

    def _remove_others(self) -> None:
        kept = {"lock", self._log.name, self._checkpoint.name}
        for path in self._folder.iterdir():
            if path.name not in kept and path.name.startswith(("log-", "checkpoint-")):
                path.unlink()

    def close(self) -> None:
        """Let another process have the folder."""
        self._file.close()
        self._lock.close()


def _record_at(data: memoryview, at: int) -> Record | None:
    """Return the record that begins there; None if no whole one does."""
    if at + _RECORD.size > len(data):
        return None
    size, crc = _RECORD.unpack_from(data, at)
    payload = data[at + _RECORD.size : at + _RECORD.size + size]
    if not size or len(payload) < size or zlib.crc32(payload) != crc:
        return None
    return Record(payload[0], payload[1:])
