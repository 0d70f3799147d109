"""What frames carry: requests, pooled blocks, node info and errors as typed arrays. No I/O, no pickle.

A body is fields (fixed numbers, then text) and arrays, each padded to 8 bytes, so that arrays can be used where they
were received; docs/wire-protocol.md is the whole format, with an example. The note of a POOL frame's first array says
which forms of an answer its sender reads, and whether a trace's context follows the other arrays; every other note is
0. A node that does not know of notes answers in float32, which everybody reads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from loader.access_counts import AccessCounts, decode_access_counts, encode_access_counts
from loader.errors import DeadlineExceededError, DeltaError, ExportError, OverloadedError, ShardrankError
from loader.snapshot.tables import refused_as
from shard_node import errors
from shard_node.answer import FLOAT32_SUMS, NONE_MISSING, UNKNOWN_SEQUENCE, Answer, ReplyEncoding, SumFormat
from shard_node.bags import Bags, Float32Array, Int32Array, Int64Array
from shard_node.errors import RemoteError, WireError
from shard_node.freshness import UNKNOWN_AGE_MS
from shard_node.node import NodeInfo
from shard_node.tracing import MAX_STATE_BYTES, SpanContext
from shard_node.training.push import Push
from shard_node.wire.frame import MAX_BUDGET_US, Body, Buffer, Frame, FrameType, pack_header

Array: TypeAlias = npt.NDArray[Any]
Scalar = TypeVar("Scalar", bound=np.generic)

# Two arrays per group of tables, and no more than 4096 tables: what bounds the work of reading array headers.
MAX_ARRAYS = 8192
MAX_NAME_BYTES = 256
MAX_ERROR_MESSAGE_BYTES = 4096
# Arrays up to this size are copied beside the header, into one buffer: cheaper than one more piece to write.
SMALL_ARRAY_BYTES = 2048

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")
_FLOAT16 = np.dtype("<f2")
_DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {1: _INT32, 2: _INT64, 3: _FLOAT32, 4: _UINT8, 5: _FLOAT16}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}

_BODY = struct.Struct("<II")
_ARRAY = struct.Struct("<HHIQ")
_VERSION_FIELD = struct.Struct("<Q")
# An answer's fields: its sequence, and after it its age.
_FRESHNESS = struct.Struct(""), _VERSION_FIELD, struct.Struct("<Qq")
_ERROR_FIELDS = struct.Struct("<HHHH")
_PUSH_FIELDS = struct.Struct("<QI")
_PADDING = bytes(8)
_TRACE = struct.Struct(">QQQ")
_TAKES_STORED, _TAKES_FLOAT16, _TAKES_SEQUENCE, _HAS_TRACE, _TAKES_AGE, _TAKES_INT8 = 1, 2, 4, 8, 16, 32
# Who takes int8 sums takes float16 ones: of a node that does not know of int8, or where they are too large for it.
_NOTE_OF_SUMS: dict[SumFormat, int] = {"float32": 0, "float16": _TAKES_FLOAT16, "int8": _TAKES_FLOAT16 | _TAKES_INT8}

_ERROR_OF_KIND: dict[str, type[ShardrankError]] = {
    error.kind: error for error in vars(errors).values() if getattr(error, "__module__", "") == errors.__name__
} | {
    "frame_too_large": WireError,
    "push_step": errors.PushRefusedError,
    "not_training": errors.PushRefusedError,
    "key_capacity": DeltaError,
    "node_overloaded": OverloadedError,
    "buffer_full": OverloadedError,
    "deadline_exceeded": DeadlineExceededError,
}


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A POOL frame as it was received: arrays are views into the frame, not yet checked to describe bags.

    Shapes are those of `Bags`; bags_per_key, offsets and values are int32 or int64. `forms` are those
    of an answer that its sender takes, and `num_fields` of its fields; `trace` is the span of the call, if it is
    sampled.
    """

    model: str
    version: int
    keys: Int32Array
    bags_per_key: npt.NDArray[np.integer[Any]]
    offsets: npt.NDArray[np.integer[Any]]
    values: npt.NDArray[np.integer[Any]]
    weights: Float32Array | None
    forms: ReplyEncoding = FLOAT32_SUMS
    num_fields: int = 0
    trace: SpanContext | None = None

    def bags(self) -> Bags:
        """Return the bags as they lie, but for numbers of bags, which become int64; they are not checked."""
        counts = self.bags_per_key.astype(np.int64, copy=False)
        return Bags(self.keys, counts, self.offsets, self.values, self.weights)  # type: ignore[arg-type]


