"""Real shard nodes for tests: small tables with exact sums, real sockets on either event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from loader.snapshot.manifest import ModelSpec
from router.shard_client import ShardClient, within
from shard_node.answer import FLOAT32_SUMS, Answer, ReplyEncoding
from shard_node.bags import Bags
from shard_node.buckets import NodeIdentity
from shard_node.node import LoadedTables, NodeInfo, ShardNode
from shard_node.tracing import SpanContext
from shard_node.wire.address import Address
from shard_node.wire.frame import HEADER, Buffer, Frame, FrameReceiver, FrameType, unpack_header
from shard_node.wire.messages import decode_answer, encode_pool
from shard_node.wire.requests import ServerLimits
from shard_node.wire.server import NodeServer
from shardrank_testing.bags import bags_of
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import model_of, table_of

MODEL = "films"
VERSION = 7
# Layout order is by (dim, dtype, name): genre 0, film 1, user 2; two groups, of dim 4 and dim 8.
SIZES = {"genre": (30, 4), "film": (500, 8), "user": (1000, 8)}
NEVER_S = 30.0
SLOW_ROW = 42


def soon() -> float:
    """A deadline that no test reaches."""
    return time.monotonic() + NEVER_S


def small_spec() -> ModelSpec:
    """Three float32 tables in two groups."""
    return model_of([table_of(name, *shape, dtype="fp32") for name, shape in SIZES.items()], MODEL)


def small_tables() -> dict[str, np.ndarray]:
    """Rows of small whole numbers, so that every sum is exact and answers can be compared bit by bit."""
    rng = np.random.default_rng(11)
    return {name: rng.integers(-50, 50, shape).astype(np.float32) for name, shape in SIZES.items()}


def reference_engine() -> ReferenceEngine:
    """The reference engine over the small tables."""
    return ReferenceEngine(small_spec(), small_tables())


class HookedEngine(ReferenceEngine):
    """The reference engine, with something that happens first when a certain row is asked for."""

    def __init__(self, hooks: dict[int, Callable[[], None]]) -> None:
        super().__init__(small_spec(), small_tables())
        self.hooks = hooks

    def pool(self, bags: Bags) -> list[np.ndarray]:
        for row in sorted(self.hooks.keys() & set(bags.values.tolist())):
            self.hooks[row]()
        return super().pool(bags)


class NearShard:
    """A shard in this process that answers as one behind a socket does; for tests to hold up, or to have fail."""

    def __init__(self, node: ShardNode) -> None:
        self._node = node

    def pool(
        self, model: str, version: int, bags: Bags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> asyncio.Future[Answer]:
        return asyncio.ensure_future(self.answer(model, version, bags, forms))

    async def answer(self, model: str, version: int, bags: Bags, forms: ReplyEncoding) -> Answer:
        return self._node.answer(model, version, bags, forms)

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        return [("local", self._node.info())]

    async def close(self) -> None:
        pass


class Gate:
    """Holds pooling of SLOW_ROW until opened; `entered` counts who waits at it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.engine = HookedEngine({SLOW_ROW: self._wait})

    @functools.cached_property
    def node(self) -> ShardNode:
        return small_node(self.engine)

    def _wait(self) -> None:
        self.entered.release()
        assert self.opened.wait(NEVER_S)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=NEVER_S)


def small_node(engine: ReferenceEngine | None = None) -> ShardNode:
    """A node that serves MODEL at VERSION."""
    node = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=1, sharding="hash"))
    node.generations.stage(MODEL, VERSION, LoadedTables(engine or reference_engine(), "identity", "digest"))
    node.generations.flip(MODEL, VERSION)
    return node


def film_bags(*bags: Sequence[int]) -> Bags:
    """Bags of the film table (key 1)."""
    return bags_of({1: bags})


def feed(receiver: FrameReceiver, data: bytes, sizes: Iterable[int] = ()) -> list[Frame]:
    """Give a receiver bytes in pieces of these sizes, then the rest; return the frames that were complete."""
    frames, view, pieces = [], memoryview(data), iter(sizes)
    while view:
        space = receiver.get_buffer()
        size = min(next(pieces, len(view)), len(space), len(view))
        assert size > 0
        space[:size] = view[:size]
        receiver.received(size)
        view = view[size:]
        while (frame := receiver.next_frame()) is not None:
            frames.append(frame)
    return frames


def received(buffers: Sequence[Buffer]) -> Frame:
    """The one frame that the buffers are, through the receiver that connections use."""
    (frame,) = feed(FrameReceiver(1 << 30), b"".join(buffers))
    return frame


