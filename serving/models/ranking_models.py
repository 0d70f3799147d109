"""The ranking models: their layers, building and loading them, their number format, their copies on devices."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.manifest import ModelSpec
from serving.errors import RankingModelError
from serving.models.config import DcnV2Config, DlrmConfig, MlpConfig, TargetAttentionConfig, parse_dense_model
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput

CPU = torch.device("cpu")
# Candidate-history pairs worked on at once: bounds the memory of a batch with long histories to some 100 MB.
MAX_PAIRS = 1 << 18
_NO_SCALARS: list[Any] = []
PackedLayer: TypeAlias = tuple[Tensor, Tensor | None, str]
"""Weight in oneDNN's own order, bias, and what follows: `relu` or `none`."""


def pack_layers(layers: Sequence[nn.Linear], num_relu: int) -> tuple[PackedLayer, ...]:
    """Copy layers for which `can_pack` is true into the form in which they score fastest; ReLU follows the first.

    A plain product puts its weights in oneDNN's order each time anew, which costs 4 to 6 %. PyTorch's compiler packs
    weights with the same operators (torch/_inductor/fx_passes/mkldnn_fusion.py).
    """
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return tuple(
        (
            reorder(one.weight.detach()),
            None if one.bias is None else one.bias.detach(),
            "relu" if number < num_relu else "none",
        )
        for number, one in enumerate(layers)
    )


def can_pack(weight: Tensor) -> bool:
    """Tell whether products with these weights can be made ready: on this CPU, by this build of PyTorch."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class Mlp(nn.Module):
    """Linear layers with ReLU between them.

    Tensors are named `layers.{i}.weight` [out, in] and `layers.{i}.bias` [out]. `sizes` has the output size of each.
    """

    def __init__(self, input_width: int, sizes: Sequence[int], *, relu_at_end: bool) -> None:
        super().__init__()
        widths = [input_width, *sizes]
        self.layers = nn.ModuleList(nn.Linear(widths[i], widths[i + 1]) for i in range(len(sizes)))
        self.output_width = widths[-1]
        # ReLU after each of these; what follows has none.
        self._num_relu = len(sizes) if relu_at_end else len(sizes) - 1
        self._packed: tuple[PackedLayer, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., input_width] to [..., sizes[-1]]."""
        if self._packed is not None and not torch.is_grad_enabled():
            linear = torch.ops.mkldnn._linear_pointwise.default
            for weight, bias, activation in self._packed:
                x = linear(x, weight, bias, activation, _NO_SCALARS, "")
            return x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number < self._num_relu:
                x = F.relu_(x)
        return x

    def pad_input(self, width: int) -> None:
        """Widen the first layer by columns of zeros, so that it can read an input with padding at its end."""
        widen(self.linears[0], in_features=width)

    def pack(self) -> None:
        """Make it ready to score where it is, for calls without gradients: its weights must not change after that."""
        layers = self.linears
        if can_pack(layers[0].weight):
            self._packed = pack_layers(layers, self._num_relu)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is packed: a copy may be meant for another device."""
        return {**self.__dict__, "_packed": None}

    @property
    def linears(self) -> list[nn.Linear]:
        """List the layers."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]


