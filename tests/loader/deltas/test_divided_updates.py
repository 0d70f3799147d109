"""Updates of tables that are stored as parts: written where each row lies, or refused, or counted; and one division."""

from __future__ import annotations

import asyncio
import logging
import shutil

import numpy as np
import pytest
import torch

from loader.deltas.batch import DeltaBatch
from loader.deltas.dense import checked_tensors
from loader.deltas.divided import PrunedUpdates
from loader.deltas.publisher import AsyncDeltaPublisher, DeltaPublisher
from loader.errors import DeltaBaseError, DeltaError, DeltaFormatError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.snapshot.per_row import read_access_counts
from loader.snapshot.publishing import publish, register
from loader.snapshot.reader import Snapshot
from loader.snapshot.tensor_files import load_numpy
from shardrank_testing.deltas import (
    MODEL,
    delta_spec,
    divided_state,
    encoded,
    export_divided,
    export_state,
    register_version,
)
from shardrank_testing.snapshots import random_rows, random_tables

STREAM = delta_stream(MODEL, 1)
STATE, COUNTS = divided_state(0)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return export_divided(tmp_path_factory.mktemp("store"), STATE, COUNTS, 1)


@pytest.fixture
def store(snapshot):
    return snapshot.path.parent.parent


def on(folder, work):
    async def run():
        registry = DirectoryRegistry(folder / "registry")
        try:
            return await work(registry)
        finally:
            await registry.close()

    return asyncio.run(run())


async def published(registry) -> list[DeltaBatch]:
    return [DeltaBatch.decode(entry.payload) for entry in await registry.read(STREAM, 0)]


def test_rows_of_a_table_are_published_as_rows_of_its_parts_in_order(tmp_path, snapshot, store):
    rng = np.random.default_rng(1)
    rows = rng.permutation(600)[:200]
    values = random_rows(rng, 200, 8)
    classes = snapshot.row_classes("item").classes()
    tables = {table.name: table for table in snapshot.spec.tables}

    async def scenario(registry):
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1, store)
        # The first of a row that is there twice does not count, whichever part it is in.
        assert await publisher.publish("item", [*rows[:50], *rows], np.vstack([values[:50] + 1, values])) == 2
        batches = await published(registry)
        assert [batch.table for batch in batches] == ["item.b0", "item.b1"]
        for number, batch in enumerate(batches):
            of_part = np.sort(rows[classes[rows] == number])
            np.testing.assert_array_equal(batch.rows, [np.count_nonzero(classes[:row] == number) for row in of_part])
            by_row = {row: values[place] for place, row in enumerate(rows)}
            expected = encoded(tables[batch.table], np.stack([by_row[row] for row in of_part]))
            np.testing.assert_array_equal(batch.stored, expected)
        (pruned,) = publisher.pruned_updates.items()
        assert pruned[0] == "item"
        np.testing.assert_array_equal(pruned[1].rows, np.sort(rows[classes[rows] == 2]))
        assert pruned[1].count == np.count_nonzero(classes[rows] == 2) > 0

    on(tmp_path, scenario)


def test_tables_in_one_part_take_their_own_rows_and_parts_trained_as_such_theirs(tmp_path, snapshot, store):
    film = snapshot.row_classes("film").classes()

    async def scenario(registry):
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1, store)
        ones = np.ones((1, 8), np.float32)
        row = int(np.flatnonzero(film == 0)[-1])
        await publisher.publish("film", [row], ones)
        await publisher.publish("narrow", [599], ones[:, :4])
        await publisher.publish("mixed.b1", [149], ones[:, :4])
        await publisher.publish("composed.q", [14], ones)
        await publisher.publish("composed.r", [39], ones)
        await publisher.publish("plain", [599], ones)
        told = [(batch.table, batch.rows.tolist()) for batch in await published(registry)]
        assert told == [
            ("film", [249]),
            ("narrow", [599]),
            ("mixed.b1", [149]),
            ("composed.q", [14]),
            ("composed.r", [39]),
            ("plain", [599]),
        ]

    on(tmp_path, scenario)


@pytest.mark.parametrize(
    ("table", "rows", "columns", "message"),
    [
        ("item", [600], 8, r"'item': row 600 is not in 0\.\.599"),
        ("item", [0], 4, r"'item': values are \[1, 4\], expected \[1, 8\]"),
        ("film", [300], 8, r"'film': row 300 is not in 0\.\.299"),
        ("item.b1", [468], 8, r"'item.b1': row 468 is what pruned rows of 'item' get, .* allowed is 0\.\.467"),
        ("narrow", [0], 8, r"values are \[1, 8\], expected \[1, 4\]"),
        ("mixed", [0], 8, r"'mixed': its parts are trained as such: .*: 'mixed.b0' \[n, 8\], 'mixed.b1' \[n, 4\]"),
        ("composed", [0], 8, r"'composed': its parts .* own row numbers: 'composed.q' \[n, 8\], 'composed.r' \[n, 8\]"),
        ("composed.r", [40], 8, r"row 40 is not in 0\.\.39"),
        ("mixed.b2", [0], 4, r"has no table 'mixed.b2'; tables: \['composed', 'composed.q', .*'item', 'item.b0', "),
    ],
)
def test_what_no_part_takes_is_refused_by_name_with_nothing_published(
    tmp_path, snapshot, store, table, rows, columns, message
):
    async def scenario(registry):
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1, store)
        with pytest.raises(DeltaFormatError, match=message):
            await publisher.publish(table, rows, np.ones((1, columns), np.float32))
        assert await published(registry) == []
        assert not publisher.pruned_updates

    on(tmp_path, scenario)


