"""`shardrank plan`: it prints the engine's own placement with every byte and lookup accounted for, or fails."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic_core import to_json

from loader.access_counts import AccessCounts, write_access_counts
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from router.plan_file import PlanFile
from router.planning.capacity import capacity
from router.planning.inputs import CapacityOptions, LookupProfile, catalog_model
from serving.cli.plan import MANIFEST_NAME, SYSTEM_NAMES
from shard_node.bags import TableLayout
from shard_node.engine.loading import load_tables
from shard_node.planning.cost_model import SYSTEMS
from shardrank_testing.command_line import blocks, shardrank
from shardrank_testing.snapshots import make_spec, write_snapshot


def fields_of(text):
    """A JSON document with its fields as attributes."""
    return json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields))


def options_of(**changes):
    base = {"system": SYSTEMS["h100"], "cards": 8, "card_memory_gb": 80.0, "pinned_memory_gb": 16.0}
    return CapacityOptions(**base | changes)


def capacity_plan(name="dlrm-v2", dtype="int8", **changes):
    spec, profile = catalog_model(name, dtype)
    return fields_of(to_json(capacity(spec, profile, options_of(**changes))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"name": "merlin-jumbo", "pinned_memory_gb": 200.0, "shards": 2}, marks=pytest.mark.nightly),
        {"card_memory_gb": 4.0, "pinned_memory_gb": 6.0},
        {"card_memory_gb": 4.0, "shards": 2, "cards": 3},
        {"card_memory_gb": 20.0, "peer_access": False},
        {"cards": 1, "card_memory_gb": 20.0},
    ],
)
def test_cards_hold_no_more_than_they_may_and_every_lookup_goes_somewhere(changes):
    plan = capacity_plan(**changes)
    budget = int(plan.options.card_memory_gb * 1e9)
    for one in plan.cards:
        assert one.hot_bytes + one.own_bytes + one.places_bytes + one.free_bytes == budget
        assert one.free_bytes >= 0
    assert plan.pinned_bytes <= plan.options.pinned_memory_gb * 1e9
    assert sum(one.lookup_share for one in plan.tiers) == pytest.approx(1)
    by_tier = {one.tier: one.rows for one in plan.tiers}
    assert by_tier["card"] == by_tier["peer"] == sum(one.card_rows for one in plan.tables)
    assert by_tier["hot"] == sum(one.hot_rows for one in plan.tables)
    rows = by_tier["hot"] + by_tier["card"] + by_tier["pinned"]
    assert (rows == plan.num_rows) == (plan.options.shards == 1)
    assert plan.fits_on_cards == (by_tier["pinned"] == 0)


def test_counts_decide_where_rows_go():
    spec = make_spec(dtype="int8")
    counts = np.zeros(1000, np.uint32)
    counts[500:600] = 100
    idle = {one.name: 0.0 for one in spec.features if one.name != "user"}
    profile = LookupProfile(counts={"user": counts}, hotness=idle)
    plan = capacity(spec, profile, options_of(cards=2, hot_gb=100 * 32 / 1e9))
    assert {table["name"]: table["hot_rows"] for table in plan["tables"]}["user"] == 100


def test_context_features_are_looked_up_once_a_request_and_others_once_a_candidate():
    spec = make_spec()
    layout = TableLayout.of(spec)
    profile = LookupProfile(hotness={"film": 2, "history": 30, "genre": 1.5})
    found = profile.lookups(spec, layout, 3, 100)
    loads = {table.name: of_table[:3] for table, of_table in zip(layout.tables, found, strict=True)}
    assert loads["user"] == (3, 3, 1)
    # `film` is pooled, once a candidate; each id of `history`, once a request, is a row of its own.
    assert loads["film"] == (2 * 100 + 30 * 3, 100 + 30 * 3, 2)
    assert loads["genre"] == (150, 100, 1.5)
    assert loads["tag"] == (100 + 3, 100 + 3, 1)


@pytest.mark.parametrize(
    ("name", "tables", "gibibytes"),
    [
        ("dlrm-v2", 26, 97.4),
        ("dlrm-criteo-113b", 26, 420.9),
        ("merlin-tiny", 55, 4.2),
        ("merlin-small", 107, 26.3),
        ("merlin-medium", 311, 206.2),
        ("merlin-large", 612, 773.8),
        ("merlin-jumbo", 1022, 3109.5),
        ("merlin-colossal", 2002, 22327.4),
        ("textbook", 1, 953.7),
    ],
)
def test_a_published_model_has_its_published_size(name, tables, gibibytes):
    found = catalog_model(name, "fp32")[0].tables
    assert len(found) == tables
    assert round(sum(4 * table.num_embeddings * table.embedding_dim for table in found) / 2**30, 1) == gibibytes


def test_criteo_without_a_cap_has_113_billion_parameters():
    tables = catalog_model("dlrm-criteo-113b")[0].tables
    assert sum(table.num_embeddings for table in tables) == 882_774_559
    assert sum(table.num_embeddings * table.embedding_dim for table in tables) == 112_995_143_552


def test_systems_of_the_flag_are_those_of_the_cost_model():
    assert set(SYSTEM_NAMES) == SYSTEMS.keys()


def planned(*arguments: object) -> SimpleNamespace:
    return fields_of(shardrank("plan", *arguments, "--json").stdout)


def test_text_and_json_tell_the_same() -> None:
    arguments = ("--model", "dlrm-v2", "--cards", "8", "--card-memory-gb", "5", "--zipf", "1.05")
    plan, text = planned(*arguments), shardrank("plan", *arguments).output
    assert f"alone_us {plan.time.alone_us:.1f}, bound {plan.time.bound}, busy_us" in text


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("ram_bytes", [10**6, 20_000])
def test_a_plan_for_cpus_has_the_bytes_of_the_engine(tmp_path: Path, shards: int, ram_bytes: int) -> None:
    tables = [table | {"bucketing": "mixed"} for table in pooled_spec().model_dump()["tables"]]
    folder, _ = write_snapshot(tmp_path, ModelSpec.model_validate(pooled_spec().model_dump() | {"tables": tables}))
    flags = ("--shards", shards, "--replicate-bytes", 2000, "--ram-gb", ram_bytes / 1e9)
    plan, snapshot = planned("--model", folder, *flags), Snapshot.open(folder)
    part = Plan.of_snapshot(snapshot, shards, replicate_bytes=2000).partition(plan.shard_index)
    loaded = load_tables(snapshot, part, "", memory_budget_bytes=ram_bytes)
    by_tier = {use.tier: use.size_bytes for use in loaded.engine.memory()}
    assert plan.disk_bytes == by_tier.get("disk", 0)
    # The engine has room for whole rows, of each width.
    assert 0 <= plan.ram_bytes - by_tier["ram"] < 100 * len(loaded.engine.layout.groups)
    tiers = {count.table: count.tier for count in loaded.engine.rows_looked_up()}
    assert {table.name: table.tier for table in plan.tables} == tiers
    lookups = sum(table.lookups for table in plan.tables if table.tier == "disk")
    assert 0 < plan.batch.disk_lookups < lookups or plan.fits_in_ram
    assert plan.fits_in_ram == (ram_bytes == 10**6)


def test_a_plan_of_a_table_with_keys_has_its_index_and_wide_keys(tmp_path: Path) -> None:
    """72 bytes of a row of 64 codes, and 20 of its key; a request's 500 keys are of 8 bytes."""
    table = {"name": "users", "keys": "int64", "capacity": 400_000_000, "embedding_dim": 64, "dtype": "int8"}
    features = [{"name": "user", "side": "candidate"}]
    tables = [table | {"feature_names": ["user"]}]
    described = {"model": "big", "tables": tables, "features": features, "dense_model": {"kind": "mlp"}}
    (tmp_path / "big.json").write_text(json.dumps(described))
    plan = planned("--model", tmp_path / "big.json", "--shards", 16, "--ram-gb", 64, "--cores", 1)
    assert plan.ram_bytes == pytest.approx(400e6 / 16 * (72 + 20), rel=0.01)
    assert plan.network.ids_bytes == pytest.approx(500 * 8)


