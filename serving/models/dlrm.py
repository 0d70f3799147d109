"""DLRM: dense inputs through a bottom MLP, dot products of all pairs of vectors, a top MLP.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", arXiv:1906.00091.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.models.config import DlrmConfig
from serving.models.inputs import InputShapes, RankingInputs
from serving.models.layers import LogitHead, Mlp
from serving.models.ranking_model import RankingModel


class Dlrm(RankingModel):
    """logit = top(concat(b, <v_i, v_j> for i < j)), with b = bottom(dense) and v = (b, e_1, ..., e_F).

    Pairs come row by row of the upper triangle without its diagonal, TorchRec's order. Without dense inputs there is no
    b.
    """

    pairs: Tensor

    def __init__(self, config: DlrmConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.num_features = len(shapes.features)
        self.dim = shapes.dims[0]
        self.bottom = Mlp(shapes.dense_width, config.bottom_mlp, relu_at_end=True) if shapes.dense_width else None
        num_vectors = self.num_features + (self.bottom is not None)
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", first * num_vectors + second, persistent=False)
        width = first.numel() + (self.dim if self.bottom is not None else 0)
        self.top = LogitHead(width, config.top_mlp)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Logits [N]."""
        vectors = inputs.embeddings.view(inputs.num_candidates, self.num_features, self.dim)
        if self.bottom is None:
            return self._top(self._interactions(vectors))
        bottom = self.bottom(inputs.dense)
        vectors = torch.cat([bottom.unsqueeze(1), vectors], dim=1)
        return self._top(torch.cat([bottom, self._interactions(vectors)], dim=1))

    def _interactions(self, vectors: Tensor) -> Tensor:
        """[N, V, D] to [N, V * (V - 1) / 2]."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.flatten(1).index_select(1, self.pairs)

    def _top(self, x: Tensor) -> Tensor:
        logits: Tensor = self.top(x)
        return logits.squeeze(1)