def test_values_that_one_part_can_not_hold_keep_back_the_other_parts_too(tmp_path, snapshot, store):
    classes = snapshot.row_classes("item").classes()
    hot, cold = int(np.flatnonzero(classes == 0)[3]), int(np.flatnonzero(classes == 1)[5])
    values = np.ones((2, 8), np.float32)
    values[0] = 1e6

    async def scenario(registry):
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1, store)
        with pytest.raises(
            DeltaFormatError, match=f"'item', part 'item.b0': row {hot} has values that fp16 can't hold"
        ):
            await publisher.publish("item", [hot, cold], values)
        values[0, 0] = np.nan
        with pytest.raises(DeltaFormatError, match=f"table 'item': row {hot} holds NaN"):
            await publisher.publish("item", [hot, cold], values)
        assert await published(registry) == []

    on(tmp_path, scenario)


def test_without_the_store_rows_of_divided_tables_can_not_be_placed(tmp_path, snapshot, store):
    async def scenario(registry):
        await register_version(registry, snapshot)
        publisher, ones = AsyncDeltaPublisher(registry, MODEL, 1), np.ones((1, 8), np.float32)
        for table in ("item", "film"):
            with pytest.raises(DeltaError, match=f"'{table}' of '{MODEL}' is divided by popularity, .* `store`"):
                await publisher.publish(table, [1], ones)
        # Where rows are their own places none is needed.
        assert await publisher.publish("narrow", [1], ones[:, :4]) == 1
        assert await publisher.publish("item.b0", [1], ones) == 2
        other, counts = divided_state(9)
        elsewhere = export_divided(tmp_path / "elsewhere", other, counts, 1)
        wrong = AsyncDeltaPublisher(registry, MODEL, 1, elsewhere.path.parent.parent)
        with pytest.raises(
            DeltaBaseError, match=f"has identity {elsewhere.identity}, published is {snapshot.identity}"
        ):
            await wrong.publish("item", [1], ones)

    on(tmp_path, scenario)


def test_updates_of_pruned_rows_are_counted_named_once_and_written_for_the_next_export(
    tmp_path, snapshot, store, caplog
):
    pruned = np.flatnonzero(snapshot.row_classes("item").classes() == 2)
    on(tmp_path, lambda registry: register_version(registry, snapshot))
    with DeltaPublisher(tmp_path / "registry", MODEL, 1, store) as publisher, caplog.at_level(logging.WARNING):
        assert publisher.write_pruned(tmp_path / "none.safetensors") == 0
        for rows in (pruned[:12], pruned[10:11], pruned[10:20]):
            assert publisher.publish("item", rows, np.ones((rows.size, 8), np.float32)) == 0
    told = [record.message for record in caplog.records if "is pruned of rows" in record.message]
    assert told == [
        f"table 'item' of '{MODEL}' is pruned of rows {pruned[:8].tolist()} and 4 more: updates of such rows are not "
        "written, but counted"
    ]
    found = publisher.pruned_updates["item"]
    assert found.rows.tolist() == pruned[:20].tolist()
    assert found.counts.tolist() == [1] * 10 + [3, 2] + [1] * 8
    assert found.count == 23
    assert publisher.write_pruned(tmp_path / "kept.safetensors") == 20
    assert not (tmp_path / "none.safetensors").exists()
    (written,) = read_access_counts(tmp_path / "kept.safetensors", snapshot.spec).items()
    expected = np.zeros(600, np.uint32)
    expected[found.rows] = found.counts
    assert written[0] == "item"
    np.testing.assert_array_equal(written[1], expected)
    assert load_numpy(tmp_path / "kept.safetensors")["item/num_embeddings"] == 600


def test_counts_of_many_updates_are_those_of_all_rows(monkeypatch):
    monkeypatch.setattr("loader.deltas.divided._MERGED_ROWS", 64)
    tally, rng, expected = PrunedUpdates(), np.random.default_rng(0), np.zeros(500, np.int64)
    for number in range(60):
        rows = rng.choice(500, 30, replace=False)
        expected[rows] += 1
        assert tally.add("item", rows) == (number == 0)
        if number % 20 == 0:
            assert tally.by_table()["item"].count == 30 * (number + 1)
    found = tally.by_table()["item"]
    assert found.rows.tolist() == np.flatnonzero(expected).tolist()
    assert found.counts.tolist() == expected[expected > 0].tolist()
    assert list(tally.by_table()) == ["item"]


