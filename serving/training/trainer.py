"""Trains tables and dense part together, in float32 and plain torch, the same for the same seed.

The scores of a trained model in this process are the answer that served scores are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from loader.progress import Progress, no_progress
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec, VocabularyMapping, fingerprint_strings
from loader.snapshot.per_row import Vocabulary
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.ranking_models import build_model
from serving.training.dataset import FilmsDataset, films_vocabularies, training_requests
from serving.training.interactions import TrainingError, offsets_of, positions_in
from shard_node.bags import Float32Array, Int64Array, KeyedBags

DEFAULT_EPOCHS = 12
# A request has some 17 samples.
REQUESTS_PER_BATCH = 48
# The highest; it rises to it and falls to zero.
LEARNING_RATE = 0.01
DENSE_WEIGHT_DECAY = 0.3
TABLE_WEIGHT_DECAY = 1.5
# Share of the pooled embeddings' elements, and of the sequences' rows, left out while training.
DROPOUT = 0.1
# Share of ids that are trained as unknown ones, in tables with vocabulary and default row.
UNKNOWN_SHARE = 0.01
# Standard deviation of the rows at the beginning.
INITIAL_SCALE = 0.05
_REQUESTS_PER_SCORING = 256


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """What training hands over: float32 rows by table, the ranking model's tensors by name, and ids in row order."""

    spec: ModelSpec
    tables: Mapping[str, Float32Array]
    dense: Mapping[str, Tensor]
    vocabularies: Mapping[str, Vocabulary]


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """R requests with N candidates, as tensors.

    Attributes:
        bags: by feature, rows int64 [nnz] and offsets int64 [R + 1], or [N + 1] for a candidate feature.
        candidates: int64 [N], positions of the candidates among those of all requests.
    """

    bags: Mapping[str, tuple[Tensor, Tensor]]
    candidate_dense: Tensor
    request_of_candidate: Tensor
    candidates: Tensor


