"""Trains tables and dense part together, in float32, the same for the same seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from loader.manifest import Frozen, ModelSpec, VocabularyMapping
from loader.progress import Progress, no_progress
from loader.vocabulary import Vocabulary
from serving.training.batches import RequestBatches, RowBatch
from serving.training.dataset import FilmsDataset
from serving.training.description import films_vocabularies
from serving.training.network import RankingNetwork
from serving.training.requests import training_requests
from shard_node.bags import Float32Array


class TrainingOptions(Frozen):
    """How to train.

    Attributes:
        seed: of the rows and weights at the beginning, the order of batches, and dropout.
        epochs: how often each training sample is seen.
        requests_per_batch: a request has some 17 samples.
        learning_rate: the highest; it rises to it and falls to zero.
        weight_decay: AdamW's, for the dense part.
        table_decay: AdamW's, for the tables.
        dropout: see `RankingNetwork`.
        unknown_share: share of ids that are trained as unknown ones, in tables with vocabulary and default row.
    """

    seed: int = Field(default=0, ge=0, lt=2**32)
    epochs: int = Field(default=12, ge=1, le=10_000)
    requests_per_batch: int = Field(default=48, ge=1, le=65_536)
    learning_rate: float = Field(default=0.01, gt=0, le=1)
    weight_decay: float = Field(default=0.3, ge=0, le=100)
    table_decay: float = Field(default=1.5, ge=0, le=100)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    unknown_share: float = Field(default=0.01, ge=0, lt=1)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """What training hands over.

    Attributes:
        spec: the model's description.
        tables: rows by table, float32 [num_embeddings, embedding_dim].
        dense: the ranking model's tensors by name, float32.
        vocabularies: ids in row order, of tables with the vocabulary mapping.
    """

    spec: ModelSpec
    tables: Mapping[str, Float32Array]
    dense: Mapping[str, Tensor]
    vocabularies: Mapping[str, Vocabulary]

    @property
    def float32_bytes(self) -> int:
        """Bytes of the tables in float32."""
        return sum(rows.nbytes for rows in self.tables.values())


def train(
    dataset: FilmsDataset,
    spec: ModelSpec,
    options: TrainingOptions | None = None,
    progress: Progress = no_progress,
) -> TrainedModel:
    """Trains a model on the dataset's training part.

    Args:
        dataset: the samples.
        spec: the model, as `films_spec` describes it.
        options: how to train.
        progress: told the batches done.

    Raises:
        RankingModelError: if the description's dense model is not valid.
    """
    options = options or TrainingOptions()
    vocabularies = films_vocabularies(dataset.interactions, spec)
    labelled = training_requests(dataset, spec)
    batches = RequestBatches(spec, vocabularies, labelled.requests)
    labels = torch.from_numpy(labelled.labels)
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        network = RankingNetwork(spec, dropout=options.dropout)
        _fit(network, batches, labels, options, progress)
    return TrainedModel(
        spec=spec,
        tables={name: network.table(name).detach().numpy() for name in network.table_names},
        dense={name: tensor.detach().clone() for name, tensor in network.ranking.state_dict().items()},
        vocabularies=vocabularies,
    )


def _fit(
    network: RankingNetwork,
    batches: RequestBatches,
    labels: Tensor,
    options: TrainingOptions,
    progress: Progress,
) -> None:
    draw = np.random.default_rng(options.seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": list(network.ranking.parameters()), "weight_decay": options.weight_decay},
            {"params": list(network.tables), "weight_decay": options.table_decay},
        ],
        lr=options.learning_rate,
    )
    batches_per_epoch = -(-batches.num_requests // options.requests_per_batch)
    steps = options.epochs * batches_per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps, pct_start=0.2)
    network.train()
    done = 0
    for _ in range(options.epochs):
        for chosen in np.array_split(draw.permutation(batches.num_requests), batches_per_epoch):
            batch = batches.take(chosen)
            _make_some_unknown(network.spec, batch, options.unknown_share)
            loss = F.binary_cross_entropy_with_logits(network(batch), labels[batch.candidates])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            done += 1
            progress("training", done, steps)


def _make_some_unknown(spec: ModelSpec, batch: RowBatch, share: float) -> None:
    """Gives some ids the default row, so that it learns what to expect of an id that nobody has seen."""
    for feature, bags in batch.bags.items():
        table = spec.table_of(feature)
        if isinstance(table.id_mapping, VocabularyMapping) and table.unknown_id == "default_row":
            bags.rows[torch.rand(bags.rows.shape) < share] = table.default_row
