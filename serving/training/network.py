"""Tables in float32 and the ranking model that serves, as one module that can be trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loader.manifest import ModelSpec
from serving.models.factory import build_model
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput, padded_positions
from serving.models.ranking_models import RankingModel
from serving.training.batches import RowBags, RowBatch


class RankingNetwork(nn.Module):
    """Looks rows up in plain torch, pools them, and runs the ranking model.

    Args:
        spec: the model.
        dropout: share of the pooled embeddings' elements, and of the sequences' rows, left out while training.
        initial_scale: standard deviation of the rows at the beginning.
    """

    def __init__(self, spec: ModelSpec, *, dropout: float = 0.0, initial_scale: float = 0.05) -> None:
        super().__init__()
        self.spec = spec
        self.shapes = InputShapes.of(spec)
        self.dropout = dropout
        self.ranking: RankingModel = build_model(spec)
        # A list beside the names, because a table's name may hold a dot and a module's may not.
        self.table_names = [table.name for table in spec.tables]
        self.tables = nn.ParameterList(
            nn.Parameter(torch.randn(table.num_embeddings, table.embedding_dim) * initial_scale)
            for table in spec.tables
        )

    def table(self, name: str) -> Tensor:
        """A table's rows, [num_embeddings, embedding_dim]."""
        rows: Tensor = self.tables[self.table_names.index(name)]
        return rows

    def load_tables(self, tables: Mapping[str, Tensor]) -> None:
        """Replaces the rows of every table."""
        with torch.no_grad():
            for name in self.table_names:
                self.table(name).copy_(tables[name])

    def forward(self, batch: RowBatch) -> Tensor:
        """Logits [N]."""
        logits: Tensor = self.ranking(self.inputs(batch))
        return logits

    def inputs(self, batch: RowBatch) -> RankingInputs:
        """The ranking model's inputs."""
        owner = batch.request_of_candidate
        pooled = []
        for name in self.shapes.features:
            embeddings = self._pool(name, batch.bags[name])
            pooled.append(embeddings[owner] if self.spec.feature(name).side == "context" else embeddings)
        embeddings = torch.cat(pooled, dim=1) if pooled else torch.zeros(owner.shape[0], 0)
        dense = torch.cat([batch.context_dense[owner], batch.candidate_dense], dim=1)
        embeddings = F.dropout(embeddings, self.dropout, self.training)
        sequences = {name: self._sequence(name, batch.bags[name]) for name in self.shapes.sequence_dims}
        return RankingInputs.of_parts(dense, embeddings, owner, sequences)

    def _pool(self, feature: str, bags: RowBags) -> Tensor:
        return F.embedding_bag(
            bags.rows,
            self.table(self.spec.table_of(feature).name),
            bags.offsets,
            mode=self.spec.pooling_of(feature),
            per_sample_weights=bags.weights,
            include_last_offset=True,
        )

    def _sequence(self, feature: str, bags: RowBags) -> SequenceInput:
        lengths = bags.offsets.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        rows = self.table(self.spec.table_of(feature).name)[bags.rows]
        positions = torch.from_numpy(padded_positions(lengths.numpy(), longest))
        padded = rows.new_zeros(lengths.shape[0] * longest, rows.shape[1]).index_copy(0, positions, rows)
        mask = torch.arange(longest) < lengths.unsqueeze(1)
        if self.training and self.dropout:
            mask = mask & (torch.rand(mask.shape) >= self.dropout)
        return SequenceInput(padded.view(lengths.shape[0], longest, -1), mask)
