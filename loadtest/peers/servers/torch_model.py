"""The model as a user of PyTorch would write it, and the bytes of a request. Imports nothing of shardrank.

A request, little-endian: seven uint32 (candidates; features, ids and dense inputs of the context; the same of the
candidates), then of the context and after it of the candidates, row by row: int64 ids [ids], int32 ids of each bag
[rows, features], float32 dense inputs [rows, dense]. The context has one row, or no columns where every candidate has
them all. A response: float32 scores [candidates].
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

HEADER = struct.Struct("<7I")
Side = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Ids [n], lengths [rows, features] and dense inputs [rows, D] of a request's context or candidates."""


class TorchRanking(nn.Module):
    """sigmoid(MLP([dense | pooled embeddings])), all features over one table, sums."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag.from_pretrained(tensors["rows"], mode="sum")
        layers = range((len(tensors) - 1) // 2)
        self.layers = [[tensors[f"mlp.layers.{n}.{name}"] for name in ("weight", "bias")] for n in layers]

    def forward(self, context: list[Tensor], candidates: list[Tensor], request: Tensor) -> Tensor:
        """Return scores, float32 [N].

        Each side is int64 ids, int32 lengths [rows, features] and float32 dense inputs [rows, D]. The context, if it
        has any column, is expanded by the request of each candidate, int64 [N].
        """
        columns = [candidates[2], self._pooled(candidates)]
        if context[1].shape[1] or context[2].shape[1]:
            dense, pooled = (part.index_select(0, request) for part in (context[2], self._pooled(context)))
            columns = [dense, columns[0], pooled, columns[1]]
        x = torch.cat(columns, 1)
        for weight, bias in self.layers[:-1]:
            x = torch.relu(functional.linear(x, weight, bias))
        return torch.sigmoid(functional.linear(x, *self.layers[-1])).squeeze(1)

    def _pooled(self, side: list[Tensor]) -> Tensor:
        """float32 [rows, features * dim], the sums of the bags."""
        ids, lengths, dense = side
        ends = lengths.view(-1).cumsum(0)
        return self.bags(ids, ends - lengths.view(-1)).view(len(dense), -1)


class Scorer:
    """Scores requests, on one thread: as many processes serve as there are cores."""

    def __init__(self, weights: str) -> None:
        torch.set_num_threads(1)
        # load_file maps the file: the processes of a peer share one copy of the rows.
        self._model = TorchRanking(load_file(weights)).eval()

    def scores(self, requests: Sequence[tuple[Side, Side]]) -> list[npt.NDArray[np.float32]]:
        """Return float32 [N] of each request, context and candidates, scored together; apart where forms differ."""
        if len({candidates[1].shape[1] for _, candidates in requests}) > 1:
            return [self.scores([request])[0] for request in requests]
        counts = [len(candidates[2]) for _, candidates in requests]
        context, candidates = (
            [torch.from_numpy(np.concatenate(parts)) for parts in zip(*side, strict=True)]
            for side in zip(*requests, strict=True)
        )
        with torch.inference_mode():
            request = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
            scores = self._model(context, candidates, request).numpy()
        return np.split(scores, np.cumsum(counts)[:-1])

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Return the responses to a batch of requests, scored together."""
        return [scores.tobytes() for scores in self.scores([read(body) for body in bodies])]


def read(body: bytes) -> tuple[Side, Side]:
    """Return a request's context and candidates. Raises ValueError: the body has another size than its header says."""
    count, *sizes = HEADER.unpack_from(body)
    at, arrays = HEADER.size, []
    for rows, (features, ids, dense) in ((1, sizes[:3]), (count, sizes[3:])):
        for dtype, shape in (("<i8", (ids,)), ("<i4", (rows, features)), ("<f4", (rows, dense))):
            arrays.append(np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape))
            at += arrays[-1].nbytes
    if len(body) != at:
        raise ValueError(f"a body of {len(body)} bytes; its header says {at}")
    return tuple(arrays[:3]), tuple(arrays[3:])