@dataclass(frozen=True)
class Place:
    """An event loop and a kind of socket."""

    loop: Literal["asyncio", "uvloop"]
    socket: Literal["tcp", "unix"]

    def __str__(self) -> str:
        return f"{self.loop}-{self.socket}"

    def address(self, folder: Path) -> Address:
        return Address(path=str(folder / "node.sock")) if self.socket == "unix" else Address.parse("127.0.0.1:0")

    @contextlib.asynccontextmanager
    async def client(
        self,
        folder: Path,
        node: ShardNode | None = None,
        server_limits: ServerLimits | None = None,
        **options: Any,
    ) -> AsyncIterator[tuple[NodeServer, ShardClient]]:
        """A server of a node, and a client of it."""
        async with (
            serving(self.address(folder), node, server_limits) as server,
            connected(server.addresses[0], **options) as client,
        ):
            yield server, client

    @contextlib.asynccontextmanager
    async def peer(
        self, folder: Path, node: ShardNode | None = None, limits: ServerLimits | None = None
    ) -> AsyncIterator[tuple[NodeServer, RawPeer]]:
        """A server of a node, and a raw connection to it."""
        async with serving(self.address(folder), node, limits) as server, raw_peer(server.addresses[0]) as peer:
            yield server, peer

    @contextlib.asynccontextmanager
    async def script(
        self, folder: Path, play: Callable[[RawPeer], Coroutine[Any, Any, None]], **options: Any
    ) -> AsyncIterator[ShardClient]:
        """A client of a node that plays the script on each connection."""
        peers: list[RawPeer] = []

        async def connection(*streams: Any) -> None:
            peers.append(RawPeer(*streams))
            await play(peers[-1])

        address = Address(path=str(folder / "node.sock"))
        server = await asyncio.start_unix_server(connection, address.path)
        async with server, connected(address, **options) as client:
            try:
                yield client
            finally:
                for peer in peers:
                    await peer.close()


EVERY_PLACE = tuple(Place(loop, sock) for loop in ("asyncio", "uvloop") for sock in ("tcp", "unix"))


in_every_place = pytest.mark.parametrize("place", EVERY_PLACE, ids=str)


async def pool(
    client: ShardClient,
    model: str,
    version: int,
    bags: Bags,
    forms: ReplyEncoding = FLOAT32_SUMS,
    timeout_s: float = NEVER_S,
    trace: SpanContext | None = None,
) -> Answer:
    """Pool on one node, whatever it serves."""
    expected = (FrameType.POOLED, FrameType.STORED) if forms.stored else (FrameType.POOLED,)
    request = encode_pool, int(timeout_s * 1e6), model, version, bags, forms, trace
    async with within(timeout_s, "no reply"):
        return await (await client.ready()).exchange(expected, decode_answer, *request)


async def pool_films(client: ShardClient, *bags: Sequence[int], timeout_s: float = NEVER_S) -> np.ndarray:
    """Return the sums of bags of the film table, float32 [bags, 8], from a node."""
    return (await pool(client, MODEL, VERSION, film_bags(*bags), timeout_s=timeout_s)).sums[1]


def expected_films(*bags: Sequence[int]) -> np.ndarray:
    """Return what `pool_films` must."""
    return reference_engine().pool(film_bags(*bags))[1]


@contextlib.asynccontextmanager
async def serving(
    address: Address, node: ShardNode | None = None, limits: ServerLimits | None = None, **options: Any
) -> AsyncIterator[NodeServer]:
    """A server on the address; its own address, with the real port, is `server.addresses[0]`."""
    server = NodeServer(node or small_node(), limits, **options)
    await server.start([address])
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(address: Address, **options: Any) -> AsyncIterator[ShardClient]:
    """A client of the address."""
    client = ShardClient(address, **options)
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    """Lets the loop run until the condition holds; for what gives no event. The test's own time limit bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(pause_s)


@dataclass
class RawPeer:
    """Somebody who writes whatever bytes he likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        self.writer.writelines(buffers)

    async def read_frame(self) -> Frame:
        header = unpack_header(memoryview(await self.reader.readexactly(HEADER.size)))
        return Frame(header, np.frombuffer(bytearray(await self.reader.readexactly(header.body_bytes)), np.uint8))

    async def read_end(self) -> bytes:
        """What still comes before the other side closes."""
        return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def raw_peer(address: Address) -> AsyncIterator[RawPeer]:
    """A raw connection to the address."""
    if address.is_unix:
        peer = RawPeer(*await asyncio.open_unix_connection(address.path))
    else:
        peer = RawPeer(*await asyncio.open_connection(address.host, address.port))
    try:
        yield peer
    finally:
        await peer.close()
