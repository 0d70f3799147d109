"""Updates of tables that are stored as parts: written where each row lies, or refused, or counted; and one division."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from loader.access_counts import read_access_counts
from loader.deltas.batch import DeltaBatch
from loader.deltas.blocking_publisher import DeltaPublisher
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaError, DeltaFormatError, SnapshotCorruptError
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.snapshot.publishing import publish
from loader.snapshot.tensor_files import load_numpy
from shardrank_testing.deltas import (
    MODEL,
    all_divisions,
    delta_spec,
    encoded,
    export_state,
    read_entry,
    register_version,
)
from shardrank_testing.errors import raises_kind
from shardrank_testing.registries import with_open
from shardrank_testing.snapshots import random_rows, random_tables

MADE = all_divisions(0)
PRUNED_ROW = MADE.spec.parts(MADE.spec.table_of("f_item"))[-1].num_embeddings - 1
"""Of part `item.b1`: what all pruned rows of `item` get."""


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return MADE.export(tmp_path_factory.mktemp("store"), version=1)


@pytest.fixture
async def publisher(directory, snapshot, store):
    await register_version(directory, snapshot)
    return AsyncDeltaPublisher(directory, MODEL, 1, store)


async def published(registry) -> list[DeltaBatch]:
    stream = delta_stream(MODEL, 1)
    return [(await read_entry(registry, stream, entry, None))[0] for entry in await registry.read(stream, 0)]


async def test_rows_of_a_table_are_published_as_rows_of_its_parts(directory, publisher, snapshot):
    rng = np.random.default_rng(1)
    rows = rng.permutation(600)[:200]
    values = random_rows(rng, 200, 8)
    by_row = dict(zip(rows, values, strict=True))
    classes = snapshot.row_classes("item").classes()
    tables = {table.name: table for table in snapshot.spec.tables}
    # The first of a row that is there twice does not count, whichever part it is in.
    assert await publisher.publish("item", [*rows[:50], *rows], np.vstack([values[:50] + 1, values])) == 2
    batches = await published(directory)
    assert [batch.table for batch in batches] == ["item.b0", "item.b1"]
    for number, batch in enumerate(batches):
        of_part = np.sort(rows[classes[rows] == number])
        np.testing.assert_array_equal(batch.rows, [np.count_nonzero(classes[:row] == number) for row in of_part])
        expected = encoded(tables[batch.table], np.stack([by_row[row] for row in of_part]))
        np.testing.assert_array_equal(batch.stored, expected)
    ((table, pruned),) = publisher.pruned_updates.items()
    assert table == "item"
    np.testing.assert_array_equal(pruned.keys, np.sort(rows[classes[rows] == 2]))
    assert pruned.total == np.count_nonzero(classes[rows] == 2) > 0


@pytest.mark.parametrize(
    ("table", "rows", "columns", "message"),
    [
        ("item", [600], 8, r"'item': row 600 is not in 0\.\.599"),
        ("item", [0], 4, r"'item': values are \[1, 4\], expected \[1, 8\]"),
        ("film", [300], 8, r"'film': row 300 is not in 0\.\.299"),
        (
            "item.b1",
            [PRUNED_ROW],
            8,
            rf"'item.b1': row {PRUNED_ROW} is what pruned rows of 'item' get, .* allowed is 0\.\.{PRUNED_ROW - 1}",
        ),
        ("narrow", [0], 8, r"values are \[1, 8\], expected \[1, 4\]"),
        ("mixed", [0], 8, r"'mixed': its parts are trained as such: .*: 'mixed.b0' \[n, 8\], 'mixed.b1' \[n, 4\]"),
        ("composed", [0], 8, r"'composed': its parts .* own row numbers: 'composed.q' \[n, 8\], 'composed.r' \[n, 8\]"),
        ("composed.r", [40], 8, r"row 40 is not in 0\.\.39"),
        ("mixed.b2", [0], 4, r"has no table 'mixed.b2'; tables: \['composed', 'composed.q', .*'item', 'item.b0', "),
    ],
)
async def test_what_no_part_takes_is_refused_by_name(directory, publisher, table, rows, columns, message):
    with pytest.raises(DeltaFormatError, match=message):
        await publisher.publish(table, rows, np.ones((1, columns), np.float32))
    assert await published(directory) == []
    assert not publisher.pruned_updates


async def test_rows_of_a_divided_table_need_its_own_snapshot(directory, publisher, tmp_path):
    other = all_divisions(1).export(tmp_path, version=1).path.parent.parent
    for store, error, message in (
        (None, DeltaError, "'item' of 'fresh' is divided by popularity, .* give the publisher `store`"),
        (other, SnapshotCorruptError, "identity .* is .*, published was "),
    ):
        with pytest.raises(error, match=message):
            await AsyncDeltaPublisher(directory, MODEL, 1, store).publish("item", [0], np.ones((1, 8), np.float32))
    assert await published(directory) == []


async def test_values_that_one_part_can_not_hold_keep_back_all_parts(directory, publisher, snapshot):
    classes = snapshot.row_classes("item").classes()
    hot, cold = int(np.flatnonzero(classes == 0)[3]), int(np.flatnonzero(classes == 1)[5])
    values = np.ones((2, 8), np.float32)
    for value, message in (
        (1e6, f"'item', part 'item.b0': row {hot} has values that fp16 can't hold"),
        (np.nan, f"table 'item': row {hot} holds NaN"),
    ):
        values[0, 0] = value
        with pytest.raises(DeltaFormatError, match=message):
            await publisher.publish("item", [hot, cold], values)
    assert await published(directory) == []


def test_updates_of_pruned_rows_are_counted_for_the_next_export(tmp_path, snapshot, store, caplog):
    pruned = np.flatnonzero(snapshot.row_classes("item").classes() == 2)
    with_open(str(tmp_path / "registry"), lambda registry: register_version(registry, snapshot))
    with DeltaPublisher(tmp_path / "registry", MODEL, 1, store) as publisher, caplog.at_level(logging.WARNING):
        assert publisher.write_pruned(tmp_path / "none.safetensors") == 0
        for rows in (pruned[:12], pruned[10:11], pruned[10:20]):
            assert publisher.publish("item", rows, np.ones((rows.size, 8), np.float32)) == 0
    assert [record.message for record in caplog.records if "is pruned of rows" in record.message] == [
        f"table 'item' of '{MODEL}' is pruned of rows {pruned[:8].tolist()} and 4 more: updates of such rows are not "
        "written, but counted"
    ]
    found = publisher.pruned_updates["item"]
    assert found.keys.tolist() == pruned[:20].tolist()
    assert found.counts.tolist() == [1] * 10 + [3, 2] + [1] * 8
    assert found.total == 23
    assert publisher.write_pruned(tmp_path / "kept.safetensors") == 20
    assert not (tmp_path / "none.safetensors").exists()
    ((table, counts),) = read_access_counts([tmp_path / "kept.safetensors"], snapshot.spec).items()
    expected = np.zeros(600, np.uint32)
    expected[found.keys] = found.counts
    assert table == "item"
    np.testing.assert_array_equal(counts[:], expected)
    assert load_numpy(tmp_path / "kept.safetensors")["item/num_embeddings"] == 600


async def test_a_version_that_is_divided_otherwise_begins_a_stream(directory, tmp_path):
    fleet = FleetRegistry(directory)
    await register_version(directory, MADE.export(tmp_path / "store", version=1))
    moved = replace(MADE, counts=MADE.counts | {"film": np.roll(MADE.counts["film"], 1)})
    spec = delta_spec(("int8",))
    # A table that is not divided any more has its rows elsewhere, too: nobody else would notice.
    for version, other, message in (
        (
            2,
            moved.export(tmp_path, version=2, last_delta=0, delta_base=1),
            r"rows of tables \['film'\] lie elsewhere than in version 1",
        ),
        (
            3,
            export_state(tmp_path, spec, random_tables(spec, 0), 3, 0, 1),
            r"version 3 .*tables \['composed', 'film', 'item', 'mixed', 'narrow'\]",
        ),
    ):
        with raises_kind("delta_base", match=message):
            await publish(fleet, other.path, tmp_path / "store", clock=lambda: 1.0)
        assert await fleet.version(MODEL, version) is None
        assert not (tmp_path / "store" / MODEL / str(version)).exists()
    new = moved.export(tmp_path, version=4)
    assert (await publish(fleet, new.path, tmp_path / "store", clock=lambda: 1.0)).record.delta_base == 4
