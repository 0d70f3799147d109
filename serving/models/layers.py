"""The layers of ranking models: linear maps whose context part is multiplied once a request, made ready for scoring.

`Linear` trains as PyTorch's does. `pack` makes it ready on one device, in one of three number formats: its columns go
in the order of the inputs, and on the CPU its weights in that of oneDNN's kernels, or into int8.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from serving.description import NumberFormat
from serving.errors import RankingModelError

CPU: Final = torch.device("cpu")
DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
Columns: TypeAlias = npt.NDArray[np.int64]
"""For each column that is read the column of the trained weights, or -1 for one that is always zero."""

MIN_INT8_INPUTS: Final = 512
MIN_INT8_OUTPUTS: Final = 128
"""Below, quantising the inputs and scaling the sums costs what the product gains. Measured with AVX-512 VNNI, against
bfloat16, 832 rows: 1,696 to 256 in 2.72 ms for 3.49; 416 to 256 in 0.72 for 0.79, and 112 rows in 0.136 for 0.128."""
INT8_ROWS: Final = 256
"""Rows are worked on so many at a time, in memory that stays in the cache."""
MAX_CODE: Final = 127.0
MIN_MAGNITUDE: Final = 1e-30
_NO_SCALARS: list[Any] = []


class Shared(NamedTuple):
    """What a layer reads of each request: context columns [R, Kc], and int64 [N], which request each row is of."""

    context: Tensor
    owner: Tensor


class PlainProduct:
    """PyTorch's: on any device, with gradients."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        if more is None or more.dim() == 1:
            y = F.linear(x, self._weight, more)
        else:
            y = torch.addmm(more, x, self._weight.t())
        return F.relu_(y) if relu else y


class PackedProduct:
    """By oneDNN, with weights in its order: plain products put them there each time, which costs 4 to 6 %.

    PyTorch's compiler packs with the same operators (torch/_inductor/fx_passes/mkldnn_fusion.py).
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        if more is None or more.dim() == 1:
            return self._linear(x, self._weight, more, "relu" if relu else "none", _NO_SCALARS, "")
        y = self._linear(x, self._weight, None, "none", _NO_SCALARS, "").add_(more)
        return F.relu_(y) if relu else y


class _Scratch(threading.local):
    """Memory for what a product works out on the way, one for each thread: fresh memory would cost a third more."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def matrix(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return memory for INT8_ROWS rows at most, undefined, the same for the same width and dtype."""
        kept = self._kept.get((width, dtype))
        if kept is None:
            kept = self._kept[width, dtype] = torch.empty(INT8_ROWS, width, dtype=dtype)
        return kept[:rows]


_SCRATCH = _Scratch()


class Int8Product:
    """Sums of int8 products in int32: a scale for each row of weights and, found anew, for each row of inputs.

    Both are symmetric: value = code * scale, with codes in -127..127. The result has the inputs' dtype. There must be
    two inputs or more: of one `_int_mm` makes nonsense (torch 2.13).
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.float()
        self._scales = weight.abs().amax(1).clamp_(min=MIN_MAGNITUDE) / MAX_CODE
        self._codes = (weight / self._scales[:, None]).round_().to(torch.int8).t()

    def __call__(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        if x.shape[0] <= INT8_ROWS:
            return self._product(x, more, relu).to(x.dtype, copy=True)
        blocks = torch.split(x, INT8_ROWS)
        added = itertools.repeat(more, len(blocks)) if more is None or more.dim() == 1 else torch.split(more, INT8_ROWS)
        return torch.cat(
            [self._product(*block, relu).to(x.dtype, copy=True) for block in zip(blocks, added, strict=True)]
        )

    def _product(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product of INT8_ROWS rows at most, float32, in memory that the next one overwrites."""
        (rows, width), outputs = x.shape, self._scales.numel()
        scaled, codes = _SCRATCH.matrix(rows, width, torch.float32), _SCRATCH.matrix(rows, width, torch.int8)
        # The largest magnitude of each row, float32 [N, 1].
        if x.dtype is torch.bfloat16:
            # Without their signs, floats are in the order of their bits, and whole numbers are compared much faster.
            bits = torch.bitwise_and(x.view(torch.int16), 0x7FFF, out=_SCRATCH.matrix(rows, width, torch.int16))
            largest = bits.amax(1, keepdim=True).view(torch.bfloat16).float()
        else:
            largest = torch.abs(x, out=_SCRATCH.matrix(rows, width, torch.float32)).amax(1, keepdim=True)
        largest.clamp_(min=MIN_MAGNITUDE)
        codes.copy_(scaled.copy_(x).mul_(MAX_CODE / largest).round_())
        sums = torch._int_mm(codes, self._codes, out=_SCRATCH.matrix(rows, outputs, torch.int32))
        y = _SCRATCH.matrix(rows, outputs, torch.float32)
        torch.mul(sums, largest / MAX_CODE, out=y).mul_(self._scales)
        if more is not None:
            y.add_(more)
        return F.relu_(y) if relu else y


