"""`shardrank counts`: what all processes counted is one file, which export and plan read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result

from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.snapshot.per_row import read_access_counts
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.wire.address import Address
from shardrank_testing.command_line import shardrank
from shardrank_testing.nodes import MODEL, VERSION, film_bags, serving, small_node, small_spec
from shardrank_testing.serving_api import MODEL as API_MODEL
from shardrank_testing.serving_api import api_request, ask, running_api, served_service, write_api_model

LOCAL = Address.parse("127.0.0.1:0")


def counted(*films: list[int]) -> list[Any]:
    """Return one node for each list of film rows, which it has looked up."""
    nodes = [small_node() for _ in films]
    for node, rows in zip(nodes, films, strict=True):
        if rows:
            node.pool(MODEL, VERSION, film_bags(rows))
    return nodes


async def counts_of(*flags: object, code: int = 0) -> Result:
    return await asyncio.to_thread(shardrank, "counts", *flags, code=code)


def seen_films(file: Path) -> dict[int, int]:
    counts = read_access_counts(file, small_spec())
    assert set(counts) == {"genre", "film", "user"}
    assert not counts["user"].any()
    return {row: int(counts["film"][row]) for row in np.flatnonzero(counts["film"]).tolist()}


def test_counts_of_shards_and_replicas_are_added_in_one_file(tmp_path: Path) -> None:
    first, second, third = counted([3, 3, 499], [3, 7], [])
    file = tmp_path / "counts.safetensors"

    async def program() -> None:
        async with serving(LOCAL, first) as one, serving(LOCAL, second) as two, serving(LOCAL, third) as three:
            replicas = f"{one.addresses[0]},{two.addresses[0]}"
            done = await counts_of("--shard", replicas, "--shard", three.addresses[0], "--out", file)
            assert "film: 3 rows, about 5 lookups" in done.output
            assert "what 3 processes counted" in done.output
            assert seen_films(file) == {3: 3, 7: 1, 499: 1}
            file.unlink()
            gone = f"unix:{tmp_path}/gone.sock"
            done = await counts_of("--shard", f"{one.addresses[0]},{gone}", "--out", file, code=1)
            assert "gone.sock" in done.output

    asyncio.run(program())
    assert list(tmp_path.iterdir()) == []


def test_nodes_of_a_fleet_are_found_in_its_registry(tmp_path: Path) -> None:
    nodes = counted([3, 3], [4])

    async def program() -> None:
        registry = open_registry(tmp_path / "registry")
        fleet = FleetRegistry(registry)
        await fleet.put_wanted(WantedModel(model=MODEL, epoch=1, live=VERSION), None)
        async with serving(LOCAL, nodes[0]) as one, serving(LOCAL, nodes[1]) as two:
            addresses = [str(one.addresses[0]), str(two.addresses[0]), f"unix:{tmp_path}/elsewhere.sock"]
            for number, (address, state) in enumerate(zip(addresses, ("ready", "ready", "staging"), strict=True)):
                report = VersionReport(model=MODEL, version=VERSION, state=state)
                record = NodeRecord(
                    node_id=f"node-{number}", kind="shard", process_id=1, versions=(report,), num_shards=2,
                    address=address, shard_index=number % 2,
                )  # fmt: skip
                await fleet.announce_node(record, ttl_s=60)
            await counts_of("--registry", tmp_path / "registry", "--out", tmp_path / "counts")
        await registry.close()

    asyncio.run(program())
    assert seen_films(tmp_path / "counts") == {3: 2, 4: 1}


def test_a_serving_process_reports_what_it_counted(tmp_path: Path) -> None:
    model, file = write_api_model(tmp_path), tmp_path / "counts"
    service = served_service(model)

    async def program() -> None:
        async with running_api(service) as api:
            for seed in range(2 * SAMPLE_EVERY):
                await ask(service, api_request(seed % 7))
            await counts_of("--server", api.http.base_url, "--model", API_MODEL, "--out", file)

    try:
        asyncio.run(program())
    finally:
        service.close()
    counts = read_access_counts(file, model.spec)
    # Every request names row 3 of the tags twice or more, and no other row of them so often.
    assert int(counts["tags"].argmax()) == 3
    assert set(counts) == {table.name for table in model.spec.tables}