def test_a_plan_without_gpus_takes_cores_memory_and_measured_rows_of_this_machine(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path, pooled_spec())
    plan, faster = (planned("--model", folder, *more) for more in ((), ("--measure", "--cores", 8)))
    system = plan.options.system
    assert (system.name, system.cores, system.rows_per_s) == ("cpu", len(os.sched_getaffinity(0)), 20e6)
    assert plan.time.alone_us == pytest.approx(plan.batch.lookups / 20)
    assert faster.options.system.rows_per_s > 1e5
    assert faster.time.lookups_per_s == 8 * faster.options.system.rows_per_s
    assert planned("--model", folder, "--cards", 2).options.system.name == "h100"


def test_tables_are_divided_over_cpus(tmp_path: Path) -> None:
    plan = planned("--model", "merlin-tiny:0.001", "--shards", 4, "--compare", "--out", tmp_path / "plan.json")
    assert PlanFile.read(tmp_path / "plan.json").num_shards == 4
    assert plan.division.ways[0].way == "per table"
    assert plan.network.slowest_us == pytest.approx(plan.network.request_us - plan.network.time.alone_us)


PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
EXAMPLES = {
    command.replace("\\\n", ""): printed
    for command, printed in pairwise(blocks(PAGE.read_text(encoding="utf-8")))
    # The largest takes half a minute.
    if command.startswith("shardrank plan") and not printed.startswith("shardrank") and "jumbo" not in command
}


