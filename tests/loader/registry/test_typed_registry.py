"""Records of a fleet, read and written through a `FleetRegistry`: against a directory and against a real Redis."""

from __future__ import annotations

import asyncio
import functools
import logging

import pytest

from loader.errors import RegistryConflictError, RegistryRecordError
from loader.registry.fleet import (
    FLEET,
    FleetRecord,
    FleetRegistry,
    NodeRecord,
    PublishedVersion,
    VersionReport,
    VersionStats,
    WantedModel,
    epoch_of,
    node_key,
    rollout_key,
    version_key,
    wanted_key,
)
from shardrank_testing.registries import contract, with_open

FIRST = WantedModel(model="m", epoch=1, live=1, hold=(1,), serve=(1,))
PUBLISHED = PublishedVersion(
    model="m", version=9, identity="ab" * 32, delta_base=9, last_delta=0, rows_bytes=100, published_at=5.0
)
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
    versions=(
        VersionReport(model="m", version=9, state="ready", stats=VersionStats(requests=3, latency_counts=(1, 2))),
    ),
)


def with_fleet(scenario):
    """Makes a test of a coroutine that takes the `FleetRegistry` of an empty registry."""

    @contract
    @functools.wraps(scenario)
    async def with_registry(registry):
        await scenario(FleetRegistry(registry))

    return with_registry


# What is wanted


@with_fleet
async def test_what_is_wanted_comes_back_as_it_was_put(fleet):
    other = FIRST.model_copy(update={"model": "n", "node_hold": {"a:1": (3, 4)}, "epoch": 8})
    await fleet.put_wanted(FIRST, None)
    await fleet.put_wanted(other, None)
    assert await fleet.wanted() == {"m": FIRST, "n": other}
    assert await fleet.wanted_model("n") == other
    assert await fleet.wanted_model("o") is None


@with_fleet
async def test_a_put_over_another_epoch_is_a_conflict(fleet):
    with pytest.raises(RegistryConflictError, match="epoch None, not 1"):
        await fleet.put_wanted(FIRST, 1)
    await fleet.put_wanted(FIRST, None)
    with pytest.raises(RegistryConflictError, match="epoch 1, not None"):
        await fleet.put_wanted(FIRST, None)
    second = FIRST.model_copy(update={"epoch": 2, "live": 2})
    await fleet.put_wanted(second, 1)
    assert await fleet.wanted_model("m") == second


@with_fleet
async def test_an_update_sees_what_is_there_and_counts_the_epoch_up(fleet):
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
    assert await fleet.wanted_model("m") == second


@with_fleet
async def test_updates_of_many_at_once_are_all_there(fleet):
    await fleet.put_wanted(FIRST, None)

    def hold_one_more(now):
        return now.model_copy(update={"hold": (*now.hold, len(now.hold) + 1)})

    await asyncio.gather(*(fleet.update_wanted("m", hold_one_more) for _ in range(12)))
    wanted = await fleet.wanted_model("m")
    assert wanted.hold == tuple(range(1, 14))
    assert wanted.epoch == 13


@with_fleet
async def test_an_update_that_is_always_too_late_gives_up(fleet):
    epochs = iter(range(1, 1000))

    class Meddling:
        """Another writer, who writes after each read."""

        def __init__(self, registry):
            self.registry = registry

        async def get(self, key):
            entry = await self.registry.get(key)
            record = FIRST.model_copy(update={"epoch": next(epochs)})
            await self.registry.put(key, record.model_dump_json().encode(), entry.revision if entry else 0)
            return entry

        async def put(self, key, value, expected_revision):
            return await self.registry.put(key, value, expected_revision)

    with pytest.raises(RegistryConflictError, match="others wrote first 64 times in a row"):
        await FleetRegistry(Meddling(fleet.registry)).update_wanted("m", lambda _: FIRST.model_copy(update={"live": 7}))


@with_fleet
async def test_a_record_of_another_model_can_not_be_put_in_ones_place(fleet):
    with pytest.raises(RegistryRecordError, match="model 'm' in the record of 'n'"):
        await fleet.update_wanted("n", lambda _: FIRST)


@with_fleet
async def test_a_record_is_restored_over_none_and_over_a_lower_epoch_only(fleet):
    fifth = FIRST.model_copy(update={"epoch": 5})
    assert await fleet.restore_wanted(fifth)
    assert not await fleet.restore_wanted(fifth.model_copy(update={"live": 4}))
    assert not await fleet.restore_wanted(FIRST)
    assert await fleet.wanted_model("m") == fifth
    assert await fleet.restore_wanted(fifth.model_copy(update={"epoch": 6}))
    assert (await fleet.wanted_model("m")).epoch == 6


@with_fleet
async def test_of_all_who_restore_at_once_the_highest_epoch_remains(fleet):
    records = [FIRST.model_copy(update={"epoch": epoch}) for epoch in (3, 9, 1, 7, 9, 2)]
    await asyncio.gather(*(fleet.restore_wanted(record) for record in records))
    assert (await fleet.wanted_model("m")).epoch == 9


# Versions


