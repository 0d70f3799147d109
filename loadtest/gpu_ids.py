"""Which rows the bench looks up: drawn on the card, by the million."""

from __future__ import annotations

import math
from typing import Literal

import torch

Ids = Literal["uniform", "zipf"]
ZIPF_EXPONENT = 1.05
# Far from a power of two and prime to most numbers of rows: neighbouring ranks lie in distant rows.
_SCATTER = 1_000_003
_PIECE = 1 << 22


def draw(ids: Ids, num_rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [count] of rows below `num_rows`, on the generator's device.

    `zipf`: P(rank) proportional to rank^-1.05, by inverting the distribution function of the continuous power law on
    [1, num_rows + 1) and rounding down; ranks are scattered over the rows.
    """
    drawn = torch.empty(count, dtype=torch.int32, device=generator.device)
    multiplier = _prime_to(num_rows)
    for first in range(0, count, _PIECE):
        part = drawn[first : first + _PIECE]
        if ids == "uniform":
            part.random_(0, num_rows, generator=generator)
            continue
        # float64: near 1 the exponent 1 / (1 - 1.05) = -20 leaves float32 without a digit.
        share = torch.rand(part.numel(), dtype=torch.float64, device=drawn.device, generator=generator)
        ranks = _ranks(share, num_rows).mul_(multiplier).add_(num_rows // 3).remainder_(num_rows)
        part.copy_(ranks)
    return drawn


def _ranks(share: torch.Tensor, num_rows: int) -> torch.Tensor:
    power = 1 - ZIPF_EXPONENT
    share.mul_((num_rows + 1) ** power - 1).add_(1).pow_(1 / power).sub_(1)
    return share.to(torch.int64).clamp_(0, num_rows - 1)


def _prime_to(num_rows: int) -> int:
    multiplier = _SCATTER
    while math.gcd(multiplier, num_rows) != 1:
        multiplier += 2
    return multiplier


def draw_split(
    card_rows: int, host_rows: int, share_on_card: float, count: int, generator: torch.Generator
) -> torch.Tensor:
    """int32 [count]: below `card_rows` with probability `share_on_card`, else one of the `host_rows` behind them."""
    drawn = draw("uniform", card_rows, count, generator)
    for first in range(0, count, _PIECE):
        part = drawn[first : first + _PIECE]
        elsewhere = torch.rand(part.numel(), device=drawn.device, generator=generator) >= share_on_card
        behind = torch.empty_like(part).random_(0, host_rows, generator=generator).add_(card_rows)
        part.copy_(torch.where(elsewhere, behind, part))
    return drawn


def share_of_distinct(values: torch.Tensor) -> float:
    """How many of the rows of one batch are different ones: what a perfect cache would have to fetch."""
    return int(torch.unique(values).numel()) / values.numel()
