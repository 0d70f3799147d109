"""What every ranking model reads: one matrix with a row a request and one with a row a candidate, and their assembly.

Each side's matrix is `[embeddings | dense | zeros]`: its pooled features in the spec's order, its dense inputs, and
padding to a multiple of 32 columns, which matrix units want. Context columns are never written for each candidate:
models multiply them once a request. A lookup answers with one block per (embedding_dim, dtype) group: feature after
feature (or slice after slice of features of sliced tables), each with all its bags. Those that are neighbours in both
orders form a run, and a run is written by one strided copy, which converts to the model's number format.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from loader.snapshot.manifest import ModelSpec, Side
from router.feature_schema import FeatureSchema
from router.router import Embeddings
from shard_node.bags import Float32Array, Int64Array

COLUMN_MULTIPLE: Final = 32
MIN_ROWS: Final = 8
"""Rows of candidates are rounded up to a multiple of it, of more for larger batches."""


def padded_width(width: int) -> int:
    """Round up to a multiple of 32."""
    return -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def rounded_rows(count: int) -> int:
    """Round a number of candidates up to its class: by 8 up to 256, by at most a sixteenth beyond; 0 stays 0.

    oneDNN prepares a product for each new number of rows, at some 0.4 ms a layer: classes are few enough to be kept.
    """
    step = max(MIN_ROWS, (1 << count.bit_length()) >> 5)
    return -(-count // step) * step


@dataclass(frozen=True)
class SideShapes:
    """The columns of one side's matrix, `width` of which carry something.

    `features` are the side's pooled ones, in the order of `spec.features`, `dims` and `offsets` their embedding_dims
    and first columns.
    """

    features: tuple[str, ...]
    dims: tuple[int, ...]
    offsets: Mapping[str, int]
    embedding_width: int
    dense_width: int
    width: int
    padded_width: int

    @classmethod
    def of(cls, dims: Mapping[str, int], dense_width: int) -> SideShapes:
        """Lay out features with these embedding_dims, and dense inputs."""
        embeddings = sum(dims.values())
        width = embeddings + dense_width
        return cls(
            features=tuple(dims),
            dims=tuple(dims.values()),
            offsets=dict(zip(dims, accumulate(dims.values(), initial=0), strict=False)),
            embedding_width=embeddings,
            dense_width=dense_width,
            width=width,
            padded_width=padded_width(width),
        )

    @property
    def dense_columns(self) -> slice:
        """Find the columns of the dense inputs."""
        return slice(self.embedding_width, self.width)

    def columns_of(self, feature: str) -> slice:
        """Find the columns of a pooled feature of this side. Raises KeyError."""
        start = self.offsets[feature]
        return slice(start, start + self.dims[self.features.index(feature)])


@dataclass(frozen=True)
class InputShapes:
    """Where each input of a model is.

    `features` and `dims` are the pooled ones of both sides, in the order of `spec.features`, and their embedding_dims.
    """

    context: SideShapes
    candidate: SideShapes
    features: tuple[str, ...]
    dims: tuple[int, ...]
    sequence_dims: Mapping[str, int]

    @classmethod
    def of(cls, spec: ModelSpec) -> InputShapes:
        """Derive the shapes of a model's inputs."""
        dims = {feature.name: spec.table_of(feature.name).embedding_dim for feature in spec.features}
        pooled = {name: dim for name, dim in dims.items() if spec.pooling_of(name) != "none"}
        of_side: dict[Side, dict[str, int]] = {"context": {}, "candidate": {}}
        for name, dim in pooled.items():
            of_side[spec.feature(name).side][name] = dim
        return cls(
            context=SideShapes.of(of_side["context"], spec.dense_inputs.context),
            candidate=SideShapes.of(of_side["candidate"], spec.dense_inputs.candidate),
            features=tuple(pooled),
            dims=tuple(pooled.values()),
            sequence_dims={name: dim for name, dim in dims.items() if name not in pooled},
        )

    def side(self, side: Side) -> SideShapes:
        """Get one side's columns."""
        return self.context if side == "context" else self.candidate

    @property
    def dense_width(self) -> int:
        """Count the dense inputs of both sides."""
        return self.context.dense_width + self.candidate.dense_width

    @property
    def embedding_width(self) -> int:
        """Count the columns of embeddings of both sides."""
        return self.context.embedding_width + self.candidate.embedding_width

    def embedding_order(self) -> tuple[Int64Array, Int64Array]:
        """Find where the context's, and the candidates', columns of embeddings stand among those of `features`."""
        starts = dict(zip(self.features, accumulate(self.dims, initial=0), strict=False))
        context, candidate = (
            np.concatenate(
                [np.arange(dim) + starts[name] for name, dim in zip(side.features, side.dims, strict=True)]
                or [np.zeros(0, np.int64)]
            )
            for side in (self.context, self.candidate)
        )
        return context, candidate


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Rows [R, L, D] of one sequence feature, one a request; `mask`, bool [R, L], is False where one has ended."""

    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class RankingInputs:
    """A batch of N candidates of R requests.

    `context` is [R, padded width of the context], `candidates` [N, padded width of the candidates],
    `request_of_candidate` int64 [N], ascending if `is_ordered`.
    """

    context: Tensor
    candidates: Tensor
    sequences: Mapping[str, SequenceInput]
    request_of_candidate: Tensor
    is_ordered: bool = False

    def on(self, device: torch.device) -> RankingInputs:
        """Copy the inputs to another device; themselves if they are there."""
        if self.candidates.device == device:
            return self
        sequences = {
            name: SequenceInput(one.rows.to(device), one.mask.to(device)) for name, one in self.sequences.items()
        }
        return replace(
            self,
            context=self.context.to(device),
            candidates=self.candidates.to(device),
            sequences=sequences,
            request_of_candidate=self.request_of_candidate.to(device),
        )

    def split(self, counts: Sequence[int]) -> Iterator[RankingInputs]:
        """Divide an ordered batch into so many candidates each, with their requests and no others."""
        first, owner = 0, self.request_of_candidate
        for count in counts:
            own = slice(first, first + count)
            of = slice(int(owner[first]), int(owner[first + count - 1]) + 1)
            yield replace(
                self,
                context=self.context[of],
                candidates=self.candidates[own],
                sequences={name: SequenceInput(one.rows[of], one.mask[of]) for name, one in self.sequences.items()},
                request_of_candidate=owner[own] - of.start,
            )
            first += count


# A block that came through a socket is read-only memory. torch has no read-only tensors and says so, once in a
# process; here blocks are only read from.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)


@dataclass(frozen=True, slots=True)
class Run:
    """Lookups for pooled features, of one side and embedding_dim, that are neighbours in block and columns.

    They are `count` lookups from `first` on, in the group `block`, with `dim` columns. They go to `width` columns of
    the side's matrix from `column` on, projected if there are `projections` (names of parts), added if it `adds`.
    """

    block: int
    side: Side
    first: int
    count: int
    dim: int
    column: int
    width: int
    projections: tuple[str, ...] = ()
    adds: bool = False


def find_runs(spec: ModelSpec, schema: FeatureSchema, features: Collection[int] | None = None) -> tuple[Run, ...]:
    """Split the lookups of features, by flat index (default: the pooled ones), into runs, those that add last."""
    shapes, lookups, projections = InputShapes.of(spec), schema.lookups, spec.projections()
    own = set(np.flatnonzero(~schema.is_none).tolist() if features is None else features)
    runs: list[Run] = []
    # Of each feature, the part that is written first, to which the others are added.
    first_parts: dict[int, int] = {}
    for number, index in enumerate(lookups.feature.tolist()):
        if index not in own:
            continue
        feature = schema.features[index]
        part = int(lookups.part[number])
        name = spec.parts(spec.table_of(feature.name))[part].name
        block = int(lookups.group[number])
        dim = schema.layout.groups[block].embedding_dim
        found = Run(
            block=block,
            side=feature.side,
            first=number,
            count=1,
            dim=dim,
            column=shapes.side(feature.side).offsets.get(feature.name, 0) + int(lookups.column[number]),
            width=projections[name][1] if name in projections else dim,
            projections=(name,) if name in projections else (),
            adds=first_parts.setdefault(index, part) != part,
        )
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.block, last.side, last.adds, bool(last.projections), last.width)
            == (found.block, found.side, found.adds, bool(found.projections), found.width)
            and last.first + last.count == found.first
            and last.column + last.count * last.width == found.column
        ):
            runs[-1] = replace(last, count=last.count + 1, projections=last.projections + found.projections)
        else:
            runs.append(found)
    return tuple(sorted(runs, key=lambda run: run.adds))


def write_run(run: Run, rows: Tensor, matrix: Tensor, projections: Mapping[str, Tensor]) -> None:
    """Write the rows of a run, [bags, lookups, dim], into its columns of a matrix: projected, added, as the run says.

    `projections` are float32 [dim, width] by part.
    """
    if run.projections:
        own = torch.stack([projections[part] for part in run.projections])
        rows = torch.bmm(rows.transpose(0, 1).float(), own).transpose(0, 1)
    first = matrix.storage_offset() + run.column
    target = matrix.as_strided(rows.shape, (matrix.stride(0), run.width, 1), first)
    if run.adds:
        target.add_(rows)
    else:
        target.copy_(rows)


class InputBuffer:
    """Memory for the matrices of one batch after the other, as large as the largest so far."""

    def __init__(self, shapes: InputShapes, dtype: torch.dtype) -> None:
        self._memory = {side: torch.empty(0, shapes.side(side).padded_width, dtype=dtype) for side in SIDES}
        self._widths = {side: shapes.side(side).width for side in SIDES}

    def rows(self, side: Side, count: int) -> Tensor:
        """Get that many rows of one side's matrix: padding is zeros, the rest is what the last batch left."""
        memory = self._memory[side]
        if count > memory.shape[0]:
            memory = self._memory[side] = memory.new_empty(count, memory.shape[1])
            # Memory that was never written may hold NaN, which a zero weight does not remove.
            memory[:, self._widths[side] :].zero_()
        return memory[:count]