def encode_pool(
    request_id: int,
    budget_us: int,
    model: str,
    version: int,
    bags: Bags,
    forms: ReplyEncoding = FLOAT32_SUMS,
    trace: SpanContext | None = None,
) -> list[Buffer]:
    """Encode a POOL frame as buffers to be written one after the other. They look into the bags: don't change those.

    `forms` are taken as an answer, beside float32 sums. `trace` is only for nodes that say that they take it
    (`NodeInfo.takes_traces`): others refuse the frame. `budget_us` is how long the answer is of use; 0 for no limit,
    and more than 71 minutes is cut to that.

    Raises WireError for a version that is not within 0..2^64-1, or a model name that is too long or not Unicode text,
    WireError if the frame's length can't be stated.
    """
    arrays: list[Array] = [
        np.ascontiguousarray(bags.keys, _INT32),
        _narrowed(bags.bags_per_key),
        _narrowed(bags.offsets),
        _narrowed(bags.values),
    ]
    if bags.weights is not None:
        arrays.append(np.ascontiguousarray(bags.weights, _FLOAT32))
    fields = _version_and_model(version, model)
    note = _TAKES_SEQUENCE | _TAKES_AGE | _TAKES_STORED * forms.stored | _NOTE_OF_SUMS[forms.sums]
    if trace is not None:
        note |= _HAS_TRACE
        ids = _TRACE.pack(trace.trace_id >> 64, trace.trace_id & (2**64 - 1), trace.span_id)
        arrays.append(np.frombuffer(ids + trace.state.encode()[:MAX_STATE_BYTES], _UINT8))
    return _encode(FrameType.POOL, request_id, fields, arrays, min(budget_us, MAX_BUDGET_US), note)


def decode_pool(frame: Frame) -> PoolRequest:
    """Read a POOL frame. Raises WireError, naming the field that is malformed; so do all that decode."""
    fields, arrays = _decode(frame.body, "POOL")
    version, model = _read_version_and_model(fields, "POOL")
    # Notes that this release does not know are of forms that it does not have either.
    note = _ARRAY.unpack_from(frame.body.data, _BODY.size)[1] if arrays else 0
    trace = _decode_trace(arrays.pop()) if note & _HAS_TRACE else None
    if len(arrays) not in (4, 5):
        raise WireError(f"POOL num_arrays is {len(arrays)}, allowed are 4 (without weights) and 5")
    return PoolRequest(
        model,
        version,
        _flat(arrays[0], "POOL keys", _INT32),
        _flat(arrays[1], "POOL bags_per_key", _INT32, _INT64),
        _flat(arrays[2], "POOL offsets", _INT32, _INT64),
        _flat(arrays[3], "POOL values", _INT32, _INT64),
        _flat(arrays[4], "POOL weights", _FLOAT32) if len(arrays) == 5 else None,
        ReplyEncoding(
            bool(note & _TAKES_STORED),
            "int8" if note & _TAKES_INT8 else "float16" if note & _TAKES_FLOAT16 else "float32",
        ),
        0 if not note & _TAKES_SEQUENCE else 2 if note & _TAKES_AGE else 1,
        trace,
    )


