"""The layers of ranking models: linear maps whose context part is multiplied once a request, made ready for scoring.

`Linear` trains as PyTorch's does. `pack` makes it ready on one device, in one of three number formats: its columns go
in the order of the inputs, and on the CPU its weights in that of oneDNN's kernels, or into int8. Inputs of an int8
layer are codes: bytes, of which each step is worth the same, as much as golden requests need.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from serving.description import NumberFormat
from serving.errors import RankingModelError

logger = logging.getLogger(__name__)

CPU: Final = torch.device("cpu")
DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
Columns: TypeAlias = npt.NDArray[np.int64]
"""For each column that is read the column of the trained weights, or -1 for one that is always zero."""

MIN_INT8_WEIGHTS: Final = 1 << 14
"""Below, quantising the inputs costs what the product gains: 256 to 64 takes 65 us for 832 rows, in float32 184."""
ZERO: Final = 128
"""The code of 0 where inputs may be negative."""
HEADROOM: Final = 1.25
"""How much larger than those of golden requests inputs may be; then they are up to √2 times as large by the grid."""
MIN_MAGNITUDE: Final = 1e-30
SAMPLED: Final = 64
"""In one of so many calls it is counted which inputs were beyond the codes."""
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


class Steps(NamedTuple):
    """The codes of a layer's inputs: x = (code - zero) * step, with a step for all, [], or for each column, [in]."""

    step: Tensor
    zero: int

    @classmethod
    def of(cls, least: Tensor, most: Tensor) -> Steps:
        """Choose them for numbers between these, [] or [in]: powers of √2, the same where rows have changed a little.

        Columns have codes for negative numbers if one of them needs these.
        """
        zero = ZERO if bool((least < 0).any()) else 0
        reach = torch.maximum(most, -least).double().clamp_(min=MIN_MAGNITUDE) * (HEADROOM / (255 - zero))
        return cls(torch.exp2(torch.ceil(2 * torch.log2(reach)) / 2).float(), zero)

    def join(self, columns: Sequence[slice]) -> None:
        """Give neighbouring features, of these columns, one step where that costs none of them more than one bit.

        Features with one step are written at once, as are all that are neighbours in their table's block.
        """
        first, before = 0, self.step.tolist()
        for number, one in enumerate(columns):
            steps = [before[each.start] for each in columns[first : number + 1]]
            if max(steps) > 2.01 * min(steps):
                first, steps = number, steps[-1:]
            self.step[columns[first].start : one.stop] = max(steps)

    def codes(self, x: Tensor) -> Tensor:
        """Return the codes of numbers, uint8; of those that are beyond, the nearest there is."""
        if self.step.dim():
            return codes_of(x / self.step, 1.0, self.zero)
        return codes_of(x, self.step.item(), self.zero)


# PyTorch says of it, once in a process, that a later release will not have it; see `int8_is_there`.
warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor", category=UserWarning)


def codes_of(x: Tensor, step: float, zero: int) -> Tensor:
    """Return uint8 codes of numbers, contiguous: by PyTorch's only such operator that makes one pass."""
    quantised = torch.quantize_per_tensor(x.float(), step, zero, torch.quint8)
    # Its bytes are copied by `int_repr`.
    return torch.empty(0, dtype=torch.uint8).set_(quantised.untyped_storage(), 0, quantised.shape, quantised.stride())


