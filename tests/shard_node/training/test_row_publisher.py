"""Rows that were trained reach a fleet's stream, also those that could not be published at first."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from loader.deltas.chain import FORMAT
from loader.registry.fleet import FleetRegistry, NodeRecord
from loader.registry.registry import Registry
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.loading import load_tables
from shard_node.errors import TrainingFailedError
from shard_node.training.push import Push
from shard_node.training.row_optimizers import RowOptimizer
from shard_node.training.row_publisher import RowPublisher
from shard_node.training.trainer import Trainer, TrainerConfig
from shard_node.wire import messages
from shardrank_testing.deltas import MODEL, published_rows
from shardrank_testing.nodes import received
from shardrank_testing.processes import wait_until
from shardrank_testing.registered_fleet import change_wanted, publish
from shardrank_testing.registries import with_open
from shardrank_testing.snapshots import model_of, table_of, write_snapshot

SPEC = model_of([table_of("films", 40, 8, dtype="fp32"), table_of("words", 50, 4, dtype="fp32", keys="int64")], MODEL)
WORDS, FILMS = 0, 1  # In layout order.
NEVER_S, SOON_S = 3600.0, 0.05


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    rng = np.random.default_rng(0)
    tables = {"films": rng.normal(size=(40, 8)), "words": rng.normal(size=(3, 4))}
    floats = {name: rows.astype(np.float32) for name, rows in tables.items()}
    return Snapshot.open(write_snapshot(tmp_path / "store", SPEC, tables=floats, keys={"words": np.arange(3)})[0])


def trainer_of(snapshot: Snapshot, folder: Path) -> Trainer:
    plan = Plan.make(snapshot.spec, num_shards=1)
    engine = load_tables(snapshot, plan.partition(0), plan.digest).engine
    assert isinstance(engine, CpuEngine)
    config = TrainerConfig(folder=folder, workers=1, optimizer=RowOptimizer(kind="sgd", lr=1.0))
    return Trainer(engine, {"model": MODEL, "version": 1}, config)


def push(trainer: Trainer, step: int, **ids: list[int]) -> None:
    gradients = {}
    for name, of_table in ids.items():
        table, dim = (FILMS, 8) if name == "films" else (WORDS, 4)
        gradients[table] = np.array(of_table), np.ones((len(of_table), dim), np.float32)
    frame, answers = received(messages.encode_push(1, 0, MODEL, 1, Push(0, step, gradients))), list[object]()
    trainer.submit(MODEL, 1, frame.body, messages.decode_push(frame)[2], lambda: None, answers.append)
    wait_until(lambda: bool(answers), "an answer")
    assert answers == [step]


def test_each_changed_row_is_published_as_it_is_when_the_time_has_come(snapshot, tmp_path):
    registry, trainer = tmp_path / "registry", trainer_of(snapshot, tmp_path / "log")
    make_live(registry, snapshot.path)
    push(trainer, 1, films=[3, 5], words=[7])
    push(trainer, 2, films=[5], words=[1])
    publisher = RowPublisher(trainer, str(registry), MODEL, SPEC.tables, NEVER_S)
    publisher.close()
    published = published_rows(registry, ["films", "words"])
    assert {name: sorted(rows) for name, rows in published.items()} == {"films": [3, 5], "words": [1, 7]}
    taken = trainer.pop_changed()
    assert {name: ids.size for name, (ids, _) in taken.items()} == {"films": 0, "words": 0}
    trainer.close()
    # After a restart all that was trained is new: nobody knows what was published before.
    again = trainer_of(snapshot, tmp_path / "log")
    for name, (ids, rows) in again.pop_changed().items():
        there = {key: row.tolist() for key, row in published[name].items()}
        assert there == dict(zip(ids.tolist(), rows.tolist(), strict=True))
    again.close()
    with pytest.raises(TrainingFailedError, match="the node ends"):
        again.pop_changed()


def test_rows_wait_for_a_fleet_that_is_not_there_yet(snapshot, tmp_path, caplog):
    registry, trainer = tmp_path / "registry", trainer_of(snapshot, tmp_path / "log")
    publisher = RowPublisher(trainer, str(registry), MODEL, SPEC.tables, SOON_S)
    push(trainer, 1, films=[1, 2])
    wait_until(lambda: f"no version of {MODEL!r} is live" in caplog.text, "a warning")
    push(trainer, 2, films=[2])
    make_live(registry, snapshot.path)
    wait_until(lambda: sorted(published_rows(registry, ["films"])["films"]) == [1, 2], "the rows")
    publisher.close()
    trainer.close()
    row = {number: values[0] for number, values in published_rows(registry, ["films"])["films"].items()}
    before = snapshot_rows(snapshot)
    assert (row[1], row[2]) == (pytest.approx(before[1] - 1), pytest.approx(before[2] - 2))


def test_a_version_whose_tables_are_others_gets_no_rows(snapshot, tmp_path, caplog):
    registry, trainer = tmp_path / "registry", trainer_of(snapshot, tmp_path / "log")
    other = model_of([table_of("films", 40, 4, dtype="fp32")], MODEL)
    make_live(registry, write_snapshot(tmp_path / "other", other)[0])
    push(trainer, 1, films=[1])
    publisher = RowPublisher(trainer, str(registry), MODEL, SPEC.tables, SOON_S)
    says = r"table 'films' of 'fresh' version 1: \(keys, rows, columns\) are \(None, 40, 4\), .* have \(None, 40, 8\)"
    wait_until(lambda: re.search(says, caplog.text) is not None, "a warning")
    publisher.close()
    trainer.close()
    assert published_rows(registry, ["films"])["films"] == {}


def test_all_that_was_trained_is_published_again_where_the_registry_has_lost_some(snapshot, tmp_path):
    """As after a registry was put back from a copy of an earlier moment."""
    registry, copy, trainer = tmp_path / "registry", tmp_path / "copy", trainer_of(snapshot, tmp_path / "log")
    make_live(registry, snapshot.path)
    publisher = RowPublisher(trainer, str(registry), MODEL, SPEC.tables, SOON_S)

    def until(rows: list[int]) -> None:
        wait_until(lambda: sorted(published_rows(registry, ["films"])["films"]) == rows, f"rows {rows}")

    push(trainer, 1, films=[1])
    until([1])
    shutil.copytree(registry, copy)
    push(trainer, 2, films=[2])
    until([1, 2])
    shutil.rmtree(registry)
    shutil.copytree(copy, registry)
    push(trainer, 3, films=[3])
    until([1, 2, 3])
    publisher.close()
    trainer.close()


def make_live(registry: Path, path: Path) -> None:
    """Put a version on record and have it live, read by a process of this release."""
    publish(registry, path)
    node = NodeRecord(node_id="serve-0", kind="serving", process_id=1, address="a:1", delta_format=FORMAT)

    async def work(opened: Registry) -> None:
        fleet = FleetRegistry(opened)
        await fleet.announce_node(node, 60)
        await change_wanted(fleet, MODEL, live=1)

    with_open(str(registry), work)


def snapshot_rows(snapshot: Snapshot) -> np.ndarray:
    """The first column of films."""
    return np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)[:, 0]