def _decode_trace(array: Array) -> SpanContext:
    data = _flat(array, "POOL trace", _UINT8).tobytes()
    if not _TRACE.size <= len(data) <= _TRACE.size + MAX_STATE_BYTES:
        allowed = f"{_TRACE.size}..{_TRACE.size + MAX_STATE_BYTES}"
        raise WireError(f"POOL trace has {len(data)} bytes, allowed are {allowed}")
    high, low, span_id = _TRACE.unpack_from(data)
    return SpanContext(high << 64 | low, span_id, _text(memoryview(data)[_TRACE.size :], "POOL trace state"))


def encode_answer(request_id: int, answer: Answer, num_fields: int = 0) -> list[Buffer]:
    """Encode a POOLED frame, sums for each group; or a STORED one, the sums of all groups, then all stored rows.

    Its fields, `num_fields` of them if they are known, are the answer's sequence and its age. What is missing comes
    last, as a flat array, if anything is. The buffers look into the arrays: don't change those.
    """
    arrays: list[Array] = [*answer.sums, *(answer.stored or ())]
    if answer.missing.size:
        arrays.append(answer.missing.astype(_INT32))
    num_fields = 0 if answer.sequence == UNKNOWN_SEQUENCE else num_fields
    fields = _FRESHNESS[num_fields].pack(*(answer.sequence, answer.age_ms)[:num_fields])
    frame_type = FrameType.POOLED if answer.stored is None else FrameType.STORED
    return _encode(frame_type, request_id, fields, list(map(np.ascontiguousarray, arrays)))


def decode_answer(frame: Frame, asked_bytes: int = 0) -> Answer:
    """Read a POOLED or STORED frame that answers one of so many bytes: its arrays are views into the frame."""
    what = FrameType(frame.header.frame_type).name
    fields, arrays = _decode(frame.body, what)
    if len(fields) not in (sizes := [field.size for field in _FRESHNESS]):
        raise WireError(f"{what} fields have {len(fields)} bytes, allowed are {sizes}")
    num_fields = sizes.index(len(fields))
    sequence, age_ms = _FRESHNESS[num_fields].unpack(fields) + (UNKNOWN_SEQUENCE, UNKNOWN_AGE_MS)[num_fields:]
    has_missing = bool(arrays) and arrays[-1].ndim == 1 and arrays[-1].dtype == _INT32
    missing = arrays.pop() if has_missing else NONE_MISSING
    count, stored = len(arrays), None
    if what == "STORED":
        if count % 2:
            raise WireError(f"STORED num_arrays is {count}, there must be two for each group")
        count //= 2
        stored = _rows(arrays[count:], "STORED rows", _UINT8)
    sums = _rows(arrays[:count], f"{what} sums", _FLOAT32, _FLOAT16, _UINT8)
    return Answer(sums, stored, asked_bytes, sequence, age_ms, missing)


def encode_info(request_id: int) -> list[Buffer]:
    """Encode an INFO frame: asks what the node serves."""
    return [pack_header(FrameType.INFO, request_id, 0)]


def encode_info_answer(request_id: int, info: NodeInfo) -> list[Buffer]:
    """Encode an INFO_ANSWER frame: `NodeInfo` as JSON."""
    return _encode(FrameType.INFO_ANSWER, request_id, info.model_dump_json().encode(), [])


def decode_info_answer(frame: Frame) -> NodeInfo:
    """Read an INFO_ANSWER frame."""
    with refused_as(WireError, "INFO_ANSWER fields are not a NodeInfo: "):
        return NodeInfo.model_validate_json(bytes(_decode_fields(frame.body, "INFO_ANSWER")))


def encode_counts(request_id: int, budget_us: int, model: str, version: int) -> list[Buffer]:
    """Encode a COUNTS frame: asks how often rows of a version were looked up. Raises as `encode_pool`."""
    fields = _version_and_model(version, model)
    return _encode(FrameType.COUNTS, request_id, fields, [], min(budget_us, MAX_BUDGET_US))


def decode_counts(frame: Frame) -> tuple[str, int]:
    """Read a COUNTS frame: the model and its version."""
    version, model = _read_version_and_model(_decode_fields(frame.body, "COUNTS"), "COUNTS")
    return model, version


