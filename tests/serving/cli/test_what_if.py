"""`plan --what-if`: the textbook's exercises 11.7.1, 11.7.3 and 11.9.1, by the numbers that the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardrank_testing.command_line import shardrank

HOSTS = ("--shards", 16, "--ram-gb", 64, "--cores", 16, "--disk-gb", 0)
STEP = ("--batch", 65_536, "--network-gb-per-s", 100, "--zipf", 1.1, "--head", "5000:0.85")
BOOK = ("--model", "textbook", "--dtype", "fp32", *HOSTS, *STEP)


def what_if(*arguments: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shardrank("plan", *arguments, "--json").stdout)
    return document


def shares(document: dict[str, Any], when: str) -> list[float]:
    """Of memory, network and updates."""
    return [round(budget[f"{when}_share"], 4) for budget in document["budgets"]]


def described(folder: Path, **table: Any) -> Path:
    """The textbook's table with other words of its description, as a description."""
    fields = {"name": "t0", "num_embeddings": 2 * 10**9, "embedding_dim": 128, "feature_names": ["f0"], "dtype": "fp32"}
    features, file = [{"name": "f0", "side": "candidate"}], folder / f"{len(table)}.json"
    model = {"model": "book", "tables": [fields | table], "features": features, "dense_model": {"kind": "mlp"}}
    file.write_text(json.dumps(model))
    return file


def test_int4_cold_tail_relieves_memory(tmp_path: Path) -> None:
    """Exercise 11.7.1 (a). M_comm is of rows as they are stored, and so do single rows of a bag travel."""
    dtype = {"hot": "fp32", "cold": "int4", "hot_share": 5000 / 2e9}
    before, after = described(tmp_path), described(tmp_path, dtype=dtype, bucketing="mixed")
    arguments = ("--hotness", "f0=40", *HOSTS, *STEP, "--hot-rows", 5000)
    found = what_if("--model", before, *arguments, "--what-if", f"model={after}")
    assert shares(found, "before") == [1.0, 0.2013, 0.0]
    assert shares(found, "after") == [0.1328, 0.0252, 0.0]
    assert (found["before"]["binds"], found["after"]["table_bytes"]) == ("memory", 128e9 + 5000 * (512 - 64))
    # Rows of 68 bytes travel in place of float16 sums of 256, beside as many ids.
    assert found["after"]["sent_bytes"] == pytest.approx(0.34 * found["before"]["sent_bytes"], rel=0.02)
    # Without a copy near it, the head goes on as it is: the network's budget is hardly relieved.
    cold = what_if("--model", before, *arguments[:-2], "--what-if", f"model={after}")
    assert shares(cold, "before")[1] == 1.3422
    assert shares(cold, "after")[1] == pytest.approx(1.3422 * (0.85 + 0.15 / 8), rel=1e-3)


def test_more_hot_rows_relieve_the_network() -> None:
    """Exercise 11.7.1 (b), by the closed form of the draw's distribution."""
    found = what_if(*BOOK, "--what-if", "hot-rows=5000")
    assert found["relieves"] == ["network"]
    assert (found["before"]["binds"], found["after"]["binds"]) == ("network", "memory")
    assert [round(found[when]["comm_us"]) for when in ("before", "after")] == [13_422, 2013]
    assert found["after"]["broadcast_bytes"] == 5000 * 512


def test_twice_the_hosts_relieve_memory_and_leave_m_comm() -> None:
    """Exercise 11.7.1 (c): only this leaves the time of the step's exchange as it is."""
    found = what_if(*BOOK, "--hot-rows", 100, "--what-if", "shards=32")
    assert (found["relieves"], found["burdens"]) == (["memory"], [])
    assert [found[when]["host_bytes"] for when in ("before", "after")] == [64e9, 32e9]
    assert found["before"]["comm_us"] == found["after"]["comm_us"] == pytest.approx(5696, abs=1)
    # A bag has rows on more hosts, each of which sends a sum.
    assert found["after"]["sent_bytes"] > 1.2 * found["before"]["sent_bytes"]


def test_compositional_hashing_relieves_memory(tmp_path: Path) -> None:
    """Exercise 11.7.1 (d): two rows a lookup, of which those by quotient are few enough to be near."""
    mapping = {"kind": "quotient_remainder", "buckets": 10**7}
    before, after = described(tmp_path), described(tmp_path, id_mapping=mapping)
    arguments = ("--model", before, "--hotness", "f0=40", *HOSTS, *STEP, "--what-if", f"model={after}")
    apart = what_if(*arguments)
    assert (apart["relieves"], apart["burdens"]) == (["memory"], ["network"])
    assert apart["after"]["table_bytes"] == (10**7 + 200) * 512
    assert apart["after"]["comm_bytes"] == 2 * apart["before"]["comm_bytes"]
    near = what_if(*arguments, "--hot-rows", 5000)
    assert near["after"]["comm_bytes"] == pytest.approx(near["before"]["comm_bytes"], rel=0.02)
    assert (near["before"]["binds"], near["after"]["binds"]) == ("memory", "network")