def test_a_version_that_is_divided_alike_goes_on_the_stream(tmp_path):
    export_divided(tmp_path / "store", STATE, COUNTS, 1)
    same = export_divided(tmp_path / "training", divided_state(3)[0], COUNTS, 2, 0, 1)

    async def scenario(registry):
        fleet = FleetRegistry(registry)
        await register(fleet, Snapshot.open(tmp_path / "store" / MODEL / "1"), clock=lambda: 1.0)
        done = await publish(fleet, same.path, tmp_path / "store", clock=lambda: 1.0)
        assert (done.is_new, done.record.delta_base) == (True, 1)
        # The first one is retired. The second knows where its stream's rows lie.
        await fleet.drop_version(MODEL, 1)
        shutil.rmtree(tmp_path / "store" / MODEL / "1")
        third = export_divided(tmp_path / "training", STATE, COUNTS, 3, 0, 1)
        assert (await publish(fleet, third.path, tmp_path / "store", clock=lambda: 1.0)).is_new

    on(tmp_path, scenario)


def test_a_version_that_is_divided_otherwise_must_begin_a_stream(tmp_path):
    export_divided(tmp_path / "store", STATE, COUNTS, 1)
    counts = COUNTS | {"film": np.roll(COUNTS["film"], 1)}

    async def scenario(registry):
        fleet = FleetRegistry(registry)
        await register(fleet, Snapshot.open(tmp_path / "store" / MODEL / "1"), clock=lambda: 1.0)
        other = export_divided(tmp_path / "training", STATE, counts, 2, 0, 1)
        with pytest.raises(DeltaBaseError, match=r"rows of tables \['film'\] lie elsewhere than in version 1 of that"):
            await publish(fleet, other.path, tmp_path / "store", clock=lambda: 1.0)
        assert await fleet.version(MODEL, 2) is None
        assert not (tmp_path / "store" / MODEL / "2").exists()
        # A table that is not divided any more has its rows elsewhere, too: nobody else would notice.
        plain = export_state(tmp_path / "training", *whole_tables(), 3, 0, 1)
        with pytest.raises(
            DeltaBaseError, match=r"version 3 .*tables \['composed', 'film', 'item', 'mixed', 'narrow'\]"
        ):
            await publish(fleet, plain.path, tmp_path / "store", clock=lambda: 1.0)
        own = export_divided(tmp_path / "training", STATE, counts, 4)
        assert (await publish(fleet, own.path, tmp_path / "store", clock=lambda: 1.0)).record.delta_base == 4

    on(tmp_path, scenario)


def test_a_version_whose_stream_has_no_version_in_the_store_any_more_is_refused(tmp_path):
    other = export_divided(tmp_path / "training", STATE, COUNTS, 2, 0, 1)

    async def scenario(registry):
        fleet = FleetRegistry(registry)
        with pytest.raises(
            DeltaBaseError, match=r"'narrow'\] are divided, and .* has no version of that stream any more"
        ):
            await publish(fleet, other.path, tmp_path / "store", clock=lambda: 1.0)
        plain = export_state(tmp_path / "training", *whole_tables(), 3, 0, 1)
        assert (await publish(fleet, plain.path, tmp_path / "store", clock=lambda: 1.0)).is_new

    on(tmp_path, scenario)


def whole_tables():
    spec = delta_spec(("int8",))
    return spec, random_tables(spec, 0)


def test_dense_steps_have_the_projections_of_narrower_parts(snapshot):
    own = snapshot.dense_tensors()
    names = {"projections.mixed/b1", "projections.narrow"}
    assert {name for name in own if name.startswith("projections.")} == names
    given = {name: torch.ones_like(tensor).numpy() for name, tensor in own.items()}
    checked = checked_tensors(snapshot, given)
    assert all(torch.equal(checked[name], torch.ones(4, 8)) for name in names)
    for change, message in (
        (
            {name: given[name] for name in given if name != "projections.narrow"},
            r"missing tensors: \['projections.narrow",
        ),
        (given | {"projections.narrow": np.ones((8, 4), np.float32)}, r"'projections.narrow' has shape \[8, 4\], not"),
        (given | {"projections.mixed/b0": np.ones((8, 8), np.float32)}, r"unknown tensors: \['projections.mixed/b0'\]"),
        (given | {"projections.mixed/b1": np.full((4, 8), np.inf, np.float32)}, "'projections.mixed/b1' holds NaN or"),
    ):
        with pytest.raises(DeltaFormatError, match=message):
            checked_tensors(snapshot, change)
