"""`shardrank plan`: what it prints is what it reckons, and it fails when nothing can be served."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.per_row import write_access_counts
from serving.cli import main
from serving.cli.capacity import CapacityPlan
from serving.cli.division import print_division
from serving.cli.plan import MANIFEST_NAME
from shardrank_testing.snapshots import make_spec, write_snapshot


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="shardrank")


def planned(*arguments: str) -> CapacityPlan:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return CapacityPlan.model_validate_json(result.output)


def test_text_and_json_tell_the_same() -> None:
    arguments = ("--model", "dlrm-v2", "--cards", "8", "--card-memory-gb", "5", "--zipf", "1.05")
    plan, text = planned(*arguments), run(*arguments).output
    assert f"{plan.num_tables} tables, 204 M rows" in text
    assert re.search(rf"peer|on one of the others .* {plan.tiers[2].lookup_share:.2%}", text)
    assert f"alone {plan.time.alone_us:.1f} us, bound by {plan.time.bound}; all 8 cards busy" in text
    assert "Tables, the largest 8 of 26" in text
    assert "fits: every row is on cards (every row on cards needs 4.5 GB of each)" in text


@pytest.mark.parametrize(
    ("dtype", "stored", "of_a_host"),
    [
        ("fp32", "stored 1.02 TB, on cards", 64.0),
        ("int8", "stored 272.0 GB (codes alone 256.0 GB), on cards", 18.0),
        ("int4", "stored 136.0 GB (codes alone 128.0 GB), on cards", 10.0),
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
    assert f"as float32 1.02 TB, {stored}" in run(*arguments).output


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
    plans = [planned("--model", str(path)) for path in (description, folder, folder / MANIFEST_NAME)]
    assert plans[0].model == "films"
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("given", ["file", "folder", "trace"])
def test_given_counts_or_a_trace_decide_what_is_hot(tmp_path: Path, given: str) -> None:
    told = np.zeros(1000, np.uint32)
    told[7] = 1000
    folder, _ = write_snapshot(tmp_path / "store", make_spec(dtype="int8"), access_counts={"user": told})
    idle = [part for one in make_spec().features if one.name != "user" for part in ("--hotness", f"{one.name}=0")]
    arguments = ("--model", str(folder), "--cards", "2", "--hot-gb", str(32e-9), *idle)
    if given == "file":
        write_access_counts(tmp_path / "counts", {"user": (np.array([3, 500]), np.array([1, 3]))})
        more = ("--counts", str(tmp_path / "counts"))
    elif given == "folder":
        (tmp_path / "counts").mkdir()
        np.save(tmp_path / "counts" / "user.npy", np.bincount([3, 500, 500, 500], minlength=1000))
        more = ("--counts", str(tmp_path / "counts"))
    else:
        np.save(tmp_path / "users.npy", np.array([500, 3, 500, 500]))
        more = ("--trace", f"user={tmp_path / 'users.npy'}")
    assert {one.tier: one.lookup_share for one in planned(*arguments, *more).tiers}["hot"] == 0.75
    # A told skew is of tables that have no counts.
    assert {one.tier: one.lookup_share for one in planned(*arguments, *more, "--zipf", "1").tiers}["hot"] == 0.75


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        ("user=outside.npy", "row 1000 is not within table 'user' of 1000 rows"),
        ("user=negative.npy", "row -1 is not within"),
        ("user=floats.npy", "must be integers [n]"),
        ("user=missing.npy", "not an array that can be read"),
        ("nobody=outside.npy", "unknown tables ['nobody']"),
    ],
)
def test_traces_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("outside", [3, 1000]), ("negative", [3, -1]), ("floats", [0.5])):
        np.save(f"{name}.npy", np.array(rows))
    Path("films.json").write_text(pooled_spec().model_dump_json())
    result = run("--model", "films.json", "--trace", trace)
    assert result.exit_code in (1, 2)
    assert problem in result.output


def test_counts_and_a_trace_are_not_both_taken(tmp_path: Path) -> None:
    result = run("--model", "dlrm-v2", "--counts", str(tmp_path), "--trace", "t0=x.npy")
    assert result.exit_code == 2
    assert "give one of them" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("--model", "merlin-colossal"), 1, "error: rows take 6374656048000 bytes"),
        (("--model", "merlin-jumbo"), 1, "rows are left over. Give more pinned memory"),
        (("--model", "lunch"), 2, "no such file, and the catalog has only dlrm-v2"),
        (("--model", "dlrm-v2:2"), 2, "above 0 and at most 1"),
        (("--model", "dlrm-v2", "--hotness", "f0=many"), 2, "'many' is not a number"),
        (("--model", "dlrm-v2", "--hotness", "nobody=3"), 1, "has no such feature"),
        (("--model", "dlrm-v2", "--sharding", "range", "--shards", "2"), 1, "is stored with 'mixed'"),
        (("--model", "dlrm-v2", "--shards", "1025"), 2, "1025 is not in the range"),
        (
            (
                "--model",
                "dlrm-v2",
                "--shards",
                "2",
                "--cards",
                "1",
                "--card-memory-gb",
                "4",
                "--pinned-memory-gb",
                "0",
                "--compare",
            ),
            1,
            "do not fit on 2 shards",
        ),
        (("--model", "merlin-tiny", "--out", "/nowhere/plan.json"), 2, "--out /nowhere/plan.json: No such file"),
        (("--model", "dlrm-v2", "--system", "z80"), 2, "is not one of"),
        (("--model", "dlrm-v2", "--card-memory-gb", "nan"), 2, "nan is not a finite number"),
        (("--model", "dlrm-v2", "--pinned-memory-gb", "inf"), 2, "inf is not a finite number"),
        (("--model", "dlrm-v2", "--zipf", "nan"), 2, "nan is not a finite number"),
        (("--model", "dlrm-v2", "--zipf", "9"), 2, "9.0 is not in the range 0<=x<=8"),
        (("--model", "dlrm-v2", "--zipf", "-0.1"), 2, "-0.1 is not in the range"),
        (("--model", "dlrm-v2", "--hbm-gb-per-s", "nan"), 2, "nan is not a finite number"),
    ],
)
def test_what_can_not_be_planned_says_why(arguments: tuple[str, ...], code: int, problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert problem in result.output


def test_a_plan_per_table_places_what_whole_tables_do_not_and_takes_less_time_than_dividing_all_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A hundredth of its rows on cards of a hundredth of the memory: two tables are larger than a card.
    arguments = ("--model", "merlin-jumbo:0.01", "--shards", "4", "--cards", "8", "--card-memory-gb", "0.8",
                 "--pinned-memory-gb", "0.16", "--compare")  # fmt: skip
    division = planned(*arguments).division
    assert division is not None
    chosen, by_row, whole = division.ways
    assert (chosen.way, by_row.way, whole.way) == ("per table", "all row_wise", "all table_wise")
    assert chosen.left_over_bytes == 0
    assert whole.left_over_bytes > 0
    assert chosen.total_us < by_row.total_us
    assert chosen.busiest_to_mean < 1.1
    assert len(division.tables) == 1022
    assert [one.rank for one in division.ranks] == list(range(32))
    print_division(division)
    output = capsys.readouterr().out
    assert re.search(r"all table_wise .* does not fit", output)
    assert re.search(r"t74 +table_wise +\S+ +\d+\.\.\d+", output)


def test_a_request_takes_the_slowest_shard_and_the_network() -> None:
    plan = planned("--model", "dlrm-v2", "--shards", "4", "--cards", "2", "--replicate-bytes", "0")
    network = plan.network
    assert network is not None
    time = network.time
    assert network.request_us == pytest.approx(network.slowest_us + time.out_us + time.back_us + 20)
    assert network.slowest_us >= plan.time.alone_us
    assert network.bound == "network bandwidth"
    # 12.5 GB/s: 80 ps a byte.
    sent = network.ids_bytes + network.offsets_bytes + network.keys_bytes + network.sums_bytes + network.framing_bytes
    assert time.out_us + time.back_us == pytest.approx(sent * 80e-6)
    slow = planned("--model", "dlrm-v2", "--shards", "4", "--cards", "2", "--network-us", "5000").network
    assert slow is not None
    assert slow.bound == "network latency"
    assert slow.crossover_hit_rate is None
    near = ("--network-gb-per-s", "1000000", "--network-us", "0")
    fast = planned("--model", "dlrm-v2", "--shards", "4", "--cards", "2", *near).network
    assert fast is not None
    assert not fast.bound.startswith("network")
    assert fast.crossover_hit_rate == 0


def test_hot_rows_at_the_router_spare_the_network_and_the_shards() -> None:
    arguments = ("--model", "dlrm-v2", "--shards", "4", "--cards", "2", "--zipf", "1.05", "--replicate-bytes", "0")
    without, some, told = (planned(*arguments, *more) for more in ((), ("--hot-rows-gb", "0.5"), ("--hit-rate", "0.9")))
    assert without.network is not None
    assert some.network is not None
    assert told.network is not None
    assert some.network.hot_bytes <= 0.5e9
    assert 0.5 < some.network.hit_rate < 1
    assert told.network.hit_rate == pytest.approx(0.9)
    for one in (some, told):
        assert one.network is not None
        assert one.network.request_us < without.network.request_us / 2
        assert one.network.shards_hit < without.network.shards_hit
        assert one.batch.card_memory_bytes < without.batch.card_memory_bytes
    assert planned("--model", "dlrm-v2").network is None