def encode_counts_answer(request_id: int, lookups: Mapping[str, AccessCounts]) -> list[Buffer]:
    """Encode a COUNTS_ANSWER frame: a file of access counts, by table."""
    file = np.frombuffer(encode_access_counts(lookups), _UINT8)
    return _encode(FrameType.COUNTS_ANSWER, request_id, b"", [file])


def decode_counts_answer(frame: Frame) -> dict[str, AccessCounts]:
    """Read a COUNTS_ANSWER frame."""
    _, arrays = _decode(frame.body, "COUNTS_ANSWER")
    if len(arrays) != 1:
        raise WireError(f"COUNTS_ANSWER num_arrays is {len(arrays)}, there must be 1")
    try:
        return decode_access_counts(_flat(arrays[0], "COUNTS_ANSWER file", _UINT8).tobytes(), "COUNTS_ANSWER")
    except ExportError as error:
        raise WireError(str(error)) from error


def encode_push(request_id: int, budget_us: int, model: str, version: int, push: Push) -> list[Buffer]:
    """Encode a PUSH frame, which looks into the push's arrays. Raises as `encode_pool`."""
    if not (0 <= push.worker < 2**32 and 0 <= push.step < 2**64):
        raise WireError(f"worker {push.worker}, step {push.step}: allowed are 0..2^32-1 and 0..2^64-1")
    arrays: list[Array] = [np.array(list(push.gradients), _INT32)]
    for ids, gradients in push.gradients.values():
        arrays += np.ascontiguousarray(ids, _INT64), np.ascontiguousarray(gradients, _FLOAT32)
    fields = _PUSH_FIELDS.pack(push.step, push.worker) + _version_and_model(version, model)
    return _encode(FrameType.PUSH, request_id, fields, arrays, min(budget_us, MAX_BUDGET_US))


def decode_push(frame: Frame) -> tuple[str, int, Push]:
    """Read a PUSH frame: the model, its version, and the push, whose arrays are views into the frame."""
    return decode_push_body(frame.body)


def decode_push_body(body: Body) -> tuple[str, int, Push]:
    """Read the body of a PUSH frame, as logs have it."""
    fields, arrays = _decode(body, "PUSH")
    if len(fields) < _PUSH_FIELDS.size:
        raise WireError(f"PUSH fields have {len(fields)} bytes, at least {_PUSH_FIELDS.size} are needed")
    step, worker = _PUSH_FIELDS.unpack_from(fields)
    version, model = _read_version_and_model(fields[_PUSH_FIELDS.size :], "PUSH")
    tables = _flat(arrays[0], "PUSH tables", _INT32).tolist() if arrays else []
    if len(arrays) != 1 + 2 * len(tables) or len(set(tables)) != len(tables):
        raise WireError(f"PUSH num_arrays is {len(arrays)}, there must be tables, and two for each, none twice")
    ids = [_flat(array, "PUSH ids", _INT64) for array in arrays[1::2]]
    gradients = _rows(arrays[2::2], "PUSH gradients", _FLOAT32)
    for table, of_table, rows in zip(tables, ids, gradients, strict=True):
        if of_table.size != rows.shape[0]:
            raise WireError(f"PUSH table {table} has {of_table.size} ids and {rows.shape[0]} gradients")
    return model, version, Push(worker, step, dict(zip(tables, zip(ids, gradients, strict=True), strict=True)))


def encode_pushed(request_id: int, slowest: int) -> list[Buffer]:
    """Encode a PUSHED frame: a push is applied, or was, and durable; the slowest worker's step is with it."""
    return _encode(FrameType.PUSHED, request_id, _VERSION_FIELD.pack(slowest), [])


def decode_pushed(frame: Frame) -> int:
    """Read a PUSHED frame: the slowest worker's step."""
    fields = _decode_fields(frame.body, "PUSHED")
    if len(fields) != _VERSION_FIELD.size:
        raise WireError(f"PUSHED fields have {len(fields)} bytes, {_VERSION_FIELD.size} are needed")
    return int(_VERSION_FIELD.unpack(fields)[0])


