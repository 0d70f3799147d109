"""Recorded requests: a bounded folder of what was asked and answered, to replay it and to warm versions with it.

docs/recording.md describes the files: ids, weights, dense inputs and scores, and which version, deltas and dense step
gave them; never a header, a token, a request's id or key. A thread writes what the service queues, and drops and counts
what does not fit. Readers count before they allocate; a last frame that is cut off, which may be being written, is the
end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import queue
import random
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from math import inf
from pathlib import Path
from sys import getsizeof
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from loader.errors import ConfigError
from loader.snapshot.manifest import DenseInputs, FeatureSpec
from loader.snapshot.tables import Frozen, Name
from serving.errors import RecordingDamagedError
from serving.formats.requests import RankRequest, RankResponse
from serving.formats.schema import RequestSchema
from shard_node.bags import Float32Array, KeyedBags

logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "shardrank recorded requests", 1
SUFFIX = ".requests"
MAX_FRAME_BYTES = 64 << 20
MAX_CANDIDATES = 1 << 20
FILES = 8
"""A folder's bytes are divided over about so many files; the oldest goes when the next one is begun."""
MAX_QUEUED_BYTES = 32 << 20
"""Of the arrays and texts of requests that wait to be written; more are dropped."""
CLOSE_TIMEOUT_S = 5.0
RETRY_S = 10.0
"""Pause after a failure: on a full disk each try would make another file."""
LOCK = ".lock"

_FRAME = struct.Struct("<II")
_BEGIN, _SCHEMA, _REQUEST = 1, 2, 3
# Kind; schema; arrival; version, delta, dense step; candidates, ids, flags, texts, bytes of texts.
_HEAD = struct.Struct("<B3xIdqqqIIIII4x")
_HAS_WEIGHTS, _HAS_LENGTHS = 1, 2

Record = TypeVar("Record", bound=Frozen)
# Of a schema: model, digest and outputs.
_Key: TypeAlias = tuple[str, str, tuple[str, ...]]
# A request that is not decoded: payload, schema, when its file was begun, and where it is, for errors.
_Framed: TypeAlias = "tuple[bytearray, RecordedSchema, float, str]"


class _Begin(Frozen):
    """The first frame of a file; `began_at` in seconds since the epoch."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    began_at: float


class RecordedSchema(Frozen):
    """What the numbers of requests mean, whatever version answered.

    Attributes:
        digest: of names, order, sides, id types and dense widths, as packed requests bring it.
        features: in flat order.
        strings: those whose ids are strings.
        outputs: that the model names beside its scores.
    """

    model: Name
    digest: str = Field(max_length=64)
    features: tuple[FeatureSpec, ...] = Field(max_length=1 << 16)
    strings: tuple[Name, ...]
    dense_inputs: DenseInputs
    outputs: tuple[Name, ...]

    @classmethod
    def of(cls, schema: RequestSchema) -> RecordedSchema:
        """Describe a schema."""
        features, spec = schema.features, schema.features.spec
        return cls(
            model=spec.model,
            digest=features.digest,
            features=features.features,
            strings=tuple(name for name in schema.names if name in features.string_features),
            dense_inputs=spec.dense_inputs,
            outputs=tuple(spec.dense_model.outputs),
        )

    @property
    def string_features(self) -> frozenset[str]:
        """Names of the features whose ids are strings."""
        return frozenset(self.strings)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One request and its answer.

    Attributes:
        arrived_at: when its call began, seconds since the epoch.
        version, delta_sequence, dense_step: that gave the scores, as of `RankResponse`.
        request: without its id and deadline, which were not recorded.
        scores: float32 [N].
    """

    schema: RecordedSchema
    arrived_at: float
    version: int
    delta_sequence: int
    dense_step: int
    request: RankRequest
    scores: Float32Array


