"""A shard as the router sees it: something that pools rows, in this process or behind a socket."""

from __future__ import annotations

from typing import Protocol

from shard_node.bags import Float32Array, KeyedBags
from shard_node.node import NodeInfo, ShardNode


class Shard(Protocol):
    """Pools the bags whose rows a shard owns."""

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        """Pools on one version of a model.

        Args:
            model: the model's name.
            version: the version whose rows are wanted; no other may answer.
            bags: keys are tables in layout order, values are rows.
            deadline: absolute time on the monotonic clock, in seconds.

        Returns:
            One float32 block per group of the table layout, as `Engine.pool`.

        Raises:
            ShardNodeError: its subclasses say what and with which status.
        """
        ...

    async def info(self) -> NodeInfo:
        """What the shard serves."""
        ...

    async def close(self) -> None:
        """Ends connections. Idempotent."""
        ...


class LocalShard:
    """A shard in this process: a plain call, nothing serialised.

    Attributes:
        node: whose rows they are; for who pools them on the card that they are on.
    """

    def __init__(self, node: ShardNode) -> None:
        self.node = node

    async def pool(self, model: str, version: int, bags: KeyedBags, deadline: float) -> list[Float32Array]:
        """Pools in the calling thread. The deadline is not looked at: the call can't wait for anything."""
        del deadline
        return self.node.pool(model, version, bags)

    async def info(self) -> NodeInfo:
        """What the node serves."""
        return self.node.info()

    async def close(self) -> None:
        """Does nothing: the node belongs to whoever made it."""