@pytest.mark.parametrize("command", [command for command in EXAMPLES if command.count("\n") == 1])
def test_plans_of_the_manual_are_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    printed = shardrank(*shlex.split(command)[1:]).stdout
    assert EXAMPLES[command] in re.sub(" +\n", "\n", printed)


@pytest.mark.parametrize(
    ("dtype", "stored", "of_a_host"),
    [
        ("fp32", "code_bytes 1.02 TB, stored_bytes 1.02 TB", 64.0),
        ("int8", "code_bytes 256.0 GB, stored_bytes 272.0 GB", 18.0),
        ("int4", "code_bytes 128.0 GB, stored_bytes 136.0 GB", 10.0),
    ],
)
def test_the_textbook_model_has_the_textbooks_sizes(dtype: str, stored: str, of_a_host: float) -> None:
    arguments = ("--model", "textbook", "--dtype", dtype, "--shards", "16", "--cards", "1", "--batch", "65536")
    plan = planned(*arguments)
    assert plan.size.float32_bytes == 1.024e12
    assert plan.size.code_bytes == {"fp32": 1.024e12, "int8": 0.256e12, "int4": 0.128e12}[dtype]
    # A row on a card is padded to 16 bytes, with its scale and bias.
    assert plan.cards[0].own_bytes == of_a_host * 1e9
    assert plan.batch.lookups == 65_536 * 40
    assert f"float32_bytes 1.02 TB, {stored}" in shardrank("plan", *arguments).output


def pooled_spec() -> ModelSpec:
    """The small model with its history pooled, as an `mlp` needs it."""
    document = make_spec().model_dump()
    for feature in document["features"]:
        feature["pooling"] = None
    return ModelSpec.model_validate(document)


def test_a_description_a_snapshot_and_its_manifest_are_planned_alike(tmp_path: Path) -> None:
    description = tmp_path / "films.json"
    description.write_text(pooled_spec().model_dump_json())
    folder, _ = write_snapshot(tmp_path, pooled_spec())
    plans = [planned("--model", path, "--disk-gb", "80") for path in (description, folder, folder / MANIFEST_NAME)]
    assert plans[0].model == "films"
    assert plans[0] == plans[1] == plans[2]
    halves = make_spec(dtype="fp16").model_dump(mode="json") | {"features": pooled_spec().model_dump()["features"]}
    description.write_text(json.dumps(halves))
    # The rest of this machine's disk changes from run to run.
    same = ("--disk-gb", "80")
    assert planned("--model", folder, "--dtype", "fp16", *same) == planned("--model", description, *same)


