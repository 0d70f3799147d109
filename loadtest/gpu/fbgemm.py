"""FBGEMM's inference lookup of int8 rows, as others serve them: an opponent of the kernel, where its libraries are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from loadtest.gpu.rows import OwnedMemory, RowsOnCard
from shard_node.cuda.kernel_params import OutDtype, round_up

LIBRARIES = ("asmjit", "fbgemm", "fbgemm_gpu_config", "fbgemm_gpu_tbe_cache", "fbgemm_gpu_tbe_inference")
"""In the order in which they need each other; of `fbgemm_gpu` 1.6.0, which is built for torch 2.11."""
ROW_ALIGNMENT = 16
# Numbers of FBGEMM: SparseType for what rows are and what is written, EmbeddingLocation, PoolingMode.
_INT8, _ON_DEVICE, _ON_HOST, _SUM = 2, 0, 3, 0
_OUT: dict[OutDtype, int] = {"fp32": 0, "fp16": 1}
_SCALE_BIAS_BYTES = 4
_PIECE_ROWS = 1 << 21
Pool = Callable[[torch.Tensor], torch.Tensor]
"""Takes the values of a batch, int32 [batch * hotness], and returns [batch, dim]."""


def load(folder: Path) -> str | None:
    """Load its libraries. Return what is missing, for people; None if nothing is."""
    for name in LIBRARIES:
        path = folder / f"{name}.so"
        if not path.exists():
            return f"{path} is not there"
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:  # Made for another torch, or another CUDA.
            return f"{path} can't be loaded: {error}"
    return None


class Table(OwnedMemory):
    """The card's first rows as FBGEMM lays them out: fp16 scale, fp16 bias, then codes, padded to 16 bytes."""

    def __init__(self, rows: RowsOnCard, count: int, dtype: OutDtype) -> None:
        super().__init__(rows.stream)
        self._dim, self._out, device = rows.embedding_dim, _OUT[dtype], rows.card.torch_device
        stride = round_up(_SCALE_BIAS_BYTES + self._dim, ROW_ALIGNMENT)
        memory = self.own(rows.card.allocate(count * stride))
        self._weights = rows.card.tensor(memory, 0, (count * stride,), torch.uint8)
        with rows.card.torch_stream(rows.stream):
            for first in range(0, count, _PIECE_ROWS):
                codes, scale_bias = rows.parts(first, min(_PIECE_ROWS, count - first))
                laid = self._weights.view(count, stride)[first : first + codes.shape[0]]
                laid[:, :_SCALE_BIAS_BYTES] = scale_bias.half().view(torch.uint8)
                laid[:, _SCALE_BIAS_BYTES : _SCALE_BIAS_BYTES + self._dim] = codes
                laid[:, _SCALE_BIAS_BYTES + self._dim :] = 0
            self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
            placement = _ON_DEVICE if device.type == "cuda" else _ON_HOST
            self._placements = torch.tensor([placement], dtype=torch.int32, device=device)
            self._begin = torch.zeros(1, dtype=torch.int64, device=device)
            self._types = torch.tensor([_INT8], dtype=torch.uint8, device=device)
            self._columns = torch.tensor([0, self._dim], dtype=torch.int32, device=device)
            self._no_locations = torch.empty(0, dtype=torch.int32, device=device)
        rows.stream.synchronize()

    def pooling(self, batch: int, hotness: int) -> Pool:
        """Make what pools `batch` bags of `hotness` rows."""
        device = self._weights.device
        offsets = torch.arange(0, batch * hotness + 1, hotness, dtype=torch.int32, device=device)

        def pool(values: torch.Tensor) -> torch.Tensor:
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
                indices=values,
                offsets=offsets,
                pooling_mode=_SUM,
                indice_weights=None,
                output_dtype=self._out,
                lxu_cache_weights=self._no_bytes.view(0, 0),
                lxu_cache_locations=self._no_locations,
                row_alignment=ROW_ALIGNMENT,
            )
            return pooled

        return pool