@pytest.mark.parametrize(("hit_rate", "megabytes"), [(0.5, 671.1), (0.85, 201.3), (0.99, 13.4)])
def test_replicas_at_workers_pay_after_some_steps(hit_rate: float, megabytes: float) -> None:
    """Exercise 11.7.3: M_comm of each step against a table of 256 MB at each of 8 workers, once, and its updates."""
    sharded = what_if(*BOOK, "--hit-rate", hit_rate, "--what-if", "workers=8")
    assert round(sharded["after"]["comm_bytes"] / 1e6, 1) == megabytes
    arguments = ("--model", "textbook:0.001", *HOSTS, *STEP, "--workers", 8, "--update-rate", 1e6)
    found = what_if(*arguments, "--hit-rate", hit_rate, "--what-if", "hit-rate=1")
    assert found["before"]["table_bytes"] == 256e6
    # Codes and scales; each update goes to the shard and all workers, not only to those that have the row.
    assert found["after"]["broadcast_bytes"] == 8 * 272e6
    assert found["after"]["comm_bytes"] == 0
    assert found["after"]["update_bytes"] == pytest.approx(1e6 * 136 * 9 * 0.01)
    assert found["before"]["update_bytes"] == pytest.approx(1e6 * 136 * (1 + 8 * hit_rate) * 0.01)
    assert (found["relieves"], found["burdens"]) == (["network"], ["updates"])
    steps = 272e6 / sharded["after"]["comm_bytes"]
    assert steps == pytest.approx({0.5: 0.405, 0.85: 1.351, 0.99: 20.27}[hit_rate], rel=1e-3)


def test_all_reduce_is_cheaper_from_the_crossover_on() -> None:
    """Exercise 11.9.1: 87.5 million rows a worker, of 100 million and 8 workers."""
    step = ("--params", 50_000_000, "--workers", 8, "--servers", 1, "--rows", 100_000_000, "--dim", 128)
    found = what_if("--training", *step, "--worker-ids", 87_499_999, "--what-if", "worker-ids=87500001")
    tables = found["before"]["table"], found["after"]["table"]
    assert [table["crossover_ids"] for table in tables] == [87.5e6, 87.5e6]
    assert [table["fewer_bytes"] for table in tables] == ["servers", "all-reduce"]
    assert tables[0]["server_bytes"] < tables[0]["all_reduce_bytes"]
    assert tables[1]["server_bytes"] > tables[1]["all_reduce_bytes"]


def test_replicas_and_workers_share_the_lines_of_hosts() -> None:
    found = what_if(*BOOK, "--workers", 64, "--update-rate", 1e5, "--what-if", "replicas=2")
    assert (found["relieves"], found["burdens"]) == (["network"], ["updates"])
    assert found["before"]["line_bytes"] == 4 * found["before"]["comm_bytes"] == 2 * found["after"]["line_bytes"]
    assert (found["before"]["hosts"], found["after"]["hosts"]) == (16, 32)


@pytest.mark.parametrize(
    ("change", "table_bytes"),
    [("rows=1000000000", 512e9), ("dim=64", 512e9), ("dtype=int8", 256e9), ("model=textbook:0.5", 512e9)],
)
def test_a_change_of_the_table_is_planned(change: str, table_bytes: float) -> None:
    found = what_if(*BOOK, "--what-if", change)
    assert (found["before"]["table_bytes"], found["after"]["table_bytes"]) == (1024e9, table_bytes)


def test_a_bound_of_hot_rows_replaces_the_other_bounds() -> None:
    """By hits before, by number after: the share of the head's first 100 rows."""
    found = what_if(*BOOK, "--hit-rate", 0.99, "--what-if", "hot_rows=100")
    assert (found["after"]["hot_rows"], found["after"]["hit_rate"]) == (100, pytest.approx(0.57558, abs=1e-5))


def test_tables_of_a_model_are_resized_in_proportion() -> None:
    """The largest of merlin-tiny has 25 million rows, its widest 16 columns."""
    arguments = ("--model", "merlin-tiny", "--dtype", "fp32", "--ram-gb", 64)
    found = what_if(*arguments, "--what-if", "rows=50000000", "--what-if", "dim=32")
    assert found["after"]["table_bytes"] == 4 * found["before"]["table_bytes"]
    assert found["before"]["comm_bytes"] == found["after"]["comm_bytes"] == 0


def test_text_has_the_numbers_of_json() -> None:
    text = shardrank("plan", *BOOK, "--what-if", "hot-rows=5000").output
    assert "relieves network\nwhat_if: hot-rows 5000\n" in text
    assert "comm_bytes 201.3 MB, comm_us 2013.3" in text
    assert "134.22%" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--what-if", "shard=2"), "--what-if shard=2: 'shard' is none of batch, card-memory-gb, "),
        (("--what-if", "shards=0"), "Invalid value for '--shards': 0 is not in the range 1<=x<=1024."),
        (("--what-if", "dtype=int5"), "'int5' is not one of 'int8', 'int4', 'fp16', 'fp32'."),
        (("--what-if", "shards"), "'shards' is not OPTION=VALUE"),
        (("--what-if", "dim=100000"), "table 't0': embedding_dim: "),
        (("--what-if", "servers=2"), "--servers goes with --training."),
        (("--replicas", 2), "--replicas goes with --what-if."),
        (("--rows", 2), "--rows goes with --training."),
        (("--servers", 2, "--what-if", "shards=2"), "--servers goes with --training."),
        (("--compare", "--what-if", "shards=2"), "not with --compare or --out."),
        (("--training", "--what-if", "shards=2"), "--model does not go with --training, "),
    ],
)
def test_a_wrong_change_is_refused(arguments: tuple[object, ...], message: str) -> None:
    result = shardrank("plan", *BOOK, *arguments, code=None)
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())
