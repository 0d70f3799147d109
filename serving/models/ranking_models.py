"""The ranking models: their arithmetic, building and loading them, their number format, their copies on devices."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import projection_name
from serving.errors import RankingModelError
from serving.models.config import DcnV2Config, DlrmConfig, MlpConfig, TargetAttentionConfig, parse_dense_model
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.layers import (
    Columns,
    Linear,
    LogitHead,
    Mlp,
    NumberFormat,
    Shared,
    bfloat16_is_native,
    input_dtype,
    int8_is_faster,
)

CPU = torch.device("cpu")
MAX_PAIRS: Final = 1 << 18
"""Candidate-history pairs worked on at once: bounds the memory of a batch with long histories to some 100 MB."""
BLOCK_ROWS: Final = 16
"""Candidates in a block, where requests have different numbers of them: a request's last block is filled up."""


@dataclass(frozen=True, slots=True)
class CandidateBlocks:
    """Candidates in blocks, each of one request: what a request shares is multiplied by whole blocks.

    Attributes:
        request: int64 [B], which of the requests each block is of.
        size: S, the rows of a block.
        rows: int64 [B * S], the candidate of each row; None where blocks are the candidates as they lie.
        back: int64 [N], the row of each candidate.
    """

    request: Tensor
    size: int
    rows: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def of(cls, inputs: RankingInputs, max_size: int) -> CandidateBlocks:
        """Divide a batch's candidates into blocks of at most `max_size`.

        Candidates that are not in the order of their requests, as where a card has them, are blocks of their own.
        """
        owner, num_requests = inputs.request_of_candidate, inputs.context.shape[0]
        if not inputs.is_ordered or not owner.numel():
            return cls(owner, 1)
        if not torch.compiler.is_exporting() and num_requests == 1 and owner.numel() <= max_size:
            return cls(owner[:1], owner.numel())
        counts = owner.new_zeros(num_requests).index_add_(0, owner, torch.ones_like(owner))
        # A program has one form for all batches.
        if not torch.compiler.is_exporting():
            most = int(counts.max())
            if most <= max_size and most * num_requests == owner.numel():
                return cls(torch.arange(num_requests), most)
        size = min(BLOCK_ROWS, max_size)
        blocks = (counts + (size - 1)) // size
        request = torch.repeat_interleave(blocks)
        starts, firsts = counts.cumsum(0) - counts, blocks.cumsum(0) - blocks
        # Behind a request's last candidate a block goes on with others, whose results nobody reads.
        first_rows = starts[request] + size * (torch.arange(request.numel()) - firsts[request])
        rows = (first_rows[:, None] + torch.arange(size)).clamp_(max=owner.numel() - 1).flatten()
        back = torch.arange(owner.numel()) + (size * firsts - starts)[owner]
        return cls(request, size, rows, back)

    def split(self, x: Tensor) -> Tensor:
        """Put candidates [N, ...] into blocks [B, S, ...]."""
        x = x if self.rows is None else x.index_select(0, self.rows)
        return torch.unflatten(x, 0, (self.request.numel(), self.size))

    def shared(self, x: Tensor) -> Tensor:
        """Give each block what its request has: [R, ...] to [B, ...]; themselves where it is the same."""
        return x if self.rows is None and self.size > 1 and self.request.numel() == x.shape[0] else x[self.request]

    def join(self, x: Tensor) -> Tensor:
        """Put blocks [B, S, ...] back into candidates [N, ...]."""
        x = x.flatten(0, 1)
        return x if self.back is None else x.index_select(0, self.back)


