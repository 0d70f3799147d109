"""Training that does not stop, on this machine: shard nodes that train, workers, and a stream of ratings in one folder.

The folder has all that is to outlive a process: `online.json` (what is trained, and how), `models` (the version that it
began with), `server-N` (log and checkpoints of each shard), `stream`, `dense.safetensors` and what workers report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file
from torch import distributed

from loader.errors import ShardrankError
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import Frozen
from loader.snapshot.writer import export_snapshot
from router.shard_client import ShardClient
from serving.config import ShardNodeConfig
from serving.fleet.config import SupervisionConfig
from serving.fleet.supervisor import ChildSpec, NotYetError, Supervisor, configured_command, supervised
from serving.models.ranking_models import build_model
from serving.training.dataset import TrainingError
from serving.training.online_model import DENSE, FEATURES, VERSION, DenseWeights, OnlineConfig
from serving.training.online_worker import GENERATION, GROUP_TIMEOUT_S, WorkerConfig, WorkerStatus, status_file
from serving.training.rating_stream import RatingStream, labels_of
from serving.training.trainer import auc
from shard_node.training.trained_rows import initial_rows
from shard_node.wire.address import Address

POLL_S: Final = 0.1
MAX_RESTARTS: Final = 50
_NOT_KEPT: Final = {"folder", "worker_timeout_s", "write_dense_s", "delays_s", "over_tcp"}
FIRST_KEY: Final = 0
"""A version has to have a key; this one's rows are those that any key begins with."""


class OnlineReport(Frozen):
    """What training came to. Seconds, steps and bytes are of the workers' last lives; a restarted one counts anew.

    `loss` is the mean log loss and `auc` the area under the ROC curve of ratings that were each scored before they were
    learned, None where a label is missing. Bytes are by server, of numbers of rows and gradients alone.
    """

    workers: int
    servers: int
    consistency: str
    dense: str
    step: int
    ratings: int
    seconds: float
    steps_per_s: float
    loss: float
    auc: float | None
    pulled_bytes: tuple[int, ...]
    pushed_bytes: tuple[int, ...]
    reduced_bytes: int
    restarts: dict[str, int]


def prepare(config: OnlineConfig) -> None:
    """Make the folder, with the version to begin with, or check that it is this training's. Raises TrainingError."""
    kept = config.model_dump(mode="json", exclude=_NOT_KEPT)
    file = config.folder / "online.json"
    if file.exists():
        there = json.loads(file.read_text(encoding="utf-8"))
        if differing := sorted(name for name in kept if there.get(name) != kept[name]):
            given = {name: (there.get(name), kept[name]) for name in differing}
            raise TrainingError(f"{config.folder}: is of another training; there, and now: {given}")
        return
    config.folder.mkdir(parents=True, exist_ok=True)
    rows = {name: initial_rows(np.array([FIRST_KEY]), config.dim, config.init_scale) for name in FEATURES}
    spec = config.trained_spec
    if config.dense_by == "server":
        rows[DENSE] = DenseWeights(config.spec, config.seed, config.row_optimizer).rows
    export_snapshot(
        config.folder / "models",
        spec,
        rows={name: ArrayRows(values) for name, values in rows.items()},
        dense=build_model(spec).state_dict(),
        keys={name: np.array([FIRST_KEY]) for name in FEATURES},
        version=VERSION,
    )
    file.write_text(json.dumps({"training": secrets.token_hex(8)} | kept, indent=2) + "\n", encoding="utf-8")


def training_id(folder: Path) -> str:
    """Return what versions of a folder's training have in their metadata, as `training`."""
    return str(json.loads((folder / "online.json").read_text(encoding="utf-8"))["training"])


