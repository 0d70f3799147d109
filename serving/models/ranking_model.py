"""What every ranking model is."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from serving.models.inputs import InputShapes, RankingInputs
from serving.models.layers import Mlp


class RankingModel(nn.Module):
    """A dense part: from a batch's inputs to one logit a candidate.

    Args:
        shapes: where each input lies.
    """

    def __init__(self, shapes: InputShapes) -> None:
        super().__init__()
        self.shapes = shapes
        # How many columns of the inputs the first layer reads: those that carry something, until `pad_inputs`.
        self.columns_read = shapes.width

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights, which the inputs must share."""
        return next(self.parameters()).dtype

    @abstractmethod
    def forward(self, inputs: RankingInputs) -> Tensor:
        """Logits, float32 [N]."""

    def pad_inputs(self) -> None:
        """Widens the layers that read the inputs' columns to the padded width, with zero weights; for serving only.

        A model that does not read the columns as they lie has nothing to widen.
        """

    def pack(self) -> None:
        """Makes it ready to score on the device that it is on; after that its weights must not change."""
        for module in self.modules():
            if isinstance(module, Mlp):
                module.pack()

    def score(self, inputs: RankingInputs) -> Tensor:
        """sigmoid(logit): float32 [N] within (0, 1), without gradients."""
        if torch.is_inference_mode_enabled():
            return torch.sigmoid(self.forward(inputs).float())
        with torch.inference_mode():
            return torch.sigmoid(self.forward(inputs).float())
