"""Trainers of one node and of several: what tables become, what is kept, who waits, and what is refused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.errors import ConfigError
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.loading import load_tables
from shard_node.errors import TrainingFailedError, TrainingLogError
from shard_node.training.push import Push
from shard_node.training.row_optimizers import RowOptimizer, summed
from shard_node.training.trainer import Trainer, TrainerConfig
from shard_node.wire import messages
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import received
from shardrank_testing.processes import wait_until
from shardrank_testing.snapshots import model_of, table_of, write_snapshot

SPEC = model_of(
    [
        table_of("films", 400, 8, dtype="fp32"),
        table_of("users", 300, 4, dtype="fp32"),
        table_of("words", 500, 8, dtype="fp32", keys="int64"),
    ]
)
KEYS = np.arange(-20, 20) * 10**15
FILMS, USERS, WORDS = 1, 0, 2  # In layout order, by dim and name.
SGD, LR = RowOptimizer(kind="sgd", lr=0.5), np.float32(0.5)
NEVER_S, SOON_S = 60.0, 0.2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """One shard's trainer, and what it answers."""

    def __init__(self, snapshot: Snapshot, folder: Path, shard: int = 0, num_shards: int = 1, **how: Any) -> None:
        plan = Plan.make(snapshot.spec, num_shards=num_shards, replicate_bytes=0)
        self.clock, self.plan, self.shard, self.kept = Clock(), plan, shard, list[int]()
        engine = load_tables(snapshot, plan.partition(shard), plan.digest).engine
        assert isinstance(engine, CpuEngine)
        self.engine = engine
        config = TrainerConfig(folder=folder, **{"optimizer": SGD, "workers": 1, "worker_timeout_s": NEVER_S} | how)
        self.trainer = Trainer(engine, {"model": "m", "version": 1, "shard": shard}, config, self.clock)

    def begin(self, push: Push) -> queue.SimpleQueue[int | Exception]:
        """Push what is of this shard; the answer comes into the queue."""
        own = {}
        for table, (ids, gradients) in push.gradients.items():
            here = np.array([self.is_here(table, one) for one in ids.tolist()], np.bool_)
            own[table] = ids[here], gradients[here]
        frame = received(messages.encode_push(1, 0, "m", 1, push._replace(gradients=own)))
        answers: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        model, version, decoded = messages.decode_push(frame)
        self.trainer.submit(model, version, frame.body, decoded, lambda: self.kept.append(push.step), answers.put)
        return answers

    def is_here(self, table: int, one: int) -> bool:
        try:
            self.engine.check_ids(table, np.array([one]))
        except Exception:
            return self.plan.num_shards == 1
        return True

    def push(self, push: Push) -> int:
        answer = self.begin(push).get(timeout=NEVER_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def rows(self, table: int) -> dict[int, list[float]]:
        """Rows that are here, by id."""
        spec = self.engine.layout.tables[table]
        ids = np.concatenate([KEYS, NEW_KEYS]) if spec.keys else np.arange(spec.num_embeddings)
        ids = np.array([one for one in ids.tolist() if self.is_here(table, one)], np.int64)
        at = self.engine.rows_of_ids(table, ids)
        ids, at = ids[at >= 0], at[at >= 0]
        return dict(zip(ids.tolist(), self.engine.read_rows(table, at).view(np.float32).tolist(), strict=True))

    def all_rows(self) -> list[dict[int, list[float]]]:
        return [self.rows(table) for table in (USERS, FILMS, WORDS)]


NEW_KEYS = np.array([7, -(2**63), 2**63 - 1, 0, 12345678901234])


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    rng = np.random.default_rng(2)
    tables = {
        table.name: rng.normal(size=(KEYS.size if table.keys else table.num_embeddings, table.embedding_dim)).astype(
            np.float32
        )
        for table in SPEC.tables
    }
    return Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), SPEC, tables=tables, keys={"words": KEYS})[0])


