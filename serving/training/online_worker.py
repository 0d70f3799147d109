"""A worker of `shardrank train --online`: step by step it reads its share of a stream, pulls rows, pushes gradients.

Step s of worker w of K, with B ratings each, is of ratings [((s - 1) * K + w) * B, + B) of the stream. Dense weights
are rows of the servers like others, or each worker has a copy, and adds gradients up with the others by an all-reduce:

1. A step's gradients are added up, and pushed; once the push is answered, the sum goes into the copy.
2. A worker that died leaves the group broken. Who notices, in an all-reduce or while its push waits, makes a new one
   with the process that was started in its stead. All get the copy that is furthest; whose step is in it by then skips
   the all-reduce.
3. If all die, the copy is what worker 0 wrote last: dense weights may go back some steps, rows do not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import distributed

from loader.errors import ShardrankError
from loader.snapshot.store import rename
from loader.snapshot.tables import Frozen
from serving.fleet.process import die_with_parent, run_until_signalled
from serving.observe.logs import ERROR_PREFIX, announce, start_logging
from serving.training.dataset import TrainingError
from serving.training.online_model import DENSE, FIELDS, VERSION, DenseWeights, OnlineConfig
from serving.training.parameter_servers import ParameterServers
from serving.training.rating_stream import Ratings, RatingStream, labels_of
from shard_node.bags import Float32Array, Int64Array, TableLayout
from shard_node.errors import PushRefusedError

logger = logging.getLogger(__name__)
T = TypeVar("T")

GROUP_TIMEOUT_S: Final = 30.0
WATCH_S: Final = 0.1
STATUS_S: Final = 0.2
GENERATION: Final = "generation"
MAX_SCORES: Final = 1 << 22


class WorkerConfig(Frozen):
    """What one worker runs by: what is trained, its number, servers by number of the shard, and the group's port."""

    training: OnlineConfig
    worker: int
    servers: tuple[str, ...]
    group_port: int


class WorkerStatus(Frozen):
    """What a worker reports, in a file: of its own life, which begins anew when it is restarted.

    `loss` is the mean log loss of its ratings, each before it was learned; bytes are of numbers alone, by server, and
    of dense gradients that went into an all-reduce.
    """

    process_id: int
    step: int
    steps: int = 0
    seconds: float = 0.0
    ratings: int = 0
    loss: float = 0.0
    pulled_bytes: tuple[int, ...] = ()
    pushed_bytes: tuple[int, ...] = ()
    reduced_bytes: int = 0
    is_done: bool = False


def status_file(folder: Path, worker: int) -> Path:
    """Return where a worker reports."""
    return folder / f"worker-{worker}.json"


def dense_file(folder: Path) -> Path:
    """Return where worker 0 writes its copy of the dense weights: `rows`, `state` and `step`."""
    return folder / "dense.safetensors"


class _GroupChangedError(Exception):
    """Another generation of the group has begun."""


