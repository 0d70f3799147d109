"""The model as a user of PyTorch would write it, and the bytes of a request. Imports nothing of shardrank.

A request: four little-endian uint32 (candidates, features, ids a bag, dense inputs), then int64 ids
[candidates, features, ids], then float32 dense inputs [candidates, dense]. An answer: float32 scores [candidates].
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

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Scores float32 [N], of int64 ids [N, features, ids] and float32 dense [N, D]."""
        candidates, features, hotness = ids.shape
        pooled = self.bags(ids.view(candidates * features, hotness)).view(candidates, -1)
        x = torch.cat((dense, pooled), 1)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = functional.linear(x, weight, bias)
            if number < last:
                x = torch.relu(x)
        return torch.sigmoid(x).squeeze(1)


class Scorer:
    """Scores requests, on one thread: as many processes serve as there are cores."""

    def __init__(self, weights: str) -> None:
        torch.set_num_threads(1)
        # Mapped, so that the processes of a peer share one copy of the rows.
        with safe_open(weights, framework="pt") as file:
            self._model = TorchRanking({name: file.get_tensor(name) for name in file.keys()}).eval()  # noqa: SIM118

    def scores(self, ids: npt.NDArray[np.int64], dense: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """float32 [N]."""
        with torch.inference_mode():
            scores: npt.NDArray[np.float32] = self._model(torch.from_numpy(ids), torch.from_numpy(dense)).numpy()
        return scores

    def answer(self, body: bytes) -> bytes:
        """Of one request."""
        return self.scores(*arrays(body)).tobytes()

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Of a batch of requests, scored together."""
        parts = [arrays(body) for body in bodies]
        if len({ids.shape[1:] for ids, _ in parts}) != 1:
            return [self.answer(body) for body in bodies]
        scores = self.scores(np.concatenate([ids for ids, _ in parts]), np.concatenate([dense for _, dense in parts]))
        ends = np.cumsum([len(ids) for ids, _ in parts])
        return [one.tobytes() for one in np.split(scores, ends[:-1])]


def arrays(body: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The ids and the dense inputs of a request, copied since torch wants memory that may be written.

    Raises:
        ValueError: the body has another size than its header says.
    """
    candidates, features, hotness, num_dense = HEADER.unpack_from(body)
    count, floats = candidates * features * hotness, candidates * num_dense
    if len(body) != (size := HEADER.size + count * ID_BYTES + floats * FLOAT_BYTES):
        raise ValueError(f"a body of {len(body)} bytes; its header says {size}")
    memory = bytearray(body)
    ids = np.frombuffer(memory, "<i8", count, HEADER.size).reshape(candidates, features, hotness)
    dense = np.frombuffer(memory, "<f4", floats, HEADER.size + count * ID_BYTES).reshape(candidates, num_dense)
    return ids, dense
