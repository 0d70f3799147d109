"""Where a batch's rows go on a card: straight into the ranking model's input, and what is sent along with the ids.

One output holds both input matrices, with a row a candidate and a row a request, and the rows of sequences as they
come. One section behind the batch's ids holds dense inputs and which request a candidate is of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loader.snapshot.manifest import ModelSpec
from router.feature_schema import FeatureSchema
from serving.models.inputs import InputShapes
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.kernel_params import MODES, OutDtype

OUT_DTYPES: Final[dict[torch.dtype, OutDtype]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ALIGNED_ELEMENTS: Final = 128
"""Parts of the output begin at multiples of it: 256 bytes or more, which matrix kernels like."""
ALIGNED_BYTES: Final = 16
MIN_CANDIDATES: Final = 32
MIN_VALUES: Final = 1024


@dataclass(frozen=True, slots=True)
class BatchClass:
    """Sizes that batches are rounded up to, so that a few sets of buffers and graphs serve all of them.

    Candidates, which the dense model multiplies, go in steps of a quarter; the others in powers of four and of two.
    """

    num_candidates: int
    num_requests: int
    num_values: int

    @classmethod
    def of(cls, num_candidates: int, num_requests: int, num_values: int) -> BatchClass:
        """Find the smallest class for a batch."""
        return cls(
            rounded_candidates(num_candidates),
            4 ** ((max(1, num_requests) - 1).bit_length() + 1 >> 1),
            1 << (max(MIN_VALUES, num_values) - 1).bit_length(),
        )


def rounded_candidates(count: int) -> int:
    """Round up to 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, ...: from 128 on at most a quarter more."""
    step = max(MIN_CANDIDATES, (1 << (max(1, count) - 1).bit_length()) >> 3)
    return -(-max(1, count) // step) * step


def candidate_classes(most: int) -> list[int]:
    """List the values of `rounded_candidates` up to that of `most`, ascending."""
    classes = [rounded_candidates(1)]
    while classes[-1] < most:
        classes.append(rounded_candidates(classes[-1] + 1))
    return classes


class OutputPlaces(NamedTuple):
    """Where the context's matrix and sequences [values, dim] begin, in elements, behind the candidates' matrix."""

    context: int
    sequences: tuple[int, ...]
    total: int


class Extra(NamedTuple):
    """What is sent along with the ids: each candidate's request, int64 [N], dense inputs float32 [R, Kc] and [N, Kd].

    `sequences` is int64 [sequence features, 2, R]: where each request's rows begin, and how many there are.
    """

    owner: Tensor
    context_dense: Tensor
    candidate_dense: Tensor
    sequences: Tensor


class CardLayout:
    """Places and runs of one model in one number format, float32 or bfloat16. Immutable.

    Attributes:
        sequences: (flat index, name, dim) of each sequence feature.
    """

    def __init__(self, spec: ModelSpec, schema: FeatureSchema, dtype: torch.dtype) -> None:
        self.shapes = InputShapes.of(spec)
        self.dtype = dtype
        self.num_features = len(schema.features)
        self.weighted = any(feature.weighted for feature in spec.features)
        self.sequences = tuple(
            (index, feature.name, self.shapes.sequence_dims[feature.name])
            for index, feature in enumerate(schema.features)
            if feature.name in self.shapes.sequence_dims
        )
        self._schema = schema
        self._tables = schema.lookups.table.astype(np.int64)
        self._keys = schema.lookups.feature.astype(np.int64)
        self._is_sliced = self._keys.size > self.num_features
        modes = np.where(schema.is_none, MODES["none"], np.where(schema.is_mean, MODES["mean"], MODES["sum"]))
        self._modes = modes[self._keys].astype(np.int64)

    def size(self, most: BatchClass) -> BatchSize:
        """Say what the largest batch of a class takes."""
        bags = np.where(self._schema.is_context, most.num_requests, most.num_candidates).astype(np.int64)
        return BatchSize(bags, most.num_values, self.weighted, self.extra_bytes(most))

    def runs(self, most: BatchClass) -> OutputRuns:
        """Say where each feature's bags go: one run for each lookup, so that slices lie side by side."""
        places, context, candidate = self.output_places(most), self.shapes.context, self.shapes.candidate
        number = {index: place for (index, _, _), place in zip(self.sequences, places.sequences, strict=True)}
        offsets, strides = [], []
        for index, feature in enumerate(self._schema.features):
            if index in number:
                offsets.append(number[index])
                strides.append(self.shapes.sequence_dims[feature.name])
            elif feature.side == "context":
                offsets.append(places.context + context.offsets[feature.name])
                strides.append(context.padded_width)
            else:
                offsets.append(candidate.offsets[feature.name])
                strides.append(candidate.padded_width)
        out_dtype = OUT_DTYPES[self.dtype]
        starts, steps = np.array([offsets, strides], np.int64)[:, self._keys]
        starts += self._schema.lookups.column
        keys = self._keys if self._is_sliced else None
        return OutputRuns(self._tables, self._modes, starts, steps, out_dtype, places.total, keys)

    def output_places(self, most: BatchClass) -> OutputPlaces:
        """Place the parts of the output for the largest batch of a class."""
        context = _round_up(most.num_candidates * self.shapes.candidate.padded_width, ALIGNED_ELEMENTS)
        end = context + _round_up(most.num_requests * self.shapes.context.padded_width, ALIGNED_ELEMENTS)
        sequences = []
        for _, _, dim in self.sequences:
            sequences.append(end)
            end += _round_up(most.num_values * dim, ALIGNED_ELEMENTS)
        return OutputPlaces(context, tuple(sequences), end)

    def extra_bytes(self, most: BatchClass) -> int:
        """Count the bytes that are sent along with the largest batch of a class."""
        sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in self._extra_parts(most))
        return sum(_round_up(size, ALIGNED_BYTES) for size in sizes)

    def extra(self, most: BatchClass, sent: Tensor) -> Extra:
        """View the parts of what is sent along in its bytes, uint8 [extra bytes]."""
        views, first = [], 0
        for dtype, shape in self._extra_parts(most):
            size = math.prod(shape) * dtype.itemsize
            views.append(sent[first : first + size].view(dtype).view(shape))
            first += _round_up(size, ALIGNED_BYTES)
        return Extra(*views)

    def _extra_parts(self, most: BatchClass) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        requests, candidates = most.num_requests, most.num_candidates
        return [
            (torch.int64, (candidates,)),
            (torch.float32, (requests, self.shapes.context.dense_width)),
            (torch.float32, (candidates, self.shapes.candidate.dense_width)),
            (torch.int64, (len(self.sequences), 2, requests)),
        ]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
