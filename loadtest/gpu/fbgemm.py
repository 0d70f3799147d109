"""FBGEMM's inference lookup of int8 rows: a peer of the pooling kernel, where its libraries are."""

from __future__ import annotations

from pathlib import Path

import torch

from loadtest.gpu.rows import MemoryStack, RowsOnCard
from shard_node.cuda.kernel_params import round_up

LIBRARIES = ("asmjit", "fbgemm", "fbgemm_gpu_config", "fbgemm_gpu_tbe_cache", "fbgemm_gpu_tbe_inference")
"""In the order in which they need each other; of `fbgemm_gpu` 1.6.0, which is built for torch 2.11."""
ROW_ALIGNMENT = 16
# Numbers of FBGEMM: SparseType of rows and sums, EmbeddingLocation, PoolingMode.
_INT8, _FP16, _ON_DEVICE, _ON_HOST, _SUM = 2, 1, 0, 3, 0
_SCALE_BIAS_BYTES = 4
_PIECE_ROWS = 1 << 21


class LibraryError(Exception):
    """FBGEMM's libraries are missing, or don't work here."""


class Table(MemoryStack):
    """The rows in FBGEMM's layout: fp16 scale, fp16 bias, then codes, padded to 16 bytes. Raises LibraryError."""

    def __init__(self, rows: RowsOnCard, folder: Path) -> None:
        super().__init__(rows.card, rows.stream)
        try:
            for name in LIBRARIES:
                torch.ops.load_library(folder / f"{name}.so")  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise LibraryError(str(error)) from error
        count = rows.count
        self._dim, device = rows.embedding_dim, rows.card.torch_device
        stride = round_up(_SCALE_BIAS_BYTES + self._dim, ROW_ALIGNMENT)
        self._weights = rows.card.tensor(self.allocate(count * stride), 0, (count * stride,), torch.uint8)
        with rows.card.torch_stream(rows.stream):
            for first in range(0, count, _PIECE_ROWS):
                stored, scale_bias = rows.stored(first, min(_PIECE_ROWS, count - first))
                piece = self._weights.view(count, stride)[first : first + stored.shape[0]].zero_()
                piece[:, :_SCALE_BIAS_BYTES] = scale_bias.half().view(torch.uint8)
                piece[:, _SCALE_BIAS_BYTES : _SCALE_BIAS_BYTES + self._dim] = stored[:, : self._dim]
            self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
            placement = _ON_DEVICE if device.type == "cuda" else _ON_HOST
            self._placements = torch.tensor([placement], dtype=torch.int32, device=device)
            self._begin = torch.zeros(1, dtype=torch.int64, device=device)
            self._types = torch.tensor([_INT8], dtype=torch.uint8, device=device)
            self._columns = torch.tensor([0, self._dim], dtype=torch.int32, device=device)
            self._no_locations = torch.empty(0, dtype=torch.int32, device=device)
            try:
                self.pool(self._columns[:1], self._columns.clamp(max=1))
            except RuntimeError as error:
                raise LibraryError(f"its lookup can't be called: {error}") from error
        rows.stream.synchronize()

    def pool(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the sums of bags, float16 [batch, dim]."""
        pooled: torch.Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self._weights,
            uvm_weights=self._no_bytes,
            weights_placements=self._placements,
            weights_offsets=self._begin,
            weights_tys=self._types,
            D_offsets=self._columns,
            total_D=self._dim,
            max_int2_D=0,
            max_int4_D=0,
            max_int8_D=self._dim,
            max_float16_D=0,
            max_float32_D=0,
            indices=ids,
            offsets=offsets,
            pooling_mode=_SUM,
            indice_weights=None,
            output_dtype=_FP16,
            lxu_cache_weights=self._no_bytes.view(0, 0),
            lxu_cache_locations=self._no_locations,
            row_alignment=ROW_ALIGNMENT,
        )
        return pooled
