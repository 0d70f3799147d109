"""What is trained online reaches a fleet that serves: a version to begin with, dense weights, and further versions.

Rows are published by the servers themselves (`shard_node.training.row_publisher`); here is what needs all of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import RolloutError, ShardrankError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.publishing import publish, stream_end
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import Frozen, RowDtype
from loader.snapshot.writer import export_snapshot
from loader.stores import open_store
from serving.training import online
from serving.training.dataset import TrainingError
from serving.training.online_model import DENSE, FIELDS, FILMS, USERS, VERSION, DenseWeights, OnlineConfig, ratings_spec
from serving.training.online_worker import dense_file
from serving.training.parameter_servers import ParameterServers
from serving.training.rating_stream import Ratings, RatingStream
from serving.training.trainer import GOLDEN_TOLERANCES
from shard_node.bags import Float32Array, Int64Array, TableLayout

logger = logging.getLogger(__name__)

GOLDEN_REQUESTS = 32
GOLDEN_FILMS = 4
POLL_S = 0.25
ROLLOUT_S = 600.0
PULLED_IDS = 1 << 16


class FeedConfig(Frozen):
    """Where what is trained goes to, and how often. Times in seconds.

    Attributes:
        store: of the fleet; a version of the model is written as the next one.
        registry: of the fleet, or None if there is none: then the store alone is written to, at the end.
        bake_s: how long a version's answers are compared with those of the one before.
    """

    store: Path
    registry: str | None = None
    dtype: RowDtype = "int8"
    publish_rows_s: float = 2.0
    publish_dense_s: float = 10.0
    snapshot_s: float = 3600.0
    bake_s: float = 0.0


class FleetFeed:
    """Feeds one fleet with what one training comes to. Belongs to one event loop."""

    def __init__(self, training: online.OnlineTraining, feed: FeedConfig) -> None:
        config, self._training, self._feed = training.config, training, feed
        self._served = ratings_spec(config.model, config.dim, config.capacity, feed.dtype)
        trained = config.trained_spec
        self._servers = ParameterServers(training.addresses, trained, VERSION, 0, config.init_scale)
        self._tables = TableLayout.of(trained).index
        self._fleet = None if feed.registry is None else FleetRegistry(open_registry(feed.registry))
        self._published_step = self._seen = 0
        # What the servers have, by the ratings that were seen.
        self._keys = {name: np.array([online.FIRST_KEY]) for name in FIELDS}

    async def begin(self) -> None:
        """Publish a version to begin with, unless one is live.

        Where nodes run it is rolled out; a fleet that starts later takes it as its newest.
        """
        if self._fleet is not None and await self._fleet.live_version(self._training.config.model) is None:
            await self.snapshot()

    async def until_learned(self, step: int) -> None:
        """Wait until all workers have done a step, and dense weights with it can be read."""
        while min(status.step for status in self._training.statuses()) < step:  # noqa: ASYNC110 - they are in files
            await asyncio.sleep(POLL_S)
        while (await self._dense()).step < step:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def run(self, ending: asyncio.Event) -> None:
        """Publish dense weights and versions until it is to end. What fails is logged, and tried again."""
        if (fleet := self._fleet) is None:
            return
        feed, snapshot_at, dense_at = self._feed, time.monotonic() + self._feed.snapshot_s, 0.0
        rolling: asyncio.Task[Path] | None = None
        while not ending.is_set() or rolling is not None:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            try:
                if now - dense_at >= feed.publish_dense_s or ending.is_set():
                    dense_at = now
                    await self._publish_dense(fleet)
                if rolling is not None and rolling.done():
                    done, rolling = rolling, None
                    done.result()
                elif rolling is None and now >= snapshot_at and not ending.is_set():
                    snapshot_at, rolling = now + feed.snapshot_s, asyncio.create_task(self.snapshot())
            except ShardrankError as error:
                logger.warning("what is trained is not published yet: %s", error)

    async def snapshot(self) -> Path:
        """Write what is trained by now as the next version; return its folder.

        It is published, and rolled out, if there is a fleet. Raises RolloutError where a rollout runs, and as `publish`
        and `export_snapshot`.
        """
        if (fleet := self._fleet) is None:
            return await self.export()
        model, feed = self._training.config.model, self._feed
        live = await fleet.live_version(model)
        record = None if live is None else await fleet.version(model, live)
        # Rows that are pulled from now on have what these deltas have, and those that come later are applied over them.
        end = None if record is None else await stream_end(fleet, model, record.delta_base)
        folder = await self.export(delta_base=None if record is None else record.delta_base, last_delta=end)
        version = (await publish(fleet, folder, feed.store, clock=time.time)).record.version
        if any(node.kind == "shard" for node in await fleet.nodes()):
            bake_s = 0.0 if live is None else feed.bake_s
            baking: dict[str, Any] = {"bake_s": bake_s, "guards": GuardLimits(min_requests=0) if bake_s else None}
            await start_rollout(fleet, model, version, rollout_id=secrets.token_hex(16), **baking)
            until = time.monotonic() + ROLLOUT_S + 11 * bake_s
            while (last := await read_rollout(fleet, model)) is not None and last.rollout.active:
                if time.monotonic() > until:
                    raise RolloutError(f"{model}: the rollout of version {version} is not done after {ROLLOUT_S:g} s")
                await asyncio.sleep(POLL_S)
            if last is not None and last.rollout.state != "done":
                logger.warning("version %d of %s: %s, %s", version, model, last.rollout.state, last.rollout.reason)
        return folder

    async def export(
        self, model: str | None = None, delta_base: int | None = None, last_delta: int | None = None
    ) -> Path:
        """Write what is trained by now as a model's next version; return its folder. Raises as `export_snapshot`."""
        config, stream = self._training.config, self._training.stream
        # What was published before it was asked for is among these.
        learned = await self._servers.last_step() * config.workers * config.batch
        ratings = stream.read_now(self._seen, max(0, learned - self._seen))
        self._seen += ratings.size
        keys = self._keys
        for name, field in FIELDS.items():
            keys[name] = np.union1d(keys[name], ratings[field])
        rows = {name: await self._pulled(self._tables[name], of) for name, of in keys.items()}
        dense = await self._dense()
        users, films = keys[USERS][-GOLDEN_REQUESTS:], np.resize(keys[FILMS][-64:], (GOLDEN_REQUESTS, GOLDEN_FILMS))
        films = films[: users.size]
        of_users = np.repeat(np.arange(keys[USERS].size)[-users.size :], GOLDEN_FILMS)
        with torch.inference_mode():
            logits = dense.logits(
                torch.from_numpy(rows[USERS][of_users]),
                torch.from_numpy(rows[FILMS][np.searchsorted(keys[FILMS], films.reshape(-1))]),
            )
        golden = GoldenRequests(
            num_candidates=np.full(users.size, GOLDEN_FILMS, np.int32),
            values={"user_id": users, "film_id": films.reshape(-1)},
            lengths={"user_id": np.ones(users.size, np.int32), "film_id": np.ones(films.size, np.int32)},
            context_dense=np.zeros((users.size, 0), np.float32),
            candidate_dense=np.zeros((films.size, 0), np.float32),
            scores=torch.sigmoid(logits).numpy(),
        )

        def write() -> Path:
            return export_snapshot(
                self._feed.store,
                self._served.model_copy(update={"model": model or self._served.model}),
                rows={name: ArrayRows(values) for name, values in rows.items()},
                dense=dense.tensors(),
                keys=keys,
                golden=golden,
                golden_tolerance=GOLDEN_TOLERANCES[self._feed.dtype],
                metadata={"training": online.training_id(config.folder), "ratings": str(learned)},
                delta_base=delta_base,
                last_delta=last_delta,
            )

        return await asyncio.to_thread(write)

    async def _pulled(self, table: int, ids: Int64Array) -> Float32Array:
        parts = [ids[start : start + PULLED_IDS] for start in range(0, ids.size, PULLED_IDS)]
        return np.concatenate([(await self._servers.pull({table: part}))[table] for part in parts])

    async def _dense(self) -> DenseWeights:
        """Return the dense weights as they are: the servers', or worker 0's, which wrote them a while ago."""
        config = self._training.config
        dense = DenseWeights(config.spec, config.seed, config.row_optimizer)
        if config.dense_by == "server":
            table = self._tables[DENSE]
            dense.step = await self._servers.last_step()
            dense.rows[:] = await self._pulled(table, np.arange(dense.rows.shape[0]))
        else:
            with suppress(FileNotFoundError):
                dense.restore(await asyncio.to_thread(load_file, dense_file(config.folder)))
        return dense

    async def _publish_dense(self, fleet: FleetRegistry) -> None:
        model = self._training.config.model
        dense, live = await self._dense(), await fleet.live_version(model)
        if dense.step <= self._published_step or live is None:
            return
        publisher = AsyncDeltaPublisher(fleet.registry, model, live, self._feed.store)
        # Of what is trained from nothing, the first steps change scores by more than those of a trained model.
        await publisher.publish_dense(dense.step, dense.tensors(), max_drift=1.0)
        self._published_step = dense.step

    async def close(self) -> None:
        """Close the connections."""
        await self._servers.close()
        if self._fleet is not None:
            await self._fleet.registry.close()