def encode_goaway() -> list[Buffer]:
    """Encode a GOAWAY frame: the node takes no new requests on this connection, and answers those in flight."""
    return [pack_header(FrameType.GOAWAY, 0, 0)]


def encode_error(request_id: int, error: ShardrankError) -> list[Buffer]:
    """Encode an ERROR frame. A message of more than 4096 bytes is cut."""
    kind, grpc_status = error.kind.encode(), error.grpc_status.encode()
    message = str(error).encode(errors="replace")[:MAX_ERROR_MESSAGE_BYTES]
    fields = _ERROR_FIELDS.pack(error.http_status, len(kind), len(grpc_status), 0) + kind + grpc_status + message
    return _encode(FrameType.ERROR, request_id, fields, [])


def decode_error(frame: Frame) -> ShardrankError:
    """Read the error of an ERROR frame, as the class of its kind; a RemoteError for an unknown kind."""
    fields = _decode_fields(frame.body, "ERROR")
    if len(fields) < _ERROR_FIELDS.size:
        raise WireError(f"ERROR fields have {len(fields)} bytes, at least {_ERROR_FIELDS.size} are needed")
    _, kind_bytes, grpc_bytes, _ = _ERROR_FIELDS.unpack_from(fields)
    texts = fields[_ERROR_FIELDS.size :]
    if kind_bytes + grpc_bytes > len(texts):
        raise WireError(f"ERROR kind and grpc_status have {kind_bytes + grpc_bytes} bytes, {len(texts)} are there")
    kind = _text(texts[:kind_bytes], "ERROR kind")
    # Cutting a message at a number of bytes may split its last character.
    message = bytes(texts[kind_bytes + grpc_bytes :]).decode(errors="replace")
    known = _ERROR_OF_KIND.get(kind)
    return RemoteError(f"{kind}: {message}") if known is None else known(message, kind=kind)


def array_section_bytes(num_arrays: int) -> int:
    """Bytes of a body without fields beside its arrays' data, at most: counts, array headers, padding."""
    return _BODY.size + (_ARRAY.size + 8) * num_arrays


def _version_and_model(version: int, model: str) -> bytes:
    if not 0 <= version < 2**64:
        raise WireError(f"version {version} is not within 0..2^64-1")
    try:
        name = model.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"model is not Unicode text: {error}") from error
    if len(name) > MAX_NAME_BYTES:
        raise WireError(f"model has {len(name)} bytes, at most {MAX_NAME_BYTES} are allowed")
    return _VERSION_FIELD.pack(version) + name


def _read_version_and_model(fields: memoryview, what: str) -> tuple[int, str]:
    if len(fields) < _VERSION_FIELD.size:
        raise WireError(f"{what} fields have {len(fields)} bytes, at least {_VERSION_FIELD.size} are needed")
    if (name_bytes := len(fields) - _VERSION_FIELD.size) > MAX_NAME_BYTES:
        raise WireError(f"{what} model has {name_bytes} bytes, at most {MAX_NAME_BYTES} are allowed")
    return _VERSION_FIELD.unpack_from(fields)[0], _text(fields[_VERSION_FIELD.size :], f"{what} model")


def _narrowed(array: Int64Array) -> Array:
    if array.dtype == _INT32:
        return np.ascontiguousarray(array)
    # The bitwise or of all numbers is non-negative and below 2^31 only if each of them is: one pass, no copy.
    if array.nbytes <= SMALL_ARRAY_BYTES or not 0 <= int(np.bitwise_or.reduce(array)) < 2**31:
        return np.ascontiguousarray(array, _INT64)
    return array.astype(_INT32)


