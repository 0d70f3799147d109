"""Recorded requests: a bounded folder of what was asked and answered, to replay it and to warm versions with it.

docs/recording.md describes the files: lines of JSON with packed requests, scores, and which version, deltas and dense
step gave them; never a header, a token, a request's id or key. A thread writes what the service queues, and drops and
counts what does not fit. A last line that is cut off, which may be being written, is the end.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from io import FileIO
from math import inf
from pathlib import Path
from sys import getsizeof

import msgspec

from loader.errors import NOT_DECODED, ConfigError
from serving.errors import InvalidRequestError, RecordingDamagedError
from serving.formats.messages import MessageCodec, packed_request
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.results import RankResult

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl"
REPLAY_ID = "shardrank-replay:"
"""How the `request_id` of a replayed request begins."""
MAX_LINE_BYTES = 64 << 20
FILES = 8
"""A folder's bytes are divided over about so many files; the oldest goes when the next one is begun."""
MAX_QUEUED_BYTES = 32 << 20
"""Of the arrays and texts of requests that wait to be written; more are dropped."""
CLOSE_TIMEOUT_S = 5.0
RETRY_S = 10.0
"""Pause after a failure: on a full disk each try would make another file."""

_ENCODER = msgspec.json.Encoder()


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request and its answer: a line of a file.

    Attributes:
        arrived_at: when its call began, seconds since the epoch.
        schema_digest: of names, order, sides, id types and dense widths, as in `request`.
        version, delta_sequence, dense_step: that gave the scores, as of `RankResult`.
        scores: [N]; float32 reads back as the same float32.
        request: a `RankRequest` of protobuf, packed, without its id, key and deadline.
    """

    arrived_at: float
    model: str
    schema_digest: str
    version: int
    delta_sequence: int
    dense_step: int
    scores: list[float]
    request: bytes


class RequestRecorder:
    """Records a share of what is answered, on a thread of its own, until `close`.

    Args:
        folder: made if it is not there. Of several processes each begins files of its own.
        share: of the rank requests that are answered; each is chosen at random.
        max_bytes: of all files together.
        on_counted: called from any thread with an outcome (`written`, `dropped`), requests, and their bytes on disk.
        draw: returns a number in [0, 1) for each request.
        clock: that calls are timed by, monotonic seconds.
        wall_clock: seconds since the epoch.

    Raises:
        ConfigError: the folder can't be used.
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
        try:
            # Ids may tell who a user is: only this user reads what is made. Of parents `mkdir` takes no mode.
            for path in (*reversed(folder.parents), folder):
                path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error.strerror or error}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--record {folder}: this process can't write there")
        # The file that is written, unbuffered, and its bytes.
        self._file: FileIO | None = None
        self._size = 0
        self._queue = queue.SimpleQueue[tuple[RequestSchema, RankRequest, RankResult, float, int] | None]()
        self._queued_bytes, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._thread.start()

    def offer(self, schema: RequestSchema, request: RankRequest, answer: RankResult, arrived_at: float) -> None:
        """Queue a request that came at a time of the clock, if drawn, no replay, and with room. Its arrays are kept."""
        if self._draw() >= self._share or request.request_id.startswith(REPLAY_ID):
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
        while (queued := self._queue.get()) is not None:
            schema, request, answer, arrived_at, size = queued
            written = 0
            try:
                if self._clock() - failed_at >= RETRY_S:
                    written = self._add(schema, request, answer, arrived_at)
                    if failed_at != -inf:
                        logger.info("requests are recorded again")
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

    def _add(self, schema: RequestSchema, request: RankRequest, answer: RankResult, arrived_at: float) -> int:
        """Write a request. Returns its bytes; 0 if it is larger than a file may be. Raises OSError."""
        recorded = RecordedRequest(
            arrived_at=self._wall_clock() - self._clock() + arrived_at,
            model=schema.features.spec.model,
            schema_digest=schema.features.digest,
            version=answer.version,
            delta_sequence=answer.delta_sequence,
            dense_step=answer.dense_step,
            scores=answer.scores.tolist(),
            request=packed_request(schema.features, request).SerializeToString(),
        )
        line = _ENCODER.encode(recorded) + b"\n"
        if len(line) > min(MAX_LINE_BYTES, self._file_bytes):
            return 0
        if self._file is None or self._size + len(line) > self._file_bytes:
            self._file = self._next_file()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)
        return len(line)

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            # On a full disk there would be more and more of empty ones, which no bound of bytes drops.
            with contextlib.suppress(OSError):
                if not (path := Path(os.fsdecode(file.name))).stat().st_size:
                    path.unlink()

    def _next_file(self) -> FileIO:
        self._end()
        sizes = {path: path.stat().st_size for path in sorted(self._folder.glob(f"*{SUFFIX}"))}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + self._file_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        # Names are in the order of time, also where a clock is set back; of names that are not ours, none is later.
        now = int(self._wall_clock() * 1e6)
        stamp = max([now, *(int(path.stem) + 1 for path in sizes if path.stem.isdecimal())])
        self._size = 0
        path = self._folder / f"{stamp:017d}{SUFFIX}"
        return FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600))


def recorded_files(folder: Path) -> list[Path]:
    """List the files of a folder and of the folders in it (of several workers, one each), the oldest first; or a file.

    Raises ConfigError if there is no such folder.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of recorded requests")
    return sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")], key=lambda path: path.name)


def read_file(path: Path) -> Iterator[RecordedRequest]:
    """Read a file's requests in the order in which they were written; one that is cut off at the end is left out.

    Raises RecordingDamagedError, with the place, for what is no recorded request; OSError.
    """
    decoder = msgspec.json.Decoder(RecordedRequest)
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES:
                    raise RecordingDamagedError(f"{path}: line {number} has more than {MAX_LINE_BYTES} bytes")
                return
            try:
                yield decoder.decode(line)
            except NOT_DECODED as error:
                raise RecordingDamagedError(f"{path}: line {number}: {error}") from error


def last_requests(folder: Path, schema: RequestSchema, count: int, max_bytes: int) -> list[RankRequest]:
    """Return the last `count` requests of a folder to a schema's model, with its features and widths.

    Older files are read until there are enough, or `max_bytes` were read. What is damaged is left out and logged, as
    is what is beyond the limits of today.
    """
    expected = schema.features.spec.model, schema.features.digest
    requests: deque[RankRequest] = deque()
    for path in reversed(recorded_files(folder)):
        last: deque[RecordedRequest] = deque(maxlen=count - len(requests))
        try:
            max_bytes -= path.stat().st_size
            for recorded in read_file(path):
                if (recorded.model, recorded.schema_digest) == expected:
                    last.append(recorded)
        except (OSError, RecordingDamagedError) as error:
            logger.warning("recorded requests are skipped: %s", error)
        # To parse one takes many times what it takes to pass it by, and others answer meanwhile.
        for recorded in reversed(last):
            try:
                request = MessageCodec(model=recorded.model).read(recorded.request, schema.limits).parse(schema)
            except InvalidRequestError as error:
                logger.warning("a recorded request is skipped: %s", error)
            else:
                assert isinstance(request, RankRequest)
                requests.appendleft(request)
        if len(requests) >= count or max_bytes <= 0:
            break
    return list(requests)
