"""What a plan is for: the nodes, the batch, and the network between router and shards."""

from __future__ import annotations

from pydantic import Field

from loader.snapshot.tables import Frozen
from router.plan import DEFAULT_REPLICATE_BYTES
from shard_node.buckets import Sharding
from shard_node.planning.card_plan import CardBudget
from shard_node.planning.cost_model import CardSystem

GB = 1_000_000_000
MAX_BATCH = 10_000_000
MAX_COMPARED = 32


class Network(Frozen):
    """What lies between the router and the shards.

    Attributes:
        gb_per_s: of the router's line, in 10^9 bytes a second of one direction; it carries what all shards send.
        latency_us: of a round trip, unloaded.
    """

    gb_per_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)


class NetworkOptions(Frozen):
    """The network between router and shards, and what the router looks up itself.

    Attributes:
        network: its line.
        hot_rows_gb: of the router's process, for the hottest rows.
        hit_rate: in place of `hot_rows_gb`, what share of the lookups they shall answer.
        compare_hit_rates, compare_hot_rows: further hit rates, and numbers of hot rows, to compare by.
    """

    network: Network
    hot_rows_gb: float = Field(default=0.0, ge=0)
    hit_rate: float | None = Field(default=None, ge=0, le=1)
    compare_hit_rates: tuple[float, ...] = Field(default=(), max_length=MAX_COMPARED)
    compare_hot_rows: tuple[float, ...] = Field(default=(), max_length=MAX_COMPARED)


class CapacityOptions(Frozen):
    """The nodes and the batch to plan for. 1 GB is 10^9 bytes.

    Attributes:
        cards: of each shard's node.
        card_memory_gb, pinned_memory_gb: of each card and of the host, for all versions that are loaded together.
        hot_gb: of each card, for one version's copies of hot rows; None as the engine chooses.
        replicate_bytes: tables of at most this size go to every shard.
        candidates: of a batch, all requests together.
        network: to the shards, and hot rows at the router; None for a single node.
    """

    system: CardSystem
    cards: int = Field(ge=1, le=64)
    card_memory_gb: float = Field(gt=0)
    pinned_memory_gb: float = Field(ge=0)
    hot_gb: float | None = Field(default=None, ge=0)
    versions: int = Field(default=1, ge=1, le=8)
    shards: int = Field(default=1, ge=1, le=1024)
    sharding: Sharding = "hash"
    replicate_bytes: int = Field(default=DEFAULT_REPLICATE_BYTES, ge=0)
    peer_access: bool = True
    requests: int = Field(default=1, ge=1, le=MAX_BATCH)
    candidates: int = Field(default=500, ge=1, le=MAX_BATCH)
    network: NetworkOptions | None = None

    @property
    def budget(self) -> CardBudget:
        """Return what one version may take of a node."""
        return CardBudget(
            (int(self.card_memory_gb * GB / self.versions),) * self.cards,
            int(self.pinned_memory_gb * GB / self.versions),
            None if self.hot_gb is None else int(self.hot_gb * GB),
            self.peer_access,
        )

    @property
    def shard_network(self) -> NetworkOptions:
        """Return `network`; of a single node one that what is cheapest does not depend on."""
        return self.network or NetworkOptions(network=Network(gb_per_s=12.5, latency_us=0.0))
