"""The built-in ranking models: their configs and arithmetic, building and loading them, their copies on devices."""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.manifest import DenseModelSpec, ModelSpec
from loader.snapshot.tables import Frozen, projection_name, schema_errors
from serving.description import NumberFormat
from serving.errors import RankingModelError
from serving.models import layers
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.layers import Columns, Linear, Mlp, ObservedProduct, Shared, Steps

MAX_PAIRS: Final = 1 << 18
"""Candidate-history pairs worked on at once: bounds the memory of a batch with long histories to some 100 MB."""
BLOCK_ROWS: Final = 16
"""Candidates in a block, where requests have different numbers of them: a request's last block is filled up."""
MAX_LAYERS = 32
MAX_LAYER_SIZE = 65_536

LayerSize = Annotated[int, Field(ge=1, le=MAX_LAYER_SIZE)]
LayerSizes = Annotated[tuple[LayerSize, ...], Field(max_length=MAX_LAYERS)]


class MlpConfig(Frozen):
    """logit = MLP(concat(dense, embeddings)): hidden layers (ReLU) of these sizes, and a last one of size 1."""

    kind: Literal["mlp"] = "mlp"
    hidden: LayerSizes = (256, 64)


class DlrmConfig(Frozen):
    """DLRM (Naumov et al., 2019, arXiv:1906.00091) with dot interaction.

    `bottom_mlp` has the layer sizes over the dense inputs (ReLU after each), the last of which is the embedding_dim;
    empty if, and only if, there are none. `top_mlp` has those of the hidden layers over the interactions.
    """

    kind: Literal["dlrm"] = "dlrm"
    bottom_mlp: LayerSizes = ()
    top_mlp: LayerSizes = (256, 64)


class DcnV2Config(Frozen):
    """DCN-v2 (Wang et al., 2021, arXiv:2008.13535), stacked: cross layers, then deep layers.

    `low_rank` is the rank of each cross layer's two factors, or None for one full matrix. `bottom_mlp` has the sizes of
    an MLP over the dense inputs (ReLU after each), whose output takes their place; this is MLPerf's DLRM-v2.
    """

    kind: Literal["dcn_v2"] = "dcn_v2"
    num_cross_layers: int = Field(default=3, ge=1, le=MAX_LAYERS)
    low_rank: LayerSize | None = None
    bottom_mlp: LayerSizes = ()
    deep: LayerSizes = (256, 64)


class TargetAttentionConfig(Frozen):
    """Attention of each candidate over a history, after DIN (Zhou et al., 2018, arXiv:1706.06978).

    The pooled candidate feature `target_feature` attends over `history_feature`, a context feature with pooling none,
    by an MLP over [q, k, q - k, q * k]; the head is over concat(dense, embeddings, attended history).
    """

    kind: Literal["target_attention"] = "target_attention"
    history_feature: str
    target_feature: str
    attention_hidden: Annotated[LayerSizes, Field(min_length=1)] = (32,)
    hidden: LayerSizes = (128, 64)


DenseModelConfig: TypeAlias = MlpConfig | DlrmConfig | DcnV2Config | TargetAttentionConfig


