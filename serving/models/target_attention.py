"""Target attention: each candidate weighs the items of its user's history by what it has to do with them.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", arXiv:1706.06978; here with a softmax over the
history and ReLU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from serving.models.config import TargetAttentionConfig
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.layers import LogitHead, Mlp
from serving.models.ranking_model import RankingModel

# Candidate-history pairs worked on at once: bounds the memory of a batch with long histories to some 100 MB.
MAX_PAIRS = 1 << 18


class AttentionUnit(nn.Module):
    """weight(q, k) = MLP([q, k, q - k, q * k]), for every pair of a candidate q and a row k of its history.

    The first layer W = [W_q, W_k, W_d, W_p] is applied as (W_q + W_d) q + (W_k - W_d) k + W_p (q * k): the first term
    once a candidate, the second once a row of a history, only the third once a pair.

    Args:
        dim: D, of q and k.
        hidden: sizes of the hidden layers.
    """

    def __init__(self, dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.dim = dim
        self.max_pairs = MAX_PAIRS
        self.first = nn.Linear(4 * dim, hidden[0])
        self.rest = Mlp(hidden[0], [*hidden[1:], 1], relu_at_end=False)

    def forward(self, queries: Tensor, history: SequenceInput, owner: Tensor) -> Tensor:
        """The attended histories.

        Args:
            queries: [N, D].
            history: of the R requests.
            owner: int64 [N], which request a candidate belongs to.

        Returns:
            [N, D], the softmax-weighted sum of each candidate's history; zeros where that is empty.
        """
        longest = history.mask.shape[1]
        if longest == 0:
            return torch.zeros_like(queries)
        of_q, of_k, of_difference, of_product = torch.split(self.first.weight, self.dim, dim=1)
        per_candidate = F.linear(queries, of_q + of_difference, self.first.bias)
        per_row = F.linear(history.rows, of_k - of_difference)
        chunk = max(1, self.max_pairs // longest)
        attended = [
            self._attend(q, partial, per_row, of_product, history, request)
            for q, partial, request in zip(
                *(torch.split(tensor, chunk) for tensor in (queries, per_candidate, owner)), strict=True
            )
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(
        self,
        queries: Tensor,
        per_candidate: Tensor,
        per_row: Tensor,
        of_product: Tensor,
        history: SequenceInput,
        owner: Tensor,
    ) -> Tensor:
        keys = history.rows.index_select(0, owner)
        mask = history.mask.index_select(0, owner)
        hidden = F.linear(keys * queries.unsqueeze(1), of_product)
        hidden = hidden + per_row.index_select(0, owner) + per_candidate.unsqueeze(1)
        weights = self.rest(F.relu_(hidden)).squeeze(2).float()
        # The finite minimum, not -inf: the softmax of a history without rows would be NaN, and so its gradient.
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
        weights = torch.softmax(weights, dim=1).masked_fill(~mask, 0.0).to(keys.dtype)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1)


class TargetAttention(RankingModel):
    """logit = MLP(concat(dense, embeddings, attended history))."""

    def __init__(self, config: TargetAttentionConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.history_feature = config.history_feature
        self.target_columns = shapes.embedding_columns(config.target_feature)
        dim = shapes.sequence_dims[config.history_feature]
        self.attention = AttentionUnit(dim, config.attention_hidden)
        self.mlp = LogitHead(shapes.width + dim, config.hidden)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Logits [N]."""
        queries = inputs.embeddings[:, self.target_columns]
        attended = self.attention(queries, inputs.sequences[self.history_feature], inputs.request_of_candidate)
        x = torch.cat([inputs.columns[:, : self.shapes.width], attended], dim=1)
        logits: Tensor = self.mlp(x)
        return logits.squeeze(1)
