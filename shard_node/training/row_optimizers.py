"""Optimizers of single rows: what becomes of a row and of its state by one gradient. Arrays in, arrays out.

Only rows with a gradient change, as with PyTorch's sparse gradients. Adam counts the steps of each row.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field

from loader.snapshot.tables import Frozen
from shard_node.bags import Float32Array, Int64Array

OptimizerKind: TypeAlias = Literal["sgd", "adagrad", "adam"]


class RowOptimizer(Frozen):
    """An optimizer and its numbers.

    `sgd`: row -= lr * g. `adagrad` (row-wise: FBGEMM's EXACT_ROWWISE_ADAGRAD): s += mean(g^2); row -= lr * g /
    (sqrt(s) + eps). `adam` (Kingma and Ba, 2015, Algorithm 1) with betas 0.9 and 0.999.
    """

    kind: OptimizerKind = "adagrad"
    lr: float = Field(default=0.01, gt=0)
    eps: float = Field(default=1e-8, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)

    def state_width(self, embedding_dim: int) -> int:
        """Return how many float32 numbers are kept beside a row."""
        return {"sgd": 0, "adagrad": 1, "adam": 1 + 2 * embedding_dim}[self.kind]

    def update(self, rows: Float32Array, state: Float32Array, gradients: Float32Array) -> None:
        """Update rows [n, dim] and their state [n, width] in place, all float32, by a gradient each, [n, dim]."""
        lr, eps = np.float32(self.lr), np.float32(self.eps)
        if self.kind == "sgd":
            rows -= lr * gradients
        elif self.kind == "adagrad":
            state[:, 0] += np.square(gradients).mean(axis=1)
            rows -= lr * gradients / (np.sqrt(state) + eps)
        else:
            dim = rows.shape[1]
            steps, first, second = state[:, :1], state[:, 1 : 1 + dim], state[:, 1 + dim :]
            steps += 1
            first += np.float32(1 - self.beta1) * (gradients - first)
            second += np.float32(1 - self.beta2) * (np.square(gradients) - second)
            mean = first / (1 - np.float32(self.beta1) ** steps)
            rows -= lr * mean / (np.sqrt(second / (1 - np.float32(self.beta2) ** steps)) + eps)


def summed(ids: Int64Array, gradients: Float32Array) -> tuple[Int64Array, Float32Array]:
    """Return the different ids, ascending, and the sum of each one's gradients, in the order in which they stand.

    `ids` are int64 [n], `gradients` float32 [n, dim].
    """
    different, index = np.unique(ids, return_inverse=True)
    sums = torch.zeros(different.size, gradients.shape[1])
    # One row after the other; NumPy's sums of runs are in another order, and take ten times as long.
    sums.index_add_(0, torch.from_numpy(index), torch.from_numpy(gradients))
    return different, sums.numpy()
