"""The model as a user of PyTorch would write it, and the bytes of a request. Imports nothing of shardrank.

A request is safetensors: of the candidates `ids`, int64 [ids] row by row, `lengths`, int32 [rows, features], the ids of
each bag, and `dense`, float32 [rows, dense inputs]; of the context `context_ids` and so on, one row, without columns
where every candidate has them all. A response: float32 scores [candidates].
"""

from collections.abc import Sequence

import torch
from safetensors.torch import load, load_file
from torch import Tensor, nn
from torch.nn import functional


class TorchRanking(nn.Module):
    """sigmoid(MLP([dense | pooled embeddings])), all features over one table, sums."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag.from_pretrained(tensors["rows"], mode="sum")
        layers = range((len(tensors) - 1) // 2)
        self.layers = [[tensors[f"mlp.layers.{n}.{name}"] for name in ("weight", "bias")] for n in layers]

    def forward(self, tensors: dict[str, Tensor], request: Tensor) -> Tensor:
        """Return scores, float32 [N]; the context is expanded by the request of each candidate, int64 [N]."""
        columns = [tensors["dense"], self._pooled(tensors["ids"], tensors["lengths"])]
        if tensors["context_lengths"].shape[1] or tensors["context_dense"].shape[1]:
            context = tensors["context_dense"], self._pooled(tensors["context_ids"], tensors["context_lengths"])
            dense, pooled = (part.index_select(0, request) for part in context)
            columns = [dense, columns[0], pooled, columns[1]]
        x = torch.cat(columns, 1)
        for weight, bias in self.layers[:-1]:
            x = torch.relu(functional.linear(x, weight, bias))
        return torch.sigmoid(functional.linear(x, *self.layers[-1])).squeeze(1)

    def _pooled(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """float32 [rows, features * dim], the sums of the bags."""
        return self.bags(ids, lengths.view(-1).cumsum(0) - lengths.view(-1)).view(len(lengths), -1)


class Scorer:
    """Scores requests, on one thread: as many processes serve as there are cores."""

    def __init__(self, weights: str) -> None:
        torch.set_num_threads(1)
        # load_file maps the file: the processes of a peer share one copy of the rows.
        self._model = TorchRanking(load_file(weights)).eval()

    def answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Return the responses to a batch of requests, scored together."""
        requests = [load(body) for body in bodies]
        tensors = {name: torch.cat([request[name] for request in requests]) for name in requests[0]}
        counts = [len(request["dense"]) for request in requests]
        with torch.inference_mode():
            scores = self._model(tensors, torch.repeat_interleave(torch.tensor(counts)))
        return [each.numpy().tobytes() for each in scores.split(counts)]