Product: TypeAlias = PlainProduct | PackedProduct | Int8Product
"""Returns x W^T + more, [..., out], of weights that were made ready; max(0, .) of it with `relu`.

`more` is a bias, [out]; or, of x [N, in], a row for each, [N, out], which may be overwritten.
"""


def can_pack(weight: Tensor) -> bool:
    """Return whether products with these weights can be made ready: on this CPU, by this build of PyTorch."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def bfloat16_is_native() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices in hardware; emulated, they would be slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    # On x86 oneDNN counts any AVX-512 as support, which includes emulation.
    in_hardware = capabilities["architecture"] != "x86_64" or capabilities["avx512_bf16"] or capabilities["amx_bf16"]
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and in_hardware)


def int8_is_faster() -> bool:
    """Return whether int8 is faster than the next best format: with AVX-512 VNNI, but without AMX."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_vnni") and not capabilities.get("amx_bf16"))


def input_dtype(number_format: NumberFormat) -> torch.dtype:
    """Return in which dtype a model in this format reads its inputs, and keeps what it does not count in int8."""
    is_half = number_format == "bfloat16" or (number_format == "int8" and bfloat16_is_native())
    return torch.bfloat16 if is_half else torch.float32


def choose_dtype(choice: DtypeChoice, device: torch.device = CPU) -> NumberFormat:
    """Choose the number format of the ranking model on a device. Raises RankingModelError for one that is not there.

    `auto` depends on the processor alone, so that equal machines choose the same: int8 where `int8_is_faster`, then
    bfloat16 where that is native, which it is on GPUs of compute capability 8.0 and above.
    """
    if choice == "float32":
        return "float32"
    is_gpu = device.type == "cuda"
    if choice == "int8" and is_gpu:
        raise RankingModelError("dtype 'int8': dense layers count in int8 on CPUs only; use 'auto' or 'bfloat16'")
    if choice == "int8" or (choice == "auto" and not is_gpu and int8_is_faster()):
        return "int8"
    native = torch.cuda.get_device_capability(device) >= (8, 0) if is_gpu else bfloat16_is_native()
    if choice == "bfloat16" and not native:
        what = "GPU" if is_gpu else "CPU"
        raise RankingModelError(f"dtype 'bfloat16': this {what} has no bfloat16; use 'auto' or 'float32'")
    return "bfloat16" if native else "float32"


def formats_to_try(chosen: NumberFormat) -> tuple[NumberFormat, ...]:
    """List the number formats narrower than float32 that a version may serve in, in the order they are tried."""
    if chosen == "int8":
        return ("int8", "bfloat16") if bfloat16_is_native() else ("int8",)
    return ("bfloat16",) if chosen == "bfloat16" else ()


class _Ready(NamedTuple):
    """Products with the columns of each request and of each row, None without any."""

    context: Product | None
    rows: Product | None
    bias: Tensor | None


