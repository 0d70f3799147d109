"""A push: the gradients of one step of one worker, for the rows of one node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shard_node.bags import Float32Array, Int64Array


class Push(NamedTuple):
    """Gradients by number of the table, in layout order: rows or keys, int64 [n], and float32 [n, embedding_dim].

    Ids may be there twice: their gradients are added up.
    """

    worker: int
    step: int
    gradients: Mapping[int, tuple[Int64Array, Float32Array]]
