"""What training online must come to: the same steps in one process."""

from __future__ import annotations

import numpy as np

from serving.training.online_model import FIELDS, DenseWeights, OnlineConfig
from serving.training.rating_stream import Ratings, labels_of
from serving.training.trainer import auc
from shard_node.training.trained_rows import initial_rows


class Reference:
    """One process that is given the steps' joined batches: rows by key, dense rows, and each rating's score."""

    def __init__(self, config: OnlineConfig, ratings: Ratings) -> None:
        optimizer, size = config.row_optimizer, config.workers * config.batch
        self.dense = DenseWeights(config.spec, config.seed, optimizer)
        self.keys = {name: np.unique(ratings[field]) for name, field in FIELDS.items()}
        self.rows = {name: initial_rows(keys, config.dim, config.init_scale) for name, keys in self.keys.items()}
        state = {
            name: np.zeros((keys.size, optimizer.state_width(config.dim)), np.float32)
            for name, keys in self.keys.items()
        }
        self.steps, scores = ratings.size // size, []
        for step in range(1, self.steps + 1):
            batch = ratings[(step - 1) * size : step * size]
            at, index = {}, {}
            for name, field in FIELDS.items():
                ids, index[name] = np.unique(batch[field], return_inverse=True)
                at[name] = np.searchsorted(self.keys[name], ids)
            result = self.dense.learn(
                {name: self.rows[name][at[name]] for name in at}, index, labels_of(batch), 1 / size
            )
            scores.append(result.scores)
            for name, gradients in result.gradients.items():
                values, of_rows = self.rows[name][at[name]], state[name][at[name]]
                optimizer.update(values, of_rows, gradients)
                self.rows[name][at[name]], state[name][at[name]] = values, of_rows
            self.dense.apply(self.dense.gradients, step)
        self.auc = auc(labels_of(ratings[: self.steps * size]), np.concatenate(scores))