class Linear(nn.Linear):
    """A linear layer that may read some columns once a request; `weight` [out, in] and `bias` [out] as PyTorch's.

    Args:
        in_features, out_features, bias: as of PyTorch.
        relu: whether it returns max(0, .).
        is_exact: whether its product is made in float32 in every number format.
        context: the columns that `Shared.context` has, if it reads some.
        rows: the columns that its rows have; None for all, as they are.
        outputs: which outputs it returns, and in which order; None for all, as they are.

    Attributes:
        ready: what scores, once it is packed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        relu: bool = False,
        is_exact: bool = False,
        context: Columns | None = None,
        rows: Columns | None = None,
        outputs: Columns | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.relu, self.is_exact = relu, is_exact
        self._context, self._rows, self._outputs = context, rows, outputs
        self.ready: _Ready | None = None

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map rows [..., columns], or [N, columns] with what they share, to [..., outputs]."""
        context, rows, bias = self.ready or self._with(PlainProduct)
        if context is None or shared is None:
            assert rows is not None
            return rows(x, bias, self.relu)
        part = context(shared.context, bias, rows is None and self.relu)
        if rows is None:
            return part.index_select(0, shared.owner)
        return rows(x, part[0] if part.shape[0] == 1 else part.index_select(0, shared.owner), self.relu)

    def pack(self, number_format: NumberFormat) -> bool:
        """Make it ready to score where it is: its weights must not change after that, and need no gradients.

        What is counted in int8 is quantised from the weights as they are, before they go into the dtype of the others.
        Returns whether it is.
        """
        weight, int8 = self._columns(self._rows), None
        outputs, inputs = weight.shape
        gains = inputs >= MIN_INT8_INPUTS and outputs >= MIN_INT8_OUTPUTS and not self.is_exact
        if number_format == "int8" and gains:
            int8 = Int8Product(weight)
        if not self.is_exact:
            self.to(input_dtype(number_format))
        ready = self._with(PackedProduct if can_pack(self.weight) else PlainProduct)
        self.ready = ready._replace(rows=int8 or ready.rows)
        return int8 is not None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is packed: a copy may be meant for another device."""
        return {**self.__dict__, "ready": None}

    def _with(self, product: type[PlainProduct] | type[PackedProduct]) -> _Ready:
        context = None if self._context is None or not self._context.size else product(self._columns(self._context))
        rows = None if self._rows is not None and not self._rows.size else product(self._columns(self._rows))
        bias: Tensor | None = self.bias
        return _Ready(context, rows, bias if bias is None else _selected(bias, self._outputs, 0))

    def _columns(self, columns: Columns | None) -> Tensor:
        return _selected(_selected(self.weight, self._outputs, 0), columns, 1)


def _selected(tensor: Tensor, indices: Columns | None, dim: int) -> Tensor:
    """Select along a dimension, or all; -1 gives zeros. Gradients flow through."""
    if indices is None:
        return tensor
    chosen = torch.from_numpy(indices).to(tensor.device)
    selected = tensor.index_select(dim, chosen.clamp(min=0))
    if (indices >= 0).all():
        return selected
    shape = [1] * tensor.dim()
    shape[dim] = -1
    return selected * (chosen >= 0).view(shape).to(tensor.dtype)


class Mlp(nn.Module):
    """Linear layers with ReLU between them; `sizes` has the output size of each, the first reads as `Linear` does.

    Tensors are named `layers.{i}.weight` [out, in] and `layers.{i}.bias` [out]. What comes last is a ReLU, nothing, or
    a logit: one column, which is made in float32 in every number format. As bfloat16, candidates whose logits differ
    by less than one part in 256 would tie; it costs next to nothing.
    """

    def __init__(
        self,
        input_width: int,
        sizes: Sequence[int],
        last: Literal["relu", "linear", "logit"],
        *,
        context: Columns | None = None,
        rows: Columns | None = None,
    ) -> None:
        super().__init__()
        self._is_logit = last == "logit"
        widths = [input_width, *sizes, *([1] if self._is_logit else [])]
        self._layers: list[Linear] = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            is_last = number == len(widths) - 2
            relu, is_exact = not is_last or last == "relu", is_last and self._is_logit
            self._layers.append(Linear(inputs, outputs, relu=relu, is_exact=is_exact, context=context, rows=rows))
            context = rows = None
        # Read from the plain list above: PyTorch's takes five calls for each layer.
        self.layers = nn.ModuleList(self._layers)
        self.output_width = widths[-1]

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [..., columns] to [..., sizes[-1]]; to logits, float32 [N], if it ends in one."""
        for layer in self._layers:
            if layer.is_exact:
                x, shared = x.float(), None if shared is None else Shared(shared.context.float(), shared.owner)
            ready = layer.ready
            if ready is None or ready.rows is None or shared is not None:
                x, shared = layer.forward(x, shared), None
            else:
                x = ready.rows(x, ready.bias, layer.relu)
        return x.squeeze(1) if self._is_logit else x