@dataclass(frozen=True, eq=False)
class OnlineTraining:
    """Servers and workers that run, `server-N` and `worker-N` among the supervisor's children.

    `addresses` are the servers', by number of the shard.
    """

    config: OnlineConfig
    supervisor: Supervisor
    addresses: tuple[str, ...]
    stream: RatingStream

    def statuses(self) -> list[WorkerStatus]:
        """Return what workers reported last."""
        files = (status_file(self.config.folder, worker) for worker in range(self.config.workers))
        return [WorkerStatus.model_validate_json(file.read_bytes()) for file in files]

    async def wait(self) -> OnlineReport:
        """Wait until all workers have read the stream to its end; return what it came to.

        Raises FleetError where a process keeps ending.
        """
        while not all(status.is_done for status in self.statuses()):
            for child in self.supervisor.children.values():
                if child.restarts > MAX_RESTARTS:
                    raise child.failure(f"was started again {child.restarts} times")
            await asyncio.sleep(POLL_S)
        return await asyncio.to_thread(self.report)

    def report(self) -> OnlineReport:
        """Return what training has come to by now; `auc` only once workers are done."""
        statuses, config = self.statuses(), self.config
        ratings, seconds = sum(status.ratings for status in statuses), max(status.seconds for status in statuses)
        restarts = {name: child.restarts for name, child in self.supervisor.children.items() if child.restarts}
        return OnlineReport(
            **config.model_dump(include={"workers", "servers", "consistency"}),
            dense=config.dense_by,
            step=min(status.step for status in statuses),
            ratings=ratings,
            seconds=seconds,
            steps_per_s=sum(status.steps for status in statuses) / config.workers / max(seconds, 1e-9),
            loss=sum(status.loss * status.ratings for status in statuses) / max(ratings, 1),
            auc=self._auc() if all(status.is_done for status in statuses) else None,
            pulled_bytes=tuple(map(sum, zip(*(status.pulled_bytes for status in statuses), strict=True))),
            pushed_bytes=tuple(map(sum, zip(*(status.pushed_bytes for status in statuses), strict=True))),
            reduced_bytes=sum(status.reduced_bytes for status in statuses),
            restarts=restarts,
        )

    def _auc(self) -> float | None:
        files = (status_file(self.config.folder, worker) for worker in range(self.config.workers))
        tensors = [load_file(path) for file in files if (path := file.with_suffix(".safetensors")).exists()]
        if not tensors:
            return None
        positions, scores = (np.concatenate([of[name] for of in tensors]) for name in ("positions", "scores"))
        ratings = self.stream.read_now(0, int(positions.max()) + 1)
        labels = labels_of(ratings)[positions]
        return auc(labels, scores) if 0 < labels.sum() < labels.size else None


@contextlib.asynccontextmanager
async def running_training(
    config: OnlineConfig,
    server_settings: dict[str, Any] | None = None,
    on_ready: Callable[[str], None] = lambda name: None,
) -> AsyncIterator[OnlineTraining]:
    """Start servers and workers, which read the folder's stream, and stop them when the block ends.

    `server_settings` are further ones of each shard node. What dies is started again. Raises TrainingError for a folder
    of another training, FleetError where a process does not come up.
    """
    await asyncio.to_thread(prepare, config)
    async with contextlib.AsyncExitStack() as stack:
        group = distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
        )
        group.set(GENERATION, "0")
        # Workers in an all-reduce answer no signal.
        supervisor = await stack.enter_async_context(supervised(SupervisionConfig(stop_grace_s=5.0)))
        folder = supervisor.run_directory
        addresses = tuple(
            f"127.0.0.1:{free_port()}" if config.over_tcp else f"unix:{folder / f'server-{shard}.sock'}"
            for shard in range(config.servers)
        )
        specs = []
        for shard, address in enumerate(addresses):
            node = _server_config(config, shard, address, server_settings or {})
            command = configured_command("shard-node", node, folder / f"server-{shard}.toml")
            specs.append(ChildSpec(f"server-{shard}", command, partial(_ask_server, address)))
        await supervisor.start(specs, on_ready)
        specs = []
        for worker in range(config.workers):
            file = folder / f"worker-{worker}.json"
            settings = WorkerConfig(training=config, worker=worker, servers=addresses, group_port=group.port)
            file.write_text(settings.model_dump_json(), encoding="utf-8")
            command = (sys.executable, "-m", "serving.training.online_worker", str(file))
            specs.append(ChildSpec(f"worker-{worker}", command, partial(_ask_worker, config.folder, worker)))
        await supervisor.start(specs, on_ready)
        yield OnlineTraining(config, supervisor, addresses, RatingStream(config.folder / "stream"))


def _server_config(config: OnlineConfig, shard: int, address: str, more: dict[str, Any]) -> ShardNodeConfig:
    return ShardNodeConfig(
        snapshot=config.folder / "models" / config.model / str(VERSION),
        shard=(shard, config.servers),
        listen=(address,),
        replicate_bytes=0,
        train=True,
        train_folder=config.folder / f"server-{shard}",
        train_workers=config.workers,
        train_consistency=config.consistency,
        train_optimizer=config.optimizer,
        train_lr=config.lr,
        train_init_scale=config.init_scale,
        worker_timeout_s=config.worker_timeout_s,
        **more,
    )


async def _ask_server(address: str, process_id: int) -> None:
    client = ShardClient(Address.parse(address))
    try:
        if (await client.info()).training is None:
            raise NotYetError(f"{address} does not train yet")
    except ShardrankError as error:
        raise NotYetError(str(error)) from error
    finally:
        await client.close()


async def _ask_worker(folder: Path, worker: int, process_id: int) -> None:
    file = status_file(folder, worker)
    if not file.exists() or WorkerStatus.model_validate_json(file.read_bytes()).process_id != process_id:
        raise NotYetError("it has not begun yet")


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
