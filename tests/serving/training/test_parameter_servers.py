"""Rows and gradients over servers: each id's are where its server has them, also after that was started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.training.parameter_servers import ParameterServers
from shard_node.engine.cpu import CpuEngine
from shard_node.node import ShardNode
from shard_node.training.row_optimizers import RowOptimizer
from shard_node.training.trained_rows import initial_rows
from shard_node.training.trainer import Trainer, TrainerConfig
from shard_node.wire.address import Address
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import serving
from shardrank_testing.snapshots import model_of, table_of, write_snapshot
from shardrank_testing.topologies import make_node

SPEC = model_of(
    [table_of("films", 400, 8, dtype="fp32"), table_of("words", 500, 4, dtype="fp32", keys="int64")],
)
WORDS, FILMS = 0, 1  # In layout order.
KEYS = np.arange(40) * 10**12
SCALE = 0.5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Snapshot, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    given = {"films": rng.normal(size=(400, 8)), "words": rng.normal(size=(KEYS.size, 4))}
    tables = {name: rows.astype(np.float32) for name, rows in given.items()}
    path, tables = write_snapshot(tmp_path_factory.mktemp("store"), SPEC, tables=tables, keys={"words": KEYS})
    return Snapshot.open(path), tables


@contextlib.asynccontextmanager
async def server(snapshot: Snapshot, folder: Path, shard: int, shards: int, **how: object) -> AsyncIterator[Trainer]:
    plan = Plan.make(SPEC, num_shards=shards, replicate_bytes=0)
    node: ShardNode = make_node(snapshot, plan, shard)
    engine = node.generations.all()[0].payload.engine
    assert isinstance(engine, CpuEngine)
    given = {"workers": 2, "consistency": "asp", "optimizer": RowOptimizer(kind="sgd", lr=1.0), "init_scale": SCALE}
    config = TrainerConfig(folder=folder / f"log-{shard}", **given | how)
    node.trainer = trainer = Trainer(engine, {"model": SPEC.model, "version": snapshot.version, "shard": shard}, config)
    try:
        async with serving(Address.parse(address_of(folder, shard)), node):
            yield trainer
    finally:
        await asyncio.to_thread(trainer.close)
        node.close()


def address_of(folder: Path, shard: int) -> str:
    return f"unix:{folder}/{shard}.sock"


@contextlib.asynccontextmanager
async def servers_of(snapshot: Snapshot, folder: Path, shards: int, **how: object) -> AsyncIterator[ParameterServers]:
    async with contextlib.AsyncExitStack() as stack:
        for shard in range(shards):
            await stack.enter_async_context(server(snapshot, folder, shard, shards, **how))
        addresses = [address_of(folder, shard) for shard in range(shards)]
        servers = ParameterServers(addresses, SPEC, snapshot.version, 0, SCALE)
        stack.push_async_callback(servers.close)
        yield servers


@pytest.mark.parametrize("shards", [1, 3])
async def test_rows_are_pulled_and_gradients_applied_wherever_they_are(written, tmp_path, shards):
    snapshot, tables = written
    rng = np.random.default_rng(shards)
    films, words = rng.permutation(400)[:150], np.concatenate([rng.permutation(KEYS)[:20], [7, -8, 2**62]])
    async with servers_of(snapshot, tmp_path, shards) as servers:
        assert await servers.resume_step() == 1
        before = await servers.pull({WORDS: words, FILMS: films})
        np.testing.assert_array_equal(before[FILMS], tables["films"][films])
        np.testing.assert_array_equal(before[WORDS][:20], tables["words"][np.searchsorted(KEYS, words[:20])])
        np.testing.assert_array_equal(before[WORDS][20:], initial_rows(words[20:], 4, SCALE))
        gradients = {table: rng.normal(size=rows.shape).astype(np.float32) for table, rows in before.items()}
        await servers.push(1, {WORDS: (words, gradients[WORDS]), FILMS: (films, gradients[FILMS])})
        # A step that repeats is applied once.
        await servers.push(1, {WORDS: (words, gradients[WORDS]), FILMS: (films, gradients[FILMS])})
        after = await servers.pull({FILMS: films, WORDS: words})
        for table, rows in before.items():
            np.testing.assert_array_equal(after[table], rows - gradients[table])
        assert await servers.resume_step() == 2
        size_bytes = 4 * (150 * 8 + 23 * 4)
        assert sum(servers.pulled_bytes) == sum(servers.pushed_bytes) == 2 * size_bytes
        # Every server counts the step, whatever it has of its rows.
        await servers.push(2, {FILMS: (films[:1], gradients[FILMS][:1])})
        assert await servers.resume_step() == 3
        with raises_kind("push_step", match="pushes step 3 next, not 9"):
            await servers.push(9, {})


async def test_a_step_that_some_servers_lack_is_pushed_again(written, tmp_path):
    snapshot, _ = written
    async with servers_of(snapshot, tmp_path, 2) as both:
        await both.push(1, {})
        half = ParameterServers([address_of(tmp_path, 0)], SPEC, snapshot.version, 0, SCALE)
        await half.push(2, {})
        await half.close()
        assert await both.resume_step() == 2
        await both.push(2, {})
        assert await both.resume_step() == 3


async def test_what_a_server_that_is_away_was_sent_is_sent_again(written, tmp_path):
    snapshot, tables = written
    rows = np.arange(6)
    servers = ParameterServers([address_of(tmp_path, 0)], SPEC, snapshot.version, 0, SCALE)
    pulling = asyncio.create_task(servers.pull({FILMS: rows}))
    await asyncio.sleep(0.2)
    for step in (1, 2):
        async with server(snapshot, tmp_path, 0, 1):
            await servers.push(step, {FILMS: (rows, np.ones((6, 8), np.float32))})
            if step == 1:
                await pulling
    async with server(snapshot, tmp_path, 0, 1):
        np.testing.assert_allclose((await servers.pull({FILMS: rows}))[FILMS], tables["films"][rows] - 2, rtol=1e-6)
        assert await servers.resume_step() == 3
    await servers.close()


async def test_one_that_left_goes_on_where_all_servers_let_it(written, tmp_path):
    """It was counted out on both, at other steps: ssp:2 lets one server's workers be ahead of another's."""
    snapshot, _ = written
    async with servers_of(snapshot, tmp_path, 2, consistency="ssp:2", worker_timeout_s=0.2) as servers:
        other = ParameterServers([address_of(tmp_path, shard) for shard in (0, 1)], SPEC, snapshot.version, 1, SCALE)
        for step in range(1, 5):
            await other.push(step, {})
        only = ParameterServers([address_of(tmp_path, 1)], SPEC, snapshot.version, 1, SCALE)
        await only.push(5, {})
        assert await servers.resume_step() == 6
        await servers.push(6, {})
        assert await servers.resume_step() == 7
        for client in (other, only):
            await client.close()
