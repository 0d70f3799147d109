"""A shard node that trains, as a process: what it acknowledged is there after kill -9, and over other processes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from router.shard_client import ShardClient
from shard_node.errors import NodeUnavailableError
from shard_node.training.push import Push
from shard_node.wire.address import Address
from shardrank_testing.bags import bags_of
from shardrank_testing.command_line import shardrank
from shardrank_testing.nodes import NEVER_S, connected, pool, until
from shardrank_testing.processes import Program, running
from shardrank_testing.snapshots import model_of, table_of, write_snapshot

ROWS, DIM, LR = 50, 4, 0.5


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    spec = model_of([table_of("films", ROWS, DIM, dtype="fp32")])
    path, tables = write_snapshot(tmp_path_factory.mktemp("store"), spec)
    return path, tables["films"]


@pytest.fixture
def flags(tmp_path: Path, snapshot: tuple[Path, np.ndarray]) -> list[str]:
    where = ["--snapshot", str(snapshot[0]), "--shard", "0/1", "--listen", f"unix:{tmp_path}/node.sock"]
    return ["shard-node", *where, "--train", "--train-folder", str(tmp_path / "log"), "--train-lr", str(LR),
            "--train-optimizer", "sgd", "--train-workers", "2", "--train-consistency", "ssp:8"]  # fmt: skip


def gradients_of(worker: int, step: int) -> np.ndarray:
    return np.random.default_rng([worker, step]).normal(size=(ROWS, DIM)).astype(np.float32)


async def push_on(client: ShardClient, worker: int, steps: range, pushed: list[np.ndarray]) -> None:
    """Push steps until the node is gone; note what was acknowledged."""
    for step in steps:
        try:
            gradients = gradients_of(worker, step)
            await client.push("m", 1, Push(worker, step, {0: (np.arange(ROWS), gradients)}), NEVER_S)
        except NodeUnavailableError:
            return
        pushed.append(gradients)


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path, flags, snapshot):
    address, pushed = Address(path=str(tmp_path / "node.sock")), list[np.ndarray]()

    async def push_and_kill(program: Program) -> None:
        async with connected(address) as client, asyncio.TaskGroup() as workers:
            for worker in range(2):
                workers.create_task(push_on(client, worker, range(1, 10_000), pushed))
            await until(lambda: len(pushed) >= 60, pause_s=0.002)
            program.process.send_signal(signal.SIGKILL)

    async def find() -> tuple[np.ndarray, tuple[int, ...]]:
        async with connected(address) as client:
            training = (await client.info()).training
            assert training is not None
            bags = bags_of({0: [[row] for row in range(ROWS)]})
            return (await pool(client, "m", 1, bags)).sums[0], training.steps

    with running(*flags) as program:
        program.read_until("listens on")
        asyncio.run(push_and_kill(program))
    with running(*flags) as program:
        program.read_until("listens on")
        rows, steps = asyncio.run(find())
        assert program.stop() == 0
    # Each worker had at most one push that it does not know of.
    assert 0 <= sum(steps) - len(pushed) <= 2
    expected = snapshot[1].astype(np.float64)
    for worker, last in enumerate(steps):
        expected = expected - LR * sum(gradients_of(worker, step).astype(np.float64) for step in range(1, last + 1))
    np.testing.assert_allclose(rows, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--train"], "--train needs --train-folder"),
        (["--train", "--train-folder", "x", "--train-consistency", "ssp"], "train_consistency"),
        (["--train", "--train-folder", "x", "--registry", "r"], "--train does not go with --registry"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, more, says):
    result = shardrank("shard-node", "--shard", "0/1", "--listen", f"unix:{tmp_path}/a", *more, code=2)
    assert says in result.output.replace("-", "_") or says in result.output


def test_copies_of_a_table_that_would_diverge_are_refused(tmp_path, flags):
    with running(*flags, "--shard", "1/2") as program:
        program.read_until(r"tables \['films'\] are copied to every shard, allowed is one copy: --replicate-bytes 0")
        assert program.process.wait(30) == 1
    with running(*flags, "--shard", "1/2", "--replicate-bytes", "0") as program:
        program.read_until("shard 1/2 listens on")
        assert program.stop() == 0
