"""Encode changed rows of one table as a delta: the same row bytes that an export would store, slices side by side.

Rows of a table that is stored as parts become rows of these: who follows a stream needs to know of stored tables only.
The format is documented in docs/deltas.md. Numbers are little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from loader.errors import DeltaFormatError, ExportError, cut
from loader.keyed_rows import as_keys
from loader.registry.registry import MAX_SEQUENCE
from loader.snapshot.buckets import Int64Array
from loader.snapshot.codecs import ByteArray, Float32Array, RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.tables import MAX_COLUMN_SLICES, MAX_EMBEDDING_DIM, MAX_NUM_EMBEDDINGS, RowDtype, TableSpec

MAGIC: Final = b"SRDELTA1"
DTYPES: Final[tuple[RowDtype, ...]] = ("int8", "int4", "fp16", "fp32")
MAX_BATCH_ROWS: Final = 8192
"""Rows of one delta; a publisher cuts what is more."""
MAX_BATCH_BYTES: Final = 4 << 20
"""Bytes of one delta's rows and row numbers; at least one row is always allowed."""
DIGEST_BYTES: Final = 16
WRITE_ROWS, UPSERT_KEYS, DELETE_KEYS = OPERATIONS = 0, 1, 2
"""Complete rows by row number; by key, as it is or new; keys whose rows go."""
# sequence, delta_base, base_version, published_at, rows, row_bytes, embedding_dim, dtype, bytes of both names, column
# slices, zeros
_HEADER = struct.Struct("<QQQdIIIHHHH4s")
_BODY_START = len(MAGIC) + DIGEST_BYTES
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")


def keyed_update(spec: ModelSpec, name: str, keys: Any, values: Any | None) -> tuple[TableSpec, Int64Array, ByteArray]:
    """Encode rows by key, or keys to delete if there are no values: the table, int64 [m], ascending, uint8 [m, bytes].

    `keys` are whole numbers [n], unsigned ones by their bits, or of a table of strings these; else as `checked_rows`.
    Raises DeltaFormatError as that, and for a table without keys.
    """
    if (table := next((table for table in spec.tables if table.name == name and table.keys is not None), None)) is None:
        names = [table.name for table in spec.tables if table.keys is not None]
        raise DeltaFormatError(f"model {spec.model!r} has no table {name!r} with keys; such tables: {names}")
    where = f"table {name!r}"
    try:
        numbers = as_keys(f"{where}: keys", table.keys, keys.tolist() if isinstance(keys, torch.Tensor) else keys)
    except ExportError as error:
        raise DeltaFormatError(str(error)) from error
    if values is None:
        numbers = np.unique(numbers)
        return table, numbers, np.zeros((numbers.size, 0), np.uint8)
    numbers, floats = checked_rows(name, None, table.embedding_dim, numbers, values)
    return table, numbers, encode_checked(table, floats, where, numbers)


def checked_rows(
    table: str, num_embeddings: int | None, embedding_dim: int, rows: Any, values: Any
) -> tuple[Int64Array, Float32Array]:
    """Return changed rows, int64 [m], ascending, none twice, and their values, float32 [m, embedding_dim].

    `rows` are whole numbers [n], of which without `num_embeddings` any is a row; of duplicates the last one counts.
    `values` are floats [n, embedding_dim], or what can become float32; arrays or tensors, on any device.

    Raises DeltaFormatError for another shape or dtype, a row outside the table, or a value that is not finite.
    """
    where = f"table {table!r}"
    numbers, floats = _array(f"{where}: rows", rows), _array(f"{where}: values", values)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise DeltaFormatError(f"{where}: rows must be flat whole numbers, got {numbers.dtype} {list(numbers.shape)}")
    if numbers.dtype == np.uint64 and (numbers >= 2**63).any():
        raise DeltaFormatError(f"{where}: row {numbers.max()} is beyond any table")
    if floats.dtype.kind != "f":
        raise DeltaFormatError(f"{where}: values must be floats, got {floats.dtype}")
    with np.errstate(over="ignore"):  # what overflows becomes inf and is named by its row
        numbers, floats = numbers.astype(np.int64, copy=False), floats.astype(np.float32, copy=False)
    if floats.shape != (numbers.size, embedding_dim):
        expected = f"expected {[numbers.size, embedding_dim]} for {numbers.size} rows"
        raise DeltaFormatError(f"{where}: values are {list(floats.shape)}, {expected}")
    if num_embeddings is not None and (outside := (numbers < 0) | (numbers >= num_embeddings)).any():
        raise DeltaFormatError(f"{where}: row {numbers[int(outside.argmax())]} is not in 0..{num_embeddings - 1}")
    finite = np.isfinite(floats).all(axis=1)
    if not finite.all():
        bad = numbers[int(finite.argmin())]
        raise DeltaFormatError(f"{where}: row {bad} holds NaN, inf, or a value beyond float32")
    if (numbers[1:] <= numbers[:-1]).any():
        order = np.argsort(numbers, kind="stable")
        in_order = numbers[order]
        last = order[np.append(in_order[1:] != in_order[:-1], True)]
        numbers, floats = numbers[last], floats[last]
    return numbers, floats