class CandidateBlocks(NamedTuple):
    """Candidates in B blocks of S (`size`) rows, each of one request: a request's share is multiplied by whole blocks.

    `request` is int64 [B]; `rows` int64 [B * S], the candidate of each row, and `back` int64 [N], the row of each
    candidate, are None where blocks are the candidates as they are.
    """

    request: Tensor
    size: int
    rows: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def of(cls, inputs: RankingInputs, max_size: int) -> CandidateBlocks:
        """Divide candidates into blocks of at most `max_size`; of one each if they are not ordered by request."""
        owner, num_requests = inputs.request_of_candidate, inputs.context.shape[0]
        count = owner.numel()
        if not inputs.is_ordered or not count:
            return cls(owner, 1)
        if num_requests == 1 and count <= max_size:
            return cls(owner[:1], count)
        counts = torch.bincount(owner, minlength=num_requests)
        largest = int(counts.max())
        if largest <= max_size and largest * num_requests == count:
            return cls(torch.arange(num_requests), largest)
        size = min(BLOCK_ROWS, max_size)
        blocks = (counts + (size - 1)) // size
        request = torch.repeat_interleave(blocks)
        starts, firsts = counts.cumsum(0) - counts, blocks.cumsum(0) - blocks
        # After a request's last candidate a block goes on with others, whose results are not read.
        first_rows = starts[request] + size * (torch.arange(request.numel()) - firsts[request])
        rows = (first_rows[:, None] + torch.arange(size)).clamp_(max=count - 1).flatten()
        return cls(request, size, rows, torch.arange(count) + (size * firsts - starts)[owner])

    def split(self, x: Tensor) -> Tensor:
        """Put candidates [N, ...] into blocks [B, S, ...]."""
        x = x if self.rows is None else x.index_select(0, self.rows)
        return torch.unflatten(x, 0, (self.request.numel(), self.size))

    def join(self, x: Tensor) -> Tensor:
        """Put blocks [B, S, ...] back into candidates [N, ...]."""
        x = x.flatten(0, 1)
        return x if self.back is None else x.index_select(0, self.back)


class RankingModel(nn.Module):
    """A dense part: from a batch's inputs to one logit a candidate. What depends on the context is computed once.

    Attributes:
        reads_candidates: the layer that reads the candidates' matrix as it is; "" if there is none.
        int8: the codes of int8 layers' inputs, by their names.
        projections: of parts that are narrower than their table, float32 [columns, embedding_dim].
        projections_by_part: the same by the names of the parts, once it is packed.
    """

    reads_candidates: str = ""

    def __init__(self, shapes: InputShapes) -> None:
        super().__init__()
        self.shapes = shapes
        self.number_format: NumberFormat = "float32"
        self.int8: dict[str, Steps] = {}
        self.projections = nn.ParameterDict()
        self.projections_by_part: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the inputs."""
        return layers.input_dtype(self.number_format)

    @abstractmethod
    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return logits, float32 [N]."""

    def pack(self, number_format: NumberFormat, int8: Mapping[str, Steps] | None = None) -> None:
        """Make it ready to score where it is; its weights must not change any more.

        With `int8` the layers of these names are, with these codes of their inputs; without any, "int8" is the
        format of the others.
        """
        self.requires_grad_(False).eval()
        self.int8 = dict(int8 or {}) if number_format == "int8" else {}
        if number_format == "int8" and not self.int8:
            number_format = "bfloat16" if layers.bfloat16_is_native() else "float32"
        self.number_format = number_format
        names = {layer: name for name, layer in self.named_modules() if isinstance(layer, Linear)}
        following = dict(pair for one in self.modules() if isinstance(one, Mlp) for pair in one.successive())
        for layer, name in names.items():
            after = following.get(layer)
            output = None if after is None else torch.float32 if after.is_exact else self.int8.get(names[after])
            layer.pack(number_format, self.int8.get(name), output)
        self.projections_by_part = {name.replace("/", "."): matrix for name, matrix in self.projections.items()}

    def take_sampled(self) -> tuple[int, int]:
        """Return how many inputs of int8 layers were looked at since the last time, and how many were beyond codes."""
        products = [one.ready.rows for one in self.modules() if isinstance(one, Linear) and one.ready]
        taken = [product.take_sampled() for product in products if isinstance(product, layers.Int8Product)]
        return sum(sampled for sampled, _ in taken), sum(beyond for _, beyond in taken)

    @contextlib.contextmanager
    def observed(self) -> Iterator[dict[str, ObservedProduct]]:
        """Have the layers that may be int8 note what they read meanwhile, by their names."""
        noted, before = dict[str, ObservedProduct](), dict[Linear, Any]()
        for name, layer in self.named_modules():
            if isinstance(layer, Linear) and layer.may_be_int8 and layer.ready and layer.ready.rows is not None:
                before[layer], noted[name] = layer.ready, ObservedProduct(layer.ready.rows)
                layer.ready = layer.ready._replace(rows=noted[name])
        try:
            yield noted
        finally:
            for layer, ready in before.items():
                layer.ready = ready

    def steps(self, noted: Mapping[str, ObservedProduct]) -> dict[str, Steps]:
        """Choose the codes of the inputs of layers, largest first: for each layer, or feature that it reads, a step."""
        chosen, side = dict[str, Steps](), self.shapes.candidate
        # Columns of a feature have the same number, others one of their own.
        group = torch.arange(side.padded_width)
        for name in side.features:
            group[self.shapes.columns[name]] = self.shapes.columns[name].start
        read = {name: product for name, product in noted.items() if product.least.dim()}
        for name, product in sorted(read.items(), key=lambda item: -self.get_parameter(f"{item[0]}.weight").numel()):
            least, most = product.least, product.most
            if name != self.reads_candidates:
                chosen[name] = Steps.of(least.amin(), most.amax())
                continue
            zeros = torch.zeros(group.numel())
            ends = (zeros.scatter_reduce(0, group, end, how)[group] for end, how in ((least, "amin"), (most, "amax")))
            chosen[name] = Steps.of(*ends)
            chosen[name].join([self.shapes.columns[feature] for feature in side.features])
        return chosen

    def scores(self, inputs: RankingInputs) -> Tensor:
        """Return sigmoid(logit), and below it each output that the model names: float32 [1 + outputs, N]."""
        return torch.sigmoid(self.forward(inputs)).unsqueeze(0)