@with_fleet
async def test_versions_are_listed_by_model_and_number(fleet):
    records = [
        PUBLISHED.model_copy(update={"model": model, "version": version})
        for model, version in (("m", 100), ("m", 9), ("n", 1), ("m", 2**63 - 1))
    ]
    for record in records:
        await fleet.put_version(record)
    assert [(one.model, one.version) for one in await fleet.versions()] == [
        ("m", 9),
        ("m", 100),
        ("m", 2**63 - 1),
        ("n", 1),
    ]
    assert [one.version for one in await fleet.versions("n")] == [1]
    assert await fleet.versions("o") == []
    assert await fleet.version("m", 9) == records[1]
    assert await fleet.version("m", 10) is None


@with_fleet
async def test_a_version_is_put_once_and_the_same_one_again_changes_nothing(fleet):
    await fleet.put_version(PUBLISHED)
    await fleet.put_version(PUBLISHED.model_copy(update={"published_at": 99.0}))
    assert await fleet.version("m", 9) == PUBLISHED
    with pytest.raises(RegistryConflictError, match="a version is immutable"):
        await fleet.put_version(PUBLISHED.model_copy(update={"identity": "cd" * 32}))
    assert await fleet.version("m", 9) == PUBLISHED


@with_fleet
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


# Nodes


@with_fleet
async def test_nodes_are_there_as_they_announced_themselves(fleet):
    other = NODE.model_copy(update={"node_id": "a", "draining": True})
    await fleet.announce_node(NODE, 60.0)
    await fleet.announce_node(other, 60.0)
    assert await fleet.nodes() == [other, NODE]
    changed = NODE.model_copy(update={"memory_total_bytes": 3})
    await fleet.announce_node(changed, 60.0)
    assert await fleet.nodes() == [other, changed]
    await fleet.withdraw_node("a")
    assert await fleet.nodes() == [changed]


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"node_id": "bad"}', NODE.model_dump_json().encode(), b"\xff"])
def test_a_node_that_can_not_be_read_hides_no_other_and_is_told_once(url, caplog, value):
    async def scenario(registry):
        fleet = FleetRegistry(registry)
        await fleet.announce_node(NODE, 60.0)
        await registry.announce(node_key("bad"), value, 60.0)
        for _ in range(3):
            assert await fleet.nodes() == [NODE]

    with caplog.at_level(logging.WARNING):
        with_open(url, scenario)
    assert len(caplog.records) == 1
    assert "nodes/bad: " in caplog.text


@with_fleet
async def test_the_first_shard_node_says_how_the_fleet_divides_rows(fleet):
    assert await fleet.fleet() is None
    records = [FleetRecord(num_shards=shards, sharding="hash", replicate_bytes=0) for shards in (1, 2, 3, 4)]
    told = await asyncio.gather(*(fleet.join_fleet(record) for record in records))
    assert len({record.num_shards for record in told}) == 1
    assert await fleet.fleet() == told[0]


# Records that can't be read


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (wanted_key("m"), b"{", "wanted/m: record: Invalid JSON"),
        (wanted_key("m"), b'{"model": "m", "epoch": 0}', "wanted/m: epoch: Input should be greater than or equal to 1"),
        (wanted_key("n"), FIRST.model_dump_json().encode(), "wanted/n: the record there belongs to wanted/m"),
        (version_key("m", 9), b"{}", "versions/m/0{19}9: model: Field required"),
        (version_key("m", 8), PUBLISHED.model_dump_json().encode(), "belongs to versions/m/0{19}9"),
        (FLEET, b'{"num_shards": 0}', "fleet: num_shards"),
    ],
)
def test_a_record_that_can_not_be_read_is_named(url, key, value, message):
    async def scenario(registry):
        fleet = FleetRegistry(registry)
        await registry.put(key, value, 0)
        read = {"wanted": fleet.wanted, "versions": fleet.versions, "fleet": fleet.fleet}[key.partition("/")[0]]
        with pytest.raises(RegistryRecordError, match=message):
            await read()

    with_open(url, scenario)


@with_fleet
async def test_a_key_that_a_later_release_added_is_let_pass(fleet):
    await fleet.registry.put(wanted_key("m"), FIRST.model_dump_json()[:-1].encode() + b', "new": [1]}', 0)
    assert await fleet.wanted_model("m") == FIRST


# Records that the caller reads itself


@with_fleet
async def test_bytes_with_an_epoch_are_restored_like_a_record(fleet):
    key = rollout_key("m")
    assert await fleet.raw(key) is None
    assert await fleet.restore_raw(key, b'{"epoch": 4, "x": 1}', 4)
    assert not await fleet.restore_raw(key, b'{"epoch": 4, "x": 2}', 4)
    assert (await fleet.raw(key)).value == b'{"epoch": 4, "x": 1}'
    assert await fleet.restore_raw(key, b'{"epoch": 5}', 5)
    assert (await fleet.raw(key)).value == b'{"epoch": 5}'


@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"[]", b"{}", b'{"epoch": true}', b'{"epoch": "1"}', b'{"epoch": 0}', b'{"epoch": 1.5}', b"\xff"],
)
def test_bytes_without_an_epoch_are_named(value):
    with pytest.raises(RegistryRecordError, match=r"^rollouts/m: "):
        epoch_of("rollouts/m", value)
