"""A model in plain torch, in float32: rows looked up, pooled and ranked, as training and its scores need it.

Tables are parameters as they are stored: of a divided table each part is one. What a feature gets is their sum, as the
router adds it up, and a projection makes narrow parts as wide as the feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from loader.snapshot.buckets import starts_of
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.tables import DividedTable, TableSpec, fingerprint_strings, projection_name
from loader.snapshot.vocabularies_and_counts import Vocabulary
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.ranking_models import build_model
from serving.training.dataset import TrainingError, positions_in
from shard_node.bags import Bags, Float32Array, Int64Array

# Share of the pooled embeddings' elements, and of the sequences' rows, dropped while training.
DROPOUT = 0.1
# Standard deviation of the rows at the beginning.
INITIAL_SCALE = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """What training hands over: float32 rows by stored table, the ranking model's tensors by name, ids in row order.

    `access_counts` say of stored tables how often each row was looked up in training.
    """

    spec: ModelSpec
    tables: Mapping[str, Float32Array]
    dense: Mapping[str, Tensor]
    vocabularies: Mapping[str, Vocabulary]
    row_classes: Mapping[str, RowClasses] = field(default_factory=dict)
    access_counts: Mapping[str, npt.NDArray[np.integer[Any]]] = field(default_factory=dict)


class RowBatch(NamedTuple):
    """R requests with N candidates; `candidates` are int64 [N], positions among those of all requests.

    `bags` are by feature rows int64 [nnz] and offsets int64 [R + 1], or [N + 1] for a candidate feature.
    """

    bags: Mapping[str, tuple[Tensor, Tensor]]
    candidate_dense: Tensor
    request_of_candidate: Tensor
    candidates: Tensor


def undivided(spec: ModelSpec) -> ModelSpec:
    """Describe the same model with every table stored undivided, as features see it."""
    fields = TableSpec.model_fields.keys() & DividedTable.model_fields.keys()
    tables = tuple(
        TableSpec(**table.model_dump(include=fields)) if isinstance(table, DividedTable) else table
        for table in spec.logical_tables
    )
    return spec.model_copy(update={"tables": tables, "divided": ()})


class RequestBatches:
    """Requests with ids mapped to rows, as features see them. Raises TrainingError for an id without a row."""

    def __init__(self, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary], requests: GoldenRequests) -> None:
        spec = undivided(spec)
        schema = FeatureSchema.of(spec)
        known = {
            name: fingerprint_strings([str(word) for word in ids]) if name == "occupations" else np.asarray(ids)
            for name, ids in vocabularies.items()
        }
        names = [feature.name for feature in schema.features]
        bags = Bags.from_lengths(
            np.arange(len(names), dtype=np.int32),
            np.array([requests.lengths[name].size for name in names], np.int64),
            np.concatenate([requests.lengths[name] for name in names]),
            np.concatenate([requests.values[name] for name in names]),
        )
        mapped = IdMapper(schema, known).map(bags)
        if rejected := mapped.rejected:
            name = names[rejected.feature[0]]
            table, size = spec.table_of(name).name, spec.table_of(name).num_embeddings
            raise TrainingError(f"feature {name!r}: id {rejected.id[0]} has no row in table {table!r} of {size} rows")
        bag_starts, self._rows = mapped.bags.bag_starts(), mapped.bags.values
        # A feature's offsets lead into the rows of all features.
        self._bag_offsets = {
            name: mapped.bags.offsets[bag_starts[number] : bag_starts[number + 1] + 1]
            for number, name in enumerate(names)
        }
        self._spec = spec
        self._candidate_dense = requests.candidate_dense
        self._offsets = starts_of(requests.num_candidates)
        self.num_requests = requests.num_requests

    def select(self, chosen: Int64Array) -> RowBatch:
        """Return the chosen requests, int64 [C], as a batch."""
        counts, candidates = positions_in(self._offsets, chosen)
        bags = {}
        for feature in self._spec.features:
            of_side = chosen if feature.side == "context" else candidates
            lengths, positions = positions_in(self._bag_offsets[feature.name], of_side)
            bags[feature.name] = torch.from_numpy(self._rows[positions]), torch.from_numpy(starts_of(lengths))
        return RowBatch(
            bags=bags,
            candidate_dense=torch.from_numpy(self._candidate_dense[candidates]),
            request_of_candidate=torch.from_numpy(np.repeat(np.arange(chosen.size), counts)),
            candidates=torch.from_numpy(candidates),
        )

    def counts(self) -> dict[str, Int64Array]:
        """Count how often each row is looked up: int64 [num_embeddings], by table."""
        counts = {table.name: np.zeros(table.num_embeddings, np.int64) for table in self._spec.tables}
        for name, offsets in self._bag_offsets.items():
            np.add.at(counts[self._spec.table_of(name).name], self._rows[offsets[0] : offsets[-1]], 1)
        return counts


class RankingNetwork(nn.Module):
    """Looks rows up in plain torch, pools them, and ranks; `row_classes` are of tables divided by popularity."""

    def __init__(self, spec: ModelSpec, row_classes: Mapping[str, RowClasses] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.shapes = InputShapes.of(spec)
        self.ranking = build_model(spec)
        self.tables = nn.ParameterDict(
            {
                _key(table.name): nn.Parameter(torch.randn(table.num_embeddings, table.embedding_dim) * INITIAL_SCALE)
                for table in spec.tables
            }
        )
        self._projected = spec.projections().keys()
        # Of each divided table by part, the row in it of each row of the table, or -1.
        self._part_rows: dict[str, list[Tensor]] = {}
        for table in spec.divided:
            rows = np.arange(table.num_embeddings)
            part_rows = [rows]
            if table.buckets is not None:
                part_rows = [rows // table.buckets, rows % table.buckets]
            elif table.num_classes > 1:
                part_of, row_in = (row_classes or {})[table.name].find(rows)
                if table.pruned:
                    is_pruned = part_of == len(table.parts)
                    part_of[is_pruned] = len(table.parts) - 1
                    row_in[is_pruned] = spec.parts(table)[-1].num_embeddings - 1
                part_rows = [np.where(part_of == number, row_in, -1) for number in range(len(table.parts))]
            self._part_rows[table.name] = [torch.from_numpy(rows_in_part) for rows_in_part in part_rows]

    @classmethod
    def of(cls, trained: TrainedModel) -> Self:
        """Make a network with a trained model's numbers, to score with."""
        network = cls(trained.spec, row_classes=trained.row_classes)
        network.tables.load_state_dict({_key(name): torch.from_numpy(rows) for name, rows in trained.tables.items()})
        network.ranking.load_state_dict(dict(trained.dense))
        return network.eval()

    def parameter(self, table: str) -> nn.Parameter:
        """Return the rows of a stored table, to be trained."""
        return self.tables.get_parameter(_key(table))

    def rows(self) -> dict[str, Float32Array]:
        """Return the rows of every stored table."""
        return {table.name: self.tables[_key(table.name)].detach().numpy() for table in self.spec.tables}

    def dense(self) -> dict[str, Tensor]:
        """Return copies of the dense model's tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.ranking.state_dict().items()}

    def forward(self, batch: RowBatch) -> Tensor:
        """Return logits [N]."""
        return self.ranking.forward(self.inputs(batch))

    def inputs(self, batch: RowBatch) -> RankingInputs:
        """Make the ranking model's inputs."""
        embeddings: dict[str, Tensor | SequenceInput] = {}
        for name, bags in batch.bags.items():
            if name in self.shapes.sequence_dims:
                embeddings[name] = self._sequence(name, *bags)
            else:
                embeddings[name] = F.dropout(self._pooled(name, *bags), DROPOUT, self.training)
        return RankingInputs.of(self.shapes, embeddings, batch.request_of_candidate, None, batch.candidate_dense)

    def embeddings(self, feature: str, rows: Tensor) -> Tensor:
        """Return what a feature gets for rows int64 [n] of its table: [n, embedding_dim]."""
        table = self.spec.table_of(feature)
        if not isinstance(table, DividedTable):
            return F.embedding(rows, self.tables[_key(table.name)])
        embeddings = torch.zeros(rows.numel(), table.embedding_dim)
        for part, part_rows in zip(table.parts, self._part_rows[table.name], strict=True):
            at = part_rows[rows]
            vectors = F.embedding(at.clamp(min=0), self.tables[_key(part)])
            if part in self._projected:
                vectors = vectors @ self.ranking.get_parameter(projection_name(part))
            embeddings = embeddings + vectors.masked_fill((at < 0).unsqueeze(1), 0)
        return embeddings

    def _pooled(self, feature: str, rows: Tensor, offsets: Tensor) -> Tensor:
        table, mode = self.spec.table_of(feature), self.spec.pooling_of(feature)
        if isinstance(table, DividedTable):
            vectors, rows = self.embeddings(feature, rows), torch.arange(rows.numel())
        else:
            vectors = self.tables[_key(table.name)]
        return F.embedding_bag(rows, vectors, offsets, mode=mode, include_last_offset=True)

    def _sequence(self, feature: str, rows: Tensor, offsets: Tensor) -> SequenceInput:
        lengths = offsets.diff()
        sequences = list(torch.split(self.embeddings(feature, rows), lengths.tolist()))
        padded = pad_sequence(sequences, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths.unsqueeze(1)
        if self.training:
            mask &= torch.rand(mask.shape) >= DROPOUT
        return SequenceInput(padded, mask)


def _key(table: str) -> str:
    return table.replace(".", "/")


def float32_scores(trained: TrainedModel, requests: GoldenRequests) -> Float32Array:
    """Score requests without engine or quantisation: float32 [N], within (0, 1). Raises as `RequestBatches`."""
    network = RankingNetwork.of(trained)
    batches = RequestBatches(trained.spec, trained.vocabularies, requests)
    with torch.inference_mode():
        parts = torch.split(torch.arange(batches.num_requests), 256)
        return torch.cat([torch.sigmoid(network(batches.select(part.numpy()))) for part in parts]).numpy()
