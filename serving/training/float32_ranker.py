"""The trained model in this process, in float32 and plain torch: the answer that a served score is compared with."""

from __future__ import annotations

import numpy as np
import torch

from loader.golden import GoldenRequests
from serving.training.batches import RequestBatches
from serving.training.network import RankingNetwork
from serving.training.trainer import TrainedModel
from shard_node.bags import Float32Array

_REQUESTS_PER_BATCH = 256


class Float32Ranker:
    """Scores requests without router, engine or quantisation.

    Args:
        trained: the model.
    """

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained
        self._network = RankingNetwork(trained.spec)
        self._network.load_tables({name: torch.from_numpy(rows) for name, rows in trained.tables.items()})
        self._network.ranking.load_state_dict(dict(trained.dense))
        self._network.eval()

    def score(self, requests: GoldenRequests) -> Float32Array:
        """float32 [N], within (0, 1); what the requests say in `scores` is not looked at.

        Raises:
            TrainingError: for an id without a row, in a table that rejects it.
        """
        batches = RequestBatches(self._trained.spec, self._trained.vocabularies, requests)
        scores = []
        with torch.inference_mode():
            for first in range(0, batches.num_requests, _REQUESTS_PER_BATCH):
                chosen = np.arange(first, min(first + _REQUESTS_PER_BATCH, batches.num_requests))
                scores.append(torch.sigmoid(self._network(batches.take(chosen))))
        return torch.cat(scores).numpy()
