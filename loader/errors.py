"""The root of every shardrank error, the errors that all packages raise, and the loader's.

ShardrankError
    ConfigError                   400  an option, an address, a file or an environment: change it
    UnavailableError              503  not reached, not ready or ending: try again, elsewhere or later
    OverloadedError               503  shed, nothing was started: come again later
    DeadlineExceededError         504  no answer in time
    SnapshotError                 422  a snapshot that must not be served
        SnapshotNotFoundError     404  export or publish it first
        SnapshotCorruptError      422  export it again
        SnapshotResourceError     503  no fault of the snapshot: try again when there is room
        SnapshotExistsError       409  export it under another version
    StoreError                    500  and below it, by what to do about the store
    ExportError                   400  what was given can't become a snapshot
    TraceError                    400  a trace of lookups can't be used
    CheckpointError               400  a checkpoint can't be read
    RegistryError                 500  and below it, by what to do about the registry
    DeltaError                    409  changed rows that do not fit what is there
        DeltaFormatError          400  the rows themselves are wrong
        StreamFullError           507  roll out a snapshot that contains them
    RolloutError                  409  as things are, a version can't be rolled out, staged or flipped

There is one class for each thing that a caller does differently; the rest is the `kind`. Each package has one such
file: `shard_node.errors`, `router.errors`, `serving.errors`, `loadtest.errors`. A message names the field, the value
and what is allowed.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ShardrankError(Exception):
    """Base of all errors that shardrank raises on purpose, and that its client raises for a server's.

    Attributes:
        kind: short stable word for metrics and for clients to branch on; the class has the usual one.
        http_status: status of the HTTP answer that carries it.
        grpc_status: name of the `grpc.StatusCode` that carries it.
        kinds: HTTP and gRPC status of those kinds for which they differ from the class's.
        field: path of the part of the request that is wrong, such as `candidates.sparse.film_id`; "" if unknown.
        retry_after_s: seconds after which a server wants to be asked again; None if it did not say.
    """

    kind: str = "internal"
    http_status: int = 500
    grpc_status: str = "INTERNAL"
    kinds: ClassVar[Mapping[str, tuple[int, str]]] = {}
    field: str = ""
    retry_after_s: float | None = None

    def __init_subclass__(cls, **given: Any) -> None:
        """Set the attributes that are given on the class; the rest is as in the base."""
        super().__init_subclass__()
        for name, value in given.items():
            if name not in ("http_status", "grpc_status", "kind", "kinds"):
                raise TypeError(f"{cls.__name__}: {name} is no attribute of an error")
            setattr(cls, name, value)

    def __init__(
        self,
        *args: object,
        kind: str | None = None,
        http_status: int | None = None,
        grpc_status: str | None = None,
        field: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(*args)
        self.field = field
        self.retry_after_s = retry_after_s
        if kind is not None and kind in self.kinds:
            self.http_status, self.grpc_status = self.kinds[kind]
        for name, value in (("http_status", http_status), ("grpc_status", grpc_status), ("kind", kind)):
            if value is not None:
                setattr(self, name, value)


class ConfigError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="config"):
    """An option, an address, a file or an environment that can't be used. The message names it."""


class UnavailableError(ShardrankError, http_status=503, grpc_status="UNAVAILABLE", kind="unavailable"):
    """Whoever was asked was not reached, is not ready, or is ending."""


class OverloadedError(
    ShardrankError,
    http_status=503,
    grpc_status="RESOURCE_EXHAUSTED",
    kind="overloaded",
    kinds=dict.fromkeys(("buffer_full", "too_many_watches"), (429, "RESOURCE_EXHAUSTED")),
):
    """Too much is in flight, waits or is buffered. Nothing was started, so the request may be sent again."""


class DeadlineExceededError(
    ShardrankError,
    http_status=504,
    grpc_status="DEADLINE_EXCEEDED",
    kind="deadline_exceeded",
    kinds={"request_timeout": (408, "DEADLINE_EXCEEDED")},
):
    """The deadline passed before the answer was complete, or (`request_timeout`) before the request was."""


class SnapshotError(ShardrankError, http_status=422, grpc_status="FAILED_PRECONDITION", kind="bad_snapshot"):
    """A snapshot that must not be served. The message names the file and the reason."""


