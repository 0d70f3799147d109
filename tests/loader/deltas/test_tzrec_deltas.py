"""Dumps of TorchEasyRec, written by pyarrow as it writes them, are published in order of step, each once."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from loader.deltas import tzrec_deltas
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.deltas.tzrec_deltas import import_deltas
from loader.errors import DeltaFormatError, RegistryRecordError
from loader.registry import open_registry
from loader.registry.fleet import delta_stream
from loader.snapshot.reader import Snapshot
from serving.cli import main
from serving.cli.settings import registry_url
from shardrank_testing.deltas import MODEL, export_state, read_entry, register_version
from shardrank_testing.snapshots import model_of, random_tables, table_of, write_snapshot

SPEC = model_of([table_of(name, 400, 6, dtype="fp32") for name in ("user", "item")], MODEL)
PATH = "model.group.ebc.embedding_bags"
STREAM = delta_stream(MODEL, 1)
FLOAT = pa.float32()


def dump(folder, step, rows, rank=None, ranks=2, of=FLOAT, **changed):
    """Write rows, {table_fqn: {key: values}}, as a rank or as the only one."""
    keys = [(fqn, key, values) for fqn, of_table in rows.items() for key, values in of_table.items()]
    columns = {
        "global_step": pa.array([step] * len(keys), pa.int64()),
        "rank": pa.array([rank or 0] * len(keys), pa.int32()),
        "world_size": pa.array([ranks] * len(keys), pa.int32()),
        "feature_name": pa.array(["f"] * len(keys), pa.string()),
        "table_fqn": pa.array([fqn for fqn, _, _ in keys], pa.string()),
        "key_id": pa.array([key for _, key, _ in keys], pa.int64()),
        "embedding": pa.array([list(values) for _, _, values in keys], pa.list_(of)),
        "source": pa.array(["model_delta_tracker"] * len(keys), pa.string()),
    } | changed
    name = f"delta_embedding_step_{step}"
    at = folder / f"{name}.parquet"
    if rank is not None:
        at = folder / f"step_{step}" / f"{name}_rank_{rank}_of_{ranks}.parquet"
        at.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), at)
    return at


@pytest.fixture
async def registry(registry, tmp_path):
    await register_version(registry, export_state(tmp_path / "store", SPEC, random_tables(SPEC, 0), 1))
    (tmp_path / "dumps").mkdir()
    return registry


async def run(registry, folder, **options):
    publisher = AsyncDeltaPublisher(registry, MODEL, 1, name=tzrec_deltas.PUBLISHER)
    return [done async for done in import_deltas(folder, registry, publisher, **options)]


async def published(registry):
    """Of each delta the table, and its rows by number."""
    found, tail = [], None
    for entry in await registry.read(STREAM, 0, max_entries=10_000, max_bytes=1 << 30):
        batch, tail = await read_entry(registry, STREAM, entry, tail)
        values = batch.stored.copy().view(np.float32).tolist()
        found.append((batch.table, dict(zip(batch.rows.tolist(), values, strict=True))))
    return found


def ones(value):
    return [float(value)] * 6


async def test_steps_are_taken_by_their_number_and_once(registry, tmp_path):
    folder = tmp_path / "dumps"
    for step in (10, 9, 100):
        dump(folder, step, {f"{PATH}.user": {3: ones(step), 4: ones(step)}, f"{PATH}.item": {399: ones(-step)}})
    assert [(done.step, done.rank, done.rows) for done in await run(registry, folder)] == [
        (9, 0, 3),
        (10, 0, 3),
        (100, 0, 3),
    ]
    first = await published(registry)
    assert first == [
        delta
        for step in (9, 10, 100)
        for delta in (("user", {3: ones(step), 4: ones(step)}), ("item", {399: ones(-step)}))
    ]
    assert await run(registry, folder) == []
    dump(folder, 101, {f"{PATH}.user": {0: ones(7)}})
    assert [done.step for done in await run(registry, folder)] == [101]
    assert await published(registry) == [*first, ("user", {0: ones(7)})]


async def test_ranks_go_on_each_behind_its_own_step(registry, tmp_path):
    folder = tmp_path / "dumps"
    dump(folder, 5, {f"{PATH}.user": {0: ones(5)}}, rank=0)
    dump(folder, 7, {}, rank=0)
    assert [(done.step, done.rank) for done in await run(registry, folder)] == [(5, 0), (7, 0)]
    dump(folder, 6, {f"{PATH}.user": {1: ones(6)}}, rank=1)
    assert [(done.step, done.rank, done.rows) for done in await run(registry, folder)] == [(6, 1, 1)]
    assert json.loads((await registry.get(f"imports/{STREAM}")).value) == {"0": 7, "1": 6}


async def test_a_file_whose_step_was_not_noted_is_published_again(registry, tmp_path, monkeypatch):
    """Killed between the rows and the note, the same rows come again, which changes nothing."""
    folder = tmp_path / "dumps"
    dump(folder, 1, {f"{PATH}.user": {0: ones(1)}})

    async def killed(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(registry), "put", killed)
        with pytest.raises(KeyboardInterrupt):
            await run(registry, folder)
    await run(registry, folder)
    assert await published(registry) == [("user", {0: ones(1)})] * 2


async def test_files_are_followed_as_they_come(registry, tmp_path):
    folder, waited = tmp_path / "dumps", []

    async def sleep(seconds):
        waited.append(seconds)
        if len(waited) > 2:
            raise KeyboardInterrupt
        dump(folder, len(waited), {f"{PATH}.user": {0: ones(len(waited))}})

    with pytest.raises(KeyboardInterrupt):
        await run(registry, folder, follow=True, sleep=sleep)
    assert await published(registry) == [("user", {0: ones(1)}), ("user", {0: ones(2)})]
    assert waited == [tzrec_deltas.POLL_S] * 3


async def test_rows_of_bytes_are_codes_scale_and_offset(registry, tmp_path):
    codes = np.array([[0, 1, 2, 253, 254, 255], [9, 9, 9, 9, 9, 9]], np.uint8)
    scale, offset = np.array([[0.5], [0.25]], np.float16), np.array([[-3], [1]], np.float16)
    rows = np.concatenate([codes, scale.view(np.uint8), offset.view(np.uint8)], axis=1)
    dump(tmp_path / "dumps", 1, {"user": dict(enumerate(rows))}, of=pa.uint8())
    await run(registry, tmp_path / "dumps")
    expected = codes * scale.astype(np.float32) + offset.astype(np.float32)
    assert await published(registry) == [("user", dict(enumerate(expected.tolist())))]


async def test_rows_of_keyed_tables_are_upserted(registry, tmp_path):
    table = table_of("user", 50, 6, dtype="fp32", keys="int64")
    state = {"tables": {"user": np.ones((2, 6), np.float32)}, "keys": {"user": np.array([7, 8])}}
    folder, _ = write_snapshot(tmp_path / "keyed", model_of([table], MODEL), version=2, **state)
    await register_version(registry, Snapshot.open(folder))
    keys = [-(2**63), -1, 2**63 - 1]
    dump(tmp_path / "dumps", 1, {f"{PATH}.user": {key: ones(key % 5) for key in keys}})
    publisher = AsyncDeltaPublisher(registry, MODEL, 2, name="x")
    assert [done.rows async for done in import_deltas(tmp_path / "dumps", registry, publisher)] == [3]
    (entry,) = await registry.read(delta_stream(MODEL, 2), 0)
    batch, _ = await read_entry(registry, delta_stream(MODEL, 2), entry, None)
    assert (batch.operation, batch.rows.tolist()) == (1, keys)


async def test_tables_are_found_by_name_or_as_they_are_told(registry, tmp_path):
    rows = {"some.other": {0: ones(1)}, "x.superuser": {1: ones(2)}, f"{PATH}.item": {2: ones(3)}}
    dump(tmp_path / "dumps", 1, rows)
    (done,) = await run(registry, tmp_path / "dumps", table_keys={"user": "some.other"})
    assert (done.rows, done.unknown) == (2, ("x.superuser",))
    assert await published(registry) == [("user", {0: ones(1)}), ("item", {2: ones(3)})]


async def test_rows_of_two_tables_that_end_alike_are_refused(registry, tmp_path):
    dump(tmp_path / "dumps", 1, {"a.user": {0: ones(1)}, "b.user": {1: ones(2)}})
    with pytest.raises(DeltaFormatError, match=r"'b\.user' and 'a\.user' are both rows of table 'user'"):
        await run(registry, tmp_path / "dumps")
    # One that is named is no other one's.
    (done,) = await run(registry, tmp_path / "dumps", table_keys={"user": "b.user"})
    assert (done.rows, done.unknown) == (1, ("a.user",))


async def test_steps_are_published_again_from_the_one_that_is_named(registry, tmp_path):
    folder = tmp_path / "dumps"
    for step in (1, 2, 3):
        dump(folder, step, {"user": {0: ones(step)}})
    await run(registry, folder)
    assert [done.step for done in await run(registry, folder, from_step=2)] == [2, 3]
    assert await run(registry, folder) == []
    dump(folder, 2, {"user": {1: ones(9)}})
    assert [done.step for done in await run(registry, folder, from_step=2, table_keys={"user": "user"})] == [2, 3]


async def test_rows_of_tables_by_turns_are_few_deltas(registry, tmp_path):
    rows = [(name, row) for row in range(300) for name in ("user", "item")]
    columns = {
        "table_fqn": pa.array([name for name, _ in rows]),
        "key_id": pa.array([row for _, row in rows], pa.int64()),
        "embedding": pa.array([ones(row) for _, row in rows], pa.list_(FLOAT)),
        "global_step": pa.array([1] * len(rows), pa.int64()),
    }
    pq.write_table(pa.table(columns), tmp_path / "dumps" / "delta_embedding_step_1.parquet")
    await run(registry, tmp_path / "dumps")
    assert await published(registry) == [(name, {row: ones(row) for row in range(300)}) for name in ("user", "item")]


REFUSED = {
    "cut": (lambda at: at.write_bytes(at.read_bytes()[:-20]), "can't be read as rows with"),
    "other columns": (lambda at: pq.write_table(pa.table({"x": [1]}), at), "can't be read as rows with"),
    "nulls": (lambda at: dump(at.parent, 1, {"user": {0: ones(1)}}, key_id=pa.array([None], pa.int64())), "found some"),
    "another step": (
        lambda at: dump(at.parent, 1, {"user": {0: ones(1)}}, global_step=pa.array([3], pa.int64())),
        r"expected rows of step 1, found \[3\]",
    ),
    "texts": (
        lambda at: dump(at.parent, 1, {"user": {0: ["a"] * 6}}, of=pa.string()),
        r"of types \[.*\], found \['string', 'int64', 'list<element: string>', 'int64'\]",
    ),
    "widths": (
        lambda at: dump(at.parent, 1, {"user": {0: ones(1), 1: [1.0]}}),
        r"table 'user': expected embeddings of float, all as wide, at least 1, found widths \[1, 6\]",
    ),
    "another dim": (lambda at: dump(at.parent, 1, {"user": {0: [1.0]}}), r"values are \[1, 1\], expected \[1, 6\]"),
    "few bytes": (
        lambda at: dump(at.parent, 1, {"user": {0: [1, 2, 3]}}, of=pa.uint8()),
        r"expected embeddings of uint8, all as wide, at least 5, found widths \[3\]",
    ),
    "wide": (
        lambda at: dump(at.parent, 1, {"user": {0: [1.0] * 11}}),
        r"expected embeddings of at most 10 values, found 11 in all",
    ),
    "number": (
        lambda at: dump(at.parent, 1, {"user": {0: ones(1)}}, embedding=pa.array([1.0], FLOAT)),
        r"found \['string', 'int64', 'float', 'int64'\]",
    ),
    "outside": (lambda at: dump(at.parent, 1, {"user": {400: ones(1)}}), r"row 400 is not in 0\.\.399"),
    "NaN": (lambda at: dump(at.parent, 1, {"user": {4: ones("nan")}}), "row 4 holds NaN"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
async def test_what_is_no_dump_is_refused_by_file(registry, tmp_path, change, message):
    at = dump(tmp_path / "dumps", 1, {"user": {0: ones(1)}})
    change(at)
    with pytest.raises(DeltaFormatError, match=message) as refused:
        await run(registry, tmp_path / "dumps")
    assert str(at) in str(refused.value)
    assert await published(registry) == []


async def test_a_record_that_is_none_is_refused(registry, tmp_path):
    await registry.put(f"imports/{STREAM}", b'["x"]', 0)
    with pytest.raises(RegistryRecordError, match=f"imports/{STREAM}: expected the last step of each rank"):
        await run(registry, tmp_path / "dumps")


def test_the_command_says_what_it_published(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "dumps"
    folder.mkdir()
    snapshot, _ = write_snapshot(store, SPEC, version=1)
    runner = CliRunner()

    async def publish() -> None:
        opened = open_registry(registry_url(None, store))
        await register_version(opened, Snapshot.open(snapshot))
        await opened.close()

    asyncio.run(publish())
    dump(folder, 4, {f"{PATH}.user": {0: ones(1)}, "else": {0: ones(1)}})
    command = ["deltas", "import", "--from", "tzrec", str(folder), "--model", MODEL, "--store", str(store)]
    unnamed = runner.invoke(main, command)
    assert unnamed.exit_code == 1
    done = runner.invoke(main, [*command, "--version", "1"])
    assert done.exit_code == 0, done.output
    assert "delta_embedding_step_4.parquet: step 4, rank 0: 1 rows" in done.output
    assert "up to delta 1; no table of the model: else" in done.output
    assert runner.invoke(main, [*command, "--version", "1"]).output == ""
