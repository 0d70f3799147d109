"""Records of a fleet, read and written through a `FleetRegistry`: against a directory and against a real Redis."""

from __future__ import annotations

import asyncio
import logging

import pytest

from loader.errors import RegistryConflictError, RegistryRecordError
from loader.registry.fleet import (
    FLEET,
    NODES,
    QUALITY,
    DenseStep,
    NodeRecord,
    PublishedVersion,
    Quality,
    VersionReport,
    VersionStats,
    WantedModel,
    version_key,
    wanted_key,
)

FIRST = WantedModel(model="m", epoch=1, live=1, hold=(1,), serve=(1,))
PUBLISHED = PublishedVersion(
    model="m", version=9, identity="ab" * 32, delta_base=9, last_delta=0, rows_bytes=100, published_at=5.0
)
STATS = VersionStats(requests=3, latency_counts=(1, 2))
NODE = NodeRecord(
    node_id="shard-0-host:7000",
    kind="shard",
    process_id=7,
    address="host:7000",
    shard_index=0,
    num_shards=2,
    sharding="hash",
    replicate_bytes=0,
    applied={"m": 3},
    versions=(VersionReport(model="m", version=9, state="ready", stats=STATS),),
)


async def test_a_put_over_another_epoch_is_a_conflict(fleet):
    with pytest.raises(RegistryConflictError, match="epoch None, not 1"):
        await fleet.put_wanted(FIRST, 1)
    await fleet.put_wanted(FIRST, None)
    with pytest.raises(RegistryConflictError, match="epoch 1, not None"):
        await fleet.put_wanted(FIRST, None)
    second = FIRST.model_copy(update={"epoch": 2, "live": 2})
    await fleet.put_wanted(second, 1)
    assert await fleet.wanted_model("m") == second


async def test_an_update_sees_what_is_there_and_increments_the_epoch(fleet):
    seen = []

    def change(now):
        seen.append(now)
        return now.model_copy(update={"live": now.live + 1, "epoch": 77}) if now is not None else FIRST

    assert await fleet.update_wanted("m", change) == FIRST
    second = await fleet.update_wanted("m", change)
    assert second == FIRST.model_copy(update={"live": 2, "epoch": 2})
    assert seen == [None, FIRST]
    assert await fleet.update_wanted("m", lambda _: None) == second
    assert await fleet.update_wanted("m", lambda now: now) == second
    with pytest.raises(RegistryRecordError, match="wanted/m: model 'n' in the record of 'm'"):
        await fleet.update_wanted("m", lambda now: now.model_copy(update={"model": "n"}))
    assert await fleet.wanted_model("m") == second


async def test_a_record_is_restored_over_a_lower_epoch_only(fleet):
    fifth = FIRST.model_copy(update={"epoch": 5})
    assert await fleet.restore_wanted(fifth)
    assert not await fleet.restore_wanted(fifth.model_copy(update={"live": 4}))
    assert not await fleet.restore_wanted(FIRST)
    assert await fleet.wanted_model("m") == fifth
    assert await fleet.restore_wanted(fifth.model_copy(update={"epoch": 6}))
    assert (await fleet.wanted_model("m")).epoch == 6
    await fleet.registry.put(wanted_key("n"), b'{"epoch": true}', 0)
    with pytest.raises(RegistryRecordError, match="wanted/n: epoch: Input should be a valid integer"):
        await fleet.restore_wanted(FIRST.model_copy(update={"model": "n"}))


async def test_versions_are_listed_by_model_and_number(fleet):
    named = [("m", 100), ("m", 9), ("n", 1), ("m", 2**63 - 1)]
    records = [PUBLISHED.model_copy(update={"model": model, "version": version}) for model, version in named]
    for record in records:
        await fleet.put_version(record)
    assert [(record.model, record.version) for record in await fleet.versions()] == sorted(named)
    assert [record.version for record in await fleet.versions("n")] == [1]
    assert await fleet.versions("o") == []
    assert await fleet.version("m", 9) == records[1]
    assert await fleet.version("m", 10) is None


async def test_a_version_is_dropped_with_its_spec(fleet):
    await fleet.put_version(PUBLISHED)
    await fleet.put_spec("m", 9, '{"a": "ä"}')
    await fleet.put_spec("m", 9, '{"a": "ä"}')
    with pytest.raises(RegistryConflictError, match="another spec"):
        await fleet.put_spec("m", 9, "{}")
    assert await fleet.spec("m", 9) == '{"a": "ä"}'
    assert await fleet.drop_version("m", 9)
    assert not await fleet.drop_version("m", 9)
    assert await fleet.version("m", 9) is None
    assert await fleet.spec("m", 9) is None


async def test_another_record_of_what_is_published_is_a_conflict(fleet):
    """The same one, published at another time, is not."""
    step = {"model": "m", "version": 9, "step": 2, "sequence": 0, "size_bytes": 1, "max_drift": 0.1}
    for put, record, changed, message in (
        (fleet.put_version, PUBLISHED, {"identity": "x"}, "this one has identity x, .* a version is immutable"),
        (
            fleet.put_dense_step,
            DenseStep(sha256="ab" * 32, published_at=5.0, **step),
            {"sha256": "x"},
            "dense step 2 is on record; 2 must be higher",
        ),
    ):
        await put(record)
        await put(record.model_copy(update={"published_at": 8.0}))
        with pytest.raises(RegistryConflictError, match=message):
            await put(record.model_copy(update=changed))
    assert await fleet.version("m", 9) == PUBLISHED


async def test_a_models_quality_is_there_as_long_as_it_is_announced(fleet):
    first, second = (Quality(model=model, auc=0.7, recent_auc=0.75, scored=9) for model in ("a", "b"))
    await fleet.announce_quality(first, 60.0)
    await fleet.announce_quality(second, 0.2)
    await fleet.registry.announce(f"{QUALITY}c", b"{", 60.0)
    assert await fleet.qualities() == {"a": first, "b": second}
    while len(await fleet.qualities()) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert await fleet.qualities() == {"a": first}


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"node_id": "bad"}', b"\xff"])
async def test_an_unreadable_node_hides_no_other_and_is_logged_once(fleet, caplog, value):
    await fleet.announce_node(NODE, 60.0)
    await fleet.registry.announce(f"{NODES}bad", value, 60.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await fleet.nodes() == [NODE]
    assert len(caplog.records) == 1
    assert "nodes/bad: " in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (wanted_key("m"), b"{", "wanted/m: document: Invalid JSON"),
        (wanted_key("m"), b'{"model": "m", "epoch": 0}', "wanted/m: epoch: Input should be greater than or equal to 1"),
        (version_key("m", 9), b"{}", "versions/m/0{19}9: model: Field required"),
        (FLEET, b'{"num_shards": 0}', "fleet: num_shards"),
    ],
)
async def test_an_unreadable_record_is_named(fleet, key, value, message):
    await fleet.registry.put(key, value, 0)
    read = {"wanted": fleet.wanted, "versions": fleet.versions, "fleet": fleet.fleet}[key.partition("/")[0]]
    with pytest.raises(RegistryRecordError, match=message):
        await read()


async def test_a_key_of_a_later_release_is_ignored(fleet):
    await fleet.registry.put(wanted_key("m"), FIRST.model_dump_json()[:-1].encode() + b', "new": [1]}', 0)
    assert await fleet.wanted_model("m") == FIRST