class SnapshotNotFoundError(SnapshotError, http_status=404, grpc_status="NOT_FOUND", kind="snapshot_not_found"):
    """No such model or version in the store."""


class SnapshotCorruptError(SnapshotError):
    """A manifest that can't be read, a path that leaves the folder, a file that is not what the manifest says.

    `unsafe_program`: an exported program that PyTorch would not read without pickle, or that is none.
    """


class SnapshotResourceError(SnapshotError, http_status=503, grpc_status="UNAVAILABLE", kind="snapshot_resource"):
    """File descriptors or memory ran out while a snapshot was read. It may be sound: try again when there is room."""


class SnapshotExistsError(SnapshotError, http_status=409, grpc_status="ALREADY_EXISTS", kind="snapshot_exists"):
    """A version is immutable: it can't be written a second time."""


class StoreError(
    ShardrankError,
    kind="store_access",
    kinds={
        "store_url": (400, "INVALID_ARGUMENT"),
        "store_unavailable": (503, "UNAVAILABLE"),
        "store_cache": (507, "RESOURCE_EXHAUSTED"),
    },
):
    """A store at a URL refuses: credentials, rights, or a bucket that does not exist.

    Other kinds: `store_url`, a text that is no URL of a store, or a URL that needs what is not installed;
    `store_unavailable`, no answer within the time limit, or one that it can't now; `store_cache`, the local cache has
    no room for a version, or can't be written.
    """


class ExportError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_export"):
    """What was handed to the writer can't become a snapshot: NaN or inf in a row, for one. The message says where."""


class TraceError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_trace"):
    """A trace of lookups can't be read, or has ids that can't be."""


class CheckpointError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_checkpoint"):
    """A checkpoint can't be read safely, or its tensors do not fit the model description."""


class RegistryError(ShardrankError, kind="registry"):
    """Something about the registry."""


class RegistryUnavailableError(RegistryError, http_status=503, grpc_status="UNAVAILABLE", kind="registry_unavailable"):
    """The registry does not answer. A write that failed like this may have taken place."""


class RegistryConflictError(RegistryError, http_status=409, grpc_status="ABORTED", kind="registry_conflict"):
    """Somebody else wrote the key since it was read."""


class RegistryRecordError(RegistryError, kind="registry_record"):
    """A record that does not fit its schema, or a key or URL that can't be one."""


class StreamSequenceError(RegistryError, http_status=409, grpc_status="OUT_OF_RANGE", kind="stream_sequence"):
    """An entry whose sequence number is not the next one of its stream."""


class DeltaError(
    ShardrankError,
    http_status=409,
    grpc_status="FAILED_PRECONDITION",
    kind="bad_delta",
    kinds={"delta_gap": (409, "OUT_OF_RANGE")},
):
    """A batch of changed rows that must not be applied.

    `delta_base`: it is for a version that this is not, and does not continue. `delta_gap`: it is not the next one, so
    applying it would skip changes.
    """


class DeltaFormatError(DeltaError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="delta_format"):
    """A delta that can't be made of what was given, or whose bytes are not what was published."""


class StreamFullError(DeltaError, http_status=507, grpc_status="RESOURCE_EXHAUSTED", kind="stream_full"):
    """A stream that has no room for another delta, since versions that are held need all that it has."""


class RolloutError(ShardrankError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="rollout"):
    """A rollout, stage, flip or retire that is not possible as things are, or a node that does not fit its fleet."""


def file_error(path: Path, action: str, error: OSError | MemoryError) -> SnapshotError:
    """Turn a failure to do `action` ("read", "mapped") with a snapshot's file into damage or a shortage of our own."""
    exhausted = isinstance(error, MemoryError) or error.errno in _EXHAUSTED
    kind = SnapshotResourceError if exhausted else SnapshotCorruptError
    if isinstance(error, FileNotFoundError):
        return kind(f"{path}: missing")
    # Not the whole text of an OSError: it names the path a second time.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return kind(f"{path}: can't be {action}: {reason}")


def cut(value: object, max_characters: int = 200) -> str:
    """Return the text of a value for a message: what an untrusted file says may be of any length."""
    text = str(value)
    return text if len(text) <= max_characters else f"{text[:max_characters]}... ({len(text)} characters)"
