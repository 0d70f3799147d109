"""Where pooled bags go: for each key of a batch its table, how it is pooled, and the elements that it is written to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import MODES, OUT_BYTES, OutDtype
from shard_node.errors import InvalidBagsError

MAX_BATCH_VALUES = 2**31 - 1
"""Positions are uint32 on cards, and kernels look some way ahead of the last one, which must not wrap around."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputRuns:
    """One run for each key of the batches to come; several keys may share a table.

    Bag i of key k is written to elements out_offsets[k] + i * out_strides[k] and on, embedding_dim of them. With mode
    `none` that is said of its values in place of its bags.

    Attributes:
        tables: int64 [S], numbers in the layout.
        modes: int64 [S], each of `kernel_params.MODES`.
        out_offsets: int64 [S].
        out_strides: int64 [S].
        out_dtype: of every element.
        out_elements: of the whole output.
    """

    tables: Int64Array
    modes: Int64Array
    out_offsets: Int64Array
    out_strides: Int64Array
    out_dtype: OutDtype
    out_elements: int

    @property
    def out_bytes(self) -> int:
        """Of the whole output."""
        return self.out_elements * OUT_BYTES[self.out_dtype]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSize:
    """The largest batch that something is made for.

    Attributes:
        bags_per_key: int64 [S].
        num_values: of all keys together.
        weighted: whether there may be weights; a batch without any then has all ones.
        extra_bytes: that the caller sends along with each batch.
    """

    bags_per_key: Int64Array
    num_values: int
    weighted: bool = False
    extra_bytes: int = 0


def check_runs(layout: TableLayout, runs: OutputRuns, size: BatchSize) -> None:
    """Checks that nothing of the largest batch is written outside the output.

    Raises:
        InvalidBagsError: naming the array or the key, and what is allowed.
    """
    shapes = {
        "tables": runs.tables.shape,
        "modes": runs.modes.shape,
        "out_offsets": runs.out_offsets.shape,
        "out_strides": runs.out_strides.shape,
        "bags_per_key": size.bags_per_key.shape,
    }
    if len(set(shapes.values())) != 1 or len(shapes["tables"]) != 1:
        raise InvalidBagsError(f"these must be flat and of one length: {shapes}")
    if not 0 <= size.num_values <= MAX_BATCH_VALUES or int(size.bags_per_key.sum()) >= MAX_BATCH_VALUES:
        raise InvalidBagsError(f"a batch has at most {MAX_BATCH_VALUES} values and fewer bags, got {size}")
    _check_range("tables", runs.tables, len(layout.tables))
    _check_range("modes", runs.modes, len(MODES))
    _check_range("bags_per_key", size.bags_per_key, MAX_BATCH_VALUES)
    dims = np.array([table.embedding_dim for table in layout.tables], np.int64)[runs.tables]
    most = np.where(runs.modes == MODES["none"], size.num_values, size.bags_per_key)
    used = most > 0
    if (runs.out_offsets[used] < 0).any() or ((runs.out_strides < dims) & (most > 1)).any():
        raise InvalidBagsError("out_offsets must not be negative, out_strides not below the table's embedding_dim")
    # As Python integers: a product of two int64 could wrap around.
    for key in np.flatnonzero(used).tolist():
        end = int(runs.out_offsets[key]) + (int(most[key]) - 1) * int(runs.out_strides[key]) + int(dims[key])
        if end > runs.out_elements:
            raise InvalidBagsError(f"key {key}: its last bag ends at element {end} of {runs.out_elements}")


def _check_range(name: str, numbers: Int64Array, limit: int) -> None:
    if ((numbers < 0) | (numbers >= limit)).any():
        raise InvalidBagsError(f"{name} must be within 0..{limit - 1}, got {numbers.tolist()}")
