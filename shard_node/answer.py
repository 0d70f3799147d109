"""What an owner of rows answers for bags, and how the answers of several owners become one block for each group.

Where bags have hardly more than one value at an owner, adding there saves nothing: the rows travel as they are stored,
in a quarter of the bytes of float32 sums, and whoever asked pools them with the operator that pools rows in memory. So
a score that is made of such rows has the same bits wherever the rows lie. Other bags travel as sums: in float32,
float16, or as int8 rows are stored, with a scale and a bias for each. Which tables' bags are sums follows from two
counts, by `travel_as_stored`; it is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shard_node.bags import Bags, Float32Array, Group, Int64Array, TableLayout
from shard_node.engine.kernels import as_tensor, pack_int8, pool_rows
from shard_node.errors import RemoteError
from shard_node.freshness import UNKNOWN_AGE_MS, FreshnessBound
from shard_node.split import Part, Sums, add, widened

StoredRows: TypeAlias = npt.NDArray[np.uint8]

WIRE_FORMS = ("stored", "int8", "float16", "float32")
"""Of what answers take on the wire, in the order of `Answer.bytes_by_form`."""
SumFormat: TypeAlias = Literal["float32", "float16", "int8"]
INT8_TAIL_BYTES = 8
"""Of an int8 row, beside its codes: the scale and the bias."""
_FLOAT16_INFINITY = 0x7C00
UNKNOWN_SEQUENCE = -1
"""Before any delta, and before the rows of any snapshot: nothing may rely on it."""
NEWEST_SEQUENCE = 2**63 - 1
"""Of an answer that no row is in."""


@dataclass(frozen=True, slots=True)
class ReplyEncoding:
    """What is accepted: rows as they are stored or not, sums in this format or a wider one, rows within `bound`."""

    stored: bool = False
    sums: SumFormat = "float32"
    bound: FreshnessBound | None = None


FLOAT32_SUMS = ReplyEncoding()
NONE_MISSING = np.zeros(0, np.int32)
EXACT = ReplyEncoding(stored=True)
"""What loses nothing: rows as they are stored, and float32 sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one owner answers: for each group of the table layout up to two arrays, in the order of what was asked for.

    `sums` are float32 or float16 [bags, embedding_dim], or int8 rows, uint8 [bags, embedding_dim + 8]; `stored` uint8
    [values, row_bytes] the rows of tables that travel as stored, None if all are among `sums`. `asked_bytes` is the
    length of the frame that it answers, 0 if it came through no socket; `sequence` the last delta that the owner had
    applied before it read its rows, `age_ms` their age (`shard_node.freshness`). `missing`, int32 or int64 [k],
    ascending, are the positions of values whose key has no row.
    """

    sums: Sequence[Sums]
    stored: Sequence[StoredRows] | None = None
    asked_bytes: int = 0
    sequence: int = UNKNOWN_SEQUENCE
    age_ms: int = UNKNOWN_AGE_MS
    missing: npt.NDArray[np.integer[Any]] = field(default_factory=lambda: NONE_MISSING)

    def bytes_by_form(self) -> tuple[int, ...]:
        """Bytes in each of `WIRE_FORMS`: of stored rows, then of sums."""
        sums = {1: 0, 2: 0, 4: 0}
        for one in self.sums:
            sums[one.itemsize] += one.nbytes
        return sum([rows.nbytes for rows in self.stored or ()]), *sums.values()

    def check(self, layout: TableLayout, bags: Bags) -> None:
        """Raise RemoteError, naming the group and both shapes, unless it fits the bags."""
        missing = self.missing
        if missing.size and (missing[0] < 0 or missing[-1] >= bags.num_values or (missing[1:] <= missing[:-1]).any()):
            raise RemoteError(f"the answer's missing keys do not ascend within its {bags.num_values} values")
        for what, arrays in (("sums", self.sums), ("stored rows", self.stored)):
            if arrays is not None and len(arrays) != len(layout.groups):
                raise RemoteError(f"the answer has {what} of {len(arrays)} groups, the model has {len(layout.groups)}")
        starts, values_per_key = bags.bag_starts(), bags.values_per_key()
        for number, (group, first, end) in enumerate(group_keys(layout, bags)):
            num_values, num_sums = 0, int(starts[end] - starts[first])
            if self.stored is not None:
                counts, values = bags.bags_per_key[first:end], values_per_key[first:end]
                is_stored = travel_as_stored(group, values, counts)
                num_values, num_sums = int(values.dot(is_stored)), num_sums - int(counts.dot(is_stored))
            sums = self.sums[number]
            row_size = group.embedding_dim + (INT8_TAIL_BYTES if sums.dtype == np.uint8 else 0)
            what, actual, shape = "sums", sums.shape, (num_sums, row_size)
            if actual == shape and self.stored is not None:
                what, actual, shape = "stored rows", self.stored[number].shape, (num_values, group.row_bytes)
            if actual != shape:
                raise RemoteError(f"the answer's {what} of group {number} are {list(actual)}, not {list(shape)}")


def travel_as_stored(group: Group, values_per_key: Int64Array, bags_per_key: Int64Array) -> npt.NDArray[np.bool_]:
    """Tell of each key, a table of the group, whether its rows travel as they are stored: bool [S].

    They do where that takes no more bytes than float16 sums, and where there is no more than one value for each bag.
    """
    return values_per_key * group.row_bytes <= bags_per_key * max(group.row_bytes, 2 * group.embedding_dim)


def group_keys(layout: TableLayout, bags: Bags) -> list[tuple[Group, int, int]]:
    """Return each group of tables with its keys [first, end) in bags of tables."""
    if len(layout.groups) == 1:
        return [(layout.groups[0], 0, bags.keys.size)]
    edges = bags.keys.searchsorted([group.first_table for group in layout.groups] + [len(layout.tables)]).tolist()
    return list(zip(layout.groups, edges[:-1], edges[1:], strict=True))


def rounded(sums: Float32Array, to: SumFormat) -> Sums:
    """Return sums in a format; in a wider one where it has no number as large, or a narrower takes no fewer bytes."""
    if not sums.size or to == "float32":
        return sums
    if to == "int8" and sums.shape[1] > INT8_TAIL_BYTES:
        rows = pack_int8(sums)
        if np.isfinite(rows[:, sums.shape[1] :].view(np.float32)).all():
            return rows
    half: npt.NDArray[np.float16] = torch.from_numpy(sums).half().numpy()
    # The largest bits of either sign: below infinity's all are numbers.
    bits = half.reshape(-1)
    positive, negative = np.maximum.reduce(bits.view(np.int16)), np.maximum.reduce(bits.view(np.uint16))
    is_finite = positive < _FLOAT16_INFINITY and negative < _FLOAT16_INFINITY | 0x8000
    return half if is_finite else sums


def add_answers(
    layout: TableLayout, bags: Bags, parts: Sequence[Part], answers: Sequence[Answer]
) -> list[Float32Array]:
    """Add what the owners of parts answered into blocks: float32 [bags, embedding_dim] for each group.

    Stored rows are weighted here, sums were where they come from. Within a bag stored rows are added in the order of
    the bag's values. `bags` are unsplit, keys are tables; `parts` what `split` made of them; `answers` are checked.
    """
    keys_of_parts = [group_keys(layout, part.bags) for part in parts]
    starts_of_parts = [(part.bags.bag_starts(), part.bags.value_starts()) for part in parts]
    bag_starts = bags.bag_starts()
    blocks = []
    for number, (group, first_key, end_key) in enumerate(group_keys(layout, bags)):
        first, end = bag_starts[[first_key, end_key]].tolist()
        # Stored rows, uint8 [n, row_bytes], and which value of the bags each of them is; sums, and which bag each is.
        rows: list[StoredRows] = []
        values: list[Int64Array] = []
        summed: list[tuple[Int64Array, Sums]] = []
        for part, answer, keys, (starts, value_starts) in zip(
            parts, answers, keys_of_parts, starts_of_parts, strict=True
        ):
            _, key, last_key = keys[number]
            if key == last_key:
                continue
            of_part = part.bags
            sums, index = answer.sums[number], part.bag_index[starts[key] : starts[last_key]]
            if answer.stored is not None and len(sums) < index.size:
                positions = part.positions[value_starts[key] : value_starts[last_key]]
                if len(sums):
                    counts, num_values = of_part.bags_per_key[key:last_key], of_part.values_per_key()[key:last_key]
                    is_stored = travel_as_stored(group, num_values, counts)
                    positions = positions[is_stored.repeat(num_values)]
                    index = index[~is_stored.repeat(counts)]
                if len(answer.stored[number]):
                    rows.append(answer.stored[number])
                    values.append(positions)
            if len(sums):
                summed.append((index, sums))
        if rows:
            joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
            block = _pool_stored(group, joined, np.concatenate(values), bags, first, end)
            for index, sums in summed:
                at = torch.from_numpy(index - first)
                torch.from_numpy(block).index_add_(0, at, torch.from_numpy(widened(sums)))
        else:
            share_no_bag = all(part.shares_no_bag for part in parts)
            block = add(summed, end - first, group.embedding_dim, first, share_no_bag=share_no_bag)
        blocks.append(block)
    return blocks


def _pool_stored(group: Group, rows: StoredRows, values: Int64Array, bags: Bags, first: int, end: int) -> Float32Array:
    """Pool stored rows of these values as if they were an arena's, of bags [first, end); others give zeros."""
    offsets, weights = bags.offsets[first : end + 1], bags.weights
    first_value, num_values = int(offsets[0]), int(offsets[-1] - offsets[0])
    if values.size == num_values:
        # Every value came as its row: they only have to be put into the order of the values.
        slots = np.empty(num_values, np.int64)
        slots[values - first_value if first_value else values] = np.arange(num_values)
        offsets = offsets - first_value if first_value else offsets
        weights = None if weights is None else weights[first_value : first_value + num_values]
    else:
        slots = values.argsort(kind="stable")
        in_order = values[slots]
        offsets = in_order.searchsorted(offsets)
        weights = None if weights is None else weights[in_order]
    return pool_rows(group.dtype, as_tensor(group.dtype, rows), slots, offsets, weights)
