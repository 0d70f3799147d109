"""The plain ranking model: an MLP over everything side by side."""

from __future__ import annotations

from torch import Tensor

from serving.models.config import MlpConfig
from serving.models.inputs import InputShapes, RankingInputs
from serving.models.layers import LogitHead
from serving.models.ranking_model import RankingModel


class MlpRanking(RankingModel):
    """logit = MLP(concat(dense, embeddings))."""

    def __init__(self, config: MlpConfig, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.mlp = LogitHead(shapes.width, config.hidden)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Logits [N]."""
        logits: Tensor = self.mlp(inputs.columns[:, : self.columns_read])
        return logits.squeeze(1)

    def pad_inputs(self) -> None:
        """Widens the first layer."""
        self.columns_read = self.shapes.padded_width
        self.mlp.pad_input(self.columns_read)
