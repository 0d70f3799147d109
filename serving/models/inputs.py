"""What every ranking model reads: one matrix with a row a request and one with a row a candidate, and their assembly.

Each side's matrix is `[embeddings | dense | zeros]`: its pooled features in the spec's order, its dense inputs, and
padding to a multiple of 32 columns, which matrix units want. The candidates' one has codes, a byte each, if the first
layer that reads it is an int8 one. Context columns are never written for each candidate:
models multiply them once a request. A lookup answers with one block per (embedding_dim, dtype) group: feature after
feature (or slice after slice of features of sliced tables), each with all its bags. Those that are neighbours in both
orders form a run, and a run is written by one strided copy, which converts to the model's number format.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.manifest import ModelSpec, Side
from router.feature_schema import FeatureSchema
from router.router import Embeddings
from serving.models.layers import Steps, codes_of
from shard_node.bags import Float32Array, Int64Array

COLUMN_MULTIPLE: Final = 32
MIN_ROWS: Final = 8
"""Rows of candidates are rounded up to a multiple of it, of more for larger batches."""


def padded_width(width: int) -> int:
    """Round up to a multiple of 32."""
    return -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


@dataclass(frozen=True)
class SideShapes:
    """The columns of one side's matrix, `width` of which carry something.

    Attributes:
        features: the side's pooled ones, in the order of `spec.features`.
        embedding_order: int64 [embedding_width], where their columns are among those of both sides' features.
        dense_columns: those of the dense inputs.
    """

    features: tuple[str, ...]
    embedding_order: Int64Array
    embedding_width: int
    dense_width: int
    dense_columns: slice
    width: int
    padded_width: int


@dataclass(frozen=True)
class InputShapes:
    """Where each input of a model is.

    Attributes:
        columns: of each pooled feature, in the order of `spec.features`, its columns in the matrix of its side.
        sequence_dims: the embedding_dim of each feature with pooling `none`.
    """

    context: SideShapes
    candidate: SideShapes
    columns: Mapping[str, slice]
    sequence_dims: Mapping[str, int]

    @classmethod
    def of(cls, spec: ModelSpec) -> InputShapes:
        """Derive the shapes of a model's inputs."""
        dims = {feature.name: spec.table_of(feature.name).embedding_dim for feature in spec.features}
        pooled = {name: dim for name, dim in dims.items() if spec.pooling_of(name) != "none"}
        starts = dict(zip(pooled, accumulate(pooled.values(), initial=0), strict=False))
        columns = dict.fromkeys(pooled, slice(0, 0))
        sides: dict[Side, SideShapes] = {}
        dense_widths: dict[Side, int] = {"context": spec.dense_inputs.context, "candidate": spec.dense_inputs.candidate}
        for side, dense_width in dense_widths.items():
            features = tuple(name for name in pooled if spec.feature(name).side == side)
            order, embeddings = [np.zeros(0, np.int64)], 0
            for name in features:
                columns[name] = slice(embeddings, embeddings + pooled[name])
                order.append(starts[name] + np.arange(pooled[name]))
                embeddings += pooled[name]
            width = embeddings + dense_width
            sides[side] = SideShapes(
                features=features,
                embedding_order=np.concatenate(order),
                embedding_width=embeddings,
                dense_width=dense_width,
                dense_columns=slice(embeddings, width),
                width=width,
                padded_width=padded_width(width),
            )
        sequence_dims = {name: dim for name, dim in dims.items() if name not in pooled}
        return cls(columns=columns, sequence_dims=sequence_dims, **sides)

    @property
    def dense_width(self) -> int:
        """Count the dense inputs of both sides."""
        return self.context.dense_width + self.candidate.dense_width

    @property
    def embedding_width(self) -> int:
        """Count the columns of embeddings of both sides."""
        return self.context.embedding_width + self.candidate.embedding_width