def encode_checked(table: TableSpec, floats: Float32Array, where: str, numbers: Int64Array) -> ByteArray:
    """Encode values [m, embedding_dim] as a table stores them: uint8 [m, row_bytes].

    Raises DeltaFormatError, with `where` and the row's number, for values that the table's dtype can't hold.
    """
    slices: list[ByteArray] = []
    for dim, part in zip(table.slice_dims, np.split(floats, _cuts(table.slice_dims), axis=1), strict=True):
        codec = RowCodec(table.dtype, dim)
        stored = codec.encode(part) if numbers.size else np.zeros((0, codec.row_bytes), np.uint8)
        if (bad := codec.first_non_finite(stored)) is not None:
            raise DeltaFormatError(f"{where}: row {numbers[bad]} has values that {table.dtype} can't hold")
        slices.append(stored)
    return slices[0] if len(slices) == 1 else np.concatenate(slices, axis=1)


def _cuts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes))[:-1]


def _array(what: str, given: Any) -> npt.NDArray[Any]:
    if isinstance(given, torch.Tensor):
        # NumPy has no bfloat16.
        return given.detach().to("cpu", torch.float32 if given.is_floating_point() else None).numpy()
    try:
        return np.asarray(given)
    except ValueError as error:  # lists of different lengths
        raise DeltaFormatError(f"{what} are no array: {error}") from error