async def check_live(config: OnlineConfig, feed: FeedConfig) -> None:
    """Raise TrainingError where a version of another training is live, whose rows are not these."""
    if feed.registry is None:
        return
    fleet = FleetRegistry(open_registry(feed.registry))
    live = await fleet.live_version(config.model)
    await fleet.registry.close()
    if live is not None:
        stored = await asyncio.to_thread(open_store(feed.store).manifest, config.model, live)
        if stored is None or stored[0].metadata.get("training") != online.training_id(config.folder):
            raise TrainingError(
                f"version {live} of {config.model!r} is live, and of another training: name another --model"
            )


async def train_online(
    config: OnlineConfig, feed: FeedConfig, ratings: Ratings, say: Callable[[str], None]
) -> tuple[online.OnlineReport, Path]:
    """Train on ratings in order of time, feed a fleet meanwhile, and write a version at the end; return its folder.

    `say` gets a line for each process that is ready. Raises TrainingError for a folder of other ratings, and as
    `check_live`, `running_training` and `FleetFeed.snapshot`.
    """
    await asyncio.to_thread(config.folder.mkdir, parents=True, exist_ok=True)
    stream = RatingStream(config.folder / "stream")
    if not stream.is_complete and len(stream) <= ratings.size:
        # One that was killed while it wrote the stream has left it without an end.
        stream.append(ratings[len(stream) :])
        stream.end()
    if len(stream) != ratings.size:
        raise TrainingError(f"{config.folder}: its stream has {len(stream)} ratings, {ratings.size} are given")
    await asyncio.to_thread(online.prepare, config)
    await check_live(config, feed)
    settings = {"publish_registry": feed.registry, "publish_rows_s": feed.publish_rows_s}
    async with online.running_training(config, settings, lambda name: say(f"{name} is ready")) as training:
        feeding = FleetFeed(training, feed)
        try:
            await feeding.begin()
            ending = asyncio.Event()
            task = asyncio.create_task(feeding.run(ending))
            report = await training.wait()
            ending.set()
            await task
            return report, await feeding.snapshot()
        finally:
            await feeding.close()
