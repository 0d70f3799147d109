"""`shardrank counts`: what all processes counted is one file, which export and plan read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from loader.access_counts import AccessCounts, read_access_counts
from loader.errors import ExportError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, WantedModel
from serving.cli.counts import join_parts
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.wire.address import Address
from shardrank_testing.command_line import shardrank
from shardrank_testing.divided import describe, divided_model
from shardrank_testing.nodes import MODEL, VERSION, film_bags, serving, small_node, small_spec
from shardrank_testing.serving_api import MODEL as API_MODEL
from shardrank_testing.serving_api import api_request, ask, running_api, served_service, write_api_model
from shardrank_testing.snapshots import one_table_spec

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
    counts = read_access_counts([file], small_spec())
    assert set(counts) == {"genre", "film", "user"}
    assert not counts["user"].total
    return dict(zip(counts["film"].keys.tolist(), counts["film"].counts.tolist(), strict=True))


def test_counts_of_shards_and_replicas_are_added_in_one_file(tmp_path: Path) -> None:
    first, second, third = counted([3, 3, 499], [3, 7], [])
    file = tmp_path / "counts.safetensors"

    async def program() -> None:
        async with serving(LOCAL, first) as one, serving(LOCAL, second) as two, serving(LOCAL, third) as three:
            replicas = f"{one.addresses[0]},{two.addresses[0]}"
            named = ("--model", MODEL, "--version", VERSION, "--out", file)
            done = await counts_of("--shard", replicas, "--shard", three.addresses[0], *named)
            assert "film: 3 rows, about 5 lookups" in done.output
            assert "what 3 processes counted" in done.output
            assert seen_films(file) == {3: 3, 7: 1, 499: 1}
            file.unlink()
            gone = f"unix:{tmp_path}/gone.sock"
            done = await counts_of("--shard", f"{one.addresses[0]},{gone}", *named, code=1)
            assert "gone.sock" in done.output
            done = await counts_of("--shard", three.addresses[0], *named, code=1)
            assert "no lookup was counted yet" in done.output
            done = await counts_of("--shard", three.addresses[0], *named, "--model", "other", code=1)
            assert "other" in done.output

    asyncio.run(program())
    assert list(tmp_path.iterdir()) == []


def test_nodes_of_a_fleet_are_found_in_its_registry(tmp_path: Path) -> None:
    nodes = counted([3, 3], [4])

    async def program() -> None:
        registry = open_registry(tmp_path / "registry")
        fleet = FleetRegistry(registry)
        await fleet.put_wanted(WantedModel(model=MODEL, epoch=1, live=VERSION), None)
        for flags, problem in (
            (("--registry", tmp_path / "registri"), "there is no such folder; beside it are ['registry']"),
            (("--model", f"{MODEL}s"), f"has no model '{MODEL}s'; it has ['{MODEL}']"),
            (
                ("--model", MODEL, "--version", 9),
                f"no process of the fleet has version 9 of '{MODEL}' ready; it has []",
            ),
        ):
            done = await counts_of("--registry", tmp_path / "registry", "--out", tmp_path / "counts", *flags, code=1)
            assert problem in done.output
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


def test_counts_of_parts_become_those_of_their_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levers = {"items": {"dtype": {"hot": "fp16", "cold": "int8", "hot_share": 0.1}}}
    made = divided_model(describe(one_table_spec(300), levers), pruned=("items",))
    snapshot, counts = made.export(tmp_path), made.counts["items"].astype(np.float32)
    classes = snapshot.row_classes("items").classes()
    found = {}
    for number, part in enumerate(snapshot.spec.stored_tables):
        # The row that all pruned ones read is the last of the last part.
        lookups = np.append(counts[classes == number], np.float32(7))[: part.num_embeddings]
        found[part.name] = AccessCounts(np.arange(lookups.size), lookups, part.num_embeddings)
    (table,) = join_parts(snapshot, found).values()
    np.testing.assert_array_equal(table[:], counts)
    assert capsys.readouterr().out == "items: about 7 more lookups of pruned rows, not known of which\n"
    with pytest.raises(ExportError, match=r"rows by table are .*, counted were {}"):
        join_parts(snapshot, {})


def test_a_serving_process_reports_what_it_counted(tmp_path: Path) -> None:
    model, file = write_api_model(tmp_path), tmp_path / "counts"
    service = served_service(model)

    async def program() -> None:
        async with running_api(service) as api:
            for seed in range(2 * SAMPLE_EVERY):
                await ask(service, api_request(seed % 7))
            for query, problem in (
                ("rows=1", "no such parameter"),
                ("table=1", "an answer has all rows of all tables"),
                ("version=x", "'x' is not an integer"),
            ):
                refused = await api.http.get(f"/v1/models/{API_MODEL}/access-counts?{query}")
                assert (refused.status_code, problem in refused.text) == (400, True)
            await counts_of("--server", api.http.base_url, "--model", API_MODEL, "--out", file)

    try:
        asyncio.run(program())
    finally:
        service.close()
    counts = read_access_counts([file], model.spec)
    # Every request names row 3 of the tags twice or more, and no other row of them so often.
    assert int(counts["tags"].hottest_first()[0]) == 3
    assert set(counts) == {table.name for table in model.spec.tables}