class Int8Product:
    """oneDNN's product of codes with int8 weights, [out, in]: scales, what is added, ReLU and the next codes in one go.

    PyTorch's compiler makes quantised models of the same operators (torch/_inductor/fx_passes/quantization.py). The
    steps of columns are part of the weights. What it returns are numbers, `output`, or codes with the steps `output`.
    """

    def __init__(self, weight: Tensor, steps: Steps, output: torch.dtype | Steps) -> None:
        weight = weight.float() * steps.step
        self.steps = steps
        self._calls = self._sampled = self._beyond = 0
        self._scales = weight.abs().amax(1).clamp_(min=MIN_MAGNITUDE) / 127.0
        codes = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(codes, None)
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        self._output = (1.0, 0, output)
        if isinstance(output, Steps):
            self._output = (output.step.item(), output.zero, torch.uint8)
        self._product: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise.default
        self._adding_product: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise.binary

    def __call__(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product with codes, or with numbers, of which it takes the codes."""
        if x.dim() > 2:
            return torch.unflatten(self(x.flatten(0, -2), more, relu), 0, x.shape[:-1])
        codes = x if x.dtype is torch.uint8 else self.steps.codes(x)
        self._calls += 1
        if self._calls % SAMPLED == 1:
            self._count(codes)
        last = "relu" if relu else "none", _NO_SCALARS, ""
        read = codes, 1.0, self.steps.zero, self._weight, self._scales, self._zeros
        if more is None or more.dim() == 1:
            return self._product(*read, None if more is None else more.float(), *self._output, *last)
        return self._adding_product(*read, more, None, *self._output, 1.0, 0, "add", 1.0, *last)

    def take_sampled(self) -> tuple[int, int]:
        """Return how many inputs were looked at since the last time, and how many of them were beyond the codes."""
        taken = self._sampled, self._beyond
        self._sampled = self._beyond = 0
        return taken

    def _count(self, codes: Tensor) -> None:
        beyond = codes == 255
        if self.steps.zero:
            beyond |= codes == 0
        self._sampled += codes.numel()
        self._beyond += int(beyond.sum())


class ObservedProduct:
    """A product that notes between which numbers its inputs are, by column."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.least, self.most = torch.tensor(math.inf), torch.tensor(-math.inf)

    def __call__(self, x: Tensor, more: Tensor | None, relu: bool) -> Tensor:
        """Return the product."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if rows.shape[0]:
            self.least, self.most = torch.minimum(self.least, rows.amin(0)), torch.maximum(self.most, rows.amax(0))
        return self.product(x, more, relu)


Product: TypeAlias = PlainProduct | PackedProduct | Int8Product | ObservedProduct
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


@functools.cache
def int8_is_there() -> bool:
    """Return whether this build of PyTorch has the operators of int8 layers, and they multiply rightly."""
    weight, x = torch.arange(-32.0, 32.0).view(4, 16) / 8.0, torch.arange(48.0).view(3, 16) - 20.0
    more, steps = torch.arange(12.0).view(3, 4) - 30.0, Steps(torch.tensor(0.25), ZERO)
    try:
        with torch.inference_mode():
            found = [Int8Product(weight, steps, torch.float32)(x, added, True) for added in (more, more[0])]
        expected = [PlainProduct(weight)(x, added, True) for added in (more.clone(), more[0])]
        bound = 0.01 * float(expected[0].abs().max()) + 0.5
        problem = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)) > bound
        reason = f"4 x 16 weights give {found}, not {expected}" if problem else ""
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = str(error)
    if reason:
        logger.warning("no int8 layers: torch %s has other operators of oneDNN: %s", torch.__version__, reason)
    return not reason


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
    if not is_gpu and (choice == "int8" or (choice == "auto" and int8_is_faster())) and int8_is_there():
        return "int8"
    native = torch.cuda.get_device_capability(device) >= (8, 0) if is_gpu else bfloat16_is_native()
    if choice == "bfloat16" and not native:
        what = "GPU" if is_gpu else "CPU"
        raise RankingModelError(f"dtype 'bfloat16': this {what} has no bfloat16; use 'auto' or 'float32'")
    return "bfloat16" if native else "float32"


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

    def pack(
        self, number_format: NumberFormat, int8: Steps | None = None, output: Steps | torch.dtype | None = None
    ) -> None:
        """Make it ready to score where it is: its weights must not change after that, and need no gradients.

        With `int8`, the codes of its rows' inputs, it is quantised from the weights as they are, before they go into
        the dtype of the others; it returns codes, or another dtype, by `output`.
        """
        dtype = input_dtype(number_format)
        product = None if int8 is None else Int8Product(self._columns(self._rows), int8, output or dtype)
        if not self.is_exact:
            self.to(dtype)
        # Of one column a packed product takes four times as long.
        is_packed = can_pack(self.weight) and self.out_features > 1
        ready = self._with(PackedProduct if is_packed else PlainProduct)
        self.ready = ready._replace(rows=product or ready.rows)

    @property
    def may_be_int8(self) -> bool:
        """Return whether int8 gains anything."""
        columns = self.in_features if self._rows is None else self._rows.size
        return not self.is_exact and columns * self.out_features >= MIN_INT8_WEIGHTS

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

    def successive(self) -> Iterator[tuple[Linear, Linear]]:
        """Yield each layer with the one that reads what it returns."""
        return itertools.pairwise(self._layers)

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
