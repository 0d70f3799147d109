"""Training with real servers and workers comes to what one process comes to, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.training.dataset import TrainingError
from serving.training.online import OnlineReport, OnlineTraining, prepare, running_training
from serving.training.online_model import DENSE, FIELDS, OnlineConfig
from serving.training.online_worker import dense_file
from serving.training.parameter_servers import ParameterServers
from serving.training.rating_stream import Ratings, RatingStream, read_ratings
from shard_node.bags import TableLayout
from shardrank_testing.nodes import until
from shardrank_testing.online import Reference


async def rows_of(training: OnlineTraining, keys: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    config = training.config
    tables = TableLayout.of(config.trained_spec).index
    servers = ParameterServers(training.addresses, config.trained_spec, 1, 0, config.init_scale)
    try:
        pulled = await servers.pull({tables[name]: of for name, of in keys.items()})
        return {name: pulled[tables[name]] for name in keys}
    finally:
        await servers.close()


def kill(training: OnlineTraining, name: str) -> None:
    pid = training.supervisor.children[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def trained(
    config: OnlineConfig, ratings: Ratings, faults: dict[int, Callable[[OnlineTraining], Awaitable[None]]]
) -> tuple[OnlineReport, dict[str, np.ndarray], np.ndarray]:
    """Train, with what happens once so many steps are done; the report, rows by key, and dense rows."""
    stream, per_step, appended = RatingStream(config.folder / "stream"), config.workers * config.batch, 0
    keys = {name: np.unique(ratings[field]) for name, field in FIELDS.items()}
    config.folder.mkdir()
    async with running_training(config) as training:
        for step, fault in sorted(faults.items()):
            stream.append(ratings[appended : step * per_step])
            appended = step * per_step
            async with asyncio.timeout(60):
                await until(lambda step=step: min(status.step for status in training.statuses()) >= step, 0.02)
            # It happens within the steps that come now.
            stream.append(ratings[appended : appended + 4 * per_step])
            appended += 4 * per_step
            await fault(training)
        stream.append(ratings[appended:])
        stream.end()
        async with asyncio.timeout(60):
            report = await training.wait()
        if config.dense_by == "allreduce":
            return report, await rows_of(training, keys), load_file(dense_file(config.folder))["rows"]
        rows = await rows_of(training, keys | {DENSE: np.arange(config.trained_spec.tables[-1].num_embeddings)})
        return report, rows, rows.pop(DENSE)


@pytest.mark.parametrize("dense", ["allreduce", pytest.param("server", marks=pytest.mark.nightly)])
async def test_servers_and_workers_that_are_killed_leave_what_one_process_computes(tmp_path: Path, dense):
    ratings = read_ratings(None, 4000, 0)
    config = OnlineConfig(folder=tmp_path / "online", dense=dense, batch=16, optimizer="sgd", lr=2.0, write_dense_s=0.5)

    async def kill_worker(training: OnlineTraining) -> None:
        kill(training, "worker-1")

    async def kill_server(training: OnlineTraining) -> None:
        kill(training, "server-0")

    report, rows, of_dense = await trained(config, ratings, {30: kill_worker, 60: kill_server, 90: kill_worker})
    reference = Reference(config, ratings)
    assert report.step == reference.steps == 125
    assert report.restarts == {"server-0": 1, "worker-1": 2}
    np.testing.assert_allclose(of_dense, reference.dense.rows, atol=2e-4)
    for name, values in rows.items():
        np.testing.assert_allclose(values, reference.rows[name], atol=2e-4)
    # In the same folder it has nothing left to do, and another training is refused.
    async with running_training(config) as training, asyncio.timeout(60):
        assert (await training.wait()).ratings == 0
    with pytest.raises(TrainingError, match=r"is of another training; .*'batch': \(16, 8\)"):
        prepare(config.model_copy(update={"batch": 8}))


@pytest.mark.nightly
@pytest.mark.parametrize(("dense", "workers", "servers"), [("allreduce", 1, 1), ("allreduce", 3, 2), ("server", 4, 3)])
async def test_200_steps_of_bsp_come_to_what_one_process_computes(tmp_path, dense, workers, servers):
    """The numbers are added up in another order; everything else is the same."""
    config = OnlineConfig(
        folder=tmp_path / "online", dense=dense, workers=workers, servers=servers, batch=48 // workers
    )
    ratings = read_ratings(None, 48 * 200, 1)
    report, rows, of_dense = await trained(config, ratings, {})
    reference = Reference(config, ratings)
    assert (report.step, report.restarts) == (200, {})
    assert report.auc == pytest.approx(reference.auc, abs=1e-5)
    np.testing.assert_allclose(of_dense, reference.dense.rows, rtol=1e-4, atol=1e-3)
    for name, values in rows.items():
        np.testing.assert_allclose(values, reference.rows[name], rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(("consistency", "least", "most"), [("bsp", 1, 1), ("ssp:3", 2, 5), ("asp", 20, 1000)])
async def test_a_worker_that_stops_holds_up_others_as_far_as_the_consistency_says(tmp_path, consistency, least, most):
    config = OnlineConfig(folder=tmp_path / "online", consistency=consistency, dense="server", batch=8)
    ratings, ahead = read_ratings(None, 8000, 0), 0

    async def stop_a_worker(training: OnlineTraining) -> None:
        nonlocal ahead
        pid = training.supervisor.children["worker-1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        training.stream.append(ratings[20 * 16 : -16])
        await asyncio.sleep(1.5)
        before = training.statuses()
        await asyncio.sleep(1.0)
        after = training.statuses()
        ahead = after[0].step - after[1].step
        if consistency != "asp":
            assert before[0].step == after[0].step
        os.kill(pid, signal.SIGCONT)

    # What is appended next begins behind what was appended above.
    config.folder.mkdir()
    async with running_training(config) as training:
        training.stream.append(ratings[: 20 * 16])
        async with asyncio.timeout(60):
            await until(lambda: min(status.step for status in training.statuses()) >= 20, 0.02)
            await stop_a_worker(training)
            training.stream.append(ratings[-16:])
            training.stream.end()
            report = await training.wait()
    assert report.step == ratings.size // 16
    assert least - 1 <= ahead <= most


@pytest.mark.nightly
async def test_a_worker_that_is_gone_leaves_the_barrier_and_comes_back(tmp_path):
    config = OnlineConfig(folder=tmp_path / "online", dense="server", batch=8, worker_timeout_s=0.5)
    ratings = read_ratings(None, 8000, 0)
    config.folder.mkdir()
    async with running_training(config) as training, asyncio.timeout(60):
        training.stream.append(ratings[:-16])
        await until(lambda: min(status.step for status in training.statuses()) >= 20, 0.02)
        pid = training.supervisor.children["worker-1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stopped_at = training.statuses()[1].step
        await until(lambda: training.statuses()[0].step >= stopped_at + 20, 0.02)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: training.statuses()[1].step >= stopped_at + 25, 0.02)
        training.stream.append(ratings[-16:])
        training.stream.end()
        report = await training.wait()
    assert report.step == ratings.size // 16
    assert report.ratings < ratings.size
