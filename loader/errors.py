"""The root of every shardrank error, the errors that all packages raise, and the loader's.

There is one class for each thing that a caller does differently; the rest is the `kind`. Each package has one such
file, docs/errors.md the whole tree. A message names the field, the value and what is allowed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

NOT_DECODED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it can't decode: also for text that is no UTF-8, and for deep nesting."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ShardrankError(Exception):
    """Base of all errors that shardrank raises on purpose, and that its client raises for a server's.

    Attributes:
        kind: short stable word for metrics and clients; the class has the usual one.
        grpc_status: name of a `grpc.StatusCode`.
        kinds: HTTP and gRPC status of kinds for which they differ from the class's.
        field: path of the part of the request that is wrong, such as `candidates.sparse.film_id`; "" if unknown.
        retry_after_s: seconds after which the server accepts another try; None if it did not say.
    """

    kind: str = "internal"
    http_status: int = 500
    grpc_status: str = "INTERNAL"
    kinds: ClassVar[Mapping[str, tuple[int, str]]] = {}
    field: str = ""
    retry_after_s: float | None = None

    def __init_subclass__(cls, **attributes: Any) -> None:
        """Set these attributes of the class; the others are the base's."""
        super().__init_subclass__()
        for name, value in attributes.items():
            if name not in ("http_status", "grpc_status", "kind"):
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
        self.field, self.retry_after_s = field, retry_after_s
        self.kind = kind or self.kind
        usual = self.http_status, self.grpc_status
        of_kind = usual if kind is None else self.kinds.get(kind, usual)
        self.http_status, self.grpc_status = http_status or of_kind[0], grpc_status or of_kind[1]


class ConfigError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="config"):
    """An option, an address, a file or an environment that can't be used."""


class UnavailableError(ShardrankError, http_status=503, grpc_status="UNAVAILABLE", kind="unavailable"):
    """The server was not reached, is not ready, or is ending."""


class OverloadedError(ShardrankError, http_status=503, grpc_status="RESOURCE_EXHAUSTED", kind="overloaded"):
    """Too much is in flight, waits or is buffered. Nothing was started, so the request may be sent again."""

    kinds: ClassVar = {"buffer_full": (429, "RESOURCE_EXHAUSTED")}


class DeadlineExceededError(ShardrankError, http_status=504, grpc_status="DEADLINE_EXCEEDED", kind="deadline_exceeded"):
    """The deadline passed before the answer was complete, or (`request_timeout`) before the request was."""

    kinds: ClassVar = {"request_timeout": (408, "DEADLINE_EXCEEDED")}


class SnapshotError(ShardrankError, http_status=422, grpc_status="FAILED_PRECONDITION", kind="bad_snapshot"):
    """A snapshot that must not be served. The message names the file."""


class SnapshotNotFoundError(SnapshotError, http_status=404, grpc_status="NOT_FOUND", kind="snapshot_not_found"):
    """No such model or version in the store."""


class SnapshotCorruptError(SnapshotError):
    """A file that is not what the manifest says. `unsafe_program`: one that PyTorch would not read without pickle."""


class SnapshotResourceError(SnapshotError, http_status=503, grpc_status="UNAVAILABLE", kind="snapshot_resource"):
    """File descriptors or memory ran out while a snapshot was read."""


class SnapshotExistsError(SnapshotError, http_status=409, grpc_status="ALREADY_EXISTS", kind="snapshot_exists"):
    """A version can't be written a second time."""


class StoreError(ShardrankError, kind="store_access"):
    """A store at a URL refuses: credentials, rights, or a bucket that does not exist.

    Other kinds: `store_url`, no URL of a store, or one that needs what is not installed; `store_unavailable`, no answer
    in time; `store_cache`, the local cache has no room for a version, or can't be written.
    """

    kinds: ClassVar = {
        "store_url": (400, "INVALID_ARGUMENT"),
        "store_unavailable": (503, "UNAVAILABLE"),
        "store_cache": (507, "RESOURCE_EXHAUSTED"),
    }


class ExportError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_export"):
    """Rows, weights or options that can't become a snapshot. The message says where."""


class TraceError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_trace"):
    """A trace of lookups that can't be read, or has ids that can't be."""


class CheckpointError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_checkpoint"):
    """A checkpoint that can't be read safely, or whose tensors do not fit the model description."""


class RegistryError(ShardrankError, kind="registry"):
    """Base of the registry's errors."""


