"""`shardrank counts`: what all processes counted is one file, which export and plan read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.registry.opening import open_registry
from loader.snapshot.per_row import read_access_counts
from serving.cli import main
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.wire.address import Address
from shardrank_testing.nodes import MODEL, VERSION, film_bags, serving, small_node, small_spec
from shardrank_testing.serving_api import MODEL as API_MODEL
from shardrank_testing.serving_api import api_request, ask, running_api, served_service, write_api_model

LOCAL = Address.parse("127.0.0.1:0")


def run_counts(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["counts", *map(str, arguments)], env={"COLUMNS": "300"})


def beside(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


def nodes_that_pooled(*films: list[int]) -> list[Any]:
    """One node for each list of film rows, which it has looked up."""
    nodes = [small_node() for _ in films]
    for node, rows in zip(nodes, films, strict=True):
        if rows:
            node.pool(MODEL, VERSION, film_bags(rows))
    return nodes


def test_what_shards_and_replicas_counted_is_added_in_one_file(tmp_path: Path) -> None:
    first, second, third = nodes_that_pooled([3, 3, 499], [3, 7], [])
    file = tmp_path / "counts.safetensors"

    async def program() -> Result:
        async with serving(LOCAL, first) as one, serving(LOCAL, second) as two, serving(LOCAL, third) as three:
            replicas = f"{one.addresses[0]},{two.addresses[0]}"
            return await asyncio.to_thread(
                run_counts, "--shard", replicas, "--shard", three.addresses[0], "--out", file
            )

    done = beside(program)
    assert done.exit_code == 0, done.output
    assert "film: 3 rows, about 5 lookups" in done.output
    assert "what 3 processes counted" in done.output
    counts = read_access_counts(file, small_spec())
    assert set(counts) == {"genre", "film", "user"}
    assert {row: int(counts["film"][row]) for row in np.flatnonzero(counts["film"]).tolist()} == {3: 3, 7: 1, 499: 1}
    assert not counts["user"].any()


def test_a_node_that_does_not_answer_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (node,) = nodes_that_pooled([3])
    file = tmp_path / "counts"
    gone = f"unix:{tmp_path}/gone.sock"

    async def program() -> Result:
        async with serving(LOCAL, node) as server:
            return await asyncio.to_thread(run_counts, "--shard", f"{server.addresses[0]},{gone}", "--out", file)

    done = beside(program)
    assert done.exit_code == 1
    assert "gone.sock" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_fleets_nodes_are_found_in_its_registry(tmp_path: Path) -> None:
    nodes = nodes_that_pooled([3, 3], [4])
    registry_folder, file = tmp_path / "registry", tmp_path / "counts"

    async def program() -> Result:
        async with serving(LOCAL, nodes[0]) as one, serving(LOCAL, nodes[1]) as two:
            registry = open_registry(registry_folder)
            fleet = FleetRegistry(registry)
            await fleet.put_wanted(WantedModel(model=MODEL, epoch=1, live=VERSION), None)
            for number, (server, state) in enumerate(((one, "ready"), (two, "ready"), (None, "staging"))):
                report = VersionReport(model=MODEL, version=VERSION, state=state)
                record = NodeRecord(
                    node_id=f"node-{number}", kind="shard", process_id=1, versions=(report,), num_shards=2,
                    address=str(server.addresses[0]) if server else f"unix:{tmp_path}/elsewhere.sock",
                    shard_index=number % 2,
                )  # fmt: skip
                await fleet.announce_node(record, ttl_s=60)
            try:
                return await asyncio.to_thread(run_counts, "--registry", registry_folder, "--out", file)
            finally:
                await registry.close()

    done = beside(program)
    assert done.exit_code == 0, done.output
    counts = read_access_counts(file, small_spec())["film"]
    assert {row: int(counts[row]) for row in np.flatnonzero(counts).tolist()} == {3: 2, 4: 1}


def test_a_serving_process_tells_what_it_counted_in_its_own_memory(tmp_path: Path) -> None:
    model = write_api_model(tmp_path)
    service, file = served_service(model), tmp_path / "counts"

    async def program() -> Result:
        async with running_api(service) as api:
            for seed in range(2 * SAMPLE_EVERY):
                await ask(service, api_request(seed % 7))
            url = str(api.http.base_url)
            return await asyncio.to_thread(run_counts, "--server", url, "--model", API_MODEL, "--out", file)

    try:
        done = beside(program)
    finally:
        service.close()
    assert done.exit_code == 0, done.output
    counts = read_access_counts(file, model.spec)
    # Every request names row 3 of the tags twice or more, and no other row of them so often.
    assert int(counts["tags"].argmax()) == 3
    assert set(counts) == {table.name for table in model.spec.tables}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --registry, or --shard and --server"),
        (("--registry", "r", "--shard", "unix:a"), "either --registry"),
        (("--shard", "unix:a", "--node-cert", "c"), "--node-cert and --node-key belong together"),
        (("--server", "ftp://a", "--model", "m"), "expected http://"),
        (("--server", "http://a"), "--server needs --model"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run_counts(*arguments, "--out", tmp_path / "counts")
    assert done.exit_code == 2
    assert message in done.output
