"""The training of one node: pushes are checked, logged, applied and answered, by one thread and in one order.

What is there when the thread looks is one batch: logged, applied, made durable by one call, then answered. The log's
order is that of all changes, so that a replay of it ends in the same rows, bit by bit.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from loader.errors import OverloadedError, ShardrankError
from loader.snapshot.tables import Frozen
from shard_node.bags import Float32Array, Int64Array
from shard_node.engine.cpu import CpuEngine
from shard_node.errors import PushRefusedError, TrainingFailedError, TrainingLogError
from shard_node.node import TrainingReport
from shard_node.training.clocks import Clocks, Consistency, ConsistencyText
from shard_node.training.push import Push
from shard_node.training.push_log import LEAVE_KIND, PUSH_KIND, PushLog
from shard_node.training.row_optimizers import RowOptimizer
from shard_node.training.trained_rows import TrainedRows
from shard_node.wire.frame import Body
from shard_node.wire.messages import decode_push_body

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 4
"""Pushes of a worker that wait for the thread: it sends one after the other, and again when it lost a connection."""
_WORKER = struct.Struct("<I")
Done: TypeAlias = Callable[[int | Exception], object]
_Changes: TypeAlias = dict[str, tuple[Int64Array, Float32Array]]


class TrainerConfig(Frozen):
    """How a node trains.

    Attributes:
        folder: of the log and of checkpoints; one node's own.
        consistency: bsp, ssp:N or asp.
        init_scale: rows of new keys begin with numbers between this and its negative.
        worker_timeout_s: how long others wait for a worker before it has left.
        checkpoint_bytes: of the log, after which a checkpoint is written.
    """

    folder: Path
    workers: int = Field(ge=1, le=1024)
    consistency: ConsistencyText = "bsp"
    optimizer: RowOptimizer = RowOptimizer()
    init_scale: float = Field(default=0.01, ge=0)
    worker_timeout_s: float = Field(default=30.0, gt=0)
    checkpoint_bytes: int = Field(default=1 << 28, ge=1)


class _Submitted(NamedTuple):
    push: Push
    body: Body
    kept: Callable[[], object]
    done: Done


class Trainer:
    """Trains the rows of one version on one node. `submit` and `report` may be called by any thread.

    What it was taught before, in the same folder, is put back before it takes anything. `of` names what is trained:
    model, version, manifest identity and shard. Raises ConfigError for tables that can't be trained, TrainingLogError
    for a folder that is another training's, damaged, or can't be written, SnapshotError for such a checkpoint.
    """

    def __init__(
        self, engine: CpuEngine, of: dict[str, Any], config: TrainerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._clock = config, clock
        self._model, self._version = of["model"], of["version"]
        self._consistency = Consistency.parse(config.consistency)
        self._clocks = Clocks(config.workers, self._consistency, config.worker_timeout_s, clock())
        self._rows = TrainedRows(engine, config.optimizer, config.init_scale)
        # Gradients of a step that is summed, by worker, until the last one is there; answers that are withheld.
        self._pending: dict[int, Push] = {}
        self._withheld: dict[int, tuple[int, Done]] = {}
        how = config.model_dump(mode="json", include={"workers", "consistency", "optimizer", "init_scale"})
        try:
            self._log = PushLog(config.folder, json.dumps(of | how, sort_keys=True).encode())
        except OSError as error:
            raise TrainingLogError(f"{config.folder}: can't be written: {error}") from error
        try:
            self._restore()
        except BaseException:
            self._log.close()
            raise
        self._report = self._reported()
        self._queue = deque[_Submitted]()
        self._changes = deque[tuple[Future[_Changes], bool]]()
        self._changed = threading.Condition()
        self._is_closed, self._failure = False, ""
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()

    def submit(self, model: str, version: int, body: Body, push: Push, kept: Callable[[], object], done: Done) -> None:
        """As `PushReceiver.submit`.

        Errors are PushRefusedError, InvalidBagsError, DeltaError for too many keys, OverloadedError, and
        TrainingFailedError.
        """
        with self._changed:
            try:
                if (model, version) != (self._model, self._version):
                    raise PushRefusedError(
                        f"{model} version {version} is not trained here, {self._model} version {self._version} is"
                    )
                if self._is_closed or self._failure:
                    raise TrainingFailedError(self._failure or "the node ends")
                if sum(waiting.push.worker == push.worker for waiting in self._queue) >= MAX_WAITING:
                    raise OverloadedError(f"{MAX_WAITING} pushes of worker {push.worker} wait", kind="node_overloaded")
            except ShardrankError as error:
                done(error)
                return
            self._queue.append(_Submitted(push, body, kept, done))
            self._changed.notify()

    def report(self) -> TrainingReport:
        """Return where workers were after the last batch."""
        return self._report

    def pop_changed(self, *, everything: bool = False) -> _Changes:
        """Return ids and rows, by table, that have changed since this was called last, all of them durable.

        With `everything` those that have since the snapshot, as after a restart. Raises TrainingFailedError.
        """
        changes: Future[_Changes] = Future()
        with self._changed:
            if self._is_closed or self._failure:
                raise TrainingFailedError(self._failure or "the node ends")
            self._changes.append((changes, everything))
            self._changed.notify()
        return changes.result()

    def close(self) -> None:
        """End the thread; whoever waits is told that the node ends. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        failure = "the node ends"
        try:
            while self._wait():
                self._do_batch()
        except BaseException as error:
            logger.exception("training ends: its log can't be written, or rows can't be changed")
            failure = f"{type(error).__name__}: {error}"
        with self._changed:
            self._failure = failure
            waiting: list[Callable[[TrainingFailedError], object]] = [submitted.done for submitted in self._queue]
            waiting += [done for _, done in self._withheld.values()]
            waiting += [changes.set_exception for changes, _ in self._changes]
            self._queue.clear()
        for done in waiting:
            _call(partial(done, TrainingFailedError(failure)))
        self._log.close()

    def _wait(self) -> bool:
        """Wait for something to do, or for as long as may pass until who is silent is noticed; False at the end."""
        with self._changed:
            if not (self._queue or self._changes or self._is_closed):
                # Who is silent is noticed late by as much, which costs a barrier that much more.
                self._changed.wait(min(1.0, self._config.worker_timeout_s / 4))
            return not self._is_closed

    def _do_batch(self) -> None:
        now, timeout_s = self._clock(), self._config.worker_timeout_s
        accepted = [submitted for _ in range(len(self._queue)) if (submitted := self._receive(now)) is not None]
        for worker in self._clocks.silent(now):
            logger.warning("worker %d was waited for for %g s: nobody waits for it any more", worker, timeout_s)
            self._log.append(LEAVE_KIND, _WORKER.pack(worker))
            self._leave(worker)
        self._log.commit()
        released = self._released(now)
        self._report = self._reported()
        for submitted in accepted:
            if (submitted.push.step, submitted.done) == self._withheld.get(submitted.push.worker):
                _call(submitted.kept)
        for done in released:
            _call(partial(done, self._clocks.slowest))
        while self._changes:
            changes, everything = self._changes[0]
            changes.set_result(self._rows.pop_changed(everything=everything))
            self._changes.popleft()
        # As many bytes of log as the last checkpoint has are worth another one.
        if self._log.size_bytes >= max(self._config.checkpoint_bytes, self._log.checkpoint_bytes) and not self._pending:
            clocks = np.array([self._clocks.steps, self._clocks.is_active], np.int64)
            self._log.replace({"clocks": clocks} | self._rows.tensors())

    def _reported(self) -> TrainingReport:
        clocks = self._clocks
        resume = tuple(map(clocks.resume_step, range(self._config.workers)))
        return TrainingReport(steps=tuple(clocks.steps), is_active=tuple(clocks.is_active), resume_steps=resume)

    def _receive(self, now: float) -> _Submitted | None:
        """Log and apply the next push, unless it was before; None if it is refused.

        Whoever is neither told nor in the queue is among those whose answer is withheld.
        """
        with self._changed:
            submitted = self._queue.popleft()
        push = submitted.push
        try:
            is_new = self._clocks.check(push.worker, push.step) == "new"
            if is_new:
                self._rows.check(push, self._pending.values())
        except Exception as error:
            _call(partial(submitted.done, error))
            return None
        before, self._withheld[push.worker] = self._withheld.get(push.worker), (push.step, submitted.done)
        if before is not None:
            again = PushRefusedError(f"worker {push.worker} has pushed step {before[0]} again", kind="push_step")
            _call(partial(before[1], again))
        self._clocks.waits(push.worker, now)
        if is_new:
            self._log.append(PUSH_KIND, submitted.body.data)
            self._apply(push)
        return submitted

    def _apply(self, push: Push) -> None:
        self._clocks.push(push.worker, push.step)
        if self._consistency.is_summed:
            self._pending[push.worker] = push
            self._apply_step()
        else:
            self._rows.apply([push])

    def _apply_step(self) -> None:
        """Apply a step that is summed once all who take part have pushed it."""
        if self._pending and next(iter(self._pending.values())).step <= self._clocks.slowest:
            self._rows.apply([self._pending[worker] for worker in sorted(self._pending)])
            self._pending.clear()

    def _leave(self, worker: int) -> None:
        self._clocks.leave(worker)
        self._apply_step()

    def _released(self, now: float) -> list[Done]:
        due = [worker for worker, (step, _) in self._withheld.items() if self._clocks.is_released(step)]
        for worker in due:
            self._clocks.answered(worker, now)
        return [self._withheld.pop(worker)[1] for worker in due]

    def _restore(self) -> None:
        tensors, num_records = self._log.tensors(), 0
        if tensors:
            steps, is_active = tensors.pop("clocks").tolist()
            self._clocks.steps, self._clocks.is_active = steps, list(map(bool, is_active))
            self._rows.restore(tensors)
        for record in self._log.records():
            num_records += 1
            if record.kind == LEAVE_KIND:
                self._leave(*_WORKER.unpack(record.content))
            else:
                _, _, push = decode_push_body(np.frombuffer(record.content, np.uint8))
                self._apply(push)
        if num_records or tensors:
            logger.info("training goes on at steps %s, after %d records", self._clocks.steps, num_records)


def _call(tell: Callable[[], object]) -> None:
    # An event loop that has ended raises; whatever is raised is no reason to answer nobody else.
    try:
        tell()
    except Exception as error:
        logger.debug("nobody is told: %s", error)