class WorkerGroup:
    """All workers, for all-reduces. After one has died, a group of the next generation takes the broken one's place."""

    def __init__(self, worker: int, workers: int, port: int) -> None:
        self._worker, self._workers = worker, workers
        # Where a host's name leads nowhere, gloo would look for an interface by it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
        )
        self._generation = -1

    def join(self, dense: DenseWeights, step: int) -> None:
        """Wait for all workers, and give each the weights of the one whose step is the highest. Blocks.

        `step` is the one that the worker is at. Where another one's is higher, the servers have all gradients of those
        before, and their dense part goes without an update that nobody has made.
        """
        while True:
            try:
                self._begin()
                gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(self._workers)]
                distributed.all_gather(gathered, torch.tensor([dense.step, step - 1]))
                steps = torch.stack(gathered)
                source = int(steps[:, 0].argmax())
                for array in (dense.rows, dense.state):
                    distributed.broadcast(torch.from_numpy(array), source)
                dense.step = int(steps.max())
                return
            except RuntimeError as error:
                logger.warning("no group is made: %s", str(error).splitlines()[0])
            except _GroupChangedError:
                pass
            time.sleep(WATCH_S)
            self.end()

    def _begin(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self._generation = generation = self._current()
        # One that was restarted is in this generation already, and so can't be in it.
        if self._store.add(f"{generation}/{self._worker}", 1) > 1:
            raise _GroupChangedError
        while not all(self._store.add(f"{generation}/{worker}", 0) for worker in range(self._workers)):
            time.sleep(WATCH_S)
            if self._current() != generation:
                raise _GroupChangedError
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore(  # type: ignore[attr-defined]
                f"group-{generation}", self._store
            ),
            rank=self._worker,
            world_size=self._workers,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )

    def _current(self) -> int:
        return int(self._store.get(GENERATION))

    def end(self) -> None:
        """Begin the next generation, unless another worker has."""
        self._store.compare_set(GENERATION, str(self._generation), str(self._generation + 1))

    def all_reduce(self, gradients: Float32Array) -> None:
        """Add up the gradients of all workers, in place. Blocks. Raises _GroupChangedError where one has died."""
        try:
            distributed.all_reduce(torch.from_numpy(gradients))
        except RuntimeError as error:
            logger.warning("a worker is gone: the group begins anew (%s)", str(error).splitlines()[0])
            self.end()
            raise _GroupChangedError from error

    async def unless_changed(self, work: Awaitable[T]) -> T:
        """Wait for work, and return what it does; end it, and raise _GroupChangedError, where the group is another."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_S))[0]:
                if self._current() != self._generation:
                    raise _GroupChangedError
            return task.result()
        finally:
            task.cancel()


class OnlineWorker:
    """One worker's life, from the step at which the servers expect it to the stream's end."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config, self._settings, self._worker = config.training, config, config.worker
        training = config.training
        self._stream = RatingStream(training.folder / "stream")
        self._dense = DenseWeights(training.spec, training.seed, training.row_optimizer)
        spec = training.trained_spec
        self._table, self._dense_ids = TableLayout.of(spec).index, np.arange(self._dense.rows.shape[0])
        self._servers = ParameterServers(config.servers, spec, VERSION, config.worker, training.init_scale)
        self._group: WorkerGroup | None = None
        self._steps = self._reduced_bytes = 0
        self._step_done, self._step_written = 0, -1
        self._loss, self._started_at, self._wrote_at = 0.0, 0.0, 0.0
        # Of the last steps: the first rating's position, and the scores before they were learned.
        self._scores = deque[tuple[int, Float32Array]](maxlen=max(1, MAX_SCORES // training.batch))

    async def run(self) -> None:
        """Train until the stream ends, then wait to be stopped. Raises ShardrankError as `ParameterServers`."""
        config = self._config
        step = await self._servers.resume_step()
        if config.dense_by == "allreduce":
            self._read_dense()
            self._group = WorkerGroup(self._worker, config.workers, self._settings.group_port)
            await asyncio.to_thread(self._group.join, self._dense, step)
        self._started_at, self._step_done = time.monotonic(), step - 1
        reporting = asyncio.create_task(self._report_on())
        try:
            await self._read(step)
        finally:
            reporting.cancel()
        if self._scores:
            positions = [np.arange(first, first + scores.size) for first, scores in self._scores]
            scores = np.concatenate([scores for _, scores in self._scores])
            file = status_file(config.folder, self._worker).with_suffix(".safetensors")
            save_file({"positions": np.concatenate(positions), "scores": scores}, file)
        self._report(is_done=True)
        await self._in_group(asyncio.Event().wait, self._step_done + 1)

    async def _in_group(self, work: Callable[[], Awaitable[T]], step: int) -> T:
        """Wait for what is no step, ready to make a group anew for another worker."""
        while self._group is not None:
            try:
                return await self._group.unless_changed(work())
            except _GroupChangedError:
                await asyncio.to_thread(self._group.join, self._dense, step)
        return await work()

    async def _read(self, step: int) -> None:
        """Train from a step to the stream's end."""
        config, group = self._config, self._group
        first, per_step = self._worker * config.batch, config.workers * config.batch
        while True:
            if len(self._stream) < step * per_step:
                await self._write_dense(is_due=True)
            ratings = await self._in_group(partial(self._stream.read, (step - 1) * per_step, per_step), step)
            if ratings is None:
                break
            try:
                await self._step(step, ratings[first : first + config.batch], (step - 1) * per_step + first)
            except PushRefusedError as error:
                if error.kind != "push_step":
                    raise
                logger.warning("step %d: %s", step, error)
                step = await self._servers.resume_step()
                if group is not None:
                    # Others have gone on, by gradients that are not in this copy.
                    group.end()
                    await asyncio.to_thread(group.join, self._dense, step)
            else:
                self._step_done = step
                await self._write_dense()
                step += 1

    async def _report_on(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(STATUS_S)

    async def _step(self, step: int, ratings: Ratings, first: int) -> None:
        config = self._config
        ids: dict[str, Int64Array] = {}
        index: dict[str, Int64Array] = {}
        for table, field in FIELDS.items():
            ids[table], index[table] = np.unique(ratings[field], return_inverse=True)
        if config.dense_by == "server":
            ids[DENSE] = self._dense_ids
        pulled = await self._servers.pull({self._table[name]: of for name, of in ids.items()})
        rows = {name: pulled[self._table[name]] for name in ids}
        if config.dense_by == "server":
            self._dense.rows[:] = rows.pop(DENSE)
        share = 1 / (config.batch * (config.workers if config.consistency == "bsp" else 1))
        result = self._dense.learn(rows, index, labels_of(ratings), share)
        await asyncio.sleep(sum(config.delays_s[self._worker : self._worker + 1]))
        gradients = {self._table[name]: (ids[name], of) for name, of in result.gradients.items()}
        if self._group is None:
            gradients[self._table[DENSE]] = self._dense_ids, self._dense.gradients
            await self._servers.push(step, gradients)
        else:
            await self._push_and_reduce(self._group, step, gradients)
        self._scores.append((first, result.scores))
        self._steps, self._loss = self._steps + 1, self._loss + result.loss

    async def _push_and_reduce(
        self, group: WorkerGroup, step: int, gradients: dict[int, tuple[Int64Array, Float32Array]]
    ) -> None:
        """Push rows' gradients, and apply the sum of all workers' dense ones once the push is answered."""
        dense = self._dense
        while True:
            summed = dense.gradients.copy()
            try:
                if dense.step < step:
                    await asyncio.to_thread(group.all_reduce, summed)
                    self._reduced_bytes += summed.nbytes
                await group.unless_changed(self._servers.push(step, gradients))
                break
            except _GroupChangedError:
                await asyncio.to_thread(group.join, dense, step)
        if dense.step < step:
            dense.apply(summed, step)

    def _read_dense(self) -> None:
        path = dense_file(self._config.folder)
        with suppress(FileNotFoundError):
            try:
                self._dense.restore(load_file(path))
            except (SafetensorError, KeyError, ValueError) as error:
                raise TrainingError(f"{path}: {error}") from error

    async def _write_dense(self, *, is_due: bool = False) -> None:
        config = self._config
        is_due = is_due or time.monotonic() - self._wrote_at >= config.write_dense_s
        if self._worker or self._group is None or self._dense.step == self._step_written or not is_due:
            return
        path = dense_file(config.folder)
        save_file(self._dense.saved(), temporary := path.with_suffix(".new"))
        rename(temporary, path)
        self._wrote_at, self._step_written = time.monotonic(), self._dense.step

    def _report(self, *, is_done: bool = False) -> None:
        ratings = self._steps * self._config.batch
        status = WorkerStatus(
            process_id=os.getpid(),
            step=self._step_done,
            steps=self._steps,
            seconds=time.monotonic() - self._started_at,
            ratings=ratings,
            loss=self._loss / max(ratings, 1),
            pulled_bytes=tuple(self._servers.pulled_bytes),
            pushed_bytes=tuple(self._servers.pushed_bytes),
            reduced_bytes=self._reduced_bytes,
            is_done=is_done,
        )
        path = status_file(self._config.folder, self._worker)
        (temporary := path.with_suffix(".new")).write_text(status.model_dump_json(), encoding="utf-8")
        os.replace(temporary, path)


def main() -> None:
    """Run a worker by the file that is named."""
    die_with_parent(os.environ)
    start_logging("warning", "text")
    torch.set_num_threads(1)
    try:
        config = WorkerConfig.model_validate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        run_until_signalled(lambda: OnlineWorker(config).run())
    except (ShardrankError, OSError) as error:
        announce(f"{ERROR_PREFIX}{error}", logging.ERROR)
        sys.exit(1)


if __name__ == "__main__":
    main()