class RequestRecorder:
    """Records a share of what is answered, on a thread of its own, until `close`.

    Args:
        folder: of this process alone; made if it is not there.
        share: of the rank requests that are answered; each is chosen at random.
        max_bytes: of all files together.
        on_counted: called from any thread with an outcome (`written`, `dropped`), requests, and their bytes on disk.
        draw: returns a number in [0, 1) for each request.
        clock: that calls are timed by, monotonic seconds.
        wall_clock: seconds since the epoch.

    Raises:
        ConfigError: the folder can't be used, or another process records into it.
    """

    def __init__(
        self,
        folder: Path,
        share: float = 0.01,
        max_bytes: int = 256_000_000,
        on_counted: Callable[[str, int, int], None] = lambda outcome, requests, size: None,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._share, self._draw, self._count = share, draw, on_counted
        self._folder, self._max_bytes, self._file_bytes = folder, max_bytes, max_bytes // FILES
        self._clock, self._wall_clock = clock, wall_clock
        self._folder_lock = _locked(folder)
        # The file that is written, unbuffered; its bytes, when it was begun, and the number of each schema in it.
        self._file: FileIO | None = None
        self._size, self._started_at = 0, 0.0
        self._schemas: dict[_Key, int] = {}
        self._described: dict[_Key, bytes] = {}
        self._queue = queue.SimpleQueue[tuple[RequestSchema, RankRequest, RankResponse, float, int] | None]()
        self._queued_bytes, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._thread.start()

    def offer(self, schema: RequestSchema, request: RankRequest, answer: RankResponse, arrived_at: float) -> None:
        """Queue a request that came at a time of the clock, if it is drawn and there is room. Its arrays are kept."""
        if self._draw() >= self._share:
            return
        bags, weights = request.bags, request.bags.weights
        size = bags.values.nbytes + bags.offsets.nbytes + request.candidate_dense.nbytes + answer.scores.nbytes
        size += (0 if weights is None else weights.nbytes) + sum(map(getsizeof, request.texts))
        with self._lock:
            has_room = self._queued_bytes + size <= MAX_QUEUED_BYTES
            self._queued_bytes += size if has_room else 0
        if has_room:
            self._queue.put((schema, request, answer, arrived_at, size))
        else:
            self._count("dropped", 1, 0)

    def close(self) -> None:
        """Write what waits, and end. Idempotent."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        failed_at = -inf
        with contextlib.closing(self._folder_lock):
            while (queued := self._queue.get()) is not None:
                schema, request, answer, arrived_at, size = queued
                written = 0
                try:
                    if self._clock() - failed_at >= RETRY_S:
                        written = self._add(schema, request, answer, arrived_at)
                        failed_at = -inf
                except Exception as error:
                    # A full disk is logged once, and what is not an OSError is a bug, which must not end the thread.
                    if failed_at == -inf:
                        logger.error("requests are not recorded: %s", error, exc_info=not isinstance(error, OSError))
                    failed_at = self._clock()
                    self._end()
                with self._lock:
                    self._queued_bytes -= size
                self._count("written" if written else "dropped", 1, written)
            self._end()

    def _add(self, schema: RequestSchema, request: RankRequest, answer: RankResponse, arrived_at: float) -> int:
        """Write a request. Returns its bytes; 0 if it is larger than a file may be. Raises OSError."""
        features = schema.features
        key = features.spec.model, features.digest, tuple(features.spec.dense_model.outputs)
        counts, content = _encoded(request, answer)
        if key not in self._described:
            self._described[key] = _framed(bytes([_SCHEMA]), RecordedSchema.of(schema).model_dump_json().encode())
        described = self._described[key]
        size, needed = _FRAME.size + _HEAD.size + len(content), 0 if key in self._schemas else len(described)
        if size - _FRAME.size > MAX_FRAME_BYTES or size + len(described) + 1024 > self._file_bytes:
            return 0
        if self._file is None or self._size + needed + size > self._file_bytes:
            self._start_file()
        if key not in self._schemas:
            self._write(described)
            self._schemas[key] = len(self._schemas)
        stamps = answer.version, answer.delta_sequence, answer.dense_step
        head = _HEAD.pack(_REQUEST, self._schemas[key], arrived_at - self._started_at, *stamps, *counts)
        self._write(_framed(head, content))
        return size

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            # On a full disk there would be more and more of empty ones, which no bound of bytes drops.
            with contextlib.suppress(OSError):
                if not (path := Path(os.fsdecode(file.name))).stat().st_size:
                    path.unlink()

    def _start_file(self) -> None:
        self._end()
        sizes = {path: path.stat().st_size for path in sorted(self._folder.glob(f"*{SUFFIX}"))}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + self._file_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        now, self._started_at = self._wall_clock(), self._clock()
        # Names are in the order of time, also where a clock is set back; of names that are not ours, none is later.
        stamp = max([int(now * 1e6), *(int(path.stem) + 1 for path in sizes if path.stem.isdecimal())])
        self._file = _open_private(self._folder / f"{stamp:017d}{SUFFIX}", "x")
        self._size, self._schemas = 0, {}
        self._write(_framed(bytes([_BEGIN]), _Begin(began_at=now).model_dump_json().encode()))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)


def _locked(folder: Path) -> FileIO:
    """Make a folder, and lock it. Raises ConfigError if it can't be used, or another process records into it."""
    try:
        # Ids may tell who a user is: only this user reads what is made. Of parents `mkdir` takes no mode.
        for path in (*reversed(folder.parents), folder):
            path.mkdir(mode=0o700, exist_ok=True)
        lock = _open_private(folder / LOCK, "w")
    except OSError as error:
        raise ConfigError(f"--record {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"--record {folder}: another process records into it") from error
    return lock


def _open_private(path: Path, mode: Literal["w", "x"]) -> FileIO:
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def _framed(*payload: bytes) -> bytes:
    joined = b"".join(payload)
    return _FRAME.pack(len(joined), zlib.crc32(joined)) + joined


def _encoded(request: RankRequest, answer: RankResponse) -> tuple[tuple[int, ...], bytes]:
    """Return the counts of a request's head, and what follows it."""
    bags, lengths, weights = request.bags, request.bags.lengths, request.bags.weights
    has_lengths = bags.num_values != lengths.size or bool((lengths != 1).any())
    texts = [text.encode("utf-8", "replace") for text in request.texts]
    flags = (_HAS_WEIGHTS if weights is not None else 0) | (_HAS_LENGTHS if has_lengths else 0)
    arrays = (
        bags.values.astype("<i8", copy=False),
        lengths.astype("<i4") if has_lengths else None,
        weights,
        request.context_dense,
        request.candidate_dense,
        answer.scores,
        np.array([len(text) for text in texts], "<u4"),
    )
    content = [b"" if array is None else array.tobytes() for array in arrays]
    counts = request.num_candidates, bags.num_values, flags, len(texts), sum(map(len, texts))
    return counts, b"".join(content + texts)


def recorded_files(folder: Path) -> list[Path]:
    """List the files of a folder and of the folders in it (of several workers, one each), the oldest first.

    Raises ConfigError if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of recorded requests")
    return sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")], key=lambda path: path.name)


def read_file(path: Path) -> Iterator[Recorded]:
    """Read a file's requests in the order in which they were written; one that is cut off at the end is left out.

    Raises RecordingDamagedError, with the place, for what was changed since or is of another format; OSError.
    """
    return itertools.starmap(_decode, _framed_requests(path))


def _framed_requests(path: Path) -> Iterator[_Framed]:
    """Read a file's frames, and check of a request no more than its checksum and its schema. Raises as `read_file`."""
    schemas = list[RecordedSchema]()
    begin: _Begin | None = None
    with path.open("rb") as file:
        at, end = 0, path.stat().st_size
        while end - at >= _FRAME.size:
            where = f"{path}: frame at byte {at}"
            if len(head := file.read(_FRAME.size)) != _FRAME.size:
                raise RecordingDamagedError(f"{where}: the file became shorter while it was read")
            size, checksum = _FRAME.unpack(head)
            if not 0 < size <= MAX_FRAME_BYTES:
                raise RecordingDamagedError(f"{where}: {size} bytes; allowed are 1..{MAX_FRAME_BYTES}")
            at += _FRAME.size + size
            if at > end:
                return
            payload = bytearray(file.read(size))
            if len(payload) != size or zlib.crc32(payload) != checksum:
                raise RecordingDamagedError(f"{where}: its checksum is another one")
            kind = payload[0]
            if (kind == _BEGIN) is (begin is not None):
                raise RecordingDamagedError(f"{where}: kind {kind}; a file begins with one of kind {_BEGIN}")
            if begin is None:
                begin = _parsed(_Begin, payload, where)
                if (begin.format, begin.format_version) != (FORMAT, FORMAT_VERSION):
                    raise RecordingDamagedError(f"{where}: format {begin.format!r} {begin.format_version}")
            elif kind == _SCHEMA:
                schemas.append(_parsed(RecordedSchema, payload, where))
            elif kind != _REQUEST:
                raise RecordingDamagedError(f"{where}: kind {kind} is not known")
            elif len(payload) < _HEAD.size:
                raise RecordingDamagedError(f"{where}: {len(payload)} bytes; a request has at least {_HEAD.size}")
            elif (number := _HEAD.unpack_from(payload)[1]) >= len(schemas):
                raise RecordingDamagedError(f"{where}: schema {number} of {len(schemas)}")
            else:
                yield payload, schemas[number], begin.began_at, where


def _parsed(schema: type[Record], payload: bytearray, where: str) -> Record:
    try:
        return schema.model_validate_json(payload[1:])
    except ValidationError as error:
        raise RecordingDamagedError(f"{where}: {error.errors(include_url=False)[0]['msg']}") from error


def _decode(payload: bytearray, schema: RecordedSchema, started_at: float, where: str) -> Recorded:
    """Decode a request, once its counts have been compared with the bytes that there are."""
    _, _, arrived_s, version, sequence, step, count, num_ids, flags, num_texts, text_bytes = _HEAD.unpack_from(payload)
    if not 1 <= count <= MAX_CANDIDATES or flags & ~(_HAS_WEIGHTS | _HAS_LENGTHS):
        raise RecordingDamagedError(f"{where}: {count} candidates, flags {flags}")
    bags_per_key = np.array([1 if feature.side == "context" else count for feature in schema.features], np.int64)
    num_bags, dense = int(bags_per_key.sum()), schema.dense_inputs
    has_lengths, has_weights = flags & _HAS_LENGTHS, flags & _HAS_WEIGHTS
    sizes = (
        ("<i8", num_ids),
        ("<i4", num_bags if has_lengths else 0),
        ("<f4", num_ids if has_weights else 0),
        ("<f4", dense.context),
        ("<f4", count * dense.candidate),
        ("<f4", count),
        ("<u4", num_texts),
    )
    expected = _HEAD.size + sum(int(dtype[-1]) * size for dtype, size in sizes) + text_bytes
    if expected != len(payload) or not (has_lengths or num_ids == num_bags):
        raise RecordingDamagedError(f"{where}: {len(payload)} bytes, but its counts need {expected}")
    at, arrays = _HEAD.size, []
    for dtype, size in sizes:
        arrays.append(np.frombuffer(payload, dtype, size, at))
        at += int(dtype[-1]) * size
    values, lengths, weights, context_dense, candidate_dense, scores, text_lengths = arrays
    lengths = lengths if has_lengths else np.ones(num_bags, np.int32)
    # Summed in 64 bits: so many numbers of 32 can't wrap around.
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.sum(dtype=np.int64)) != num_ids):
        raise RecordingDamagedError(f"{where}: lengths of bags do not add up to {num_ids} ids")
    if values.size and int(values.min()) < 0:
        raise RecordingDamagedError(f"{where}: id {int(values.min())} is negative")
    keys = np.arange(bags_per_key.size, dtype=np.int32)
    bags = KeyedBags.from_lengths(keys, bags_per_key, lengths, values, weights if has_weights else None)
    is_string = np.array([feature.name in schema.string_features for feature in schema.features], np.bool_)
    expected = int(bags.values_per_key()[is_string].sum())
    ends = [0, *np.cumsum(text_lengths, dtype=np.int64).tolist()]
    if num_texts != expected or ends[-1] != text_bytes:
        raise RecordingDamagedError(f"{where}: {num_texts} texts of {text_bytes} bytes for {expected} ids")
    try:
        texts = tuple(payload[at + first : at + last].decode() for first, last in itertools.pairwise(ends))
    except UnicodeDecodeError as error:
        raise RecordingDamagedError(f"{where}: a text is not UTF-8") from error
    matrix = candidate_dense.reshape(count, dense.candidate)
    request = RankRequest(bags, count, context_dense, matrix, timeout_s=0.0, texts=texts)
    return Recorded(schema, started_at + arrived_s, version, sequence, step, request, scores)


def last_requests(folder: Path, schema: RequestSchema, count: int, max_bytes: int) -> list[RankRequest]:
    """Return the last `count` requests of a folder to a schema's model, with its features and widths.

    Older files are read until there are enough, or `max_bytes` were read. What is damaged is left out and logged.
    """
    expected = schema.features.spec.model, schema.features.digest
    requests: deque[RankRequest] = deque()
    for path in reversed(recorded_files(folder)):
        last: deque[_Framed] = deque(maxlen=count - len(requests))
        try:
            max_bytes -= path.stat().st_size
            for framed in _framed_requests(path):
                if (framed[1].model, framed[1].digest) == expected:
                    last.append(framed)
        except (OSError, RecordingDamagedError) as error:
            logger.warning("recorded requests are passed by: %s", error)
        # To decode one takes many times what it takes to pass it by, and others answer meanwhile.
        for framed in reversed(last):
            try:
                requests.appendleft(_decode(*framed).request)
            except RecordingDamagedError as error:
                logger.warning("a recorded request is passed by: %s", error)
        if len(requests) >= count or max_bytes <= 0:
            break
    return list(requests)
