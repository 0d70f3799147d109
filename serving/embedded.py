"""The in-process call: a model ranked from Python, with no server.

```python
with Ranker.open("models/films/3") as ranker:
    result = ranker.rank("films", {"user_id": 42}, {"film_id": [3, 9]}, top_k=10)
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from loader.errors import ConfigError
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import refused_as
from router.plan import DEFAULT_REPLICATE_BYTES, Plan
from serving.client.client import Client, RetryPolicy
from serving.client.transports import Method, Request
from serving.errors import InternalError
from serving.formats.messages import MessageCodec, encode_model
from serving.limits import RequestLimits
from serving.models.layers import DtypeChoice
from serving.rank.service import RankingService, answer_in_thread
from serving.versions.loaded_version import LoadedVersion, LoadOptions
from shard_node.buckets import Sharding
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.engine.arena_builder import CheckedLoad
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, ShardNode


class ServiceTransport:
    """Calls of a service in this process, of messages as gRPC has them."""

    def __init__(self, service: RankingService) -> None:
        self._service = service

    async def send(self, method: Method, request: Request, timeout_s: float, headers: Mapping[str, str]) -> Any:
        """Make one call, while the thread waits. Raises ShardrankError."""
        if method == "GetModel":
            version = request.version if request.HasField("version") else None
            return encode_model(self._service.describe(request.model, version))
        codec = MessageCodec("rank" if method == "Rank" else "lookup", api="embedded")
        return answer_in_thread(self._service, codec, request.SerializeToString())

    async def close(self) -> None:
        """Wait for requests in flight, and free everything."""
        self._service.close()


class Ranker(Client):
    """A `Client` of a model version in this process: the same requests, results, limits and errors. Thread-safe.

    `close` waits for requests in flight and frees everything. Nothing is tried again, and headers have no use.
    """

    def __init__(self, service: RankingService) -> None:
        limits, never = service.limits, RetryPolicy(max_attempts=1)
        transport = ServiceTransport(service)
        super().__init__(transport, timeout_ms=limits.default_timeout_ms, retry=never, clock=service.clock)

    @classmethod
    def open(
        cls,
        snapshot: str | Path,
        *,
        cards: int = 1,
        device: str = "cpu",
        card_options: CardOptions | None = None,
        dtype: DtypeChoice = "auto",
        num_replicas: int = 1,
        memory_budget_bytes: int | None = None,
        verify: bool = True,
        trust_exported: bool = False,
        limits: RequestLimits | None = None,
    ) -> Ranker:
        """Load a version from its folder and check it against its golden requests.

        Args:
            snapshot: the folder.
            cards: over which the rows are divided.
            device: where rows lie, as `--device` of `shardrank serve` has it.
            card_options: what the rows may take of the cards, if that is not the CPU.
            dtype: of the dense model; `auto` is the fastest that the device has and golden requests bear out.
            num_replicas: ranking replicas, each a thread; on cards they take turns over these.
            memory_budget_bytes: RAM for rows; cold rows beyond it are on disk, or, with cards, refused.
                None: all in RAM, or, with cards, as much pinned memory as `card_options` says.
            verify: check every file's SHA-256.
            trust_exported: run an exported program, which is code and can do whatever this process can.
            limits: of requests and batches.

        Raises:
            ShardrankError: as `load_served_model` and `CardSet.open`.
        """
        service = RankingService(limits)
        with refused_as(ConfigError, ""):
            source = ModelSource(
                snapshot=Path(snapshot),
                cards=cards,
                memory_budget_bytes=memory_budget_bytes,
                card_set=CardSet.open(device, cards, card_options),
                verify=verify,
                trust_exported=trust_exported,
                num_replicas=num_replicas,
                dtype=dtype,
            )
        service.install(load_served_model(source, service))
        return cls(service)


class ModelSource(LoadOptions):
    """Which version is loaded, and how its rows are divided.

    Attributes:
        snapshot: its folder.
        local_shards: shards in this process; 1 but for tests.
        cards: of each shard.
        memory_budget_bytes: RAM for rows, of what does not fit cold rows are on disk; None to hold all of them.
        card_set: the cards for rows; None to pool on the CPU.
        rows_checked: all rows were: they stay in the files, and only those that are looked up are read.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    snapshot: Path
    local_shards: int = Field(default=1, ge=1, le=64)
    cards: int = Field(default=1, ge=1, le=64)
    sharding: Sharding = "hash"
    replicate_bytes: int = Field(default=DEFAULT_REPLICATE_BYTES, ge=0)
    memory_budget_bytes: int | None = Field(default=None, ge=0)
    card_set: CardSet | None = None
    rows_checked: bool = False


def load_served_model(
    source: ModelSource, service: RankingService, loop: asyncio.AbstractEventLoop | None = None
) -> LoadedVersion:
    """Open, load and check a version. Blocks; `service.install` makes it live.

    `loop` runs in another thread, and is where requests come from; it ranks if `num_replicas` is 0, for rows in RAM.
    Raises ShardrankError if the version must not be served.
    """
    may_block = source.memory_budget_bytes is not None or source.card_set is not None
    if source.num_replicas == 0 and (loop is None or may_block):
        raise InternalError("num_replicas 0 ranks rows in RAM on the event loop of requests; allowed here is 1..64")
    snapshot = Snapshot.open(source.snapshot, verify=source.verify)
    model, version = snapshot.spec.model, snapshot.version
    division = source.local_shards, source.sharding, source.cards, source.replicate_bytes
    plan, nodes = Plan.of_snapshot(snapshot, *division, source.plan), list[ShardNode]()
    with ExitStack() as closing:
        for index in range(source.local_shards):
            part, budget = (snapshot, plan.partition(index), plan.digest), source.memory_budget_bytes
            if source.rows_checked:
                # Rows by key are in memory wherever they are.
                budget_bytes = None if any(table.keys for table in snapshot.spec.tables) else 0
                tables = CheckedLoad(*part, memory_budget_bytes=budget_bytes).run(())
            else:
                tables = load_tables(*part, memory_budget_bytes=budget, card_set=source.card_set)
            nodes.append(ShardNode(plan.identity(index)))
            closing.callback(nodes[-1].close)
            nodes[-1].generations.stage(model, version, tables)
            nodes[-1].generations.flip(model, version)
        kept = ExitStack()
        served = LoadedVersion.load(
            snapshot,
            plan,
            lambda events: [LocalShard(node) for node in nodes],
            source,
            limits=service.limits,
            metrics=service.metrics,
            clock=service.clock,
            on_close=kept.close,
            loop=loop,
        )
        kept.push(closing.pop_all())
        return served
