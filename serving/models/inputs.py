"""What every ranking model reads: one matrix of dense inputs and pooled embeddings, and padded sequences.

All columns of a candidate lie side by side in one matrix, `[dense | embeddings | zeros]`, so that models which begin
with their concatenation read it as it is. Its width is padded to a multiple of 32: the bfloat16 matrix units want that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from loader.manifest import ModelSpec

COLUMN_MULTIPLE = 32


def padded_width(width: int) -> int:
    """`width` rounded up to a multiple of 32."""
    return -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


@dataclass(frozen=True)
class InputShapes:
    """Where each input of a model lies. Derived from its description.

    Attributes:
        context_dense_width: Kc, dense inputs that come once a request.
        candidate_dense_width: Kd, dense inputs of each candidate.
        features: the pooled features, in the order of `spec.features`.
        dims: embedding_dim of each of them.
        sequence_dims: embedding_dim of each feature with pooling none.
    """

    context_dense_width: int
    candidate_dense_width: int
    features: tuple[str, ...]
    dims: tuple[int, ...]
    sequence_dims: Mapping[str, int]

    @classmethod
    def of(cls, spec: ModelSpec) -> InputShapes:
        """The shapes of a model's inputs."""
        dims = {feature.name: spec.table_of(feature.name).embedding_dim for feature in spec.features}
        pooled = tuple(name for name in dims if spec.pooling_of(name) != "none")
        return cls(
            context_dense_width=spec.dense_inputs.context,
            candidate_dense_width=spec.dense_inputs.candidate,
            features=pooled,
            dims=tuple(dims[name] for name in pooled),
            sequence_dims={name: dim for name, dim in dims.items() if name not in pooled},
        )

    @property
    def dense_width(self) -> int:
        """Kc + Kd."""
        return self.context_dense_width + self.candidate_dense_width

    @cached_property
    def embedding_width(self) -> int:
        """W, the sum of the pooled features' dims."""
        return sum(self.dims)

    @property
    def width(self) -> int:
        """Kc + Kd + W, the columns that carry something."""
        return self.dense_width + self.embedding_width

    @property
    def padded_width(self) -> int:
        """The columns of the matrix."""
        return padded_width(self.width)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First column of each pooled feature within the embeddings."""
        offsets, column = {}, 0
        for name, dim in zip(self.features, self.dims, strict=True):
            offsets[name] = column
            column += dim
        return offsets

    def embedding_columns(self, feature: str) -> slice:
        """The columns of a pooled feature within `RankingInputs.embeddings`. Raises KeyError."""
        start = self.offsets[feature]
        return slice(start, start + self.dims[self.features.index(feature)])


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """The rows of one sequence feature, one sequence a request.

    Attributes:
        rows: [R, L, D]; L is the longest sequence of the batch, shorter ones end in zeros.
        mask: bool [R, L], true where a row is real.
    """

    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class RankingInputs:
    """A batch of candidates of R requests.

    Attributes:
        columns: [N, padded width], each candidate's dense inputs (context, then candidate), its pooled embeddings in
            the order of `InputShapes.features` (context features repeated for each candidate), zeros.
        dense_width: Kc + Kd.
        embedding_width: W.
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
        """Puts dense inputs [N, Kc + Kd] and embeddings [N, W] side by side (a copy; gradients flow through)."""
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
        """[N, Kc + Kd], a view."""
        return self.columns[:, : self.dense_width]

    @property
    def embeddings(self) -> Tensor:
        """[N, W], a view."""
        return self.columns[:, self.dense_width : self.dense_width + self.embedding_width]

    @property
    def num_candidates(self) -> int:
        """N."""
        return self.columns.shape[0]

    def on(self, device: torch.device) -> RankingInputs:
        """The same inputs on another device; themselves if they are there."""
        if self.columns.device == device:
            return self
        sequences = {
            name: SequenceInput(sequence.rows.to(device), sequence.mask.to(device))
            for name, sequence in self.sequences.items()
        }
        owner = self.request_of_candidate.to(device)
        return RankingInputs(self.columns.to(device), self.dense_width, self.embedding_width, sequences, owner)

    def to(self, dtype: torch.dtype) -> RankingInputs:
        """The same inputs in another floating-point type."""
        sequences = {
            name: SequenceInput(sequence.rows.to(dtype), sequence.mask) for name, sequence in self.sequences.items()
        }
        return RankingInputs(
            self.columns.to(dtype),
            self.dense_width,
            self.embedding_width,
            sequences,
            self.request_of_candidate,
        )
