"""The torch calls that pool stored rows: one for each row dtype, for rows in an arena and for rows that just came."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from loader.snapshot.tables import RowDtype
from shard_node.bags import Float32Array, Int64Array

# torch warns, once a process, of memory that is read-only, such as offsets that requests of one shape share.
# It never writes to what it pools.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

# Gathered fp16 rows are widened to float32 before they are summed: so many bytes at a time stay in a core's cache.
FP16_GATHER_BYTES = 2 << 20


def _pool_fp32(
    rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(
        slots, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def _pool_fp16(
    rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    # torch's half embedding_bag rounds its sum to half, which overflows at 65504 and would be rounded once per part.
    # So rows are widened first, in chunks of whole bags that a cache holds, and of single rows if a bag is longer.
    chunk = max(1, FP16_GATHER_BYTES // (rows.shape[1] * 4))
    count = slots.numel()
    if count <= chunk:
        numbers = torch.arange(count, dtype=offsets.dtype)
        return _pool_fp32(rows.index_select(0, slots).float(), numbers, offsets, weights)
    ends = offsets.numpy()
    edges = np.unique(np.append(np.searchsorted(ends, np.arange(0, count, chunk), side="right") - 1, ends.size - 1))
    longest = int(np.diff(ends[edges]).max())
    if longest > 2 * chunk:
        return _pool_long_bags(rows, slots, offsets, weights, chunk)
    out = torch.empty(ends.size - 1, rows.shape[1])
    numbers = torch.arange(longest, dtype=offsets.dtype)
    half, wide = (torch.empty(longest, rows.shape[1], dtype=dtype) for dtype in (torch.float16, torch.float32))
    for bag, end_bag in pairwise(edges.tolist()):
        first, end = int(ends[bag]), int(ends[end_bag])
        size = end - first
        torch.index_select(rows, 0, slots[first:end], out=half[:size])
        factors = None if weights is None else weights[first:end]
        own = offsets[bag : end_bag + 1] - first
        out[bag:end_bag] = _pool_fp32(wide[:size].copy_(half[:size]), numbers[:size], own, factors)
    return out


def _pool_long_bags(
    rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, chunk: int
) -> torch.Tensor:
    out = torch.zeros(offsets.numel() - 1, rows.shape[1])
    bag_of_value = torch.repeat_interleave(torch.diff(offsets))
    for begin in range(0, slots.numel(), chunk):
        gathered = rows[slots[begin : begin + chunk]].float()
        if weights is not None:
            gathered *= weights[begin : begin + chunk, None]
        out.index_add_(0, bag_of_value[begin : begin + chunk], gathered)
    return out


_QUANTISED: dict[RowDtype, Callable[..., torch.Tensor]] = {
    "int8": torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default,
    "int4": torch.ops.quantized.embedding_bag_4bit_rowwise_offsets.default,
}


def pack_int8(rows: Float32Array) -> npt.NDArray[np.uint8]:
    """Store float32 [n, dim] as int8 rows, uint8 [n, dim + 8]. A row whose range is infinite gets an infinite scale."""
    packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack.default(torch.from_numpy(rows))
    return packed.numpy()


def unpack_int8(rows: npt.NDArray[np.uint8]) -> Float32Array:
    """Return int8 rows, uint8 [n, dim + 8], as float32 [n, dim]."""
    unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack.default(torch.from_numpy(rows))
    return unpacked.numpy()


def as_tensor(dtype: RowDtype, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
    """View stored rows, uint8 [slots, row_bytes], contiguous, as what `pool_rows` reads."""
    tensor = torch.from_numpy(rows)
    if dtype in ("fp16", "fp32"):
        tensor = tensor.view(torch.float16 if dtype == "fp16" else torch.float32)
    return tensor


def pool_rows(
    dtype: RowDtype, rows: torch.Tensor, slots: Int64Array, offsets: Int64Array, weights: Float32Array | None
) -> Float32Array:
    """Sum the rows of each bag, float32 [b, embedding_dim].

    `rows` are as of `as_tensor`, at least one; `slots` int64 or int32 [n], positions in them that the caller has
    checked; `offsets` int64 or int32 [b + 1], beginning with 0; `weights` float32 [n] or None.
    """
    # The operators want one dtype of both.
    offsets = offsets.astype(slots.dtype, copy=False)
    factors = None if weights is None else torch.from_numpy(weights)
    at, ends = torch.from_numpy(slots), torch.from_numpy(offsets)
    if (op := _QUANTISED.get(dtype)) is not None:
        # Positional: scale_grad_by_freq, mode (ignored by the op: it sums), pruned_weights, per_sample_weights,
        # compressed_indices_mapping, include_last_offset.
        pooled = op(rows, at, ends, False, 0, False, factors, None, True)
    else:
        pooled = (_pool_fp16 if dtype == "fp16" else _pool_fp32)(rows, at, ends, factors)
    return pooled.numpy()