def _input_columns(shapes: InputShapes) -> tuple[Columns, Columns]:
    """Return the columns of both matrices in weights over [context dense | candidate dense | embeddings]."""
    context, candidate = (
        np.concatenate(
            [
                shapes.dense_width + side.embedding_order,
                first_dense + np.arange(side.dense_width),
                np.full(side.padded_width - side.width, -1),
            ]
        )
        for side, first_dense in ((shapes.context, 0), (shapes.candidate, shapes.context.dense_width))
    )
    return context, candidate


class MlpRanking(RankingModel):
    """logit = MLP(concat(dense, embeddings))."""

    reads_candidates = "mlp.layers.0"

    def __init__(self, config: MlpConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        context, rows = _input_columns(shapes)
        width = shapes.dense_width + shapes.embedding_width
        self.mlp = Mlp(width, config.hidden, "logit", context=context, rows=rows)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return logits [N]."""
        return self.mlp.forward(inputs.candidates, Shared(inputs.context, inputs.request_of_candidate))


class DenseBottom(Mlp):
    """An MLP over the dense inputs: of the context alone once a request, else its first layer's part of them."""

    def __init__(self, shapes: InputShapes, sizes: tuple[int, ...]) -> None:
        context, candidate = shapes.context.dense_width, shapes.candidate.dense_width
        columns = np.arange(context + candidate)
        super().__init__(
            context + candidate,
            sizes,
            "relu",
            context=columns[:context] if candidate else None,
            rows=columns[context:] if candidate else None,
        )
        self._shapes = shapes
        # Columns of its output that each request, and that each candidate, has.
        self.side_widths = (0, self.output_width) if candidate else (self.output_width, 0)

    def with_embeddings(self, inputs: RankingInputs) -> tuple[Tensor, Tensor]:
        """Return the embeddings of both sides, [R, ...] and [N, ...], after its output, if that side has it."""
        sides = self._shapes.context, self._shapes.candidate
        matrices = inputs.context, inputs.candidates
        context, rows = (matrix[:, : side.embedding_width] for matrix, side in zip(matrices, sides, strict=True))
        dense = inputs.context[:, sides[0].dense_columns]
        if self.side_widths[0]:
            return torch.cat([self.forward(dense), context], dim=1), rows
        shared = Shared(dense, inputs.request_of_candidate)
        return context, torch.cat([self.forward(inputs.candidates[:, sides[1].dense_columns], shared), rows], dim=1)


class Dlrm(RankingModel):
    """logit = top(concat(b, <v_i, v_j> for i < j)), with b = bottom(dense) and v = (b, e_1, ..., e_F).

    Pairs come row by row of the upper triangle, TorchRec's order. Without dense inputs there is no b. Products of two
    vectors of the context are made once a request.
    """

    def __init__(self, config: DlrmConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.bottom = DenseBottom(shapes, config.bottom_mlp) if shapes.dense_width else None
        self.bottom_widths = (0, 0) if self.bottom is None else self.bottom.side_widths
        columns_before_pairs = sum(self.bottom_widths)
        numbers = {name: number for number, name in enumerate(shapes.columns, start=int(columns_before_pairs > 0))}
        self.dim = next(columns.stop - columns.start for columns in shapes.columns.values())
        # Of each side its vectors' numbers; of each pair its column in the trained weights.
        shared, local = (
            np.array([0] * (width > 0) + [numbers[name] for name in side.features], np.int64)
            for width, side in zip(self.bottom_widths, (shapes.context, shapes.candidate), strict=True)
        )
        self.num_shared, self.num_local = shared.size, local.size
        count = shared.size + local.size
        column = np.zeros((count, count), np.int64)
        upper = np.triu_indices(count, 1)
        column[upper] = np.arange(upper[0].size) + columns_before_pairs
        column += column.T
        sides: list[Columns] = []
        positions: list[Tensor] = []
        for vectors, width in zip((shared, local), self.bottom_widths, strict=True):
            i, j = np.triu_indices(vectors.size, 1)
            sides.append(np.concatenate([np.arange(width), column[vectors[i], vectors[j]]]))
            positions.append(torch.from_numpy(i * vectors.size + j))
        self.shared_pairs, self.local_pairs = (nn.Buffer(position, persistent=False) for position in positions)
        rows = np.concatenate([sides[1], column[local[:, None], shared[None, :]].reshape(-1)])
        self.top = Mlp(columns_before_pairs + upper[0].size, config.top_mlp, "logit", context=sides[0], rows=rows)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return logits [N]."""
        if self.bottom is not None:
            context, rows = self.bottom.with_embeddings(inputs)
        else:
            context = inputs.context[:, : self.shapes.context.embedding_width]
            rows = inputs.candidates[:, : self.shapes.candidate.embedding_width]
        # [R, C, D] and [N, K, D].
        shared = torch.unflatten(context, 1, (self.num_shared, self.dim))
        local = torch.unflatten(rows, 1, (self.num_local, self.dim))
        blocks = CandidateBlocks.of(inputs, local.shape[0])
        shared_products = torch.bmm(shared, shared.transpose(1, 2)).flatten(1).index_select(1, self.shared_pairs)
        products = torch.bmm(local, local.transpose(1, 2)).flatten(1).index_select(1, self.local_pairs)
        crossed = torch.bmm(blocks.split(local).flatten(1, 2), shared[blocks.request].transpose(1, 2))
        crossed = blocks.join(torch.unflatten(crossed, 1, (blocks.size, self.num_local))).flatten(1)
        of_context, of_rows = self.bottom_widths
        context = torch.cat([context[:, :of_context], shared_products], dim=1)
        rows = torch.cat([rows[:, :of_rows], products, crossed], dim=1)
        return self.top.forward(rows, Shared(context, inputs.request_of_candidate))


class CrossLayers(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with W_l = U_l V_l^T where a rank is given.

    Tensors are named `full.{l}.weight` [width, width] and `full.{l}.bias` [width], or `down.{l}.weight` [rank, width]
    (V^T), `up.{l}.weight` [width, rank] (U) and `up.{l}.bias`. The first product reads the context's columns once a
    request; `context` and `rows` say which these and the candidates' are, and in which order x has them all.
    """

    def __init__(self, width: int, num_layers: int, low_rank: int | None, context: Columns, rows: Columns) -> None:
        super().__init__()
        self.low_rank = low_rank
        order = np.concatenate([context, rows])
        sides = [(None, order) if layer else (context, rows) for layer in range(num_layers)]
        if low_rank is None:
            self.full = nn.ModuleList(Linear(width, width, context=c, rows=r, outputs=order) for c, r in sides)
        else:
            self.down = nn.ModuleList(Linear(width, low_rank, bias=False, context=c, rows=r) for c, r in sides)
            self.up = nn.ModuleList(Linear(low_rank, width, outputs=order) for _ in sides)

    def forward(self, rows: Tensor, shared: Shared) -> Tensor:
        """Map candidates [N, Kd], with the context [R, Kc] that they share, to [N, Kc + Kd]."""
        x = x0 = torch.cat([shared.context.index_select(0, shared.owner), rows], dim=1)
        read: tuple[Tensor, Shared | None] = rows, shared
        for number, layer in enumerate(self.full if self.low_rank is None else self.down):
            product = layer(*read)
            x = torch.addcmul(x, x0, product if self.low_rank is None else self.up[number](product))
            read = x, None
        return x


class DcnV2(RankingModel):
    """logit = deep(cross(concat(dense or bottom(dense), embeddings)))."""

    def __init__(self, config: DcnV2Config, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.bottom = DenseBottom(shapes, config.bottom_mlp) if config.bottom_mlp else None
        width = shapes.embedding_width
        if self.bottom is None:
            width += shapes.dense_width
            context, rows = _input_columns(shapes)
        else:
            width += self.bottom.output_width
            context, rows = (
                np.concatenate([np.arange(of_bottom), self.bottom.output_width + side.embedding_order])
                for of_bottom, side in zip(self.bottom.side_widths, (shapes.context, shapes.candidate), strict=True)
            )
        self.cross = CrossLayers(width, config.num_cross_layers, config.low_rank, context, rows)
        self.deep = Mlp(width, config.deep, "logit", rows=np.concatenate([context, rows]))

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return logits [N]."""
        context, rows = inputs.context, inputs.candidates
        if self.bottom is not None:
            context, rows = self.bottom.with_embeddings(inputs)
        return self.deep.forward(self.cross.forward(rows, Shared(context, inputs.request_of_candidate)))


class AttentionUnit(nn.Module):
    """weight(q, k) = MLP([q, k, q - k, q * k]), for every pair of a candidate q and a row k of its history.

    The first layer W = [W_q, W_k, W_d, W_p] is applied as (W_q + W_d) q + (W_k - W_d) k + W_p (q * k): the first term
    once a candidate, the second once a row of a history, only the third once a pair.
    """

    def __init__(self, dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.dim = dim
        self.max_pairs = MAX_PAIRS
        self.first = Linear(4 * dim, hidden[0])
        self.rest = Mlp(hidden[0], [*hidden[1:], 1], "linear")

    def forward(self, queries: Tensor, history: SequenceInput, inputs: RankingInputs) -> Tensor:
        """Return the softmax-weighted sum of each candidate's history [N, D]; zeros where that is empty.

        Queries are [N, D], `history` those of R requests.
        """
        longest = history.mask.shape[1]
        if longest == 0 or not queries.shape[0]:
            return torch.zeros_like(queries)
        of_q, of_k, of_difference, of_product = torch.split(self.first.weight, self.dim, dim=1)
        per_candidate = F.linear(queries, of_q + of_difference, self.first.bias)
        per_row = F.linear(history.rows, of_k - of_difference)
        blocks = CandidateBlocks.of(inputs, max(1, self.max_pairs // longest))
        chunk = max(1, self.max_pairs // (longest * blocks.size))
        parts = (blocks.split(queries), blocks.split(per_candidate), blocks.request)
        attended = []
        for q, partial, request in zip(*(torch.split(part, chunk) for part in parts), strict=True):
            # [B, S, D] over keys [B, L, D] that the S candidates of a block share.
            keys, padding = history.rows[request], ~history.mask[request].unsqueeze(1)
            hidden = F.linear(q.unsqueeze(2) * keys.unsqueeze(1), of_product)
            hidden = hidden + per_row[request].unsqueeze(1) + partial.unsqueeze(2)
            weights = self.rest.forward(F.relu_(hidden)).squeeze(3).float()
            # The finite minimum, not -inf: the softmax of a history without rows would be NaN, and so its gradient.
            weights = weights.masked_fill(padding, torch.finfo(weights.dtype).min)
            weights = torch.softmax(weights, dim=2).masked_fill(padding, 0.0).to(keys.dtype)
            attended.append(torch.bmm(weights, keys))
        return blocks.join(attended[0] if len(attended) == 1 else torch.cat(attended))


class TargetAttention(RankingModel):
    """logit = MLP(concat(dense, embeddings, attended history))."""

    def __init__(self, config: TargetAttentionConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.history_feature = config.history_feature
        self.target_columns = shapes.columns[config.target_feature]
        dim = shapes.sequence_dims[config.history_feature]
        self.attention = AttentionUnit(dim, config.attention_hidden)
        context, rows = _input_columns(shapes)
        width = shapes.dense_width + shapes.embedding_width
        rows = np.concatenate([rows, np.arange(width, width + dim)])
        self.mlp = Mlp(width + dim, config.hidden, "logit", context=context, rows=rows)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return logits [N]."""
        queries = inputs.candidates[:, self.target_columns]
        attended = self.attention.forward(queries, inputs.sequences[self.history_feature], inputs)
        rows = torch.cat([inputs.candidates, attended], dim=1)
        return self.mlp.forward(rows, Shared(inputs.context, inputs.request_of_candidate))


class DeviceCopies:
    """Copies of a ranking model by device, made when first asked for; the original is on the CPU. Thread-safe."""

    def __init__(self, original: RankingModel) -> None:
        self._lock = threading.Lock()
        self.original = original
        self._by_device: dict[torch.device, RankingModel] = {layers.CPU: original}

    def on(self, device: torch.device) -> RankingModel:
        """Return the model on `cpu`, or on a CUDA device with its index, not to be changed."""
        with self._lock:
            if device not in self._by_device:
                model = copy.deepcopy(self.original).to(device)
                model.pack(self.original.number_format, self.original.int8)
                if device.type == "cuda":
                    # It was made on this thread's stream, and is read on another one.
                    torch.cuda.current_stream(device).synchronize()
                self._by_device[device] = model
            return self._by_device[device]


_MODELS: dict[str, Callable[[Any, InputShapes], RankingModel]] = {
    "mlp": MlpRanking,
    "dlrm": Dlrm,
    "dcn_v2": DcnV2,
    "target_attention": TargetAttention,
}
_ADAPTER: TypeAdapter[DenseModelConfig] = TypeAdapter(Annotated[DenseModelConfig, Field(discriminator="kind")])


def parse_dense_model(spec: ModelSpec) -> DenseModelConfig:
    """Return `spec.dense_model`, checked against the model's features and dense inputs. Raises RankingModelError."""
    described, prefix = spec.dense_model, f"model {spec.model!r}:"
    if not isinstance(described, DenseModelSpec):
        raise RankingModelError(f"{prefix} dense_model {described.kind!r} is no built-in model")
    if "kind" in described.config:
        raise RankingModelError(f"{prefix} dense_model.config must not have 'kind', it is beside config")
    try:
        config = _ADAPTER.validate_python({"kind": described.kind, **described.config})
    except ValidationError as error:
        # A discriminated union puts the kind in front of each location; the name of the option follows.
        reasons = "; ".join(
            f"{'.'.join(map(str, problem.place[1:])) or 'kind'}: {problem.problem} (got {problem.value!r:.80})"
            for problem in schema_errors(error, get_args(DenseModelConfig), elsewhere=["kind"])
        )
        raise RankingModelError(f"{prefix} dense_model {described.kind!r}: {reasons}") from error
    if problem := next(_problems(spec, config), None):
        raise RankingModelError(f"{prefix} {problem}")
    return config


def _problems(spec: ModelSpec, config: DenseModelConfig) -> Iterator[str]:
    """Yield why a config does not fit a model; only the first is sure."""
    poolings = {feature.name: spec.pooling_of(feature.name) for feature in spec.features}
    dims = {name: spec.table_of(name).embedding_dim for name in poolings}
    pooled = {name: dim for name, dim in dims.items() if poolings[name] != "none"}
    dense_width, sequence = spec.dense_inputs.context + spec.dense_inputs.candidate, None
    if isinstance(config, DlrmConfig):
        if len(set(pooled.values())) != 1:
            yield f"dlrm needs features of one embedding_dim, got {pooled}"
        dim, bottom = next(iter(pooled.values())), config.bottom_mlp
        if bool(bottom) != bool(dense_width):
            rule = "it must be empty without dense inputs, and only then"
            yield f"dlrm with {dense_width} dense inputs has bottom_mlp {list(bottom)}; {rule}"
        if bottom and bottom[-1] != dim:
            yield f"dlrm's bottom_mlp ends in {bottom[-1]}, not in the embedding_dim {dim}"
        if len(pooled) + bool(bottom) < 2:
            yield f"dlrm needs at least two vectors to interact, got {sorted(pooled)}"
    elif isinstance(config, TargetAttentionConfig):
        sequence, target = config.history_feature, config.target_feature
        for option, name in (("history_feature", sequence), ("target_feature", target)):
            if name not in dims:
                yield f"{option} {name!r} is not one of its features: {list(dims)}"
        for option, name, side, allowed in (
            ("history_feature", sequence, "context", ("none",)),
            ("target_feature", target, "candidate", ("sum", "mean")),
        ):
            if (given := spec.feature(name).side) != side or poolings[name] not in allowed:
                expected = f"must be a {side} feature with pooling {' or '.join(allowed)}"
                yield f"{option} {name!r} {expected}, it is a {given} feature with pooling {poolings[name]}"
        if dims[sequence] != dims[target]:
            yield f"history and target differ in embedding_dim: { {name: dims[name] for name in (sequence, target)} }"
    elif isinstance(config, DcnV2Config) and config.bottom_mlp and not dense_width:
        yield f"dcn_v2 has bottom_mlp {list(config.bottom_mlp)}, but no dense inputs"
    elif not pooled and not dense_width:
        yield f"{config.kind} has no pooled feature and no dense input"
    for name in dims:
        if name not in pooled and name != sequence:
            advice = "use pooling sum or mean, or target_attention with it as history_feature"
            yield f"feature {name!r} has pooling none, which {config.kind} does not use; {advice}"


def build_model(spec: ModelSpec) -> RankingModel:
    """Build an untrained model in float32, as its description says. Raises RankingModelError if that is not valid."""
    config = parse_dense_model(spec)
    model = _MODELS[config.kind](config, InputShapes.of(spec))
    for part, (columns, dim) in spec.projections().items():
        name = projection_name(part).removeprefix("projections.")
        # As large as the rows were: each of the columns adds to all of the dims.
        model.projections[name] = nn.Parameter(torch.randn(columns, dim) / columns**0.5)
    return model


def load_model(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    number_format: NumberFormat = "float32",
    int8: Mapping[str, Steps] | None = None,
) -> RankingModel:
    """Load a model, made ready as by `RankingModel.pack`. Raises RankingModelError, naming tensors that don't fit."""
    # On the meta device nothing is allocated or drawn at random before the tensors are known to fit.
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build_model(spec).state_dict().items()}
    prefix = f"model {spec.model!r}: dense model {spec.dense_model.kind!r}"
    if missing := sorted(expected.keys() - tensors.keys()):
        raise RankingModelError(f"{prefix}: missing tensors: {missing}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise RankingModelError(f"{prefix}: unknown tensors: {unknown}; it has: {sorted(expected)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            shapes = f"shape {list(tensor.shape)}, expected {list(expected[name])}"
            raise RankingModelError(f"{prefix}: tensor {name!r} has {shapes}")
        if not tensor.is_floating_point():
            raise RankingModelError(f"{prefix}: tensor {name!r} is {tensor.dtype}, expected floating point")
        if not bool(torch.isfinite(tensor).all()):
            raise RankingModelError(f"{prefix}: tensor {name!r} holds NaN or inf")
    model = build_model(spec)
    model.load_state_dict(dict(tensors))
    model.pack(number_format, int8)
    return model
