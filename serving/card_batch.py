"""One class of batches on one card: its buffers, how they are filled, and the work between ids and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.models.card_layout import BatchClass, CardLayout
from serving.models.inputs import RankingInputs, SequenceInput
from serving.models.ranking_model import RankingModel
from serving.rank.merge import MergedBatch
from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.cuda.cards import Graph
from shard_node.cuda.lane import Lane
from shard_node.errors import MemoryBudgetError

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Extra:
    """The host's side of what is sent along with the ids: views of pinned memory, of the class's size."""

    owner: Int64Array
    context_dense: Float32Array
    candidate_dense: Float32Array
    sequences: Int64Array

    @classmethod
    def of(cls, array: npt.NDArray[np.uint8], layout: CardLayout, most: BatchClass) -> _Extra:
        places, shapes = layout.extra_places(most), layout.shapes
        requests, candidates = most.num_requests, most.num_candidates

        def view(first: int, dtype: npt.DTypeLike, *shape: int) -> npt.NDArray[Any]:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            return array[first : first + size].view(dtype).reshape(shape)

        return cls(
            view(places.owner, np.int64, candidates),
            view(places.context_dense, np.float32, requests, shapes.context_dense_width),
            view(places.candidate_dense, np.float32, candidates, shapes.candidate_dense_width),
            view(places.sequences, np.int64, len(layout.sequences), 2, requests),
        )

    def fill(self, batch: MergedBatch, bags: KeyedBags, layout: CardLayout) -> None:
        """What lies behind the batch stays as it was: candidates that nobody reads, each of some request."""
        num_candidates, num_requests = batch.candidate_dense.shape[0], batch.context_dense.shape[0]
        self.owner[:num_candidates] = batch.request_of_candidate
        self.context_dense[:num_requests] = batch.context_dense
        self.candidate_dense[:num_candidates] = batch.candidate_dense
        bag_starts, value_starts = bags.bag_starts(), bags.value_starts()
        for target, (index, _, _) in zip(self.sequences, layout.sequences, strict=True):
            offsets = bags.offsets[int(bag_starts[index]) : int(bag_starts[index + 1]) + 1]
            np.subtract(offsets[:-1], value_starts[index], out=target[0, :num_requests])
            np.subtract(offsets[1:], offsets[:-1], out=target[1, :num_requests])


class CardBatch:
    """Buffers for batches of one class, one at a time; once captured, graphs. Belongs to the lane's thread.

    Args:
        lane: where the work goes. Outlives this.
        layout: of the model.
        model: on the lane's card, in the layout's dtype.
        most: the class.

    Attributes:
        most: as given.
        size_bytes: of its buffers on the card.
        num_uses: batches so far.
        can_capture: whether its work may be recorded; False once that failed.

    Raises:
        MemoryBudgetError: the card or the host has no room; nothing is kept then.
    """

    def __init__(self, lane: Lane, layout: CardLayout, model: RankingModel, most: BatchClass) -> None:
        self.most = most
        self.num_uses = 0
        self.can_capture = True
        self._lane = lane
        self._card = lane.card
        self._layout = layout
        self._model = model
        self._pooling: Graph | None = None
        self._ranking: Graph | None = None
        with ExitStack() as undo:
            self._slot = lane.prepare(layout.runs(most), layout.size(most))
            undo.callback(self._slot.close)
            self._scores = self._card.allocate(FLOAT_BYTES * most.num_candidates)
            undo.callback(self._scores.free)
            self._down = lane.rows.cards.allocate_pinned(self._scores.size_bytes)
            undo.callback(self._down.free)
            self._host_scores: Float32Array = self._down.array.view(np.float32)
            # Candidates behind a batch's last are of some request too.
            self._slot.extra.fill(0)
            self._extra = _Extra.of(self._slot.extra, layout, most)
            self._views()
            with self._card.torch_stream(lane.stream), torch.inference_mode():
                # Columns of padding must be zeros, and no other may ever hold NaN.
                self._out.zero_()
            undo.pop_all()
        self.size_bytes = self._slot.batch.size_bytes + self._slot.out.size_bytes + self._scores.size_bytes

    @property
    def is_captured(self) -> bool:
        """Whether its work is recorded, as far as it can be."""
        return self._pooling is not None

    @property
    def is_graph(self) -> bool:
        """Whether all of its work is recorded."""
        return self._ranking is not None

    def fill(self, batch: MergedBatch, bags: KeyedBags) -> None:
        """Packs a batch into pinned memory. Nothing of the last one may be under way.

        Args:
            batch: at most of the class's size.
            bags: its bags, with rows for ids.

        Raises:
            InvalidBagsError: for a row outside its table.
        """
        self._slot.fill(bags)
        self._extra.fill(batch, bags, self._layout)

    def run_empty(self) -> None:
        """Runs the work of the whole class without a batch, so that what it needs once is there.

        Raises:
            MemoryBudgetError: the card has no room for the dense model's work.
        """
        num_keys = self._layout.num_features
        nothing = np.zeros(0, np.int64)
        keys = np.arange(num_keys, dtype=np.int32)
        bags = KeyedBags(keys, np.zeros(num_keys, np.int64), np.zeros(1, np.int64), nothing)
        self._slot.fill(bags)
        self._lane.launch(partial(self._pool, bags))
        if not self._layout.sequences:
            self._rank_class()
        self._lane.stream.synchronize()

    def capture(self) -> None:
        """Records its work as graphs, after it has run once.

        Two of them, so that row writes, which wait for lookups, do not wait for the dense model too. Sequences are laid
        out as long as a batch has them, so a model with some has only the first.

        Raises:
            CardError, MemoryBudgetError: it can't be recorded; batches are scored as before.
        """
        stream = self._lane.stream
        try:
            ranking = None if self._layout.sequences else self._card.capture(stream, self._rank_class)
            self._pooling = self._card.capture(stream, self._slot.enqueue)
        except BaseException:
            self.can_capture = False
            raise
        self._ranking = ranking

    def score(self, batch: MergedBatch, bags: KeyedBags) -> Float32Array:
        """Scores what was filled in. Blocks, without the interpreter lock, until the scores are here.

        Returns:
            float32 [N], a copy.

        Raises:
            MemoryBudgetError: the card has no room for the dense model's work.
        """
        stream = self._lane.stream
        self._lane.launch(partial(self._pool, bags))
        if self._ranking is not None:
            self._ranking.replay(stream)
        elif self._layout.sequences:
            self._rank(batch)
        else:
            self._rank_class()
        stream.synchronize()
        self.num_uses += 1
        return self._host_scores[: batch.candidate_dense.shape[0]].copy()

    def free(self) -> None:
        """Gives the buffers back; nothing may be under way. Idempotent."""
        self._pooling = self._ranking = None
        self._slot.close()
        self._scores.free()
        self._down.free()

    def _pool(self, bags: KeyedBags) -> None:
        if self._pooling is None:
            self._slot.enqueue()
        else:
            self._pooling.replay(self._lane.stream)
        self._slot.add_mapped(bags)

    def _rank_class(self) -> None:
        """Puts the dense model's work on the stream, for as many candidates as the class has."""
        with self._dense_work(self.most.num_candidates):
            self._score(self._inputs, self._owner)
        self._send_scores(self.most.num_candidates)

    def _rank(self, batch: MergedBatch) -> None:
        """Puts the dense model's work on the stream, for the batch's own size."""
        num_candidates, num_requests = batch.candidate_dense.shape[0], batch.context_dense.shape[0]
        with self._dense_work(num_candidates):
            columns, owner = self._columns[:num_candidates], self._owner[:num_candidates]
            inputs = self._ranking_inputs(columns, owner, self._padded_sequences(num_requests))
            self._score(inputs, owner)
        self._send_scores(num_candidates)

    @contextmanager
    def _dense_work(self, num_candidates: int) -> Iterator[None]:
        """Within it torch works on the lane's stream, and memory that it does not find is a MemoryBudgetError."""
        try:
            with self._card.torch_stream(self._lane.stream), torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            card = self._card.number
            raise MemoryBudgetError(
                f"card {card} has no room for the dense model's work on {num_candidates} candidates: {error}"
            ) from error

    def _score(self, inputs: RankingInputs, owner: Tensor) -> None:
        shapes, columns = self._layout.shapes, inputs.columns
        num_candidates = columns.shape[0]
        if shapes.context_dense_width:
            first = self._layout.context_dense_column
            self._context[:, first : first + shapes.context_dense_width].copy_(self._context_dense)
        if shapes.candidate_dense_width:
            target = columns[:, shapes.context_dense_width : shapes.dense_width]
            target.copy_(self._candidate_dense[:num_candidates])
        for one in self._layout.expansions:
            shared = self._context[:, one.source : one.source + one.width]
            torch.index_select(shared, 0, owner, out=columns[:, one.column : one.column + one.width])
        torch.sigmoid(self._model(inputs).float(), out=self._scores_on_card[:num_candidates])

    def _send_scores(self, num_candidates: int) -> None:
        size = FLOAT_BYTES * num_candidates
        self._card.copy_to_host(self._down, 0, self._scores.address, size, self._lane.stream)

    def _padded_sequences(self, num_requests: int) -> dict[str, SequenceInput]:
        """Lays ragged rows side by side, [R, longest, D], ending in zeros."""
        sequences = {}
        for number, (_, name, dim) in enumerate(self._layout.sequences):
            longest = int(self._extra.sequences[number, 1, :num_requests].max(initial=0))
            starts, lengths = self._sequence_bounds[number, :, :num_requests].unbind(0)
            within = torch.arange(longest, device=starts.device)
            mask = within < lengths[:, None]
            # Behind the end of a sequence any row may be read: it is overwritten.
            rows = (starts[:, None] + within).clamp_(max=self.most.num_values - 1).flatten()
            padded = self._sequence_rows[number].index_select(0, rows).view(num_requests, longest, dim)
            sequences[name] = SequenceInput(padded.masked_fill_(~mask[:, :, None], 0), mask)
        return sequences

    def _ranking_inputs(self, columns: Tensor, owner: Tensor, sequences: Mapping[str, SequenceInput]) -> RankingInputs:
        shapes = self._layout.shapes
        return RankingInputs(columns, shapes.dense_width, shapes.embedding_width, sequences, owner)

    def _views(self) -> None:
        """Tensors over the buffers; they live as long as these."""
        card, layout, most, slot = self._card, self._layout, self.most, self._slot
        output, extra = layout.output_places(most), layout.extra_places(most)
        shapes, requests, candidates = layout.shapes, most.num_requests, most.num_candidates
        out = self._out = card.tensor(slot.out, 0, (output.total,), layout.dtype)
        self._columns = out[: candidates * shapes.padded_width].view(candidates, shapes.padded_width)
        context = out[output.context : output.context + requests * layout.context_stride]
        self._context = context.view(requests, layout.context_stride)
        self._sequence_rows = [
            out[first : first + most.num_values * dim].view(most.num_values, dim)
            for first, (_, _, dim) in zip(output.sequences, layout.sequences, strict=True)
        ]

        sent_bytes = card.tensor(slot.batch, slot.extra_at, (extra.size_bytes,), torch.uint8)

        def sent(first: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return sent_bytes[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        self._owner = sent(extra.owner, torch.int64, candidates)
        self._context_dense = sent(extra.context_dense, torch.float32, requests, shapes.context_dense_width)
        self._candidate_dense = sent(extra.candidate_dense, torch.float32, candidates, shapes.candidate_dense_width)
        self._sequence_bounds = sent(extra.sequences, torch.int64, len(layout.sequences), 2, requests)
        self._scores_on_card = card.tensor(self._scores, 0, (candidates,), torch.float32)
        self._inputs = self._ranking_inputs(self._columns, self._owner, {})