def test_given_counts_decide_what_is_hot(tmp_path: Path) -> None:
    stored = np.zeros(1000, np.uint32)
    stored[7] = 1000
    folder, _ = write_snapshot(tmp_path / "store", make_spec(dtype="int8"), access_counts={"user": stored})
    idle = [f"--hotness={feature.name}=0" for feature in make_spec().features if feature.name != "user"]
    counts = tmp_path / "counts"
    write_access_counts(counts, {"user": AccessCounts(np.array([3, 500]), np.array([1, 3]), 1000)})
    # A skew is of tables that have no counts.
    for more in ((), ("--zipf", "1")):
        plan = planned("--model", folder, "--cards", 2, "--hot-gb", 32e-9, *idle, "--counts", counts, *more)
        assert {tier.tier: tier.lookup_share for tier in plan.tiers}["hot"] == 0.75


@pytest.mark.nightly
def test_a_plan_per_table_beats_whole_tables_and_divided_rows() -> None:
    # A hundredth of its rows on cards of a hundredth of the memory: two tables are larger than a card.
    arguments = ("--model", "merlin-jumbo:0.01", "--shards", "4", "--cards", "8", "--card-memory-gb", "0.8",
                 "--pinned-memory-gb", "0.16", "--compare")  # fmt: skip
    division = planned(*arguments).division
    assert division is not None
    chosen, by_row, whole = division.ways
    assert (chosen.way, by_row.way, whole.way) == ("per table", "all row_wise", "all table_wise")
    assert not any(shard.left_over_bytes for shard in chosen.shards)
    assert any(shard.left_over_bytes for shard in whole.shards)
    chosen_us, by_row_us = (
        way.network.alone_us + max(shard.cards_us for shard in way.shards) for way in (chosen, by_row)
    )
    assert chosen_us < by_row_us
    lookups = [shard.lookups for shard in chosen.shards]
    assert max(lookups) < 1.1 * np.mean(lookups)
    assert len(division.tables) == 1022


FOUR_SHARDS = ("--model", "dlrm-v2", "--shards", "4", "--cards", "2")


def network(*flags: str) -> SimpleNamespace:
    found = planned(*FOUR_SHARDS, *flags).network
    assert found is not None
    return found


def test_a_request_takes_the_slowest_shard_and_the_network() -> None:
    plan = planned(*FOUR_SHARDS, "--replicate-bytes", "0")
    found = plan.network
    assert found is not None
    time = found.time
    assert found.request_us == pytest.approx(found.slowest_us + time.out_us + time.back_us + 20)
    assert found.slowest_us >= plan.time.alone_us
    assert found.bound == "network bandwidth"
    # 12.5 GB/s: 80 ps a byte.
    sent = found.ids_bytes + found.offsets_bytes + found.keys_bytes + found.sums_bytes + found.framing_bytes
    assert time.out_us + time.back_us == pytest.approx(sent * 80e-6)
    narrow = network("--shard-gb-per-s", "0.1", "--replicate-bytes", "0").time
    # The busiest of four shards has more than a quarter of the bytes.
    assert sent / 4 * 0.01 < narrow.out_us + narrow.back_us < 1.3 * sent / 4 * 0.01
    int8 = network("--sums", "int8")
    assert int8.sums_bytes < found.sums_bytes
    slow = network("--network-us", "5000")
    assert slow.bound == "network latency"
    fast = network("--network-gb-per-s", "1000000", "--network-us", "0")
    assert not fast.bound.startswith("network")
    assert planned("--model", "dlrm-v2").network is None


def test_hot_rows_at_the_router_spare_the_network_and_the_shards() -> None:
    skewed = (*FOUR_SHARDS, "--zipf", "1.05", "--replicate-bytes", "0")
    without, some, given = (planned(*skewed, *more) for more in ((), ("--hot-rows-gb", "0.5"), ("--hit-rate", "0.9")))
    assert without.network is not None
    for plan in (some, given):
        assert plan.network is not None
        assert plan.network.request_us < without.network.request_us / 2
        assert plan.network.shards_hit < without.network.shards_hit
        assert plan.batch.card_memory_bytes < without.batch.card_memory_bytes
    assert some.network.hot_bytes <= 0.5e9
    assert 0.5 < some.network.hit_rate < 1
    assert given.network.hit_rate == pytest.approx(0.9)


ROWS = 100_000
DESCRIBED: dict[str, Any] = {
    "model": "shop",
    "tables": [{"name": "item", "num_embeddings": ROWS, "embedding_dim": 64, "feature_names": ["item"]}],
    "features": [{"name": "item", "side": "candidate"}],
    "dense_model": {"kind": "mlp", "config": {"hidden": [2]}},
}


