"""Which rows a node holds. No rows, and no PyTorch, which takes a second to load: for whoever divides or counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from shard_node.errors import InvalidBagsError

Sharding = Literal["hash", "range", "table"]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The rows that one node holds, by bucket.

    `card_of_bucket`, int16 [buckets] for each table in layout order, is the card that holds a bucket, -1 for another
    node's.
    """

    num_cards: int
    card_of_bucket: tuple[npt.NDArray[np.int16], ...]

    def __post_init__(self) -> None:
        for cards in self.card_of_bucket:
            if cards.min() < -1 or cards.max() >= self.num_cards:
                raise InvalidBagsError(f"card_of_bucket must be within -1..{self.num_cards - 1}")


class Message(BaseModel):
    """What processes tell each other: unknown keys are let pass, so that releases can differ during an upgrade."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeIdentity(Message):
    """Which shard of how many a node is. Fixed for its life."""

    shard_index: int = Field(ge=0)
    num_shards: int = Field(ge=1)
    num_cards: int = Field(ge=1)
    sharding: Sharding