class SequenceInput(NamedTuple):
    """Rows [R, L, D] of one sequence feature, one a request; `mask`, bool [R, L], is False where one has ended."""

    rows: Tensor
    mask: Tensor


class RankingInputs(NamedTuple):
    """A batch of N candidates of R requests.

    `context` is [R, padded width of the context], `candidates` [N, padded width of the candidates],
    `request_of_candidate` int64 [N], ascending if `is_ordered`.
    """

    context: Tensor
    candidates: Tensor
    sequences: Mapping[str, SequenceInput]
    request_of_candidate: Tensor
    is_ordered: bool = False

    @classmethod
    def of(
        cls,
        shapes: InputShapes,
        embeddings: Mapping[str, Tensor | SequenceInput],
        request_of_candidate: Tensor,
        context_dense: Tensor | None = None,
        candidate_dense: Tensor | None = None,
    ) -> RankingInputs:
        """Lay out what a model reads, to train it; gradients flow through.

        Args:
            shapes: the model's, `RankingModel.shapes`.
            embeddings: by feature, pooled, [R, embedding_dim] of a context feature, [N, embedding_dim] of a candidate
                feature; or the rows of one with pooling `none`.
            request_of_candidate: int64 [N], ascending.
            context_dense: [R, dense_inputs.context], None for none.
            candidate_dense: [N, dense_inputs.candidate], None for none.
        """
        sequences = {name: cast(SequenceInput, embeddings[name]) for name in shapes.sequence_dims}
        pooled = {name: cast(Tensor, rows) for name, rows in embeddings.items() if name not in sequences}
        of_context = [
            *(pooled[name] for name in shapes.context.features),
            *(sequence.rows for sequence in sequences.values()),
        ]
        given = [matrix.shape[0] for matrix in (*of_context, context_dense) if matrix is not None]
        num_requests = max(given, default=int(request_of_candidate.max()) + 1)
        matrices = []
        for side, dense, count in (
            (shapes.context, context_dense, num_requests),
            (shapes.candidate, candidate_dense, request_of_candidate.numel()),
        ):
            parts = [*(pooled[name] for name in side.features), *([] if dense is None else [dense])]
            matrix = torch.cat(parts, dim=1) if parts else torch.empty(count, 0)
            if matrix.shape != (count, side.width):
                raise ValueError(f"embeddings and dense inputs are {list(matrix.shape)}, not {[count, side.width]}")
            matrices.append(F.pad(matrix, (0, side.padded_width - side.width)))
        return cls(matrices[0], matrices[1], sequences, request_of_candidate)

    def on(self, device: torch.device) -> RankingInputs:
        """Copy the inputs to another device; themselves if they are there."""
        if self.candidates.device == device:
            return self
        sequences = {
            name: SequenceInput(rows.to(device), mask.to(device)) for name, (rows, mask) in self.sequences.items()
        }
        matrices = self.context.to(device), self.candidates.to(device)
        return RankingInputs(*matrices, sequences, self.request_of_candidate.to(device), self.is_ordered)

    def split(self, counts: Sequence[int]) -> Iterator[RankingInputs]:
        """Divide an ordered batch into so many candidates each, with their requests and no others."""
        first, owner = 0, self.request_of_candidate
        for count in counts:
            rows = slice(first, first + count)
            requests = slice(int(owner[first]), int(owner[first + count - 1]) + 1)
            yield RankingInputs(
                self.context[requests],
                self.candidates[rows],
                {name: SequenceInput(*(part[requests] for part in parts)) for name, parts in self.sequences.items()},
                owner[rows] - requests.start,
                self.is_ordered,
            )
            first += count


# A block that came through a socket is read-only memory. torch has no read-only tensors and says so, once in a
# process; here blocks are only read from.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)