def rows_per_batch(row_bytes: int) -> int:
    """Return how many rows of that size one delta may hold."""
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // (row_bytes + 8)))


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBatch:
    """One delta of rows (int64 [n], ascending, none twice) and what they are now (uint8 [n, row_bytes]).

    Attributes:
        delta_base: the version that the stream began with; `base_version` that its publisher trains on from.
        published_at: by the publisher's clock, in seconds since the epoch.
        column_dims: of a table in slices, whose stored rows are concatenated in `stored`; else empty.
        operation: of `OPERATIONS`; with keys, `rows` are these, and of keys to delete `stored` is uint8 [n, 0].
    """

    model: str
    delta_base: int
    base_version: int
    sequence: int
    published_at: float
    table: str
    dtype: RowDtype
    embedding_dim: int
    rows: Int64Array
    stored: ByteArray
    column_dims: tuple[int, ...] = ()
    operation: int = WRITE_ROWS

    @property
    def slice_dims(self) -> tuple[int, ...]:
        """Columns of each slice; of an unsliced table, its `embedding_dim`."""
        return self.column_dims or (self.embedding_dim,)

    @property
    def name(self) -> str:
        """For messages."""
        return f"delta {self.sequence} of {self.model!r} from {self.delta_base}"

    def encode(self) -> bytes:
        """Its bytes in format 1. Raises DeltaFormatError if no reader would accept them."""
        self.check()
        if self.operation != WRITE_ROWS:
            raise DeltaFormatError(f"{self.name}: keys need format 2")
        model, table = self.model.encode(), self.table.encode()
        shape = self.rows.size, self.stored.shape[1], self.embedding_dim, DTYPES.index(self.dtype)
        lengths = len(model), len(table), len(self.column_dims), bytes(4)
        header = _HEADER.pack(self.sequence, self.delta_base, self.base_version, self.published_at, *shape, *lengths)
        header += struct.pack(f"<{len(self.column_dims)}I", *self.column_dims) + model + table
        rows, padding = self.rows.astype("<i8", copy=False), bytes(-len(header) % 8)
        body = b"".join([header, padding, rows.tobytes(), self.stored.tobytes()])
        return MAGIC + digest_of(body) + body

    @classmethod
    def decode(cls, payload: bytes) -> DeltaBatch:
        """Read what `encode` wrote; `rows` and `stored` are read-only views of `payload`. Raises DeltaFormatError."""
        if len(payload) < _BODY_START + _HEADER.size or payload[: len(MAGIC)] != MAGIC:
            raise DeltaFormatError(f"{len(payload)} bytes that begin with {payload[:8]!r} are no delta")
        if digest_of(memoryview(payload)[_BODY_START:]) != payload[len(MAGIC) : _BODY_START]:
            raise DeltaFormatError(f"a delta of {len(payload)} bytes does not have the checksum that it states")
        sequence, base, trained_from, published_at, *sizes = _HEADER.unpack_from(payload, _BODY_START)
        count, row_bytes, dim, dtype, model_bytes, table_bytes, num_slices, _ = sizes
        names = _BODY_START + _HEADER.size + 4 * num_slices
        rows = names + model_bytes + table_bytes
        rows += -(rows - _BODY_START) % 8
        stored = rows + 8 * count
        if len(payload) != stored + count * row_bytes:
            raise DeltaFormatError(f"delta {sequence}: {len(payload)} bytes, {stored + count * row_bytes} are stated")
        if dtype >= len(DTYPES):
            raise DeltaFormatError(f"delta {sequence}: dtype {dtype}; allowed is 0..{len(DTYPES) - 1}")
        try:
            model = payload[names : names + model_bytes].decode()
            table = payload[names + model_bytes : names + model_bytes + table_bytes].decode()
        except UnicodeDecodeError as error:
            raise DeltaFormatError(f"delta {sequence}: a name is not UTF-8: {error}") from error
        batch = cls(
            model=model,
            delta_base=base,
            base_version=trained_from,
            sequence=sequence,
            published_at=published_at,
            table=table,
            dtype=DTYPES[dtype],
            embedding_dim=dim,
            rows=np.frombuffer(payload, "<i8", count, rows),
            stored=np.frombuffer(payload, np.uint8, count * row_bytes, stored).reshape(count, row_bytes),
            column_dims=struct.unpack_from(f"<{num_slices}I", payload, _BODY_START + _HEADER.size),
        )
        batch.check()
        return batch

    def check_table(self, *slices: TableSpec) -> None:
        """Raise DeltaFormatError unless these are finite rows that a table has, stored as it stores them.

        `slices` are what the table is stored as, in column order: itself, if it is not sliced.
        """
        where = f"{self.name}: table {self.table!r}"
        dims, table = tuple(part.embedding_dim for part in slices), slices[0]
        if (self.dtype, self.slice_dims) != (table.dtype, dims):
            raise DeltaFormatError(
                f"{where} has {table.dtype} rows of {' + '.join(map(str, dims))}, the delta {self.dtype} of "
                f"{' + '.join(map(str, self.slice_dims))}"
            )
        if (self.operation == WRITE_ROWS) != (table.keys is None):
            has = "no keys" if table.keys is None else "keys"
            raise DeltaFormatError(f"{where} has {has}, the delta has operation {self.operation}")
        if table.keys is None and self.rows[-1] >= table.num_embeddings:
            raise DeltaFormatError(f"{where}: row {self.rows[-1]} is not in 0..{table.num_embeddings - 1}")
        if self.operation == DELETE_KEYS:
            return
        codecs = [RowCodec(self.dtype, dim) for dim in dims]
        parts = np.split(self.stored, _cuts(codec.row_bytes for codec in codecs), axis=1)
        for codec, stored in zip(codecs, parts, strict=True):
            if (bad := codec.first_non_finite(stored)) is not None:
                raise DeltaFormatError(f"{where}: row {self.rows[bad]} holds NaN or inf")

    def check(self) -> None:
        """Raise DeltaFormatError unless every reader accepts it."""
        for what, name in (("model", self.model), ("table", self.table)):
            if _NAME.match(name) is None:
                raise DeltaFormatError(f"delta {self.sequence}: {what} {cut(repr(name))} is not a name")
        for what, number in (("delta_base", self.delta_base), ("base_version", self.base_version)):
            if not 1 <= number < 2**63:
                raise DeltaFormatError(f"{self.name}: {what} {number} is not in [1, 2^63)")
        if not 1 <= self.sequence <= MAX_SEQUENCE:
            raise DeltaFormatError(f"{self.name}: sequence; allowed is 1 to {MAX_SEQUENCE}")
        if not (math.isfinite(self.published_at) and self.published_at >= 0):
            raise DeltaFormatError(f"{self.name}: published_at {self.published_at} is no time")
        if not 1 <= self.embedding_dim <= MAX_EMBEDDING_DIM:
            raise DeltaFormatError(f"{self.name}: embedding_dim {self.embedding_dim} is not in 1..{MAX_EMBEDDING_DIM}")
        dims, columns = self.column_dims, " + ".join(map(str, self.slice_dims))
        if dims and not (2 <= len(dims) <= MAX_COLUMN_SLICES and min(dims) >= 1 and sum(dims) == self.embedding_dim):
            allowed = f"allowed are none, or 2 to {MAX_COLUMN_SLICES} that add up to them"
            raise DeltaFormatError(f"{self.name}: {self.embedding_dim} columns in slices of {cut(columns)}; {allowed}")
        if self.operation not in OPERATIONS:
            raise DeltaFormatError(f"{self.name}: operation {self.operation} is none of {OPERATIONS}")
        row_bytes = sum(RowCodec(self.dtype, dim).row_bytes for dim in self.slice_dims)
        row_bytes = 0 if self.operation == DELETE_KEYS else row_bytes
        if self.stored.dtype != np.uint8 or self.stored.shape != (self.rows.size, row_bytes):
            raise DeltaFormatError(
                f"{self.name}: stored rows are {self.stored.dtype} {list(self.stored.shape)}, {self.rows.size} rows of "
                f"{self.dtype} x {columns} are uint8 {[self.rows.size, row_bytes]}"
            )
        limit = rows_per_batch(row_bytes)
        if not 1 <= self.rows.size <= limit:
            raise DeltaFormatError(f"{self.name}: {self.rows.size} rows of {row_bytes} bytes; allowed is 1 to {limit}")
        is_within = self.operation != WRITE_ROWS or (self.rows[0] >= 0 and self.rows[-1] < MAX_NUM_EMBEDDINGS)
        if not is_within or (self.rows[1:] <= self.rows[:-1]).any():
            raise DeltaFormatError(f"{self.name}: rows must ascend within 0..{MAX_NUM_EMBEDDINGS - 1}, none twice")


