"""The root of every shardrank error, and the loader's own branch of the tree.

Each package keeps one such file. An error says what it is on both public protocols (`http_status`, `grpc_status`)
so that no server has to guess, and its message names the field, the value and what is allowed.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ShardrankError(Exception):
    """Base of all errors that shardrank raises on purpose.

    A class says what its errors are; a class with several kinds passes the `kind` of an error, and its statuses where
    they differ, when it is raised.

    Attributes:
        http_status: status of the HTTP answer that carries it.
        grpc_status: name of the `grpc.StatusCode` that carries it.
        kind: short stable word for metrics and for clients to branch on.
        kinds: HTTP and gRPC status of those kinds for which they differ from the class's.
    """

    http_status: int = 500
    grpc_status: str = "INTERNAL"
    kind: str = "internal"
    kinds: ClassVar[Mapping[str, tuple[int, str]]] = {}

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
    ) -> None:
        super().__init__(*args)
        if kind is not None and kind in self.kinds:
            self.http_status, self.grpc_status = self.kinds[kind]
        for name, value in (("http_status", http_status), ("grpc_status", grpc_status), ("kind", kind)):
            if value is not None:
                setattr(self, name, value)


class LoaderError(ShardrankError):
    """Something about a snapshot, a checkpoint or a store."""


class SnapshotError(LoaderError, http_status=422, grpc_status="FAILED_PRECONDITION", kind="bad_snapshot"):
    """A snapshot that must not be served. The message names the file and the reason."""


class SnapshotNotFoundError(SnapshotError, http_status=404, grpc_status="NOT_FOUND", kind="snapshot_not_found"):
    """No such model or version in the store."""


class SnapshotFormatError(SnapshotError):
    """The manifest is not JSON, does not fit its schema, or has a format version this release can't read."""


class SnapshotPathError(SnapshotError):
    """A file path in the manifest is absolute or leaves the snapshot's folder."""


class SnapshotCorruptError(SnapshotError):
    """A file is missing, or its size, SHA-256, dtype or shape is not what the manifest says."""


class UnsafeProgramError(SnapshotError, kind="unsafe_program"):
    """A file of an exported program that PyTorch would not read without pickle, or that is no such file."""


class SnapshotResourceError(SnapshotError, http_status=503, grpc_status="UNAVAILABLE", kind="snapshot_resource"):
    """File descriptors or memory ran out while a snapshot was read. It may be sound: try again when there is room."""


class SnapshotExistsError(SnapshotError, http_status=409, grpc_status="ALREADY_EXISTS", kind="snapshot_exists"):
    """A version is immutable: it can't be written a second time."""


class StoreError(
    LoaderError,
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


class ExportError(LoaderError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_export"):
    """What was handed to the writer can't become a snapshot."""


class NonFiniteRowError(ExportError):
    """A row holds NaN or inf. Quantisation would hide it, so it is refused by table and row."""


class TraceError(LoaderError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_trace"):
    """A trace of lookups can't be read, or has ids that can't be."""


class CheckpointError(LoaderError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_checkpoint"):
    """A checkpoint can't be read safely, or its tensors do not fit the model description."""


class RegistryError(LoaderError, kind="registry"):
    """Something about the registry."""


class RegistryUnavailableError(RegistryError, http_status=503, grpc_status="UNAVAILABLE", kind="registry_unavailable"):
    """The registry does not answer. A write that failed like this may have taken place."""


class RegistryConflictError(RegistryError, http_status=409, grpc_status="ABORTED", kind="registry_conflict"):
    """Somebody else wrote the key since it was read."""


class RegistryRecordError(RegistryError, kind="registry_record"):
    """A record that does not fit its schema, or a key or URL that can't be one."""


class StreamSequenceError(RegistryError, http_status=409, grpc_status="OUT_OF_RANGE", kind="stream_sequence"):
    """An entry whose sequence number is not the next one of its stream."""


class DeltaError(LoaderError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="bad_delta"):
    """A batch of changed rows that must not be applied."""


class DeltaFormatError(DeltaError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="delta_format"):
    """A delta that can't be made of what was given, or whose bytes are not what was published."""


class DeltaBaseError(DeltaError, kind="delta_base"):
    """A delta for a version that this is not, and does not continue."""


class DeltaGapError(DeltaError, grpc_status="OUT_OF_RANGE", kind="delta_gap"):
    """A delta that is not the next one: applying it would skip changes."""


class StreamFullError(DeltaError, http_status=507, grpc_status="RESOURCE_EXHAUSTED", kind="stream_full"):
    """A stream that has no room for another delta, since versions that are held need all that it has."""


class RolloutError(LoaderError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="rollout"):
    """A rollout that can't be started, aborted or undone as things are. The message says why."""


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