class Run(NamedTuple):
    """Lookups for pooled features, of one side and embedding_dim, that are neighbours in block and columns.

    They are `num_lookups` from `first` on, in the group `block`, with `dim` columns. They go to `width` columns of
    the side's matrix from `column` on, projected if there are `projections` (names of parts), added if it `adds`, as
    codes if their `step` is not 0.
    """

    block: int
    side: Side
    first: int
    num_lookups: int
    dim: int
    column: int
    width: int
    projections: tuple[str, ...]
    adds: bool
    step: float = 0.0


def find_runs(
    spec: ModelSpec, schema: FeatureSchema, features: Sequence[int], steps: Float32Array | None = None
) -> tuple[Run, ...]:
    """Split the lookups of features, by flat index, into runs, those that add last. Sequences begin at column 0.

    `steps`, float32 [padded width], are those of the candidates' columns; None for no codes.
    """
    columns, lookups, projections = InputShapes.of(spec).columns, schema.lookups, spec.projections()
    runs: list[Run] = []
    # Of each feature, the part that is written first, to which the others are added.
    first_parts: dict[int, int] = {}
    for number in np.flatnonzero(np.isin(lookups.feature, features)).tolist():
        index, part, block = (int(array[number]) for array in (lookups.feature, lookups.part, lookups.group))
        feature = schema.features[index]
        name = spec.parts(spec.table_of(feature.name))[part].name
        dim = schema.layout.groups[block].embedding_dim
        column = columns.get(feature.name, slice(0, 0)).start + int(lookups.column[number])
        run = Run(
            block=block,
            side=feature.side,
            first=number,
            num_lookups=1,
            dim=dim,
            column=column,
            width=projections[name][1] if name in projections else dim,
            projections=(name,) if name in projections else (),
            adds=first_parts.setdefault(index, part) != part,
            step=0.0 if steps is None or feature.side == "context" else float(steps[column]),
        )
        last = runs[-1] if runs else run
        following = last._replace(
            first=last.first + last.num_lookups,
            num_lookups=1,
            column=last.column + last.num_lookups * last.width,
            projections=run.projections,
        )
        if run == following and bool(run.projections) == bool(last.projections):
            runs[-1] = last._replace(num_lookups=last.num_lookups + 1, projections=last.projections + run.projections)
        else:
            runs.append(run)
    return tuple(sorted(runs, key=lambda run: run.adds))


def write_run(run: Run, rows: Tensor, matrix: Tensor, projections: Mapping[str, Tensor], zero: int = 0) -> None:
    """Write the rows of a run, [lookups, bags, dim], into its columns of a matrix: projected, added, as the run says.

    `projections` are float32 [dim, width] by part; `zero` is the code of 0.
    """
    if run.projections:
        rows = torch.bmm(rows.float(), torch.stack([projections[part] for part in run.projections]))
    if run.step:
        rows = codes_of(rows, run.step, zero)
    rows = rows.transpose(0, 1)
    first = matrix.storage_offset() + run.column
    target = matrix.as_strided(rows.shape, (matrix.stride(0), run.width, 1), first)
    if run.adds:
        target.add_(rows)
    else:
        target.copy_(rows)