def digest_of(content: bytes | memoryview) -> bytes:
    """Return the XXH3-128 of some bytes."""
    return xxhash.xxh3_128_intdigest(content).to_bytes(DIGEST_BYTES, "little")


StoredRows: TypeAlias = tuple[TableSpec, Int64Array, ByteArray]
"""A stored table, rows of it, int64 [n], ascending, none twice, and what they are now, uint8 [n, row_bytes]."""


def stored_updates(
    spec: ModelSpec, name: str, rows: Any, values: Any, classes: RowClasses | None
) -> tuple[list[StoredRows], Int64Array]:
    """Encode changed rows of a table as features see it, or of a part, as rows of stored tables.

    `rows` and `values` are as `checked_rows` takes them; of a divided table the rows of the table, whose parts must all
    have its dim, or be one part only. `classes` are of the table, if it has classes.

    Returns the rows of each stored table, and those that the table is pruned of, int64 [k], which are stored nowhere.
    Raises DeltaFormatError as `checked_rows`, for an unknown table, one whose parts are trained as such, or the row
    that stands for pruned ones.
    """
    tables, divided_tables = {table.name: table for table in spec.tables}, {table.name: table for table in spec.divided}
    nothing = np.zeros(0, np.int64)
    if (divided := divided_tables.get(name)) is None:
        if (table := tables.get(name)) is None:
            names = sorted({*tables, *divided_tables})
            raise DeltaFormatError(f"model {spec.model!r} has no table {name!r}; tables: {names}")
        if table.keys is not None:
            raise DeltaFormatError(f"table {name!r} has keys: upsert or delete them")
        numbers, floats = checked_rows(name, table.num_embeddings, table.embedding_dim, rows, values)
        stored = encode_checked(table, floats, f"table {name!r}", numbers)
        parent, last = spec.divided_of(name), table.num_embeddings - 1
        if parent is not None and parent.pruned and name == parent.parts[-1] and last in numbers[-1:]:
            raise DeltaFormatError(
                f"table {name!r}: row {last} is what pruned rows of {parent.name!r} get, which no update changes; "
                f"allowed is 0..{last - 1}"
            )
        return [(table, numbers, stored)], nothing
    parts = spec.parts(divided)
    if len(parts) > 1 and (
        divided.by == "quotient_remainder" or any(part.embedding_dim != divided.embedding_dim for part in parts)
    ):
        allowed = ", ".join(f"{part.name!r} [n, {part.embedding_dim}]" for part in parts)
        raise DeltaFormatError(
            f"table {divided.name!r}: its parts are trained as such: publish rows of each by its name, by the part's "
            f"own row numbers: {allowed}"
        )
    numbers, floats = checked_rows(name, divided.num_embeddings, parts[0].embedding_dim, rows, values)
    if classes is None:
        return [(parts[0], numbers, encode_checked(parts[0], floats, f"table {name!r}", numbers))], nothing
    class_of_row, row_in_class = classes.find(numbers)
    updates: list[StoredRows] = []
    for number, part in enumerate(parts):
        in_part = class_of_row == number
        if in_part.any():
            stored = encode_checked(part, floats[in_part], f"table {name!r}, part {part.name!r}", numbers[in_part])
            updates.append((part, row_in_class[in_part], stored))
    return updates, numbers[class_of_row == len(parts)]
