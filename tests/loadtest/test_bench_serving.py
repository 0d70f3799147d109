"""The serving benchmark: real servers, a client that keeps them busy, and the same batches without a server."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import loadtest
from loadtest.bench_serving import (
    AgainstBench,
    BenchConfig,
    Cost,
    Pair,
    Saturated,
    ServingBench,
    Unloaded,
    bench_config,
    main,
    show,
)
from loadtest.workloads.catalog import BenchShape

SHORT = ("--rows", "500", "--quick", "--seconds", "0.3", "--hotness", "2", "--in-flight", "8", "--dtype", "float32")


def test_a_short_run_measures_real_servers_against_the_same_batches(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    apis = ("--api", "grpc", "--api", "oip-http", "--api", "json", "--mode", "local")
    arguments = [*SHORT, *apis, "--json", str(file), "--profile", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = ServingBench.model_validate_json(file.read_text())
    names = ["grpc", "oip-http", "json"]
    assert [(one.head, one.hotness, one.api) for one in found.saturated] == [("mlp", 2, name) for name in names]
    for one in found.saturated:
        assert one.cpu_ms > 0
        assert one.ratio == pytest.approx(one.cpu_ms / one.limit_cpu_ms)
        assert 1 <= one.batch_requests <= 8
        assert one.requests_per_s > 0
        assert one.p50_ms <= one.p99_ms
    assert [(one.mode, one.api) for one in found.unloaded] == [("local", name) for name in names]
    for one in found.unloaded:
        assert one.extra_ms == pytest.approx(one.p50_ms - one.limit_ms)
    # The server under load told where its time went, and it is the load's.
    profile = json.loads((tmp_path / "profile-mlp.json").read_text())
    assert {one["api"] for one in profile["accounts"]} == {"grpc", "oip_http", "http"}
    for account in profile["accounts"]:
        assert abs(account["unaccounted_share"]) <= 0.05, account
    assert "8 in flight" in result.output
    assert found.shape.varied
    assert "requests: 50-500:200 candidates, varied: ragged bags, headers that change" in result.output


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Another folder with this code: what its server runs is found there, and nowhere else."""
    folder = tmp_path / "old"
    folder.mkdir()
    here = Path(loadtest.__file__).parents[1]
    for package in ("loader", "shard_node", "router", "serving"):
        (folder / package).symlink_to(here / package)
    return folder


def test_two_checkouts_are_weighed_in_alternation_and_their_ratio_is_shown(tmp_path: Path, checkout: Path) -> None:
    file = tmp_path / "against.json"
    arguments = ["--rows", "300", "--head", "mlp", "--rounds", "2", "--seconds", "0.2", "--hotness", "1"]
    arguments += ["--api", "oip-http", "--api", "oip-grpc", "--against-api", "oip-grpc=grpc"]
    same = ["--in-flight", "4", "--dtype", "float32", "--same", "--against", str(checkout), "--json", str(file)]
    result = CliRunner().invoke(main, [*arguments, *same])
    assert result.exit_code == 0, result.output
    found = AgainstBench.model_validate_json(file.read_text())
    assert [(one.round, one.api, one.old_api) for one in found.pairs] == [
        (number, api, old) for number in (0, 1) for api, old in (("oip-http", "oip-http"), ("oip-grpc", "grpc"))
    ]
    assert all(cost.cpu_us > 0 and cost.requests_per_s > 0 for one in found.pairs for cost in (one.new, one.old))
    assert found.old_commit == "old, not under git"
    assert (found.shape.candidates, found.shape.varied) == ("100", False)
    assert "requests: 100 candidates, not varied (--same)" in result.output
    said = [line for line in result.output.splitlines() if line.endswith((", new", ", old"))]
    # Whichever was first in a round is second in the next one.
    assert [line.rsplit(", ", 1)[1] for line in said] == ["new", "old"] * 2 + ["old", "new"] * 2


def test_the_old_server_is_the_code_of_the_other_checkout(checkout: Path) -> None:
    (checkout / "serving").unlink()
    (checkout / "serving" / "cli").mkdir(parents=True)
    (checkout / "serving" / "__init__.py").touch()
    (checkout / "serving" / "cli" / "__main__.py").write_text("raise SystemExit('this is the old one')")
    result = CliRunner().invoke(main, [*SHORT, "--api", "json", "--against", str(checkout)])
    assert result.exit_code == 1
    assert "has ended before it served" in result.output
    assert "this is the old one" in result.output