def described(folder: Path, **levers: object) -> Path:
    document = copy.deepcopy(DESCRIBED)
    document["tables"][0].update(levers)
    (folder / "shop.json").write_text(json.dumps(document))
    return folder / "shop.json"


def test_the_hot_part_draws_the_lookups_of_its_ranks(tmp_path: Path) -> None:
    model = described(tmp_path, dtype={"hot": "fp16", "cold": "int4", "hot_share": 0.1})
    weights = np.arange(1, ROWS + 1) ** -1.05
    tables = planned("--model", model, "--cards", 1, "--zipf", 1.05).tables
    expected = 500 * weights[: ROWS // 10].sum() / weights.sum()
    assert [table.lookups for table in tables] == pytest.approx([expected, 500 - expected], rel=1e-6)
    plan = planned("--model", model, "--cards", 1, "--zipf", 1.05, "--head", "20000:0.5")
    expected = 500 * (0.5 * weights[: ROWS // 10].sum() / weights[:20_000].sum() + 0.5 * 0.1)
    assert plan.tables[0].lookups == pytest.approx(expected, rel=1e-6)
    assert plan.divided[0].classes_bytes == -(-ROWS // 512) * 68
    counts = np.ones(ROWS, np.uint32)
    counts[7] = ROWS
    write_access_counts(tmp_path / "counts", {"item": AccessCounts(np.arange(ROWS), counts, ROWS)})
    tables = planned("--model", model, "--cards", 1, "--counts", tmp_path / "counts").tables
    expected = 500 * (ROWS + 9_999) / (2 * ROWS - 1)
    assert [table.lookups for table in tables] == pytest.approx([expected, 500 - expected])


def test_pruned_rows_are_not_planned_for(tmp_path: Path) -> None:
    seen = np.arange(0, ROWS, 4)
    write_access_counts(tmp_path / "counts", {"item": AccessCounts(seen, np.ones(seen.size), ROWS)})
    flags = ("--model", described(tmp_path, dtype="fp32"), "--counts", tmp_path / "counts", "--prune")
    plan = planned(*flags, "--cards", 1)
    (divided,) = plan.divided
    assert (divided.pruned, divided.stored_bytes) == (ROWS - seen.size, (seen.size + 1) * 256)
    assert divided.classes_bytes == pytest.approx(ROWS * 1.0625 / 8, rel=0.01)
    assert re.search(r"item +\S+ +100000 +64 +75000 +25.6 MB +6.4 MB", shardrank("plan", *flags).output)


@pytest.mark.parametrize(
    ("levers", "flags", "problem"),
    [
        ({}, ["--prune"], "--prune needs --counts"),
        ({"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 2}}, [], "hot_share: Input should be less than 1"),
        ({"id_mapping": {"kind": "quotient_remainder", "buckets": 0}}, [], "buckets: Input should be greater than"),
        ({"column_dims": [32, 32], "project_to": 128}, [], "column_dims goes with a table that is stored whole"),
    ],
)
def test_levers_that_can_not_be_are_named(
    tmp_path: Path, levers: dict[str, Any], flags: list[str], problem: str
) -> None:
    result = shardrank("plan", "--model", described(tmp_path, **levers), *flags, code=1)
    assert problem in result.output


def test_bytes_of_a_training_step_are_printed_from_flags():
    model = ("--params", 50_000_000, "--rows", 100_000_000, "--dim", 128)
    flags = ("--training", *model, "--workers", 8, "--servers", 1, "--worker-ids", 4096)
    found = planned(*flags)
    assert (found.dense.all_reduce_link_bytes, found.dense.server_link_bytes) == (0.35e9, 3.2e9)
    assert (found.table.server_bytes, found.table.all_reduce_bytes) == (33_554_432, 716.8e9)
    assert found.table.crossover_ids == 87.5e6
    halved = planned(*flags, "--number-bytes", 2)
    assert halved.table.server_bytes == 33_554_432 / 2
    assert "table: server_bytes 33.6 MB, all_reduce_bytes 716.8 GB" in shardrank("plan", *flags).output
