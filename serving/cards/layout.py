"""Where a batch's rows go on a card: straight into the ranking model's input, and what is sent along with the ids.

One output holds both input matrices, with a row a candidate and a row a request, and the rows of sequences as they
come. One section behind the batch's ids holds dense inputs and which request a candidate is of.

Features of tables that are divided into parts are pooled beside these, into scratch: on the card, before the model
runs, what their parts bring is projected, added, and written into the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loader.snapshot.manifest import ModelSpec
from router.feature_schema import FeatureSchema
from router.id_mapping import MappedBags
from router.router import LookedUp, Router
from serving.models.inputs import InputShapes, Run, find_runs, write_run
from shard_node.cuda.batch import BatchSize, OutputRuns
from shard_node.cuda.kernel_params import MODES, OutDtype, round_up

DTYPE_NAMES: Final[dict[torch.dtype, OutDtype]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ALIGNED_ELEMENTS: Final = 128
"""Parts of the output begin at multiples of it: 256 bytes or more, which matrix kernels like."""
ALIGNED_BYTES: Final = 16
ALIGNED_COLUMNS: Final = 8
MIN_CANDIDATES: Final = 32
MIN_VALUES: Final = 1024
CANDIDATES, REQUESTS, VALUES = range(3)
"""Indices of the counts in `BatchClass`."""


class BatchClass(NamedTuple):
    """Sizes that batches are rounded up to: candidates in steps of a quarter, others by powers of four and of two."""

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


def candidate_classes(max_candidates: int) -> list[int]:
    """List the values of `rounded_candidates` up to that of a number of candidates, ascending."""
    classes = [rounded_candidates(1)]
    while classes[-1] < max_candidates:
        classes.append(rounded_candidates(classes[-1] + 1))
    return classes


class Area(NamedTuple):
    """A matrix of the output: the count of `BatchClass` that it has rows of, and its columns."""

    rows: int
    width: int


class Extra(NamedTuple):
    """What is sent along with the ids: each candidate's request, int64 [N], dense inputs float32 [R, Kc] and [N, Kd].

    `sequences` is int64 [sequence features, 2, R]: where each request's rows begin, and how many there are.
    """

    owner: Tensor
    context_dense: Tensor
    candidate_dense: Tensor
    sequences: Tensor


class Sum(NamedTuple):
    """A run that is pooled into the area `source`, at `column`, and then written or added to the area `target`."""

    run: Run
    source: int
    column: int
    target: int


class CardLayout:
    """Places and runs of one model in one number format, float32 or bfloat16. Immutable.

    Attributes:
        areas: of the output: the candidates' matrix, the context's, one for each sequence, then scratch.
        sequences: (flat index, name, dim) of each sequence feature.
        sums: what is to be done with scratch before the model runs. Empty where no table is divided.
        num_keys: of the bags that are pooled: features; where tables are divided or have keys, lookups.
        tables: int64 [lookups], the stored table of each.
        values_per_id: int64 [features], values that are pooled for an id.
    """

    def __init__(self, spec: ModelSpec, schema: FeatureSchema, dtype: torch.dtype) -> None:
        self.shapes = InputShapes.of(spec)
        self.dtype = dtype
        self.sequences = tuple(
            (index, feature.name, self.shapes.sequence_dims[feature.name])
            for index, feature in enumerate(schema.features)
            if feature.name in self.shapes.sequence_dims
        )
        lookups, tables = schema.lookups, [spec.table_of(feature.name) for feature in schema.features]
        self._schema = schema
        self.tables = lookups.table.astype(np.int64)
        self._features = lookups.feature.astype(np.int64)
        # Slices of a table with keys have rows of their own for the same ids, as parts have.
        self._by_lookup = bool(spec.divided) or schema.layout.has_keys
        self.num_keys = lookups.feature.size if self._by_lookup else len(schema.features)
        # What comes row by row from parts is a bag for each id, and a part has not all ids of a bag to divide by.
        num_parts = np.array([len(spec.parts(table)) for table in tables])
        self._by_id = schema.is_none & self._by_lookup
        self._is_mean_of_parts = schema.is_mean & (num_parts > 1)
        self._has_mean_of_parts = bool(self._is_mean_of_parts.any())
        modes = np.where(schema.is_none, MODES["none"], np.where(schema.is_mean, MODES["mean"], MODES["sum"]))
        modes[self._by_id | self._is_mean_of_parts] = MODES["sum"]
        self._modes = modes[self._features].astype(np.int64)
        self.weighted = self._has_mean_of_parts or any(feature.weighted for feature in spec.features)
        is_chosen = np.array([getattr(table, "by", "popularity") == "popularity" for table in tables])
        num_lookups = np.bincount(self._features) if self._by_lookup else np.ones(len(tables), np.int64)
        self.values_per_id = np.where(is_chosen, num_lookups // num_parts, num_lookups)
        self.areas = [
            Area(CANDIDATES, self.shapes.candidate.padded_width),
            Area(REQUESTS, self.shapes.context.padded_width),
            *(Area(VALUES, dim) for _, _, dim in self.sequences),
        ]
        targets = schema.is_context.astype(np.int64)
        targets[[index for index, _, _ in self.sequences]] = 2 + np.arange(len(self.sequences))
        columns = [self.shapes.columns.get(feature.name, slice(0, 0)).start for feature in schema.features]
        # Of each lookup the area that its bags are pooled into, and its first column there.
        self._areas = targets[self._features]
        self._columns = np.array(columns, np.int64)[self._features] + lookups.column
        needed = spec.projections()
        is_narrow = np.array([any(part.name in needed for part in spec.parts(table)) for table in tables])
        in_scratch = (num_parts > 1) | is_narrow
        sums: list[Sum] = []
        for target, area in enumerate(tuple(self.areas)):
            source, width = len(self.areas), 0
            for run in find_runs(spec, schema, np.flatnonzero(in_scratch & (targets == target)).tolist()):
                sums.append(Sum(run, source, width, target))
                of_run = slice(run.first, run.first + run.num_lookups)
                self._areas[of_run] = source
                self._columns[of_run] = width + run.dim * np.arange(run.num_lookups)
                width += round_up(run.num_lookups * run.dim, ALIGNED_COLUMNS)
            if width:
                self.areas.append(Area(area.rows, width))
        self.sums = tuple(sums)

    def looked_up(self, router: Router, mapped: MappedBags) -> LookedUp:
        """Find what is pooled of a batch of all features, `num_keys` keys: its bags, or the bags of all lookups."""
        if not self._by_lookup:
            return LookedUp(mapped.bags.bags_per_key, mapped.bags, mapped.bags)
        if self._has_mean_of_parts:
            lengths = mapped.bags.lengths
            divisors = np.where(np.repeat(self._is_mean_of_parts, mapped.bags.bags_per_key), np.maximum(lengths, 1), 1)
            weights = np.repeat((1 / divisors).astype(np.float32), lengths)
            if mapped.bags.weights is not None:
                weights *= mapped.bags.weights
            mapped = replace(mapped, bags=mapped.bags.with_values(mapped.bags.values, weights))
        return router.rows_to_fetch(mapped)

    def combine(self, areas: Sequence[Tensor], projections: Mapping[str, Tensor]) -> None:
        """Write what is in scratch into the inputs of a whole class; idempotent.

        Areas are matrices [rows of the class, width], projections float32 [columns, embedding_dim] by part; all on one
        device.
        """
        for run, source, column, target in self.sums:
            rows = areas[source]
            shape, strides = (run.num_lookups, rows.shape[0], run.dim), (run.dim, rows.stride(0), 1)
            write_run(run, rows.as_strided(shape, strides, rows.storage_offset() + column), areas[target], projections)

    def size(self, batch_class: BatchClass) -> BatchSize:
        """Say what the largest batch of a class takes."""
        bags = np.where(self._schema.is_context, batch_class.num_requests, batch_class.num_candidates).astype(np.int64)
        if self._by_lookup:
            bags = np.where(self._by_id, batch_class.num_values, bags)[self._features]
        return BatchSize(bags, batch_class.num_values, self.weighted, self.extra_bytes(batch_class))

    def runs(self, batch_class: BatchClass) -> OutputRuns:
        """Say where the bags go: one run for each lookup."""
        areas, total = self.area_starts(batch_class)
        starts = np.array(areas, np.int64)[self._areas] + self._columns
        steps = np.array([area.width for area in self.areas], np.int64)[self._areas]
        # Slices of a feature's table pool the same bags.
        keys = self._features if self.num_keys < self._features.size else None
        return OutputRuns(self.tables, self._modes, starts, steps, DTYPE_NAMES[self.dtype], total, keys)

    def area_starts(self, batch_class: BatchClass) -> tuple[list[int], int]:
        """Return where each area of the output begins for the largest batch of a class, and the end, in elements."""
        sizes = [round_up(batch_class[area.rows] * area.width, ALIGNED_ELEMENTS) for area in self.areas]
        *starts, total = accumulate(sizes, initial=0)
        return starts, total

    def extra_bytes(self, batch_class: BatchClass) -> int:
        """Count the bytes that are sent along with the largest batch of a class."""
        sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in self._extra_parts(batch_class))
        return sum(round_up(size, ALIGNED_BYTES) for size in sizes)

    def extra(self, batch_class: BatchClass, sent: Tensor) -> Extra:
        """View the parts of what is sent along in its bytes, uint8 [extra bytes]."""
        views, first = [], 0
        for dtype, shape in self._extra_parts(batch_class):
            size = math.prod(shape) * dtype.itemsize
            views.append(sent[first : first + size].view(dtype).view(shape))
            first += round_up(size, ALIGNED_BYTES)
        return Extra(*views)

    def _extra_parts(self, batch_class: BatchClass) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        requests, candidates = batch_class.num_requests, batch_class.num_candidates
        return [
            (torch.int64, (candidates,)),
            (torch.float32, (requests, self.shapes.context.dense_width)),
            (torch.float32, (candidates, self.shapes.candidate.dense_width)),
            (torch.int64, (len(self.sequences), 2, requests)),
        ]