def test_a_folder_that_is_no_checkout_and_an_api_that_there_is_not_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--against", str(tmp_path)])
    assert result.exit_code == 1
    assert "it has no loader/__init__.py" in result.output
    result = CliRunner().invoke(main, ["--against-api", "grpc-packed"])
    assert result.exit_code == 2
    assert "'grpc-packed' is not NEW=OLD with two of json, oip-http, grpc, grpc-packed, oip-grpc" in result.output


def cost(cpu_us: float) -> Cost:
    return Cost(cpu_us=cpu_us, requests_per_s=1000.0, client_cores=0.5, p50_ms=2.0)


def test_the_ratio_of_two_checkouts_is_that_of_each_round_and_shown_with_its_range() -> None:
    cell = {"head": "mlp", "hotness": 1, "api": "grpc-packed", "old_api": "grpc"}
    pairs = tuple(
        Pair.model_validate({**cell, "round": number, "new": cost(new), "old": cost(old)})
        for number, (new, old) in enumerate([(900.0, 1000.0), (800.0, 1000.0), (990.0, 900.0)])
    )
    result = AgainstBench(**ABOUT, new_commit="c0ffee", old_commit="b482ca3", rounds=3, pairs=pairs)
    console = Console(width=200, record=True, file=io.StringIO())
    show(result, console)
    text = console.export_text()
    assert "0.90× (0.80–1.10)" in text
    assert "≤ 1.00×" in text
    assert "900 (800–990)" in text
    assert "1000 (900–1000)" in text
    assert "new: c0ffee, old: b482ca3" in text


def test_the_quick_form_is_shorter_and_flags_are_stronger() -> None:
    full = bench_config(quick=False, rows=1000, varied=True, heads=(), rounds=None)
    assert full == BenchConfig(shape=BenchShape(rows=1000))
    quick = bench_config(quick=True, rows=1000, varied=True, heads=())
    assert (quick.heads, quick.rounds) == (("mlp",), 1)
    assert quick.seconds < full.seconds
    same = bench_config(quick=False, rows=1000, varied=False)
    assert same.shape == BenchShape(rows=1000, candidates="100", varied=False)
    chosen = bench_config(quick=True, rows=1000, varied=True, heads=("dlrm", "mlp"), rounds=3, seconds=9.0)
    assert (chosen.heads, chosen.rounds, chosen.seconds) == (("dlrm", "mlp"), 3, 9.0)


ABOUT: dict[str, Any] = {
    "began_at": "2026-11-21T10:00:00+00:00",
    "machine": "a processor, 2 cores",
    "versions": {"python": "3.11"},
    "shape": BenchShape(),
    "dtype": "bfloat16",
    "server_arguments": (),
    "in_flight": 32,
    "seconds": 5.0,
}


def result_of(ratios: list[float], extras: list[float]) -> ServingBench:
    cell = {"head": "dlrm", "hotness": 20, "api": "oip-http"}
    load = dict.fromkeys(
        ("cpu_ms", "limit_cpu_ms", "batch_requests", "requests_per_s", "server_cores", "client_cores", "p50_ms"), 1.0
    )
    return ServingBench(
        **ABOUT,
        rounds=len(ratios),
        saturated=tuple(
            Saturated.model_validate(cell | load | {"round": number, "ratio": ratio, "p99_ms": 2.0})
            for number, ratio in enumerate(ratios)
        ),
        unloaded=tuple(
            Unloaded.model_validate(
                cell
                | {"round": number, "mode": "two_shards", "p50_ms": 1.0 + extra, "limit_ms": 1.0, "extra_ms": extra}
            )
            for number, extra in enumerate(extras)
        ),
    )


def test_rounds_are_summed_up_by_their_median_and_shown_with_their_range() -> None:
    result = result_of([1.2, 9.0, 1.3], [0.9, 1.1, 1.4])
    console = Console(width=200, record=True, file=io.StringIO())
    show(result, console)
    text = console.export_text()
    assert "1.30× (1.20–9.00)" in text
    assert "≤ 1.25×" in text
    assert "1.10 (0.90–1.40)" in text
    assert ServingBench.model_validate_json(result.model_dump_json()) == result
