"""DCN-v2, stacked: explicit feature crosses, then deep layers.

Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems",
arXiv:2008.13535. A full-matrix cross layer is equation 1, a low-rank one equation 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from serving.models.config import DcnV2Config
from serving.models.inputs import InputShapes, RankingInputs
from serving.models.layers import LogitHead, Mlp, padded_linear
from serving.models.ranking_model import RankingModel


class CrossLayers(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with W_l = U_l V_l^T where a rank is given.

    Tensors are named `full.{l}.weight` [width, width] and `full.{l}.bias` [width], or `down.{l}.weight` [rank, width]
    (V^T), `up.{l}.weight` [width, rank] (U) and `up.{l}.bias`.

    Args:
        width: columns of x.
        num_layers: how many.
        low_rank: the rank, or None for full matrices.
    """

    def __init__(self, width: int, num_layers: int, low_rank: int | None) -> None:
        super().__init__()
        self.low_rank = low_rank
        layers = range(num_layers)
        if low_rank is None:
            self.full = nn.ModuleList(nn.Linear(width, width) for _ in layers)
        else:
            self.down = nn.ModuleList(nn.Linear(width, low_rank, bias=False) for _ in layers)
            self.up = nn.ModuleList(nn.Linear(low_rank, width) for _ in layers)

    def forward(self, x0: Tensor) -> Tensor:
        """[N, width] to [N, width]."""
        x = x0
        if self.low_rank is None:
            for full in self.full:
                x = torch.addcmul(x, x0, full(x))
        else:
            for down, up in zip(self.down, self.up, strict=True):
                x = torch.addcmul(x, x0, up(down(x)))
        return x

    def pad(self, width: int) -> None:
        """Widens every layer by columns that stay zero."""
        for name, layers in self.named_children():
            assert isinstance(layers, nn.ModuleList)
            for number, layer in enumerate(layers):
                assert isinstance(layer, nn.Linear)
                layers[number] = padded_linear(
                    layer,
                    in_features=layer.in_features if name == "up" else width,
                    out_features=layer.out_features if name == "down" else width,
                )


class DcnV2(RankingModel):
    """logit = deep(cross(concat(dense or bottom(dense), embeddings)))."""

    def __init__(self, config: DcnV2Config, shapes: InputShapes) -> None:
        super().__init__(shapes)
        self.bottom = Mlp(shapes.dense_width, config.bottom_mlp, relu_at_end=True) if config.bottom_mlp else None
        width = shapes.width if self.bottom is None else self.bottom.output_width + shapes.embedding_width
        self.cross = CrossLayers(width, config.num_cross_layers, config.low_rank)
        self.deep = LogitHead(width, config.deep)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Logits [N]."""
        if self.bottom is None:
            x0 = inputs.columns[:, : self.columns_read]
        else:
            x0 = torch.cat([self.bottom(inputs.dense), inputs.embeddings], dim=1)
        logits: Tensor = self.deep(self.cross(x0))
        return logits.squeeze(1)

    def pad_inputs(self) -> None:
        """Widens the cross layers and the first deep layer, unless a bottom MLP stands between them and the columns."""
        if self.bottom is None:
            self.columns_read = self.shapes.padded_width
            self.cross.pad(self.columns_read)
            self.deep.pad_input(self.columns_read)
