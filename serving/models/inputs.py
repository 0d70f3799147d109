"""What every ranking model reads, `[dense | embeddings | zeros]` with one row a candidate, and how it is assembled.

The matrix is padded to a multiple of 32 columns, which the bfloat16 matrix units want; models that begin with the
concatenation read it as it is. A lookup answers with one block per (embedding_dim, dtype) group: feature after feature
(or slice after slice of features of sliced tables), each with all its bags. Those that are neighbours in both orders,
on one side, form a run, and a run is written by one strided copy, which converts to the model's number format.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from loader.snapshot.manifest import ModelSpec, Side
from router.feature_schema import FeatureSchema
from router.router import Embeddings
from shard_node.bags import Float32Array, Int64Array

COLUMN_MULTIPLE = 32


def padded_width(width: int) -> int:
    """Round up to a multiple of 32."""
    return -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


@dataclass(frozen=True)
class InputShapes:
    """Where each input of a model lies. Derived from its description.

    Attributes:
        context_dense_width, candidate_dense_width: Kc and Kd, dense inputs of a request and of each candidate.
        features, dims: the pooled features, in the order of `spec.features`, and the embedding_dim of each.
        offsets: first column of each pooled feature within the embeddings.
        sequence_dims: embedding_dim of each feature with pooling none.
        dense_width, embedding_width, width: Kc + Kd; W, the sum of `dims`; all columns that carry something.
        padded_width: the columns of the matrix.
    """

    context_dense_width: int
    candidate_dense_width: int
    features: tuple[str, ...]
    dims: tuple[int, ...]
    offsets: Mapping[str, int]
    sequence_dims: Mapping[str, int]
    dense_width: int
    embedding_width: int
    width: int
    padded_width: int

    @classmethod
    def of(cls, spec: ModelSpec) -> InputShapes:
        """Derive the shapes of a model's inputs."""
        dims = {feature.name: spec.table_of(feature.name).embedding_dim for feature in spec.features}
        pooled = {name: dim for name, dim in dims.items() if spec.pooling_of(name) != "none"}
        context, candidate, embeddings = spec.dense_inputs.context, spec.dense_inputs.candidate, sum(pooled.values())
        width = context + candidate + embeddings
        return cls(
            context_dense_width=context,
            candidate_dense_width=candidate,
            features=tuple(pooled),
            dims=tuple(pooled.values()),
            offsets=dict(zip(pooled, accumulate(pooled.values(), initial=0), strict=False)),
            sequence_dims={name: dim for name, dim in dims.items() if name not in pooled},
            dense_width=context + candidate,
            embedding_width=embeddings,
            width=width,
            padded_width=padded_width(width),
        )

    def embedding_columns(self, feature: str) -> slice:
        """Find the columns of a pooled feature within `RankingInputs.embeddings`. Raises KeyError."""
        start = self.offsets[feature]
        return slice(start, start + self.dims[self.features.index(feature)])


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Rows [R, L, D] of one sequence feature, one a request; `mask`, bool [R, L], is False where one has ended."""

    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class RankingInputs:
    """A batch of candidates of R requests.

    Attributes:
        columns: [N, padded width], each candidate's dense inputs (context, then candidate), its pooled embeddings in
            the order of `InputShapes.features` (context features repeated for each candidate), zeros.
        sequences: the sequence features by name.
        request_of_candidate: int64 [N], which of the R requests a candidate belongs to.
    """

    columns: Tensor
    dense_width: int
    embedding_width: int
    sequences: Mapping[str, SequenceInput]
    request_of_candidate: Tensor

    @classmethod
    def of_parts(
        cls,
        dense: Tensor,
        embeddings: Tensor,
        request_of_candidate: Tensor,
        sequences: Mapping[str, SequenceInput] | None = None,
    ) -> RankingInputs:
        """Put dense inputs [N, Kc + Kd] and embeddings [N, W] side by side (a copy; gradients flow through)."""
        width = dense.shape[1] + embeddings.shape[1]
        padding = dense.new_zeros(dense.shape[0], padded_width(width) - width)
        return cls(
            torch.cat([dense, embeddings, padding], dim=1),
            dense.shape[1],
            embeddings.shape[1],
            sequences or {},
            request_of_candidate,
        )

    @property
    def dense(self) -> Tensor:
        """View the dense inputs, [N, Kc + Kd]."""
        return self.columns[:, : self.dense_width]

    @property
    def embeddings(self) -> Tensor:
        """View the embeddings, [N, W]."""
        return self.columns[:, self.dense_width : self.dense_width + self.embedding_width]

    def on(self, device: torch.device) -> RankingInputs:
        """Copy the inputs to another device; themselves if they are there."""
        if self.columns.device == device:
            return self
        sequences = {
            name: SequenceInput(one.rows.to(device), one.mask.to(device)) for name, one in self.sequences.items()
        }
        owner = self.request_of_candidate.to(device)
        return replace(self, columns=self.columns.to(device), sequences=sequences, request_of_candidate=owner)


# A block that came through a socket is read-only memory. torch has no read-only tensors and says so, once in a
# process; here blocks are only read from.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)


@dataclass(frozen=True, slots=True)
class Run:
    """Lookups for pooled features, of one side and embedding_dim, that are neighbours in block and columns."""

    block: int
    side: Side
    first: int
    count: int
    dim: int
    column: int


def find_runs(spec: ModelSpec, schema: FeatureSchema) -> tuple[Run, ...]:
    """Split the lookups for pooled features, in order, into the fewest runs."""
    shapes, lookups = InputShapes.of(spec), schema.lookups
    runs: list[Run] = []
    for number, index in enumerate(lookups.feature.tolist()):
        feature = schema.features[index]
        if feature.name in shapes.sequence_dims:
            continue
        block = int(lookups.group[number])
        dim = schema.layout.groups[block].embedding_dim
        column = shapes.dense_width + shapes.offsets[feature.name] + int(lookups.column[number])
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.block, last.side) == (block, feature.side)
            and last.first + last.count == number
            and last.column + last.count * dim == column
        ):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(block, feature.side, number, 1, dim, column))
    return tuple(runs)


@dataclass(slots=True)
class ColumnBuffer:
    """Memory [most candidates so far, padded width] for the columns of one batch after the other."""

    memory: Tensor


class InputAssembler:
    """Writes a batch's embeddings and dense floats into a ranking model's inputs, in its number format."""

    def __init__(self, spec: ModelSpec, schema: FeatureSchema, dtype: torch.dtype) -> None:
        self.shapes = InputShapes.of(spec)
        self.dtype = dtype
        self.runs = find_runs(spec, schema)
        self._sequences = tuple(
            (index, feature.name)
            for index, feature in enumerate(schema.features)
            if feature.name in self.shapes.sequence_dims
        )

    def buffer(self) -> ColumnBuffer:
        """Make a buffer for `assemble`."""
        return ColumnBuffer(torch.empty(0, self.shapes.padded_width, dtype=self.dtype))

    def assemble(
        self,
        embeddings: Embeddings,
        request_of_candidate: Int64Array,
        context_dense: Float32Array,
        candidate_dense: Float32Array,
        buffer: ColumnBuffer | None = None,
    ) -> RankingInputs:
        """Build the inputs of R requests' N candidates, in the assembler's dtype.

        Embeddings are the batch's lookup of all features: context features have R bags, candidate features N.
        `request_of_candidate` is int64 [N], ascending, dense inputs float32 [R, Kc] and [N, Kd]. Without a buffer the
        columns have memory of their own.
        """
        num_requests, num_candidates = context_dense.shape[0], candidate_dense.shape[0]
        shapes, buffer, owner = self.shapes, buffer or self.buffer(), torch.from_numpy(request_of_candidate)
        if num_candidates > buffer.memory.shape[0]:
            buffer.memory = buffer.memory.new_empty(num_candidates, shapes.padded_width)
            # Memory that was never written may hold NaN, which a zero weight does not remove.
            buffer.memory[:, shapes.width :].zero_()
        columns = buffer.memory[:num_candidates]
        # Dense inputs may lie in the bytes of a request, which nobody may write: torch warns of tensors over such.
        if context := shapes.context_dense_width:
            dense = torch.from_numpy(context_dense.copy()).to(self.dtype)
            torch.index_select(dense, 0, owner, out=columns[:, :context])
        if shapes.candidate_dense_width:
            columns[:, context : shapes.dense_width].copy_(torch.from_numpy(candidate_dense.copy()))
        blocks = list(map(torch.from_numpy, embeddings.blocks))
        for run in self.runs:
            # The run is rows [F, bags, D] of its block, from `start` on; it is read as [bags, F, D].
            block, start = blocks[run.block], int(embeddings.row_starts[run.first]) * run.dim
            dim, width = run.dim, run.count * run.dim
            if run.side == "context":
                shape = (num_requests, run.count, dim)
                rows = block.as_strided(shape, (dim, num_requests * dim, 1), start).to(self.dtype).flatten(1)
                torch.index_select(rows, 0, owner, out=columns[:, run.column : run.column + width])
            else:
                shape = (num_candidates, run.count, dim)
                target = columns.as_strided(shape, (columns.stride(0), dim, 1), run.column)
                target.copy_(block.as_strided(shape, (dim, num_candidates * dim, 1), start))
        sequences: dict[str, SequenceInput] = {}
        for index, name in self._sequences:
            sequences[name] = padded_sequence(embeddings.feature(index), embeddings.lengths(index), self.dtype)
        return RankingInputs(columns, shapes.dense_width, shapes.embedding_width, sequences, owner)


def padded_sequence(rows: Float32Array, lengths: Int64Array, dtype: torch.dtype) -> SequenceInput:
    """Lay out ragged sequences, float32 [lengths.sum(), D], side by side: [R, max(lengths), D], ending in zeros."""
    num_requests, dim = lengths.size, rows.shape[1]
    longest = int(lengths.max(initial=0))
    mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
    source = torch.from_numpy(rows).to(dtype)
    if rows.shape[0] == num_requests * longest:
        return SequenceInput(source.view(num_requests, longest, dim), mask)
    padded = torch.zeros(num_requests * longest, dim, dtype=dtype)
    padded.index_copy_(0, mask.flatten().nonzero().flatten(), source)
    return SequenceInput(padded.view(num_requests, longest, dim), mask)
