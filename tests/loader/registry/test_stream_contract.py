"""What every registry's streams keep to: each test runs against a directory and against a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from loader.errors import RegistryRecordError, StreamSequenceError
from loader.registry.registry import StreamBounds, StreamEntry
from shardrank_testing.registries import contract, with_open


@contract
async def test_a_stream_begins_anywhere_and_goes_on_by_one(registry):
    await registry.append("s", 254, b"a")
    for sequence, payload in ((255, b""), (256, b"\x00\n"), (257, b"d")):
        await registry.append("s", sequence, payload)
    assert await registry.bounds("s") == StreamBounds(254, 257)
    for wrong in (1, 253, 254, 257, 259, 2**53 - 1):
        with pytest.raises(StreamSequenceError, match=f"sequence {wrong} after 257; 258 is next"):
            await registry.append("s", wrong, b"?")
    entries = await registry.read("s", 0)
    assert [(entry.sequence, entry.payload) for entry in entries] == [
        (254, b"a"),
        (255, b""),
        (256, b"\x00\n"),
        (257, b"d"),
    ]
    assert [entry.sequence for entry in await registry.read("s", 255)] == [256, 257]
    assert await registry.read("s", 257) == []
    assert await registry.read("s", 10_000) == []


@pytest.mark.parametrize("sequence", [0, -1, 2**53])
def test_a_sequence_number_that_is_none_is_refused(url, sequence):
    async def scenario(registry):
        with pytest.raises(StreamSequenceError, match="allowed is 1 to"):
            await registry.append("s", sequence, b"")
        assert await registry.bounds("s") == StreamBounds(0, 0)

    with_open(url, scenario)


@contract
async def test_a_read_is_bounded_but_gives_at_least_one_entry(registry):
    for sequence in range(1, 11):
        await registry.append("s", sequence, b"x" * 100)
    assert [entry.sequence for entry in await registry.read("s", 3, max_entries=4)] == [4, 5, 6, 7]
    assert [entry.sequence for entry in await registry.read("s", 3, max_bytes=250)] == [4, 5]
    assert [entry.sequence for entry in await registry.read("s", 3, max_bytes=1)] == [4]
    for limits in ({"max_entries": 0}, {"max_bytes": 0}):
        with pytest.raises(RegistryRecordError, match="must be at least 1"):
            await registry.read("s", 0, **limits)


@contract
async def test_what_is_trimmed_is_gone_and_the_end_stays_known(registry):
    for sequence in range(250, 262):
        await registry.append("s", sequence, b"%d" % sequence)
    await registry.trim("s", 258)
    assert await registry.bounds("s") == StreamBounds(258, 261)
    assert [entry.sequence for entry in await registry.read("s", 0)] == [258, 259, 260, 261]
    await registry.trim("s", 3)
    assert await registry.bounds("s") == StreamBounds(258, 261)
    await registry.trim("s", 1000)
    assert await registry.bounds("s") == StreamBounds(262, 261)
    assert await registry.read("s", 0) == []
    await registry.trim("s", 1000)
    with pytest.raises(StreamSequenceError, match="262 is next"):
        await registry.append("s", 1, b"")
    await registry.append("s", 262, b"262")
    assert await registry.bounds("s") == StreamBounds(262, 262)
    assert await registry.read("s", 0) == [StreamEntry(262, b"262")]


@contract
async def test_of_publishers_that_append_the_same_number_one_wins(registry):
    results = await asyncio.gather(
        *(registry.append("s", 1, b"%d" % publisher) for publisher in range(12)), return_exceptions=True
    )
    won = [publisher for publisher, result in enumerate(results) if result is None]
    assert len(won) == 1
    assert sum(isinstance(result, StreamSequenceError) for result in results) == 11
    assert await registry.read("s", 0) == [StreamEntry(1, b"%d" % won[0])]