class RankingModel(nn.Module):
    """A dense part: from a batch's inputs to one logit a candidate. What depends on the context is computed once.

    `projections` are those of parts that are narrower than their table, float32 [columns, embedding_dim].
    """

    def __init__(self, shapes: InputShapes) -> None:
        super().__init__()
        self.shapes = shapes
        self.number_format: NumberFormat = "float32"
        self.projections = nn.ParameterDict()

    @property
    def projections_by_part(self) -> dict[str, Tensor]:
        """Get the projections by the names of the parts."""
        return {name.replace("/", "."): matrix.detach() for name, matrix in self.projections.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Tell the dtype of the inputs."""
        return input_dtype(self.number_format)

    @abstractmethod
    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits, float32 [N]."""

    def pack(self, number_format: NumberFormat) -> None:
        """Make it ready to score, on the device that it is on; after that its weights must not change.

        `self.number_format` becomes another one for a model without a layer that gains by int8.
        """
        layers = [module for module in self.modules() if isinstance(module, Linear)]
        for layer in layers:
            layer.pack(number_format)
        if number_format == "int8" and not any(layer.is_int8 for layer in layers):
            number_format = "bfloat16" if bfloat16_is_native() else "float32"
        self.number_format = number_format

    def score(self, inputs: RankingInputs) -> Tensor:
        """Give sigmoid(logit): float32 [N] within (0, 1), without gradients."""
        if torch.is_inference_mode_enabled():
            return torch.sigmoid(self.forward(inputs))
        with torch.inference_mode():
            return torch.sigmoid(self.forward(inputs))

    def scores(self, inputs: RankingInputs) -> Tensor:
        """Give the score, and below it each output that the model names: float32 [1 + outputs, N], no gradients."""
        return self.score(inputs).unsqueeze(0)


def _of_inputs(shapes: InputShapes) -> tuple[Columns, Columns]:
    """Find the columns of both matrices in weights over [context dense | candidate dense | embeddings]."""
    found = []
    dense_at = 0
    for side, embeddings in zip((shapes.context, shapes.candidate), shapes.embedding_order(), strict=True):
        dense = np.arange(dense_at, dense_at + side.dense_width)
        padding = np.full(side.padded_width - side.width, -1)
        found.append(np.concatenate([embeddings + shapes.dense_width, dense, padding]))
        dense_at += side.dense_width
    return found[0], found[1]


class MlpRanking(RankingModel):
    """logit = MLP(concat(dense, embeddings))."""

    def __init__(self, config: MlpConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        context, rows = _of_inputs(shapes)
        width = shapes.dense_width + shapes.embedding_width
        self.mlp = LogitHead(width, config.hidden, context=context, rows=rows)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        return self.mlp.forward(inputs.candidates, Shared(inputs.context, inputs.request_of_candidate))


class DenseBottom(Mlp):
    """An MLP over the dense inputs: of the context alone once a request, else its first layer's part of them."""

    def __init__(self, shapes: InputShapes, sizes: tuple[int, ...]) -> None:
        context, candidate = shapes.context.dense_width, shapes.candidate.dense_width
        columns = np.arange(context + candidate)
        super().__init__(
            context + candidate,
            sizes,
            relu_at_end=True,
            context=columns[:context] if candidate else None,
            rows=columns[context:] if candidate else None,
        )
        self.is_shared = not candidate
        self._columns = shapes.context.dense_columns, shapes.candidate.dense_columns

    def of(self, inputs: RankingInputs) -> Tensor:
        """Give [R, width] if it is shared by a request's candidates, else [N, width]."""
        context = inputs.context[:, self._columns[0]]
        if self.is_shared:
            return self.forward(context)
        candidates = inputs.candidates[:, self._columns[1]]
        return self.forward(candidates, Shared(context, inputs.request_of_candidate))


class Dlrm(RankingModel):
    """logit = top(concat(b, <v_i, v_j> for i < j)), with b = bottom(dense) and v = (b, e_1, ..., e_F).

    Pairs come row by row of the upper triangle, TorchRec's order. Without dense inputs there is no b. Products of two
    vectors of the context are made once a request.
    """

    def __init__(self, config: DlrmConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.dim = shapes.dims[0]
        self.bottom = DenseBottom(shapes, config.bottom_mlp) if shapes.dense_width else None
        first = self.bottom is not None
        of_side = [
            [first + shapes.features.index(name) for name in side.features]
            for side in (shapes.context, shapes.candidate)
        ]
        if self.bottom is not None:
            of_side[0 if self.bottom.is_shared else 1].insert(0, 0)
        self.num_shared, self.num_own = map(len, of_side)
        count = self.num_shared + self.num_own
        column = np.zeros((count, count), np.int64)
        upper = np.triu_indices(count, 1)
        column[upper] = np.arange(upper[0].size) + (self.dim if first else 0)
        column += column.T
        shared, own = (np.array(side, np.int64) for side in of_side)
        pairs = [np.triu_indices(side.size, 1) for side in (shared, own)]
        self.shared_pairs, self.own_pairs = (
            nn.Buffer(torch.from_numpy(one[0] * side.size + one[1]), persistent=False)
            for one, side in zip(pairs, (shared, own), strict=True)
        )
        bottom = np.arange(self.dim if first else 0)
        is_shared = self.bottom is not None and self.bottom.is_shared
        context = [bottom[: self.dim * is_shared], column[shared[pairs[0][0]], shared[pairs[0][1]]]]
        rows = [bottom[self.dim * is_shared :], column[own[pairs[1][0]], own[pairs[1][1]]]]
        rows.append(column[own[:, None], shared[None, :]].reshape(-1))
        self.top = LogitHead(
            upper[0].size + bottom.size, config.top_mlp, context=np.concatenate(context), rows=np.concatenate(rows)
        )

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        bottom = None if self.bottom is None else self.bottom.of(inputs)
        # [R, C, D] and [N, K, D].
        shared = self._vectors(inputs.context[:, : self.shapes.context.embedding_width], bottom, is_shared=True)
        own = self._vectors(inputs.candidates[:, : self.shapes.candidate.embedding_width], bottom, is_shared=False)
        blocks = CandidateBlocks.of(inputs, own.shape[0])
        context = torch.bmm(shared, shared.transpose(1, 2)).flatten(1).index_select(1, self.shared_pairs)
        rows = torch.bmm(own, own.transpose(1, 2)).flatten(1).index_select(1, self.own_pairs)
        crossed = torch.bmm(blocks.split(own).flatten(1, 2), blocks.shared(shared).transpose(1, 2))
        crossed = blocks.join(torch.unflatten(crossed, 1, (blocks.size, self.num_own))).flatten(1)
        rows = torch.cat([rows, crossed], dim=1)
        if self.bottom is not None and bottom is not None:
            if self.bottom.is_shared:
                context = torch.cat([bottom, context], dim=1)
            else:
                rows = torch.cat([bottom, rows], dim=1)
        return self.top.forward(rows, Shared(context, inputs.request_of_candidate))

    def _vectors(self, embeddings: Tensor, bottom: Tensor | None, *, is_shared: bool) -> Tensor:
        vectors = torch.unflatten(embeddings, 1, (embeddings.shape[1] // self.dim, self.dim))
        if self.bottom is None or bottom is None or self.bottom.is_shared is not is_shared:
            return vectors
        return torch.cat([bottom.unsqueeze(1), vectors], dim=1)


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
        for number in range(len(self.full if self.low_rank is None else self.down)):
            read = (x, None) if number else (rows, shared)
            product = self.full[number](*read) if self.low_rank is None else self.up[number](self.down[number](*read))
            x = torch.addcmul(x, x0, product)
        return x


class DcnV2(RankingModel):
    """logit = deep(cross(concat(dense or bottom(dense), embeddings)))."""

    def __init__(self, config: DcnV2Config, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.bottom = DenseBottom(shapes, config.bottom_mlp) if config.bottom_mlp else None
        if self.bottom is None:
            width = shapes.dense_width + shapes.embedding_width
            context, rows = _of_inputs(shapes)
        else:
            output = np.arange(self.bottom.output_width)
            width = output.size + shapes.embedding_width
            context, rows = (order + output.size for order in shapes.embedding_order())
            if self.bottom.is_shared:
                context = np.concatenate([context, output])
            else:
                rows = np.concatenate([rows, output])
        self.cross = CrossLayers(width, config.num_cross_layers, config.low_rank, context, rows)
        self.deep = LogitHead(width, config.deep, rows=np.concatenate([context, rows]))

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        context, rows = inputs.context, inputs.candidates
        if self.bottom is not None:
            bottom = self.bottom.of(inputs)
            context = context[:, : self.shapes.context.embedding_width]
            rows = rows[:, : self.shapes.candidate.embedding_width]
            if self.bottom.is_shared:
                context = torch.cat([context, bottom], dim=1)
            else:
                rows = torch.cat([rows, bottom], dim=1)
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
        self.rest = Mlp(hidden[0], [*hidden[1:], 1], relu_at_end=False)

    def forward(self, queries: Tensor, history: SequenceInput, inputs: RankingInputs) -> Tensor:
        """Give the softmax-weighted sum of each candidate's history [N, D]; zeros where that is empty.

        Queries are [N, D], `history` those of R requests.
        """
        longest = history.mask.shape[1]
        if longest == 0 or not queries.shape[0]:
            return torch.zeros_like(queries)
        of_q, of_k, of_difference, of_product = torch.split(self.first.weight, self.dim, dim=1)
        per_candidate = F.linear(queries, of_q + of_difference, self.first.bias)
        per_row = F.linear(history.rows, of_k - of_difference)
        blocks = CandidateBlocks.of(inputs, max(1, self.max_pairs // longest))
        parts = (blocks.split(queries), blocks.split(per_candidate), blocks.request)
        # A program works on all pairs at once: it has no loop whose turns depend on the batch.
        chunk = max(1, self.max_pairs // (longest * blocks.size))
        chunks = (
            [parts]
            if torch.compiler.is_exporting()
            else zip(*(torch.split(part, chunk) for part in parts), strict=True)
        )
        attended = [
            self._attend(q, partial, of_product, history.rows[request], per_row[request], history.mask[request])
            for q, partial, request in chunks
        ]
        return blocks.join(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _attend(
        self, queries: Tensor, per_candidate: Tensor, of_product: Tensor, keys: Tensor, per_row: Tensor, mask: Tensor
    ) -> Tensor:
        """Attend in blocks: queries [B, S, D] over keys [B, L, D] that the S of a block share."""
        hidden = F.linear(queries.unsqueeze(2) * keys.unsqueeze(1), of_product)
        hidden = hidden + per_row.unsqueeze(1) + per_candidate.unsqueeze(2)
        weights = self.rest(F.relu_(hidden)).squeeze(3).float()
        # The finite minimum, not -inf: the softmax of a history without rows would be NaN, and so its gradient.
        ended = ~mask.unsqueeze(1)
        weights = weights.masked_fill(ended, torch.finfo(weights.dtype).min)
        weights = torch.softmax(weights, dim=2).masked_fill(ended, 0.0).to(keys.dtype)
        return torch.bmm(weights, keys)


class TargetAttention(RankingModel):
    """logit = MLP(concat(dense, embeddings, attended history))."""

    def __init__(self, config: TargetAttentionConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.history_feature = config.history_feature
        self.target_columns = shapes.candidate.columns_of(config.target_feature)
        dim = shapes.sequence_dims[config.history_feature]
        self.attention = AttentionUnit(dim, config.attention_hidden)
        context, rows = _of_inputs(shapes)
        width = shapes.dense_width + shapes.embedding_width
        rows = np.concatenate([rows, np.arange(width, width + dim)])
        self.mlp = LogitHead(width + dim, config.hidden, context=context, rows=rows)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [N]."""
        queries = inputs.candidates[:, self.target_columns]
        attended = self.attention(queries, inputs.sequences[self.history_feature], inputs)
        rows = torch.cat([inputs.candidates, attended], dim=1)
        return self.mlp.forward(rows, Shared(inputs.context, inputs.request_of_candidate))


class DeviceCopies:
    """Copies of a ranking model by device, made when first asked for; the original is on the CPU. Thread-safe."""

    def __init__(self, original: RankingModel) -> None:
        self._lock = threading.Lock()
        self._by_device: dict[torch.device, RankingModel] = {CPU: original}

    def on(self, device: torch.device) -> RankingModel:
        """Get the model on `cpu`, or on a CUDA device with its index: one object for all, not to be changed."""
        with self._lock:
            if device not in self._by_device:
                original = self._by_device[CPU]
                made = copy.deepcopy(original).to(device)
                made.pack(original.number_format)
                if device.type == "cuda":
                    # It was made on this thread's stream; who scores with it does so on another one.
                    torch.cuda.current_stream(device).synchronize()
                self._by_device[device] = made
            return self._by_device[device]


DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
_MODELS: dict[str, Callable[[Any, InputShapes], RankingModel]] = {
    "mlp": MlpRanking,
    "dlrm": Dlrm,
    "dcn_v2": DcnV2,
    "target_attention": TargetAttention,
}


def build_model(spec: ModelSpec) -> RankingModel:
    """Build an untrained model in float32, as its description says. Raises RankingModelError if that is not valid."""
    config = parse_dense_model(spec)
    model = _MODELS[config.kind](config, InputShapes.of(spec))
    for part, (columns, dim) in spec.projections().items():
        name = projection_name(part).removeprefix("projections.")
        # As large as the rows were: each of the columns adds to all of the dims.
        model.projections[name] = nn.Parameter(torch.randn(columns, dim) / columns**0.5)
    return model


def load_model(spec: ModelSpec, tensors: Mapping[str, Tensor], number_format: NumberFormat = "float32") -> RankingModel:
    """Load a model, ready to score in a number format. Raises RankingModelError, naming tensors that don't fit."""
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
            raise RankingModelError(
                f"{prefix}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise RankingModelError(f"{prefix}: tensor {name!r} is {tensor.dtype}, expected floating point")
        if not bool(torch.isfinite(tensor).all()):
            raise RankingModelError(f"{prefix}: tensor {name!r} holds NaN or inf")
    model = build_model(spec)
    model.load_state_dict(dict(tensors), strict=True)
    model.requires_grad_(False).eval()
    model.pack(number_format)
    return model


def choose_dtype(choice: DtypeChoice, device: torch.device = CPU) -> NumberFormat:
    """Choose the number format of the ranking model on a device. Raises RankingModelError for one that is not there.

    `auto` goes by what the processor has and nothing else, so that all processes of a fleet of equal machines choose
    the same: int8 where `int8_is_faster`, then bfloat16 where that is native, which GPUs of compute capability 8.0 and
    above have.
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