@pytest.fixture
def start(snapshot: Snapshot, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def begin(name: str = "log", **how: Any) -> Server:
            server = Server(snapshot, tmp_path / name, **how)
            stack.callback(server.trainer.close)
            return server

        yield begin


def push_of(worker: int, step: int, seed: int = 0) -> Push:
    rng = np.random.default_rng([seed, worker, step])
    words = np.concatenate([KEYS, NEW_KEYS])
    return Push(
        worker,
        step,
        {
            table: (ids.astype(np.int64), rng.normal(size=(ids.size, dim)).astype(np.float32))
            for table, ids, dim in (
                (FILMS, rng.integers(0, 400, 60), 8),
                (USERS, rng.integers(0, 300, 9), 4),
                (WORDS, rng.choice(words, 30), 8),
            )
        },
    )


def by_hand(before: Server, steps: list[list[Push]]) -> list[dict[int, list[float]]]:
    """One process that adds up the gradients of the joined batch, and updates once a step, by SGD."""
    rows = {table: before.rows(table) for table in (USERS, FILMS, WORDS)}
    for pushes in steps:
        for table in rows:
            ids = np.concatenate([push.gradients[table][0] for push in pushes])
            gradients = np.concatenate([push.gradients[table][1] for push in pushes])
            for one, gradient in zip(*summed(ids, gradients), strict=True):
                row = np.array(rows[table].get(int(one), initial(one, gradient.size)), np.float32)
                rows[table][int(one)] = (row - LR * gradient).tolist()
    return [rows[table] for table in (USERS, FILMS, WORDS)]


def initial(key: int, dim: int) -> np.ndarray:
    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    columns = [mix((mix(int(key) % 2**64) + column) % 2**64) >> 40 for column in range(dim)]
    return np.float32(0.01) * (np.array(columns, np.float32) * np.float32(2**-23) - np.float32(1))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_bsp_is_one_process_on_the_joined_batch_bit_by_bit(start, num_servers):
    servers = [start(f"s{n}", shard=n, num_shards=num_servers, workers=3) for n in range(num_servers)]
    whole = start("whole")
    steps = [[push_of(worker, step) for worker in range(3)] for step in range(1, 21)]
    expected = by_hand(whole, steps)
    for pushes in steps:
        # In another order at each step: sums are in the order of workers.
        answers = [server.begin(pushes[(n + pushes[0].step) % 3]) for n in (2, 0, 1) for server in servers]
        assert [answer.get(timeout=NEVER_S) for answer in answers] == [pushes[0].step] * 3 * num_servers
    for table, rows in enumerate(expected):
        found = {one: row for server in servers for one, row in server.rows(table).items()}
        assert found == rows


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("checkpoint_bytes", [1, 10_000, 2**30])
def test_what_was_acknowledged_is_there_again_bit_by_bit(start, optimizer, checkpoint_bytes):
    how = {"optimizer": RowOptimizer(kind=optimizer), "checkpoint_bytes": checkpoint_bytes, "consistency": "ssp:2"}
    one_life = start("one", **how)
    for life in range(3):
        server = start("several", **how)
        assert server.trainer.report().steps == (4 * life,)
        for step in range(4 * life + 1, 4 * life + 5):
            assert server.push(push_of(0, step)) == one_life.push(push_of(0, step)) == step
        server.trainer.close()
    again = start("several", **how)
    assert again.all_rows() == one_life.all_rows()
    # And the optimizer's state is: the next step is the same.
    again.push(push_of(0, 13))
    one_life.push(push_of(0, 13))
    assert again.all_rows() == one_life.all_rows()


def test_a_push_is_applied_once_however_often_it_comes(start):
    server, other = start("a", workers=2, consistency="asp"), start("b", workers=2, consistency="asp")
    for push in (push_of(0, 1), push_of(0, 1), push_of(1, 1), push_of(0, 2), push_of(0, 1)):
        server.push(push)
    for push in (push_of(0, 1), push_of(1, 1), push_of(0, 2)):
        other.push(push)
    assert server.all_rows() == other.all_rows()
    # Also over a restart.
    server.trainer.close()
    again = start("a", workers=2, consistency="asp")
    again.push(push_of(0, 2))
    assert again.all_rows() == other.all_rows()


@pytest.mark.parametrize(("consistency", "ahead"), [("bsp", 0), ("ssp:1", 1), ("ssp:3", 3), ("asp", 6)])
def test_a_straggler_holds_the_others_up_as_far_as_is_said(start, consistency, ahead):
    server = start(workers=2, consistency=consistency)
    server.begin(push_of(1, 1))
    step = 1
    while step <= 6 and (step <= ahead + 1 or consistency == "asp"):
        assert server.begin(push_of(0, step)).get(timeout=NEVER_S) == 1
        step += 1
    if step <= 6:
        waiting = server.begin(push_of(0, step))
        with pytest.raises(queue.Empty):
            waiting.get(timeout=SOON_S)
        server.begin(push_of(1, 2))
        assert waiting.get(timeout=NEVER_S) == 2
    assert step == {"bsp": 2, "asp": 7}.get(consistency, ahead + 2)


def test_who_is_silent_is_not_waited_for_and_comes_back_behind_the_slowest(start):
    server = start(workers=3, worker_timeout_s=0.4)
    for worker in range(3):
        server.begin(push_of(worker, 1))
    waiting = [server.begin(push_of(worker, 2)) for worker in (0, 1)]
    with pytest.raises(queue.Empty):
        waiting[0].get(timeout=SOON_S)
    server.clock.now = 0.5
    assert [answer.get(timeout=NEVER_S) for answer in waiting] == [2, 2]
    report = server.trainer.report()
    assert (report.steps, report.is_active, report.resume_steps) == ((2, 2, 1), (True, True, False), (3, 3, 3))
    with raises_kind("push_step", match="worker 2 has left: it pushes step 3 next, not 2"):
        server.push(push_of(2, 2))
    back = [server.begin(push_of(worker, 3)) for worker in (2, 0, 1)]
    assert [answer.get(timeout=NEVER_S) for answer in back] == [3, 3, 3]
    rows = server.all_rows()
    server.trainer.close()
    again = start(workers=3, worker_timeout_s=0.4)
    assert (again.trainer.report().steps, again.all_rows()) == ((3, 3, 3), rows)


def test_gradients_that_wait_for_others_outlive_the_process(start):
    server, whole = start(workers=2), start("whole", workers=2)
    lost = server.begin(push_of(0, 1))
    # Its frame is let go of while the answer is withheld.
    wait_until(lambda: server.kept == [1], "the push is in the log")
    server.trainer.close()
    assert isinstance(lost.get(timeout=NEVER_S), TrainingFailedError)
    again = start(workers=2)
    # A worker that has forgotten all asks where it is, and is not let past what waits.
    assert again.trainer.report().resume_steps == (1, 1)
    with raises_kind("push_step", match="worker 0 is at step 1: it pushes step 1 next, not 2"):
        again.push(push_of(0, 2))
    pushed = [again.begin(push_of(0, 1)), again.begin(push_of(0, 1)), again.begin(push_of(1, 1))]
    with raises_kind("push_step", match="worker 0 has pushed step 1 again"):
        raise pushed.pop(0).get(timeout=NEVER_S)
    assert [answer.get(timeout=NEVER_S) for answer in pushed] == [1, 1]
    assert again.all_rows() == by_hand(whole, [[push_of(0, 1), push_of(1, 1)]])


def test_a_log_that_can_not_be_written_ends_the_training_and_loses_nothing(start, monkeypatch):
    server, whole = start(), start("whole")
    server.push(push_of(0, 1))
    monkeypatch.setattr("os.fdatasync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for _ in range(2):
        with pytest.raises(TrainingFailedError, match="No space left on device"):
            server.push(push_of(0, 2))
    monkeypatch.undo()
    again = start()
    assert again.all_rows() == by_hand(whole, [[push_of(0, 1)]])
    assert again.push(push_of(0, 2)) == 2


def ones(count: int, dim: int = 8) -> np.ndarray:
    return np.ones((count, dim), np.float32)


@pytest.mark.parametrize(
    ("gradients", "kind", "says"),
    [
        ({3: (np.arange(2), ones(2))}, "push_refused", r"table 3 is none of 0\.\.2"),
        ({FILMS: (np.arange(2), ones(2, 4))}, "push_refused", "table 'films' have 4 columns, rows 8"),
        ({FILMS: (np.array([5, 6]), ones(2) * [[1], [np.nan]])}, "push_refused", "of id 6 of table .films. has"),
        ({FILMS: (np.array([5]), ones(1) * 2e9)}, "push_refused", "of id 5 .* are not within 1e\\+09 of 0"),
        ({FILMS: (np.array([5, 400]), ones(2))}, "invalid_bags", "row 400 of table 'films' is outside it"),
        ({FILMS: (np.array([-1]), ones(1))}, "invalid_bags", "row -1 of table 'films' is outside it"),
        ({WORDS: (np.arange(1, 1001), ones(1000))}, "key_capacity", "1040 keys with 1000 new ones"),
    ],
)  # fmt: skip
def test_gradients_that_do_not_fit_are_refused_and_change_nothing(start, gradients, kind, says):
    server = start()
    before = server.all_rows()
    with raises_kind(kind, match=says):
        server.push(Push(0, 1, {table: (ids, one.astype(np.float32)) for table, (ids, one) in gradients.items()}))
    assert (server.all_rows(), server.trainer.report().steps) == (before, (0,))
    # The step is still due.
    assert server.push(push_of(0, 1)) == 1


def test_keys_that_wait_count_to_the_capacity(start):
    server = start(workers=2)
    room = 500 - KEYS.size
    first = server.begin(Push(0, 1, {WORDS: (np.arange(room - 10) + 10**6, ones(room - 10))}))
    with raises_kind("key_capacity", match="new ones"):
        server.push(Push(1, 1, {WORDS: (np.arange(30), ones(30))}))
    assert server.push(Push(1, 1, {WORDS: (np.arange(10), ones(10))})) == 1
    assert first.get(timeout=NEVER_S) == 1


def test_rows_are_read_while_they_are_trained(start):
    """Each lookup sees rows of one step: of the rows of a table all have had as many equal gradients."""
    server, stop = start(), threading.Event()
    wrong: list[np.ndarray] = []
    first = np.array([server.rows(USERS)[row] for row in range(300)], np.float32)

    def look_up() -> None:
        from shardrank_testing.bags import bags_of

        bags = bags_of({USERS: [[row] for row in range(300)]})
        while not stop.is_set():
            pooled = next(block for block in server.engine.pool(bags) if block.shape[0])
            steps = np.round((first - pooled) / LR)
            if np.ptp(steps):
                wrong.append(steps)

    reader = threading.Thread(target=look_up)
    reader.start()
    for step in range(1, 60):
        server.push(Push(0, step, {USERS: (np.arange(300), ones(300, 4))}))
    stop.set()
    reader.join()
    assert wrong == []


def test_what_can_not_be_trained_is_refused(snapshot, start, tmp_path):
    start()
    for how, says in (({"workers": 2}, '"workers": 1'), ({"optimizer": RowOptimizer(kind="adam")}, '"kind": "sgd"')):
        with pytest.raises(TrainingLogError, match="another process"):
            start(**how)
        folder = f"other {says}"
        start(folder).trainer.close()
        with pytest.raises(TrainingLogError, match=says):
            start(folder, **how)
    spec = model_of([table_of("films", 40, 8)])
    path, _ = write_snapshot(tmp_path / "int8", spec)
    with pytest.raises(ConfigError, match="table 'films' is int8, in ram: rows are trained as fp32"):
        Server(Snapshot.open(path), tmp_path / "other")
    server = start("last")
    server.trainer.close()
    with pytest.raises(TrainingFailedError, match="the node ends"):
        server.push(push_of(0, 1))
