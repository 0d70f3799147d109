"""The fully connected layers that the ranking models are made of, and how they are made ready to score on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_NO_SCALARS: list[Any] = []
PackedLayer: TypeAlias = tuple[Tensor, Tensor | None, str]
"""Weight in oneDNN's own order, bias, and what follows: `relu` or `none`."""


def pack_layers(layers: Sequence[nn.Linear], relu_after: Sequence[bool]) -> tuple[PackedLayer, ...]:
    """Copies layers for which `can_pack` is true into the form in which they score fastest.

    A plain product puts its weights in oneDNN's order each time anew: measured on an AVX-512 core with bfloat16, 100
    rows through the layers [1696, 256, 64] take 6 % longer then, 2000 rows 4 %. PyTorch's compiler packs weights with
    the same operators (torch/_inductor/fx_passes/mkldnn_fusion.py). What is added up is the same, though not always in
    that order.
    """
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return tuple(
        (reorder(one.weight.detach()), None if one.bias is None else one.bias.detach(), "relu" if relu else "none")
        for one, relu in zip(layers, relu_after, strict=True)
    )


def can_pack(weight: Tensor) -> bool:
    """Whether products with these weights can be made ready: on this CPU, by this build of PyTorch."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class Mlp(nn.Module):
    """Linear layers with ReLU between them.

    Tensors are named `layers.{i}.weight` [out, in] and `layers.{i}.bias` [out].

    Args:
        input_width: columns of the input.
        sizes: output size of each layer.
        relu_at_end: whether ReLU follows the last layer too.
    """

    def __init__(self, input_width: int, sizes: Sequence[int], *, relu_at_end: bool) -> None:
        super().__init__()
        widths = [input_width, *sizes]
        self.layers = nn.ModuleList(nn.Linear(widths[i], widths[i + 1]) for i in range(len(sizes)))
        self.relu_at_end = relu_at_end
        self.output_width = widths[-1]
        self._packed: tuple[PackedLayer, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_width] to [..., sizes[-1]]."""
        if self._packed is not None and not torch.is_grad_enabled():
            linear = torch.ops.mkldnn._linear_pointwise.default
            for weight, bias, activation in self._packed:
                x = linear(x, weight, bias, activation, _NO_SCALARS, "")
            return x
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number < last or self.relu_at_end:
                x = F.relu_(x)
        return x

    def pad_input(self, width: int) -> None:
        """Widens the first layer by columns of zeros, so that it can read an input with padding at its end."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        self.layers[0] = padded_linear(first, in_features=width)

    def pack(self) -> None:
        """Makes it ready to score where it is: its weights must not change after that.

        On the CPU they are copied (`pack_layers`), for calls that want no gradients; elsewhere nothing changes.
        """
        layers = self._linears()
        if can_pack(layers[0].weight):
            self._packed = pack_layers(layers, [True] * (len(layers) - 1) + [self.relu_at_end])

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not packed: it may be meant for another device."""
        return {**self.__dict__, "_packed": None}

    def _linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]


class LogitHead(Mlp):
    """Linear layers with ReLU between them that end in one logit, float32 whatever the weights' format is.

    The last product is made in float32: a bfloat16 logit has 8 significant bits, and candidates whose logits differ by
    less than one part in 256 would tie, which is no order at all. It is one column, so it costs next to nothing.

    Args:
        input_width: columns of the input.
        hidden: output size of each layer before the last.
    """

    def __init__(self, input_width: int, hidden: Sequence[int]) -> None:
        super().__init__(input_width, [*hidden, 1], relu_at_end=False)
        self._last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_width] to float32 [..., 1]."""
        if self._packed is not None and self._last is not None and not torch.is_grad_enabled():
            linear = torch.ops.mkldnn._linear_pointwise.default
            for weight, bias, activation in self._packed:
                x = linear(x, weight, bias, activation, _NO_SCALARS, "")
            return F.linear(x.float(), *self._last)
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu_(layer(x))
        assert isinstance(last, nn.Linear)
        return F.linear(x.float(), last.weight.float(), last.bias.float())

    def pack(self) -> None:
        """As `Mlp.pack`."""
        *hidden, last = self._linears()
        if can_pack(last.weight):
            self._packed = pack_layers(hidden, [True] * len(hidden))
            self._last = last.weight.detach().float(), last.bias.detach().float()

    def __getstate__(self) -> dict[str, Any]:
        """As of `Mlp`."""
        return {**super().__getstate__(), "_last": None}


def padded_linear(linear: nn.Linear, *, in_features: int, out_features: int | None = None) -> nn.Linear:
    """The same layer with zero weights for inputs and outputs that are added at the end."""
    out_features = out_features or linear.out_features
    wider = nn.Linear(
        in_features, out_features, bias=linear.bias is not None, device=linear.weight.device, dtype=linear.weight.dtype
    )
    wider.weight = nn.Parameter(padded(linear.weight, out_features, in_features), requires_grad=False)
    if linear.bias is not None:
        wider.bias = nn.Parameter(padded(linear.bias, out_features), requires_grad=False)
    return wider


def padded(tensor: Tensor, *shape: int) -> Tensor:
    """A copy of `tensor` at the beginning of a tensor of zeros of that shape."""
    result = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    result[tuple(slice(size) for size in tensor.shape)] = tensor.detach()
    return result
