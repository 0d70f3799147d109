"""The layers of ranking models: linear maps whose context part is multiplied once a request, made ready for scoring.

`Linear` trains as PyTorch's does. `pack` makes it ready on one device, in one of three number formats: its columns go
in the order of the inputs, and on the CPU its weights in that of oneDNN's kernels, or into int8.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from serving.errors import RankingModelError

CPU: Final = torch.device("cpu")
DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
NumberFormat: TypeAlias = Literal["float32", "bfloat16", "int8"]
"""Of a ranking model's products. With `int8`, layers that gain nothing by it are in bfloat16, or in float32."""
Columns: TypeAlias = npt.NDArray[np.int64]
"""For each column that is read the column of the trained weights, or -1 for one that is always zero."""

MIN_INT8_INPUTS: Final = 512
MIN_INT8_OUTPUTS: Final = 128
"""Below, quantising the inputs and scaling the sums costs what the product gains. Measured with AVX-512 VNNI, against
bfloat16, 832 rows: 1,696 to 256 in 2.72 ms for 3.49; 416 to 256 in 0.72 for 0.79, and 112 rows in 0.136 for 0.128."""
INT8_ROWS: Final = 256
"""Rows are worked on so many at a time, in memory that stays in the cache."""
INT8_MOST: Final = 127.0
SMALLEST_SCALED: Final = 1e-30
_NO_SCALARS: list[Any] = []


class Shared(NamedTuple):
    """What a layer reads of each request: context columns [R, Kc], and int64 [N], which request each row is of."""

    context: Tensor
    owner: Tensor


class PlainProduct:
    """PyTorch's own: on any device."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        y = F.linear(x, self._weight, bias)
        return F.relu_(y) if relu else y

    def plus(self, x: Tensor, more: Tensor, relu: bool) -> Tensor:
        """Give the product and more."""
        y = torch.addmm(more, x, self._weight.t())
        return F.relu_(y) if relu else y


class PackedProduct:
    """By oneDNN, with weights in its own order: plain products put them there each time, which costs 4 to 6 %.

    PyTorch's compiler packs with the same operators (torch/_inductor/fx_passes/mkldnn_fusion.py).
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        found: Tensor = self._linear(x, self._weight, bias, "relu" if relu else "none", _NO_SCALARS, "")
        return found

    def plus(self, x: Tensor, more: Tensor, relu: bool) -> Tensor:
        """Give the product and more."""
        y = self(x, None, False).add_(more)
        return F.relu_(y) if relu else y


class _Scratch(threading.local):
    """Memory for what a product works out on the way, one for each thread: fresh memory would cost a third more."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def take(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Get memory for INT8_ROWS rows at most, as whoever took that width and dtype last has left it."""
        kept = self._kept.get((width, dtype))
        if kept is None:
            kept = self._kept[width, dtype] = torch.empty(INT8_ROWS, width, dtype=dtype)
        return kept if rows == INT8_ROWS else kept[:rows]


_SCRATCH = _Scratch()


class Int8Product:
    """Sums of int8 products in int32: a scale for each row of weights and, found anew, for each row of inputs.

    Both are symmetric: value = code * scale, with codes in -127..127. The result has the inputs' dtype. There must be
    two inputs or more: of one `_int_mm` makes nonsense (torch 2.13).
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.float()
        self._scales = weight.abs().amax(1).clamp_(min=SMALLEST_SCALED) / INT8_MOST
        self._codes = (weight / self._scales[:, None]).round_().to(torch.int8).t()

    def __call__(self, x: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        if x.shape[0] <= INT8_ROWS:
            return self._product(x, bias, relu).to(x.dtype, copy=True)
        return torch.cat([self._product(rows, bias, relu).to(x.dtype, copy=True) for rows in torch.split(x, INT8_ROWS)])

    def plus(self, x: Tensor, more: Tensor, relu: bool) -> Tensor:
        """Give the product and more."""
        parts = zip(torch.split(x, INT8_ROWS), torch.split(more, INT8_ROWS), strict=True)
        return torch.cat([self._product(rows, own, relu).to(x.dtype, copy=True) for rows, own in parts])

    def _product(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product of INT8_ROWS rows at most, float32, in memory that the next one overwrites."""
        (rows, width), outputs = x.shape, self._scales.numel()
        scaled, codes = _SCRATCH.take(rows, width, torch.float32), _SCRATCH.take(rows, width, torch.int8)
        # The largest magnitude of each row, float32 [N, 1].
        if x.dtype is torch.bfloat16:
            # Without their signs, floats are in the order of their bits, and whole numbers are compared much faster.
            bits = torch.bitwise_and(x.view(torch.int16), 0x7FFF, out=_SCRATCH.take(rows, width, torch.int16))
            largest = bits.amax(1, keepdim=True).view(torch.bfloat16).float()
        else:
            largest = torch.abs(x, out=_SCRATCH.take(rows, width, torch.float32)).amax(1, keepdim=True)
        largest.clamp_(min=SMALLEST_SCALED)
        codes.copy_(scaled.copy_(x).mul_(INT8_MOST / largest).round_())
        sums = torch._int_mm(codes, self._codes, out=_SCRATCH.take(rows, outputs, torch.int32))
        y = _SCRATCH.take(rows, outputs, torch.float32)
        torch.mul(sums, largest / INT8_MOST, out=y).mul_(self._scales)
        if more is not None:
            y.add_(more)
        return F.relu_(y) if relu else y


