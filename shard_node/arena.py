"""Arenas: contiguous rows of one (embedding_dim, dtype), pooled by one torch call.

An arena is either RAM that one card holds (in huge pages where the kernel gives them: random rows of a 2 GB table cost
a third less) or one row file of the snapshot, read where it lies through the page cache.
"""

from __future__ import annotations

import logging
import mmap
import warnings
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loader.codecs import codec_for
from loader.manifest import RowDtype
from loader.resident_memory import give_back
from shard_node.bags import Float32Array, Int64Array
from shard_node.engine import Tier

logger = logging.getLogger(__name__)

# torch warns, once a process, of memory that is read-only: mapped rows, or offsets that requests of one shape share.
# It never writes to what it pools.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

HUGE_PAGE_BYTES = 2 << 20
# Gathered fp16 rows are widened to float32 before they are summed; this bounds the memory that takes.
FP16_GATHER_BYTES = 8 << 20

Kernel: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Arena:
    """Rows of one width and dtype, and the call that pools them.

    Args:
        dtype: the rows' dtype.
        embedding_dim: the rows' width in elements.
        rows: uint8 [slots, row_bytes], contiguous; kept, not copied. Read-only ones can't be written later.
        card: the card that it belongs to.
        tier: where the rows are.
    """

    def __init__(self, dtype: RowDtype, embedding_dim: int, rows: npt.NDArray[np.uint8], card: int, tier: Tier) -> None:
        self.card = card
        self.tier = tier
        self.size_bytes = rows.nbytes
        self._kernel = _KERNELS[dtype]
        self._embedding_dim = embedding_dim
        self._bytes = rows
        # One item per row: NumPy copies such whole, several times faster than bytes.
        self._items = rows.view(f"V{rows.shape[1]}").reshape(-1)
        tensor = torch.from_numpy(rows)
        if dtype in ("fp16", "fp32"):
            tensor = tensor.view(torch.float16 if dtype == "fp16" else torch.float32)
        self._rows = tensor

    def pool(self, slots: Int64Array, offsets: Int64Array, weights: Float32Array | None) -> Float32Array:
        """Sums the rows of each bag.

        Args:
            slots: int64 [n], positions in this arena; the caller has checked them.
            offsets: int64 [b + 1], beginning with 0.
            weights: float32 [n] or None.

        Returns:
            float32 [b, embedding_dim].
        """
        if offsets.size == 1:
            return np.zeros((0, self._embedding_dim), np.float32)
        if not slots.size:
            return np.zeros((offsets.size - 1, self._embedding_dim), np.float32)
        pooled = self._kernel(
            self._rows,
            torch.from_numpy(slots),
            torch.from_numpy(offsets),
            None if weights is None else torch.from_numpy(weights),
        )
        out: Float32Array = pooled.numpy()
        return out

    def touch(self, slots: Int64Array) -> None:
        """Has the pages of these slots in memory, as this arena's own, so that `write` is but a copy.

        Every row's first and last byte is written as it is: no reader sees a difference, but another writer might.
        """
        if self.tier == "mapped":
            for column in (0, -1):
                edge = self._bytes[:, column]
                edge[slots] = edge[slots]

    def write(self, slots: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        """Replaces rows. Nobody may pool meanwhile.

        Args:
            slots: int64 [n], positions in this arena; the caller has checked them.
            stored: uint8 [n, row_bytes], contiguous.
        """
        self._items[slots] = stored.view(self._items.dtype).reshape(-1)

    def free(self) -> None:
        """Gives the rows' memory back, a piece at a time and without the interpreter lock. Nobody may need them."""
        if self.tier == "ram" and self._bytes.nbytes >= HUGE_PAGE_BYTES:
            give_back(self._bytes)


def allocate_rows(num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory for rows, uint8 [num_rows, row_bytes], in huge pages where the kernel grants them.

    It is private anonymous memory, given back to the system when the last view of it is gone.
    """
    size_bytes = num_rows * row_bytes
    if size_bytes < HUGE_PAGE_BYTES:
        return np.zeros((num_rows, row_bytes), np.uint8)
    padded = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, padded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # A kernel built without transparent huge pages says EINVAL; small pages hold the same rows.
        logger.info("no huge pages for %d bytes of rows: %s", size_bytes, error)
    return np.frombuffer(memory, np.uint8, count=size_bytes).reshape(num_rows, row_bytes)


def row_bytes_of(dtype: RowDtype, embedding_dim: int) -> int:
    """Bytes of one stored row."""
    return codec_for(dtype, embedding_dim).row_bytes


def _quantised(op: Callable[..., torch.Tensor]) -> Kernel:
    def pool(
        rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        # Positional: scale_grad_by_freq, mode (ignored by the op: it sums), pruned_weights, per_sample_weights,
        # compressed_indices_mapping, include_last_offset.
        return op(rows, slots, offsets, False, 0, False, weights, None, True)

    return pool


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
    # So rows are widened first, in chunks of whole bags where that fits and of single rows where a bag is longer.
    chunk = max(1, FP16_GATHER_BYTES // (rows.shape[1] * 4))
    if slots.numel() <= chunk:
        return _pool_fp32(rows[slots].float(), torch.arange(slots.numel()), offsets, weights)
    out = torch.zeros(offsets.numel() - 1, rows.shape[1])
    bag_of_value = torch.repeat_interleave(torch.diff(offsets))
    for begin in range(0, slots.numel(), chunk):
        gathered = rows[slots[begin : begin + chunk]].float()
        if weights is not None:
            gathered *= weights[begin : begin + chunk, None]
        out.index_add_(0, bag_of_value[begin : begin + chunk], gathered)
    return out


_KERNELS: dict[RowDtype, Kernel] = {
    "int8": _quantised(torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default),
    "int4": _quantised(torch.ops.quantized.embedding_bag_4bit_rowwise_offsets.default),
    "fp16": _pool_fp16,
    "fp32": _pool_fp32,
}