class RegistryUnavailableError(RegistryError, http_status=503, grpc_status="UNAVAILABLE", kind="registry_unavailable"):
    """The registry does not answer. A write that failed like this may have taken place."""


class RegistryForeignError(RegistryUnavailableError, kind="registry_foreign"):
    """The registry has another id than the one that was used before. Nothing of it is used, or written to it."""


class RegistryConflictError(RegistryError, http_status=409, grpc_status="ABORTED", kind="registry_conflict"):
    """The key was written since it was read."""


class RegistryRecordError(RegistryError, kind="registry_record"):
    """A record that does not fit its schema, or a key or URL that can't be one."""


class StreamSequenceError(RegistryError, http_status=409, grpc_status="OUT_OF_RANGE", kind="stream_sequence"):
    """An entry that does not go on from the end of its stream, or of a format that is over there."""


class DeltaError(ShardrankError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="bad_delta"):
    """Changed rows that must not be applied.

    `delta_base`: of a version that this one is not, and does not continue. `delta_gap`: not the next delta.
    `delta_fork`: the stream does not go on from what was applied. `key_capacity`: more keys than the table may have.
    """

    kinds: ClassVar = {"delta_gap": (409, "OUT_OF_RANGE"), "key_capacity": (507, "RESOURCE_EXHAUSTED")}


class DeltaFormatError(DeltaError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="delta_format"):
    """Rows that can't become a delta, or bytes that are not what was published."""


class DeltaLostError(DeltaError, http_status=409, grpc_status="DATA_LOSS", kind="delta_lost"):
    """Deltas that the registry had acknowledged and has lost. Their rows may be published again.

    `sequences` are their numbers, ascending; none of them is given again.
    """

    def __init__(self, message: str, sequences: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sequences = sequences


class PublisherSupersededError(DeltaError, http_status=409, grpc_status="ABORTED", kind="publisher_superseded"):
    """Another publisher of the same name has begun since: nothing more is taken from this one."""


class StreamFullError(DeltaError, http_status=507, grpc_status="RESOURCE_EXHAUSTED", kind="stream_full"):
    """A stream without room for another delta: versions in use need all that it has."""


class RolloutError(ShardrankError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="rollout"):
    """A rollout, stage, flip or retire that is not possible as things are, or a node that does not fit its fleet."""


@contextmanager
def file_errors(path: Path, action: str) -> Iterator[None]:
    """Raise a SnapshotError where the block can't do `action` ("read", "mapped") with a file: damage, or a shortage."""
    try:
        yield
    except (OSError, MemoryError) as error:
        exhausted = isinstance(error, MemoryError) or error.errno in _EXHAUSTED
        kind = SnapshotResourceError if exhausted else SnapshotCorruptError
        # Not the whole text of an OSError: it names the path a second time.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        is_gone = isinstance(error, FileNotFoundError)
        raise kind(f"{path}: missing" if is_gone else f"{path}: can't be {action}: {reason}") from error


def is_passing(error: BaseException) -> bool:
    """Return whether an error may pass by itself: a file system refused, or does not show what is there; no damage."""
    return isinstance(error, OSError | SnapshotNotFoundError) or isinstance(error.__cause__, OSError)


def nearest(name: str, known: Iterable[str]) -> str:
    """Write, for a message, which known names are near one, or else the first few."""
    names = sorted(known)
    return f"{get_close_matches(name, names, 3) or names[:3]}{f', {len(names)} in all' if len(names) > 3 else ''}"


def no_path(what: str, path: Path, kind: str = "folder") -> str:
    """Write, for a message, which folder or file of a path is not there, and which ones beside it have near names."""
    missing = next((part for part in [*reversed(path.absolute().parents), path.absolute()] if not part.exists()), path)
    paths = [other for other in missing.parent.glob("*") if kind != "folder" or other.is_dir()]
    beside = [other.name for other in paths if other.name.startswith(".") == missing.name.startswith(".")]
    where = "" if missing.name == path.name else f" {missing.name!r}"
    near = f"; beside it are {nearest(missing.name, beside)}" if beside else ""
    return f"{what} {path}: there is no such {kind}{where}{near}"


def cut(value: object, max_characters: int = 200) -> str:
    """Return the text of a value for a message: what an untrusted file says may be of any length."""
    text = str(value)
    return text if len(text) <= max_characters else f"{text[:max_characters]}... ({len(text)} characters)"
