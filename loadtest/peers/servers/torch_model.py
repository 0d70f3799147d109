"""The model as a user of PyTorch would write it, and the bytes of a request. Imports nothing of shardrank.

A request, little-endian: seven uint32 (candidates; features, ids and dense inputs of the context; the same of the
candidates), then of the context and after it of the candidates, row by row: int64 ids [ids], int32 ids of each bag
[rows, features], float32 dense inputs [rows, dense]. The context has one row, or no columns where every candidate has
them all. An answer: float32 scores [candidates].
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

HEADER = struct.Struct("<7I")
ID_BYTES = 8
LENGTH_BYTES = 4
FLOAT_BYTES = 4
ROWS = "rows"


@dataclass(frozen=True)
class Settings:
    """What a peer's server is told, in environment variables `PEER_<NAME>`."""

    weights: str
    port: int
    workers: int
    batch: int

    @classmethod
    def read(cls) -> Settings:
        """From this process's environment."""
        get = os.environ.__getitem__
        return cls(get("PEER_WEIGHTS"), int(get("PEER_PORT")), int(get("PEER_WORKERS")), int(get("PEER_BATCH")))


Side = tuple[Tensor, Tensor, Tensor]


class TorchRanking(nn.Module):
    """sigmoid(MLP([dense | pooled embeddings])), all features over one table, sums."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag.from_pretrained(tensors[ROWS], mode="sum")
        layers = sum(name.startswith("mlp.") for name in tensors) // 2
        self.weights = [tensors[f"mlp.layers.{number}.weight"] for number in range(layers)]
        self.biases = [tensors[f"mlp.layers.{number}.bias"] for number in range(layers)]

    def _pooled(self, side: Side) -> Tensor:
        """float32 [rows, features * dim], the sums of the bags."""
        ids, lengths, dense = side
        ends = lengths.view(-1).cumsum(0)
        return self.bags(ids, ends - lengths.view(-1)).view(len(dense), -1)

    def forward(self, context: Side, candidates: Side, request: Tensor) -> Tensor:
        """Scores float32 [N], of what comes once a request and what comes once a candidate.

        Each side is int64 ids [sum of lengths], int32 lengths [rows, features] and float32 dense inputs [rows, D].
        The context is expanded, by the request of each candidate, int64 [N], if it has any column.
        """
        columns = [candidates[2], self._pooled(candidates)]
        if context[1].shape[1] or context[2].shape[1]:
            once = torch.cat((context[2], self._pooled(context)), 1).index_select(0, request)
            width = context[2].shape[1]
            columns = [once[:, :width], columns[0], once[:, width:], columns[1]]
        x = torch.cat(columns, 1)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = functional.linear(x, weight, bias)
            if number < last:
                x = torch.relu(x)
        return torch.sigmoid(x).squeeze(1)


Parts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Ids, lengths and dense inputs of a request's context or candidates."""
NO_CONTEXT: Parts = (np.zeros(0, np.int64), np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32))


class Scorer:
    """Scores requests, on one thread: as many processes serve as there are cores."""

    def __init__(self, weights: str) -> None:
        torch.set_num_threads(1)
        # Mapped, so that the processes of a peer share one copy of the rows.
        with safe_open(weights, framework="pt") as file:
            self._model = TorchRanking({name: file.get_tensor(name) for name in file.keys()}).eval()  # noqa: SIM118

    def scores(self, requests: Sequence[tuple[Parts, Parts]]) -> list[npt.NDArray[np.float32]]:
        """float32 [N] of each request, context and candidates, scored together; each alone where forms differ."""
        if len({candidates[1].shape[1] for _, candidates in requests}) > 1:
            # What is left of a load that was ended may wait beside the next one's requests.
            return [self.scores([one])[0] for one in requests]
        counts = [len(candidates[2]) for _, candidates in requests]
        if len(requests) == 1:
            sides = requests[0]
        else:
            sides = [
                [np.concatenate(parts) for parts in zip(*side, strict=True)] for side in zip(*requests, strict=True)
            ]
        context, candidates = (tuple(map(torch.from_numpy, side)) for side in sides)
        with torch.inference_mode():
            request = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
            scores = self._model(context, candidates, request).numpy()
        return np.split(scores, np.cumsum(counts)[:-1])

    def answer(self, body: bytes) -> bytes:
        """Of one request."""
        return self.scores([arrays(body)])[0].tobytes()

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Of a batch of requests, scored together."""
        return [one.tobytes() for one in self.scores([arrays(body) for body in bodies])]


def arrays(body: bytes) -> tuple[Parts, Parts]:
    """Return a request's arrays, copied since torch wants memory that may be written.

    Raises:
        ValueError: the body has another size than its header says.
    """
    candidates, *sizes = HEADER.unpack_from(body)
    memory, at, sides = bytearray(body), HEADER.size, []
    of_sides = ((1, *sizes[:3]), (candidates, *sizes[3:]))
    size = at + sum(
        ids * ID_BYTES + rows * (features * LENGTH_BYTES + dense * FLOAT_BYTES)
        for rows, features, ids, dense in of_sides
    )
    if len(body) != size:
        raise ValueError(f"a body of {len(body)} bytes; its header says {size}")
    for rows, features, num_ids, num_dense in of_sides:
        first_length = at + num_ids * ID_BYTES
        first_float = first_length + rows * features * LENGTH_BYTES
        at = first_float + rows * num_dense * FLOAT_BYTES
        ids = np.frombuffer(memory, "<i8", num_ids, first_length - num_ids * ID_BYTES)
        lengths = np.frombuffer(memory, "<i4", rows * features, first_length).reshape(rows, features)
        dense = np.frombuffer(memory, "<f4", rows * num_dense, first_float).reshape(rows, num_dense)
        sides.append((ids, lengths, dense))
    return sides[0], sides[1]