class InputAssembler:
    """Writes a batch's embeddings and dense floats into a ranking model's inputs, in its number format. Immutable.

    `steps` are those of the candidates' columns, [padded width], if the model reads their codes. Sums over slices of a
    table can't be made of codes: where there are some, it gets numbers, and takes their codes itself.
    """

    def __init__(self, spec: ModelSpec, schema: FeatureSchema, dtype: torch.dtype, steps: Steps | None = None) -> None:
        self.shapes = InputShapes.of(spec)
        self.dtype = dtype
        features = np.flatnonzero(~schema.is_none).tolist()
        self._runs = find_runs(spec, schema, features, None if steps is None else steps.step.numpy())
        if any(run.adds and run.step for run in self._runs):
            steps, self._runs = None, find_runs(spec, schema, features)
        self._zero = 0 if steps is None else steps.zero
        self._dense_steps = steps and steps._replace(step=steps.step[self.shapes.candidate.dense_columns])
        self._sequences = [(index, schema.features[index].name) for index in np.flatnonzero(schema.is_none).tolist()]

    def buffer(self, num_requests: int = 0, num_candidates: int = 0) -> list[Tensor]:
        """Make memory for `assemble`, the context's matrix and the candidates': padding is 0, the rest undefined.

        It grows to the largest batch; only one batch may use it at a time.
        """
        buffer = []
        dtype = self.dtype if self._dense_steps is None else torch.uint8
        of_context, of_candidates = (self.dtype, 0, num_requests), (dtype, self._zero, num_candidates)
        for side, (dtype, zero, count) in ((self.shapes.context, of_context), (self.shapes.candidate, of_candidates)):
            matrix = torch.empty(count, side.padded_width, dtype=dtype)
            # Memory that was never written may hold NaN, which a zero weight does not remove.
            matrix[:, side.width :].fill_(zero)
            buffer.append(matrix)
        return buffer

    def assemble(
        self,
        embeddings: Embeddings,
        request_of_candidate: Int64Array,
        context_dense: Float32Array,
        candidate_dense: Float32Array,
        buffer: list[Tensor],
        projections: Mapping[str, Tensor],
    ) -> RankingInputs:
        """Build the inputs of R requests' N candidates, in the assembler's dtype.

        Embeddings are the batch's lookup of all features: context features have R bags, candidate features N.
        `request_of_candidate` is int64 [N], ascending, dense inputs float32 [R, Kc] and [N, Kd]. The candidates' matrix
        has rows in classes: by 8 up to 256, by at most a sixteenth beyond. Those after N are zeros, of the last
        request. `projections` are the ranking model's, float32 by part.
        """
        num_requests, num_candidates = context_dense.shape[0], candidate_dense.shape[0]
        # oneDNN prepares a product for each new number of rows, at some 0.4 ms a layer: classes are few enough to keep.
        step = max(MIN_ROWS, (1 << num_candidates.bit_length()) >> 5)
        num_rows = -(-num_candidates // step) * step
        if num_requests > buffer[0].shape[0] or num_rows > buffer[1].shape[0]:
            buffer[:] = self.buffer(max(num_requests, buffer[0].shape[0]), max(num_rows, buffer[1].shape[0]))
        context, candidates = buffer[0][:num_requests], buffer[1][:num_rows]
        candidates[num_candidates:].fill_(self._zero)
        # Dense inputs may be in the bytes of a request, which nobody may write: torch warns of tensors over such.
        if self.shapes.context.dense_width:
            context[:, self.shapes.context.dense_columns] = torch.from_numpy(context_dense.copy())
        if self.shapes.candidate.dense_width:
            dense, steps = torch.from_numpy(candidate_dense.copy()), self._dense_steps
            codes = dense if steps is None else steps.codes(dense)
            candidates[:num_candidates, self.shapes.candidate.dense_columns] = codes
        for run in self._runs:
            matrix, bags = (context, num_requests) if run.side == "context" else (candidates, num_candidates)
            # The run is rows [F, bags, D] of its block, from `start` on.
            dim, start = run.dim, int(embeddings.row_starts[run.first]) * run.dim
            block = torch.from_numpy(embeddings.blocks[run.block])
            of_run = block.as_strided((run.num_lookups, bags, dim), (bags * dim, dim, 1), start)
            write_run(run, of_run, matrix, projections, self._zero)
        sequences: dict[str, SequenceInput] = {}
        for index, name in self._sequences:
            rows = embeddings.feature(index, {name: matrix.numpy() for name, matrix in projections.items()})
            sequences[name] = padded_sequence(rows, embeddings.lengths(index), self.dtype)
        owner = np.full(num_rows, num_requests - 1, np.int64)
        owner[:num_candidates] = request_of_candidate
        return RankingInputs(context, candidates, sequences, torch.from_numpy(owner), True)


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