def _encode(
    frame_type: FrameType, request_id: int, fields: bytes, arrays: Sequence[Array], budget_us: int = 0, note: int = 0
) -> list[Buffer]:
    """Return header, fields and arrays as buffers: small arrays joined, large ones as views."""
    sizes = [array.nbytes for array in arrays]
    fields_end = _BODY.size + _ARRAY.size * len(arrays) + len(fields)
    body_bytes = fields_end + -fields_end % 8 + sum([size + -size % 8 for size in sizes])
    joined = bytearray(pack_header(frame_type, request_id, body_bytes, budget_us))
    joined += _BODY.pack(len(fields), len(arrays))
    for array in arrays:
        width = array.shape[1] if array.ndim == 2 else 0
        joined += _ARRAY.pack(_CODE_OF_DTYPE[array.dtype], note, width, array.shape[0])
        note = 0
    joined += fields
    joined += _PADDING[: -fields_end % 8]
    buffers: list[Buffer] = [joined]
    for array, size in zip(arrays, sizes, strict=True):
        if size > SMALL_ARRAY_BYTES:
            buffers.append(array.data.cast("B"))
            joined = bytearray()
            buffers.append(joined)
        elif size:
            joined += array.data.cast("B")
        joined += _PADDING[: -size % 8]
    return [buffer for buffer in buffers if len(buffer)]


def _decode(body: Body, what: str) -> tuple[memoryview, list[Array]]:
    """Return fields and arrays of a body, as views into it. Every number is checked before it is used."""
    view = body.data
    size = len(view)
    if size < _BODY.size:
        raise WireError(f"{what} body has {size} bytes, at least {_BODY.size} are needed")
    fields_bytes, num_arrays = _BODY.unpack_from(view)
    if num_arrays > MAX_ARRAYS:
        raise WireError(f"{what} num_arrays is {num_arrays}, at most {MAX_ARRAYS} are allowed")
    fields_start = _BODY.size + _ARRAY.size * num_arrays
    if fields_start > size:
        raise WireError(f"{what} num_arrays is {num_arrays}, their headers do not fit a body of {size} bytes")
    fields_end = fields_start + fields_bytes
    position = fields_end + -fields_end % 8
    if position > size:
        raise WireError(f"{what} fields_bytes is {fields_bytes}, they do not fit a body of {size} bytes")
    arrays = []
    for number, (code, _, width, rows) in enumerate(_ARRAY.iter_unpack(view[_BODY.size : fields_start])):
        if (dtype := _DTYPE_OF_CODE.get(code)) is None:
            raise WireError(f"{what} array {number}: dtype {code} is none of {sorted(_DTYPE_OF_CODE)}")
        # Python's integers do not overflow, so a count that is made up can't wrap around to a small one.
        count = rows * (width or 1)
        end = position + count * dtype.itemsize
        end += -end % 8
        if end > size:
            raise WireError(f"{what} array {number}: {rows} rows of width {width} do not fit a body of {size} bytes")
        array = np.frombuffer(body, dtype, count, position) if count else np.empty(0, dtype)
        arrays.append(array.reshape(rows, width) if width else array)
        position = end
    if position != size:
        raise WireError(f"{what} body has {size - position} bytes after its last array")
    return view[fields_start:fields_end], arrays


def _decode_fields(body: Body, what: str) -> memoryview:
    fields, arrays = _decode(body, what)
    if arrays:
        raise WireError(f"{what} num_arrays is {len(arrays)}, none are allowed")
    return fields


def _flat(array: npt.NDArray[Scalar], name: str, *allowed: np.dtype[Any]) -> npt.NDArray[Scalar]:
    if array.ndim != 1 or array.dtype not in allowed:
        raise WireError(f"{name} is {array.ndim}-d {array.dtype}, it must be 1-d {' or '.join(map(str, allowed))}")
    return array


def _rows(arrays: list[npt.NDArray[Scalar]], name: str, *allowed: np.dtype[Any]) -> list[npt.NDArray[Scalar]]:
    for number, array in enumerate(arrays):
        if array.ndim != 2 or array.dtype not in allowed:
            types = " or ".join(map(str, allowed))
            raise WireError(f"{name} of group {number} are {array.ndim}-d {array.dtype}, they must be 2-d {types}")
    return arrays


def _text(data: memoryview, name: str) -> str:
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise WireError(f"{name} is not UTF-8: {error}") from error