SIDES: Final[tuple[Side, Side]] = ("context", "candidate")


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

    def buffer(self) -> InputBuffer:
        """Make a buffer for `assemble`."""
        return InputBuffer(self.shapes, self.dtype)

    def assemble(
        self,
        embeddings: Embeddings,
        request_of_candidate: Int64Array,
        context_dense: Float32Array,
        candidate_dense: Float32Array,
        buffer: InputBuffer | None = None,
        projections: Mapping[str, Tensor] | None = None,
    ) -> RankingInputs:
        """Build the inputs of R requests' N candidates, in the assembler's dtype.

        Embeddings are the batch's lookup of all features: context features have R bags, candidate features N.
        `request_of_candidate` is int64 [N], ascending, dense inputs float32 [R, Kc] and [N, Kd]. The candidates' matrix
        has `rounded_rows(N)` rows: those behind N are zeros, of the last request. Without a buffer both matrices have
        memory of their own. `projections` are the ranking model's, float32 by part.
        """
        counts: dict[Side, int] = {"context": context_dense.shape[0], "candidate": candidate_dense.shape[0]}
        buffer, num_candidates = buffer or self.buffer(), counts["candidate"]
        context = buffer.rows("context", counts["context"])
        candidates = buffer.rows("candidate", rounded_rows(num_candidates))
        candidates[num_candidates:].zero_()
        matrices: dict[Side, Tensor] = {"context": context, "candidate": candidates}
        # Dense inputs may lie in the bytes of a request, which nobody may write: torch warns of tensors over such.
        if self.shapes.context.dense_width:
            context[:, self.shapes.context.dense_columns].copy_(torch.from_numpy(context_dense.copy()))
        if self.shapes.candidate.dense_width:
            target = candidates[:num_candidates, self.shapes.candidate.dense_columns]
            target.copy_(torch.from_numpy(candidate_dense.copy()))
        blocks = list(map(torch.from_numpy, embeddings.blocks))
        for run in self.runs:
            # The run is rows [F, bags, D] of its block, from `start` on; it is read as [bags, F, D].
            matrix, bags, dim = matrices[run.side], counts[run.side], run.dim
            start = int(embeddings.row_starts[run.first]) * dim
            source = blocks[run.block].as_strided((bags, run.count, dim), (dim, bags * dim, 1), start)
            write_run(run, source, matrix, projections or {})
        sequences: dict[str, SequenceInput] = {}
        of_parts = {name: matrix.numpy() for name, matrix in (projections or {}).items()}
        for index, name in self._sequences:
            rows = embeddings.feature(index, of_parts)
            sequences[name] = padded_sequence(rows, embeddings.lengths(index), self.dtype)
        owner = np.full(candidates.shape[0], context.shape[0] - 1, np.int64)
        owner[:num_candidates] = request_of_candidate
        return RankingInputs(context, candidates, sequences, torch.from_numpy(owner), is_ordered=True)


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
