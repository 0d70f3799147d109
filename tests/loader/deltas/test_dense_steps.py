"""Dense weights published between snapshots: refused by name, written once, read as they were published."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.deltas.dense import KEPT_STEPS, read_step, steps_folder
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaFormatError, RegistryConflictError, SnapshotError
from loader.registry.fleet import DenseStep
from loader.snapshot.store import Store
from shardrank_testing.deltas import MODEL, delta_spec, export_state, register_version
from shardrank_testing.registries import with_open
from shardrank_testing.snapshots import random_tables

SPEC = delta_spec(("fp32",))


@pytest.fixture
def snapshot(tmp_path):
    return export_state(tmp_path / "store", SPEC, random_tables(SPEC, 0), 1)


@pytest.fixture
async def publisher(registry, snapshot, store):
    """Of version 1, which is on record."""
    await register_version(registry, snapshot)
    return AsyncDeltaPublisher(registry, MODEL, 1, store, clock=lambda: 12.5)


def weights(snapshot, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in snapshot.dense_tensors().items()}


async def test_a_step_is_read_as_it_was_published(publisher, fleet, snapshot, store):
    assert await fleet.dense_step(MODEL, 1) is None
    assert await publisher.publish_dense(10, weights(snapshot, 0.5)) == 0
    await publisher.publish("fp32", [3], np.ones((1, 4), np.float32))
    given = {name: tensor.double().numpy() for name, tensor in weights(snapshot, 0.25).items()}
    assert await publisher.publish_dense(20, given, max_drift=0.1) == 1
    record = await fleet.dense_step(MODEL, 1)
    assert (record.step, record.sequence, record.max_drift, record.published_at) == (20, 1, 0.1, 12.5)
    found = read_step(Store(store), record)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], torch.from_numpy(given[name]).float()) for name in given)


async def test_a_published_step_is_immutable_and_steps_only_rise(publisher, fleet, snapshot, store):
    await publisher.publish_dense(7, weights(snapshot, 0.5))
    before = await fleet.dense_step(MODEL, 1)
    assert await publisher.publish_dense(7, weights(snapshot, 0.5)) == 0
    with pytest.raises(RegistryConflictError, match="dense step 7 is published with other weights"):
        await publisher.publish_dense(7, weights(snapshot, 0.75))
    with pytest.raises(RegistryConflictError, match="dense step 7 is published; 6 must be higher"):
        await publisher.publish_dense(6, weights(snapshot, 0.5))
    assert await fleet.dense_step(MODEL, 1) == before
    read_step(Store(store), before)


def with_last(value: float):
    def change(tensor):
        tensor.view(-1)[-1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: None, r"missing tensors: \["),
        (lambda tensor: tensor[:-1], r"has shape \[.*\], not \["),
        (lambda tensor: tensor.long(), "is torch.int64, the version has torch.float32"),
        (with_last(float("nan")), "holds NaN or inf"),
        (with_last(float("-inf")), "holds NaN or inf"),
        (with_last(1e39), "holds NaN or inf"),
    ],
)
async def test_weights_that_are_not_the_versions_are_refused(publisher, fleet, snapshot, store, change, problem):
    tensors = {name: tensor.double() for name, tensor in weights(snapshot, 0.5).items()}
    first = next(iter(tensors))
    changed = {
        name: tensor for name, tensor in {**tensors, first: change(tensors[first])}.items() if tensor is not None
    }
    with pytest.raises(DeltaFormatError, match=problem):
        await publisher.publish_dense(1, changed)
    with pytest.raises(DeltaFormatError, match=r"unknown tensors: \['more'\]; it has"):
        await publisher.publish_dense(1, {**tensors, "more": torch.zeros(1)})
    assert await fleet.dense_step(MODEL, 1) is None
    assert not (store / steps_folder(MODEL, 1)).exists()


@pytest.mark.parametrize(
    ("step", "options", "problem"),
    [
        (0, {}, "dense step 0 is not within 1"),
        (1, {"sequence": 1}, r"sequence 1 is not within 0\.\.0"),
        (1, {"sequence": -1}, "sequence -1 is not within"),
        (1, {"max_drift": 0.0}, "max_drift 0.0 is not above 0"),
        (1, {"max_drift": float("nan")}, "max_drift nan is not above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(url, snapshot, store, step, options, problem):
    with_open(url, lambda registry: register_version(registry, snapshot))
    with DeltaPublisher(url, MODEL, 1, store) as publisher, pytest.raises(DeltaFormatError, match=problem):
        publisher.publish_dense(step, weights(snapshot, 0.5), **options)


async def test_only_the_last_files_stay_and_a_damaged_one_is_refused(publisher, fleet, snapshot, store):
    for step in range(1, KEPT_STEPS + 4):
        await publisher.publish_dense(step, weights(snapshot, step / 100))
    files = sorted((store / steps_folder(MODEL, 1)).iterdir())
    assert [int(file.name.split("-")[0]) for file in files] == list(range(4, KEPT_STEPS + 4))
    record = await fleet.dense_step(MODEL, 1)
    content = bytearray(files[-1].read_bytes())
    content[-1] ^= 1
    files[-1].write_bytes(content)
    with pytest.raises(DeltaFormatError, match=r"bytes of SHA-256 .*; published were"):
        read_step(Store(store), record)
    files[-1].unlink()
    with pytest.raises(SnapshotError, match="missing"):
        read_step(Store(store), record)


@pytest.mark.parametrize(("dtype", "shape", "size"), [("F4", [2], 1), ("I64", [2**63, 0], 0)])
def test_a_file_that_torch_can_not_hold_is_refused(tmp_path, dtype, shape, size):
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    record = DenseStep(
        model=MODEL,
        version=1,
        step=1,
        sequence=0,
        max_drift=0.1,
        published_at=1.0,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
    )
    store = Store(tmp_path)
    store.write_file(f"{steps_folder(MODEL, 1)}/{1:020d}-{record.sha256[:16]}.safetensors", content)
    with pytest.raises(DeltaFormatError, match="safetensors: "):
        read_step(store, record)