class LogitHead(Mlp):
    """Linear layers with ReLU between them that end in one logit, float32 whatever the weights' format is.

    The last product is made in float32: as bfloat16, candidates whose logits differ by less than one part in 256 would
    tie. It is one column, so it costs next to nothing.
    """

    def __init__(self, input_width: int, hidden: Sequence[int]) -> None:
        super().__init__(input_width, [*hidden, 1], relu_at_end=False)
        self._last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, input_width] to float32 [N]."""
        if self._packed is not None and self._last is not None and not torch.is_grad_enabled():
            linear = torch.ops.mkldnn._linear_pointwise.default
            for weight, bias, activation in self._packed:
                x = linear(x, weight, bias, activation, _NO_SCALARS, "")
            return F.linear(x.float(), *self._last).squeeze(1)
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu_(layer(x))
        assert isinstance(last, nn.Linear)
        return F.linear(x.float(), last.weight.float(), last.bias.float()).squeeze(1)

    def pack(self) -> None:
        """Pack the hidden layers; the last one is kept in float32."""
        *hidden, last = self.linears
        if can_pack(last.weight):
            self._packed = pack_layers(hidden, len(hidden))
            self._last = last.weight.detach().float(), last.bias.detach().float()


def widen(linear: nn.Linear, *, in_features: int | None = None, out_features: int | None = None) -> None:
    """Add inputs and outputs at the end, with zero weights; for serving only."""
    more_in = 0 if in_features is None else in_features - linear.in_features
    more_out = 0 if out_features is None else out_features - linear.out_features
    linear.in_features += more_in
    linear.out_features += more_out
    linear.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, more_in, 0, more_out)), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(F.pad(linear.bias.detach(), (0, more_out)), requires_grad=False)


class RankingModel(nn.Module):
    """A dense part: from a batch's inputs to one logit a candidate."""

    def __init__(self, shapes: InputShapes) -> None:
        super().__init__()
        self.shapes = shapes
        # How many columns of the inputs the first layer reads: those that carry something, until `pad_inputs`.
        self.columns_read = shapes.width

    @property
    def dtype(self) -> torch.dtype:
        """Tell the number format of the weights, which the inputs must share."""
        return next(self.parameters()).dtype

    @abstractmethod
    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits, float32 [N]."""

    def pad_inputs(self) -> None:
        """Widen the layers that read the inputs' columns as they lie to the padded width; for serving only."""

    def pack(self) -> None:
        """Make it ready to score on the device that it is on; after that its weights must not change."""
        for module in self.modules():
            if isinstance(module, Mlp):
                module.pack()

    def score(self, inputs: RankingInputs) -> Tensor:
        """Give sigmoid(logit): float32 [N] within (0, 1), without gradients."""
        if torch.is_inference_mode_enabled():
            return torch.sigmoid(self.forward(inputs))
        with torch.inference_mode():
            return torch.sigmoid(self.forward(inputs))