class RequestBatches:
    """Requests whose ids are mapped to rows once, to be taken in any order.

    Raises:
        TrainingError: for an id without a row, in a table that rejects it.
    """

    def __init__(self, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary], requests: GoldenRequests) -> None:
        schema = FeatureSchema.of(spec)
        known = {
            name: fingerprint_strings([str(word) for word in ids]) if name == "occupations" else np.asarray(ids)
            for name, ids in vocabularies.items()
        }
        names = [feature.name for feature in schema.features]
        bags = KeyedBags.from_lengths(
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
        self._sides = {feature.name: feature.side for feature in spec.features}
        self._candidate_dense = requests.candidate_dense
        self._offsets = offsets_of(requests.num_candidates)
        self.num_requests = requests.num_requests

    def take(self, chosen: Int64Array) -> RowBatch:
        """Return the chosen requests, int64 [C], as a batch."""
        counts, candidates = positions_in(self._offsets, chosen)
        bags = {}
        for name, side in self._sides.items():
            lengths, positions = positions_in(self._bag_offsets[name], chosen if side == "context" else candidates)
            bags[name] = torch.from_numpy(self._rows[positions]), torch.from_numpy(offsets_of(lengths))
        return RowBatch(
            bags=bags,
            candidate_dense=torch.from_numpy(self._candidate_dense[candidates]),
            request_of_candidate=torch.from_numpy(np.repeat(np.arange(chosen.size), counts)),
            candidates=torch.from_numpy(candidates),
        )


class RankingNetwork(nn.Module):
    """Looks rows up in plain torch, pools them, and runs the ranking model that serves."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.shapes = InputShapes.of(spec)
        self.ranking = build_model(spec)
        self.tables = nn.ParameterDict(
            {
                table.name: nn.Parameter(torch.randn(table.num_embeddings, table.embedding_dim) * INITIAL_SCALE)
                for table in spec.tables
            }
        )

    @classmethod
    def of(cls, trained: TrainedModel) -> Self:
        """Make a network with a trained model's numbers, to score with."""
        network = cls(trained.spec)
        network.tables.load_state_dict({name: torch.from_numpy(rows) for name, rows in trained.tables.items()})
        network.ranking.load_state_dict(dict(trained.dense))
        return network.eval()

    def forward(self, batch: RowBatch) -> Tensor:
        """Return logits [N]."""
        logits: Tensor = self.ranking(self.inputs(batch))
        return logits

    def inputs(self, batch: RowBatch) -> RankingInputs:
        """Make the ranking model's inputs."""
        owner = batch.request_of_candidate
        pooled = []
        for name in self.shapes.features:
            rows, offsets = batch.bags[name]
            mode = self.spec.pooling_of(name)
            embeddings = F.embedding_bag(rows, self._table(name), offsets, mode=mode, include_last_offset=True)
            pooled.append(embeddings[owner] if self.spec.feature(name).side == "context" else embeddings)
        embeddings = F.dropout(torch.cat(pooled, dim=1), DROPOUT, self.training)
        sequences = {name: self._sequence(name, *batch.bags[name]) for name in self.shapes.sequence_dims}
        return RankingInputs.of_parts(batch.candidate_dense, embeddings, owner, sequences)

    def _table(self, feature: str) -> Tensor:
        rows: Tensor = self.tables[self.spec.table_of(feature).name]
        return rows

    def _sequence(self, feature: str, rows: Tensor, offsets: Tensor) -> SequenceInput:
        lengths = offsets.diff()
        sequences = list(torch.split(self._table(feature)[rows], lengths.tolist()))
        padded = pad_sequence(sequences, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths.unsqueeze(1)
        if self.training:
            mask &= torch.rand(mask.shape) >= DROPOUT
        return SequenceInput(padded, mask)


def train(
    dataset: FilmsDataset,
    spec: ModelSpec,
    *,
    seed: int = 0,
    epochs: int = DEFAULT_EPOCHS,
    progress: Progress = no_progress,
) -> TrainedModel:
    """Trains a model that `films_spec` describes on the dataset's training part, which is seen `epochs` times.

    The seed is that of the rows and weights at the beginning, the order of batches, and dropout.

    Raises:
        RankingModelError: if the description's dense model is not valid.
    """
    vocabularies = films_vocabularies(dataset.interactions, spec)
    labelled = training_requests(dataset, spec)
    batches = RequestBatches(spec, vocabularies, labelled.requests)
    labels, draw = torch.from_numpy(labelled.labels), np.random.default_rng(seed)
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RankingNetwork(spec).train()
        optimizer = torch.optim.AdamW(
            [
                {"params": list(network.ranking.parameters()), "weight_decay": DENSE_WEIGHT_DECAY},
                {"params": list(network.tables.parameters()), "weight_decay": TABLE_WEIGHT_DECAY},
            ],
            lr=LEARNING_RATE,
        )
        batches_per_epoch = -(-batches.num_requests // REQUESTS_PER_BATCH)
        steps, done = epochs * batches_per_epoch, 0
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.2)
        for _ in range(epochs):
            for chosen in np.array_split(draw.permutation(batches.num_requests), batches_per_epoch):
                batch = batches.take(chosen)
                _make_some_unknown(spec, batch)
                loss = F.binary_cross_entropy_with_logits(network(batch), labels[batch.candidates])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
                done += 1
                progress("training", done, steps)
    return TrainedModel(
        spec=spec,
        tables={name: rows.detach().numpy() for name, rows in network.tables.items()},
        dense={name: tensor.detach().clone() for name, tensor in network.ranking.state_dict().items()},
        vocabularies=vocabularies,
    )


def _make_some_unknown(spec: ModelSpec, batch: RowBatch) -> None:
    """Give some ids the default row, so that it learns what to expect of an id that nobody has seen."""
    for feature, (rows, _) in batch.bags.items():
        table = spec.table_of(feature)
        if isinstance(table.id_mapping, VocabularyMapping) and table.unknown_id == "default_row":
            rows[torch.rand(rows.shape) < UNKNOWN_SHARE] = table.default_row


def float32_scores(trained: TrainedModel, requests: GoldenRequests) -> Float32Array:
    """Scores requests without engine or quantisation: float32 [N], within (0, 1).

    Raises:
        TrainingError: for an id without a row, in a table that rejects it.
    """
    network = RankingNetwork.of(trained)
    batches = RequestBatches(trained.spec, trained.vocabularies, requests)
    with torch.inference_mode():
        parts = torch.split(torch.arange(batches.num_requests), _REQUESTS_PER_SCORING)
        return torch.cat([torch.sigmoid(network(batches.take(part.numpy()))) for part in parts]).numpy()
