"""From a trainer's float32 rows to stored ones: the same bytes that an export of those rows would store."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.codecs import ByteArray, Float32Array, codec_for
from loader.errors import DeltaFormatError
from loader.manifest import TableSpec

Int64Array = npt.NDArray[np.int64]


def encode_rows(table: TableSpec, rows: Any, values: Any) -> tuple[Int64Array, ByteArray]:
    """Encodes changed rows.

    Args:
        table: the table.
        rows: whole numbers [n], in any order. Of a row that is there twice, the last one counts.
        values: floats [n, embedding_dim]; float32, or what can become it. Arrays or tensors, on any device.

    Returns:
        int64 [m], the rows, ascending, none twice; and uint8 [m, row_bytes].

    Raises:
        DeltaFormatError: another shape or dtype, a row outside the table, or a value that is not finite or that the
            table's dtype can't hold.
    """
    where = f"table {table.name!r}"
    numbers, floats = _row_numbers(where, rows), _floats(where, values)
    if floats.shape != (numbers.size, table.embedding_dim):
        raise DeltaFormatError(
            f"{where}: values are {list(floats.shape)}, expected {[numbers.size, table.embedding_dim]} for "
            f"{numbers.size} rows"
        )
    outside = (numbers < 0) | (numbers >= table.num_embeddings)
    if outside.any():
        wrong = numbers[int(outside.argmax())]
        raise DeltaFormatError(f"{where}: row {wrong} is not in 0..{table.num_embeddings - 1}")
    finite = np.isfinite(floats).all(axis=1)
    if not finite.all():
        raise DeltaFormatError(
            f"{where}: row {numbers[int(finite.argmin())]} holds NaN, inf, or a value beyond float32"
        )
    if (numbers[1:] <= numbers[:-1]).any():
        last = _last_of_each(numbers)
        numbers, floats = numbers[last], floats[last]
    codec = codec_for(table.dtype, table.embedding_dim)
    stored = codec.encode(floats) if numbers.size else np.zeros((0, codec.row_bytes), np.uint8)
    if (bad := codec.first_non_finite(stored)) is not None:
        raise DeltaFormatError(f"{where}: row {numbers[bad]} has values that {table.dtype} can't hold")
    return numbers, stored


def _row_numbers(where: str, rows: Any) -> Int64Array:
    numbers = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else _array(f"{where}: rows", rows)
    if numbers.size == 0 and numbers.ndim == 1:
        return np.zeros(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise DeltaFormatError(f"{where}: rows must be flat whole numbers, got {numbers.dtype} {list(numbers.shape)}")
    if numbers.dtype == np.uint64 and (numbers >= 2**63).any():
        raise DeltaFormatError(f"{where}: row {numbers.max()} is beyond any table")
    return numbers.astype(np.int64, copy=False)


def _floats(where: str, values: Any) -> Float32Array:
    if isinstance(values, torch.Tensor):
        if not values.is_floating_point():
            raise DeltaFormatError(f"{where}: values must be floats, got {values.dtype}")
        floats: Float32Array = values.detach().to("cpu", torch.float32).numpy()
        return floats
    array = _array(f"{where}: values", values)
    if array.dtype.kind != "f":
        raise DeltaFormatError(f"{where}: values must be floats, got {array.dtype}")
    with np.errstate(over="ignore"):  # what overflows becomes inf and is named by its row
        return array.astype(np.float32, copy=False)


def _array(what: str, given: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(given)
    except ValueError as error:  # lists of different lengths
        raise DeltaFormatError(f"{what} are no array: {error}") from error


def _last_of_each(numbers: Int64Array) -> Int64Array:
    """Positions of the last one of each number, by ascending number."""
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    last: Int64Array = order[np.append(in_order[1:] != in_order[:-1], True)]
    return last