Product: TypeAlias = PlainProduct | PackedProduct | Int8Product
"""Returns x W^T + bias, [..., out], of weights that were made ready, or `plus` a row for each of x."""


def can_pack(weight: Tensor) -> bool:
    """Tell whether products with these weights can be made ready: on this CPU, by this build of PyTorch."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def bfloat16_is_native() -> bool:
    """Tell whether this CPU multiplies bfloat16 matrices in hardware; emulated, they would be slower than float32."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    capabilities = torch.cpu.get_capabilities()
    if capabilities["architecture"] != "x86_64":
        return True
    # On x86 oneDNN counts any AVX-512 as support, which includes emulation.
    return bool(capabilities["avx512_bf16"] or capabilities["amx_bf16"])


def int8_is_faster() -> bool:
    """Tell whether int8 is faster than the next best format: with AVX-512 VNNI, but without AMX."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_vnni") and not capabilities.get("amx_bf16"))


def input_dtype(number_format: NumberFormat) -> torch.dtype:
    """Say in which dtype a model in this format reads its inputs, and keeps what it does not count in int8."""
    if number_format == "int8":
        return torch.bfloat16 if bfloat16_is_native() else torch.float32
    return torch.bfloat16 if number_format == "bfloat16" else torch.float32


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


def formats_to_try(wanted: NumberFormat) -> tuple[NumberFormat, ...]:
    """List the number formats narrower than float32 that a version may serve in, in the order they are tried."""
    if wanted == "int8":
        return ("int8", "bfloat16") if bfloat16_is_native() else ("int8",)
    return ("bfloat16",) if wanted == "bfloat16" else ()


def gains_by_int8(in_features: int, out_features: int) -> bool:
    """Tell whether a layer is counted in int8 where that was chosen."""
    return in_features >= MIN_INT8_INPUTS and out_features >= MIN_INT8_OUTPUTS


@dataclass(frozen=True, slots=True)
class _Ready:
    context: Product | None
    rows: Product | None
    bias: Tensor | None


class Linear(nn.Linear):
    """A linear layer that may read some columns once a request; `weight` [out, in] and `bias` [out] as PyTorch's.

    Args:
        in_features, out_features, bias: as of PyTorch.
        context: the columns that `Shared.context` has, if it reads some.
        rows: the columns that its rows have; None for all, as they are.
        outputs: which outputs it returns, and in which order; None for all, as they are.

    Attributes:
        is_exact: whether its product is made in float32 in every number format.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        context: Columns | None = None,
        rows: Columns | None = None,
        outputs: Columns | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.is_exact = False
        self._context, self._rows, self._outputs = context, rows, outputs
        self._ready: _Ready | None = None

    def forward(self, x: Tensor, shared: Shared | None = None, relu: bool = False) -> Tensor:
        """Map rows [..., columns], or [N, columns] with what they share, to [..., outputs]; with `relu` max(0, .)."""
        ready = self._ready
        if ready is None or torch.is_grad_enabled():
            ready = self._made(PlainProduct, self.weight, self.bias)
        if shared is None or ready.context is None:
            assert ready.rows is not None
            return ready.rows(x, ready.bias, relu)
        part = ready.context(shared.context, ready.bias, False)
        if ready.rows is None:
            return (F.relu(part) if relu else part).index_select(0, shared.owner)
        if part.shape[0] == 1:
            return ready.rows(x, part[0], relu)
        return ready.rows.plus(x, part.index_select(0, shared.owner), relu)

    def pack(self, number_format: NumberFormat) -> None:
        """Make it ready to score where it is, for calls without gradients: its weights must not change after that.

        What is counted in int8 is quantised from the weights as they are, before they go into the dtype of the others.
        """
        exact = self.weight.detach()
        if not self.is_exact:
            self.to(input_dtype(number_format))
        product = PackedProduct if can_pack(self.weight) else PlainProduct
        ready = self._made(product, self.weight.detach(), None if self.bias is None else self.bias.detach())
        if number_format == "int8" and ready.rows is not None and not self.is_exact:
            weight = self._columns(exact, self._rows)
            if gains_by_int8(weight.shape[1], weight.shape[0]):
                ready = replace(ready, rows=Int8Product(weight))
        self._ready = ready

    @property
    def is_int8(self) -> bool:
        """Tell whether its rows are counted in int8."""
        return self._ready is not None and isinstance(self._ready.rows, Int8Product)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is packed: a copy may be meant for another device."""
        return {**self.__dict__, "_ready": None}

    def _made(self, product: type[PlainProduct] | type[PackedProduct], weight: Tensor, bias: Tensor | None) -> _Ready:
        sides = [
            None if columns is not None and not columns.size else product(self._columns(weight, columns))
            for columns in (self._context, self._rows)
        ]
        if bias is not None and self._outputs is not None:
            bias = _selected(bias, self._outputs, 0)
        return _Ready(None if self._context is None else sides[0], sides[1], bias)

    def _columns(self, weight: Tensor, columns: Columns | None) -> Tensor:
        if self._outputs is not None:
            weight = _selected(weight, self._outputs, 0)
        return weight if columns is None else _selected(weight, columns, 1)


def _selected(tensor: Tensor, indices: Columns, dim: int) -> Tensor:
    """Select along a dimension; -1 gives zeros. Gradients flow through."""
    chosen = torch.from_numpy(indices).to(tensor.device)
    found = tensor.index_select(dim, chosen.clamp(min=0))
    if (indices >= 0).all():
        return found
    shape = [1] * tensor.dim()
    shape[dim] = -1
    return found * (chosen >= 0).view(shape).to(tensor.dtype)


class Mlp(nn.Module):
    """Linear layers with ReLU between them; `sizes` has the output size of each, the first reads as `Linear` does.

    Tensors are named `layers.{i}.weight` [out, in] and `layers.{i}.bias` [out].
    """

    def __init__(
        self,
        input_width: int,
        sizes: Sequence[int],
        *,
        relu_at_end: bool,
        context: Columns | None = None,
        rows: Columns | None = None,
    ) -> None:
        super().__init__()
        widths = [input_width, *sizes]
        self.layers = nn.ModuleList(
            Linear(widths[i], widths[i + 1], context=None if i else context, rows=None if i else rows)
            for i in range(len(sizes))
        )
        self.output_width = widths[-1]
        self._relu_at_end = relu_at_end

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [..., columns] to [..., sizes[-1]]."""
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x, shared = layer(x, shared, number < last or self._relu_at_end), None
        return x


class LogitHead(Mlp):
    """Linear layers with ReLU between them that end in one logit, float32 whatever the weights' format is.

    The last product is made in float32: as bfloat16, candidates whose logits differ by less than one part in 256 would
    tie. It is one column, so it costs next to nothing.
    """

    def __init__(
        self, input_width: int, hidden: Sequence[int], *, context: Columns | None = None, rows: Columns | None = None
    ) -> None:
        super().__init__(input_width, [*hidden, 1], relu_at_end=False, context=context, rows=rows)
        last = self.layers[len(self.layers) - 1]
        assert isinstance(last, Linear)
        last.is_exact = True

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [N, columns] to float32 [N]."""
        hidden = len(self.layers) - 1
        for number in range(hidden):
            x, shared = self.layers[number](x, shared, True), None
        if shared is not None:
            shared = Shared(shared.context.float(), shared.owner)
        logits: Tensor = self.layers[hidden](x.float(), shared)
        return logits.squeeze(1)
