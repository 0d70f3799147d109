"""The log and checkpoints of what is trained, in a folder that one process has: what was acknowledged is not lost.

`log-N` has the changes since `checkpoint-N.safetensors`; checkpoint 0 is the snapshot itself and has no file. A record,
numbers little-endian:

    bytes 0..4      b"SRPL"
    bytes 4..12     where the commit begins that the record is of, in the file
    bytes 12..16    length of the payload
    bytes 16..20    CRC-32 of bytes 4..16 and the payload
    payload         its first byte is the kind: 0 what is trained and how, as JSON, the first of each log; 1 the body
                    of a PUSH frame; 2 a worker that has left, uint32

What follows the last whole record was being written when the process ended, unless a record of a later commit follows:
that log is damaged, and refused.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
_MAGIC: Final = b"SRPL"
_STATED = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_HEAD_BYTES: Final = len(_MAGIC) + _STATED.size + _CRC.size
_FILE: Final = re.compile(r"(?:log|checkpoint)-(\d+)(?:\.safetensors|\.new)?")


class Record(NamedTuple):
    """A record's kind and what follows it; where its commit begins in the file, and where the record ends."""

    kind: int
    content: memoryview
    commit_at: int
    end: int


class PushLog:
    """A folder's newest checkpoint and the log that goes on from it. For one thread.

    `identity` says what is trained and how: `records` refuses a log of something else. Raises TrainingLogError where
    another process has the folder; OSError.

    Attributes:
        size_bytes: of the log, with what is not committed yet.
        checkpoint_bytes: of the checkpoint.
    """

    def __init__(self, folder: Path, identity: bytes) -> None:
        make_folders(folder)
        self._folder, self._identity = folder, identity
        self._lock = (folder / "lock").open("a")
        if not try_lock(self._lock):
            self._lock.close()
            raise TrainingLogError(f"{folder}: another process trains in it")
        checkpoints = [match for match in self._files() if match[0].endswith(".safetensors")]
        self._number = max((int(match[1]) for match in checkpoints), default=0)
        self._begin()

    def _begin(self) -> None:
        self._file = self._log.open("ab")
        self.size_bytes = self._log.stat().st_size
        self.checkpoint_bytes = self._checkpoint.stat().st_size if self._number else 0
        # Where the next commit begins, and what it has.
        self._commit_at, self._uncommitted = self.size_bytes, list[bytes | memoryview]()
        if not self.size_bytes:
            self.append(HEADER_KIND, self._identity)
            self.commit()
            fsync_path(self._folder)

    def _files(self) -> list[re.Match[str]]:
        return [match for path in self._folder.iterdir() if (match := _FILE.fullmatch(path.name)) and path.is_file()]

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
        """Yield the changes since the checkpoint, in order, and move aside what follows the last whole one.

        Raises TrainingLogError for a damaged log, or one of another training.
        """
        content = self._log.read_bytes()
        data, at = memoryview(content), 0
        while (record := _record_at(data, at)) is not None:
            if at == 0 and (record.kind, bytes(record.content)) != (HEADER_KIND, self._identity):
                was = bytes(record.content).decode(errors="replace")
                raise TrainingLogError(f"{self._log} is of {was}, this process trains {self._identity.decode()}")
            if at:
                yield record
            at = record.end
        if at < len(data):
            self._cut(content, at)
        # What a process before wrote may be in memory only; it is answered as kept from now on.
        os.fdatasync(self._file.fileno())
        for match in self._files():
            if match[0] not in (self._log.name, self._checkpoint.name):
                (self._folder / match[0]).unlink()

    def _cut(self, content: bytes, at: int) -> None:
        following = at
        while (following := content.find(_MAGIC, following + 1)) >= 0:
            later = _record_at(memoryview(content), following)
            if later is not None and later.commit_at > at:
                raise TrainingLogError(f"{self._log}: the record at byte {at} is damaged, later commits follow it")
        aside = self._folder / f"{self._log.name}.cut"
        aside.write_bytes(content[at:])
        logger.warning("%s: %d bytes after its last whole record go to %s", self._log, len(content) - at, aside)
        self._file.close()
        os.truncate(self._log, at)
        self._begin()

    def append(self, kind: int, *content: bytes | memoryview) -> None:
        """Add a record to the next commit; nothing is written before. The content must stay as it is until then."""
        parts = [bytes([kind]), *content]
        stated = _STATED.pack(self._commit_at, sum(map(len, parts)))
        self._uncommitted += [_MAGIC + stated + _CRC.pack(_crc(stated, *parts)), *parts]
        self.size_bytes += _HEAD_BYTES + sum(map(len, parts))

    def commit(self) -> None:
        """Write what was appended, and make it durable. After an error nothing more may be appended."""
        if not self._uncommitted:
            return
        try:
            for part in self._uncommitted:
                self._file.write(part)
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except BaseException:
            # Pages that could not be written count as clean now: nobody may read them as kept.
            with suppress(OSError):
                os.truncate(self._log, self._commit_at)
            raise
        self._commit_at, self._uncommitted = self.size_bytes, []

    def replace(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin anew with a checkpoint of all that was committed."""
        before, number = [self._log, self._checkpoint], self._number + 1
        work = self._folder / f"checkpoint-{number}.new"
        save_file(dict(tensors), work)
        fsync_path(work)
        self._file.close()
        # The log first, so that a checkpoint always has one.
        self._number = number
        self._log.unlink(missing_ok=True)
        with self._log.open("wb"):
            pass
        rename(work, self._checkpoint)
        self._begin()
        logger.info("checkpoint %d is %d bytes", number, self.checkpoint_bytes)
        for path in before:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the folder; what is not committed was never there."""
        with suppress(OSError):
            self._file.close()
        self._lock.close()


def _crc(*parts: bytes | memoryview) -> int:
    return functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0)


def _record_at(data: memoryview, at: int) -> Record | None:
    """Return the record that begins there; None if no whole one does."""
    head, payload_at = data[at : at + _HEAD_BYTES], at + _HEAD_BYTES
    if len(head) < _HEAD_BYTES or bytes(head[: len(_MAGIC)]) != _MAGIC:
        return None
    stated, (crc,) = head[len(_MAGIC) : -_CRC.size], _CRC.unpack(head[-_CRC.size :])
    commit_at, size = _STATED.unpack(stated)
    payload = data[payload_at : payload_at + size]
    if not size or len(payload) < size or _crc(stated, payload) != crc:
        return None
    return Record(payload[0], payload[1:], commit_at, payload_at + size)
