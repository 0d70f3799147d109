"""The model as a user of PyTorch would write it, and the bytes of a request. Imports nothing of shardrank.

A request, little-endian and candidate by candidate: four uint32 (candidates, features, ids, dense inputs), then int64
ids [ids], int32 ids of each bag [candidates, features], float32 dense inputs [candidates, dense]. An answer: float32
scores [candidates].
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

HEADER = struct.Struct("<4I")
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


class TorchRanking(nn.Module):
    """sigmoid(MLP([dense | pooled embeddings])), all features over one table, sums."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag.from_pretrained(tensors[ROWS], mode="sum")
        layers = sum(name.startswith("mlp.") for name in tensors) // 2
        self.weights = [tensors[f"mlp.layers.{number}.weight"] for number in range(layers)]
        self.biases = [tensors[f"mlp.layers.{number}.bias"] for number in range(layers)]

    def forward(self, ids: Tensor, lengths: Tensor, dense: Tensor) -> Tensor:
        """Scores float32 [N], of int64 ids [sum of lengths], int32 lengths [N, features] and float32 dense [N, D]."""
        ends = lengths.view(-1).cumsum(0)
        x = torch.cat((dense, self.bags(ids, ends - lengths.view(-1)).view(len(dense), -1)), 1)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = functional.linear(x, weight, bias)
            if number < last:
                x = torch.relu(x)
        return torch.sigmoid(x).squeeze(1)


Parts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Ids, lengths and dense inputs of a request, as `TorchRanking.forward` takes them."""


class Scorer:
    """Scores requests, on one thread: as many processes serve as there are cores."""

    def __init__(self, weights: str) -> None:
        torch.set_num_threads(1)
        # Mapped, so that the processes of a peer share one copy of the rows.
        with safe_open(weights, framework="pt") as file:
            self._model = TorchRanking({name: file.get_tensor(name) for name in file.keys()}).eval()  # noqa: SIM118

    def scores(self, requests: Sequence[Parts]) -> list[npt.NDArray[np.float32]]:
        """float32 [N] of each request, scored together."""
        joined = requests[0] if len(requests) == 1 else [np.concatenate(parts) for parts in zip(*requests, strict=True)]
        with torch.inference_mode():
            scores = self._model(*map(torch.from_numpy, joined)).numpy()
        return np.split(scores, np.cumsum([len(dense) for *_, dense in requests])[:-1])

    def answer(self, body: bytes) -> bytes:
        """Of one request."""
        return self.scores([arrays(body)])[0].tobytes()

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Of a batch of requests, scored together."""
        return [one.tobytes() for one in self.scores([arrays(body) for body in bodies])]


def arrays(body: bytes) -> Parts:
    """Return a request's arrays, copied since torch wants memory that may be written.

    Raises:
        ValueError: the body has another size than its header says.
    """
    candidates, features, num_ids, num_dense = HEADER.unpack_from(body)
    bags, floats = candidates * features, candidates * num_dense
    first_length = HEADER.size + num_ids * ID_BYTES
    first_float = first_length + bags * LENGTH_BYTES
    if len(body) != (size := first_float + floats * FLOAT_BYTES):
        raise ValueError(f"a body of {len(body)} bytes; its header says {size}")
    memory = bytearray(body)
    ids = np.frombuffer(memory, "<i8", num_ids, HEADER.size)
    lengths = np.frombuffer(memory, "<i4", bags, first_length).reshape(candidates, features)
    return ids, lengths, np.frombuffer(memory, "<f4", floats, first_float).reshape(candidates, num_dense)