class MlpRanking(RankingModel):
    """logit = MLP(concat(dense, embeddings))."""

    def __init__(self, config: MlpConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.mlp = LogitHead(shapes.width, config.hidden)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        return self.mlp.forward(inputs.columns[:, : self.columns_read])

    def pad_inputs(self) -> None:
        """Widen the first layer."""
        self.columns_read = self.shapes.padded_width
        self.mlp.pad_input(self.columns_read)


class Dlrm(RankingModel):
    """logit = top(concat(b, <v_i, v_j> for i < j)), with b = bottom(dense) and v = (b, e_1, ..., e_F).

    Pairs come row by row of the upper triangle, TorchRec's order. Without dense inputs there is no b.
    """

    pairs: Tensor

    def __init__(self, config: DlrmConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.num_features = len(shapes.features)
        self.dim = shapes.dims[0]
        self.bottom = Mlp(shapes.dense_width, config.bottom_mlp, relu_at_end=True) if shapes.dense_width else None
        num_vectors = self.num_features + (self.bottom is not None)
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", first * num_vectors + second, persistent=False)
        width = first.numel() + (self.dim if self.bottom is not None else 0)
        self.top = LogitHead(width, config.top_mlp)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        vectors = inputs.embeddings.view(inputs.columns.shape[0], self.num_features, self.dim)
        bottom = None if self.bottom is None else self.bottom(inputs.dense)
        if bottom is not None:
            vectors = torch.cat([bottom.unsqueeze(1), vectors], dim=1)
        # [N, V, D] to [N, V * (V - 1) / 2].
        x = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top.forward(x if bottom is None else torch.cat([bottom, x], dim=1))


class CrossLayers(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with W_l = U_l V_l^T where a rank is given.

    Tensors are named `full.{l}.weight` [width, width] and `full.{l}.bias` [width], or `down.{l}.weight` [rank, width]
    (V^T), `up.{l}.weight` [width, rank] (U) and `up.{l}.bias`.
    """

    def __init__(self, width: int, num_layers: int, low_rank: int | None) -> None:
        super().__init__()
        self.low_rank = low_rank
        layers = range(num_layers)
        if low_rank is None:
            self.full = nn.ModuleList(nn.Linear(width, width) for _ in layers)
        else:
            self.down = nn.ModuleList(nn.Linear(width, low_rank, bias=False) for _ in layers)
            self.up = nn.ModuleList(nn.Linear(low_rank, width) for _ in layers)

    def forward(self, x0: Tensor) -> Tensor:
        """Map [N, width] to [N, width]."""
        x = x0
        if self.low_rank is None:
            for full in self.full:
                x = torch.addcmul(x, x0, full(x))
        else:
            for down, up in zip(self.down, self.up, strict=True):
                x = torch.addcmul(x, x0, up(down(x)))
        return x

    def pad(self, width: int) -> None:
        """Widen every layer by columns that stay zero."""
        for name, layers in self.named_children():
            for layer in layers.children():
                assert isinstance(layer, nn.Linear)
                widen(
                    layer,
                    in_features=None if name == "up" else width,
                    out_features=None if name == "down" else width,
                )


class DcnV2(RankingModel):
    """logit = deep(cross(concat(dense or bottom(dense), embeddings)))."""

    def __init__(self, config: DcnV2Config, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.bottom = Mlp(shapes.dense_width, config.bottom_mlp, relu_at_end=True) if config.bottom_mlp else None
        width = shapes.width if self.bottom is None else self.bottom.output_width + shapes.embedding_width
        self.cross = CrossLayers(width, config.num_cross_layers, config.low_rank)
        self.deep = LogitHead(width, config.deep)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        if self.bottom is None:
            x0 = inputs.columns[:, : self.columns_read]
        else:
            x0 = torch.cat([self.bottom(inputs.dense), inputs.embeddings], dim=1)
        return self.deep.forward(self.cross.forward(x0))

    def pad_inputs(self) -> None:
        """Widen the cross layers and the first deep layer, unless a bottom MLP stands between them and the columns."""
        if self.bottom is None:
            self.columns_read = self.shapes.padded_width
            self.cross.pad(self.columns_read)
            self.deep.pad_input(self.columns_read)


class AttentionUnit(nn.Module):
    """weight(q, k) = MLP([q, k, q - k, q * k]), for every pair of a candidate q and a row k of its history.

    The first layer W = [W_q, W_k, W_d, W_p] is applied as (W_q + W_d) q + (W_k - W_d) k + W_p (q * k): the first term
    once a candidate, the second once a row of a history, only the third once a pair.
    """

    def __init__(self, dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.dim = dim
        self.max_pairs = MAX_PAIRS
        self.first = nn.Linear(4 * dim, hidden[0])
        self.rest = Mlp(hidden[0], [*hidden[1:], 1], relu_at_end=False)

    def forward(self, queries: Tensor, history: SequenceInput, owner: Tensor) -> Tensor:
        """Give the softmax-weighted sum of each candidate's history [N, D]; zeros where that is empty.

        Queries are [N, D], histories those of R requests, `owner` is int64 [N], which request a candidate belongs to.
        """
        longest = history.mask.shape[1]
        if longest == 0:
            return torch.zeros_like(queries)
        of_q, of_k, of_difference, of_product = torch.split(self.first.weight, self.dim, dim=1)
        per_candidate = F.linear(queries, of_q + of_difference, self.first.bias)
        per_row = F.linear(history.rows, of_k - of_difference)
        chunk = max(1, self.max_pairs // longest)
        attended = [
            self._attend(q, partial, per_row, of_product, history, request)
            for q, partial, request in zip(
                *(torch.split(tensor, chunk) for tensor in (queries, per_candidate, owner)), strict=True
            )
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(
        self,
        queries: Tensor,
        per_candidate: Tensor,
        per_row: Tensor,
        of_product: Tensor,
        history: SequenceInput,
        owner: Tensor,
    ) -> Tensor:
        keys = history.rows.index_select(0, owner)
        mask = history.mask.index_select(0, owner)
        hidden = F.linear(keys * queries.unsqueeze(1), of_product)
        hidden = hidden + per_row.index_select(0, owner) + per_candidate.unsqueeze(1)
        weights = self.rest(F.relu_(hidden)).squeeze(2).float()
        # The finite minimum, not -inf: the softmax of a history without rows would be NaN, and so its gradient.
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
        weights = torch.softmax(weights, dim=1).masked_fill(~mask, 0.0).to(keys.dtype)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1)


class TargetAttention(RankingModel):
    """logit = MLP(concat(dense, embeddings, attended history))."""

    def __init__(self, config: TargetAttentionConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.history_feature = config.history_feature
        self.target_columns = shapes.embedding_columns(config.target_feature)
        dim = shapes.sequence_dims[config.history_feature]
        self.attention = AttentionUnit(dim, config.attention_hidden)
        self.mlp = LogitHead(shapes.width + dim, config.hidden)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        queries = inputs.embeddings[:, self.target_columns]
        attended = self.attention(queries, inputs.sequences[self.history_feature], inputs.request_of_candidate)
        return self.mlp.forward(torch.cat([inputs.columns[:, : self.shapes.width], attended], dim=1))


class DeviceCopies:
    """Copies of a ranking model by device, made when first asked for; the original is on the CPU. Thread-safe."""

    def __init__(self, original: RankingModel) -> None:
        self._lock = threading.Lock()
        self._by_device: dict[torch.device, RankingModel] = {CPU: original}

    def on(self, device: torch.device) -> RankingModel:
        """Get the model on `cpu`, or on a CUDA device with its index: one object for all, not to be changed."""
        with self._lock:
            if device not in self._by_device:
                made = copy.deepcopy(self._by_device[CPU]).to(device)
                made.pack()
                self._by_device[device] = made
            return self._by_device[device]


DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16"]
_MODELS: dict[str, Callable[[Any, InputShapes], RankingModel]] = {
    "mlp": MlpRanking,
    "dlrm": Dlrm,
    "dcn_v2": DcnV2,
    "target_attention": TargetAttention,
}


def build_model(spec: ModelSpec) -> RankingModel:
    """Build an untrained model in float32, as its description says. Raises RankingModelError if that is not valid."""
    config = parse_dense_model(spec)
    return _MODELS[config.kind](config, InputShapes.of(spec))


def load_model(spec: ModelSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> RankingModel:
    """Load a model that is ready to score, with its weights in `dtype`: float32 or bfloat16.

    Raises RankingModelError, naming the tensors that are missing, unknown, not finite floats or of another shape.
    """
    # On the meta device nothing is allocated or drawn at random before the tensors are known to fit.
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build_model(spec).state_dict().items()}
    _check_tensors(spec, tensors, expected)
    model = build_model(spec)
    model.load_state_dict(dict(tensors), strict=True)
    model.pad_inputs()
    model = model.to(dtype).requires_grad_(False).eval()
    model.pack()
    return model


def _check_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    prefix = f"model {spec.model!r}: dense model {spec.dense_model.kind!r}"
    if missing := sorted(expected.keys() - tensors.keys()):
        raise RankingModelError(f"{prefix}: missing tensors: {missing}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise RankingModelError(f"{prefix}: unknown tensors: {unknown}; it has: {sorted(expected)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise RankingModelError(
                f"{prefix}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise RankingModelError(f"{prefix}: tensor {name!r} is {tensor.dtype}, expected floating point")
        if not bool(torch.isfinite(tensor).all()):
            raise RankingModelError(f"{prefix}: tensor {name!r} holds NaN or inf")


def bfloat16_is_native() -> bool:
    """Tell whether this CPU multiplies bfloat16 matrices in hardware; emulated, they would be slower than float32."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    capabilities = torch.cpu.get_capabilities()
    if capabilities["architecture"] != "x86_64":
        return True
    # On x86 oneDNN counts any AVX-512 as support, which includes emulation.
    return bool(capabilities["avx512_bf16"] or capabilities["amx_bf16"])


def choose_dtype(choice: DtypeChoice, device: torch.device = CPU) -> torch.dtype:
    """Choose the number format of the ranking model on a device: `auto` is bfloat16 where that has it.

    GPUs of compute capability 8.0 and above do. Raises RankingModelError if bfloat16 is asked for and there is none.
    """
    if choice == "float32":
        return torch.float32
    is_gpu = device.type == "cuda"
    native = torch.cuda.get_device_capability(device) >= (8, 0) if is_gpu else bfloat16_is_native()
    if choice == "bfloat16" and not native:
        what = "GPU" if is_gpu else "CPU"
        raise RankingModelError(f"dtype 'bfloat16': this {what} has no bfloat16; use 'auto' or 'float32'")
    return torch.bfloat16 if native else torch.float32
