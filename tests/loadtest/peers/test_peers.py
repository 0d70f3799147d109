"""Comparing with other servers: the same model and requests, real servers, and what the numbers come to."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from loadtest.errors import AnswerError, RequestFailedError, ScoresDifferError, ServerFailedError
from loadtest.load.cli import loadtest
from loadtest.load.closed_loop import CpuTime, Weighed
from loadtest.load.generator import ask_scores, open_payloads
from loadtest.load.result import LoadResult, this_machine
from loadtest.peers.catalog import PEERS
from loadtest.peers.run import (
    Ahead,
    PeerRound,
    PeersConfig,
    ahead,
    best_throughput,
    compared,
    peer_serving,
    random_tensors,
    reference_scores,
)
from loadtest.servers import check_scores
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_requests
from loadtest.workloads.payloads import HEADER_LENGTH, Encoding
from shardrank_testing.load_results import example_run

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates="7")

SMALL = PeersConfig(shape=SHAPE, hotness=(4,), workers=1, batch=1)


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """FastAPI's is the environment that runs the tests: all that it needs is installed there."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "fastapi").symlink_to(Path(sys.executable).parent.parent, target_is_directory=True)
    return folder


def body_of(encoding: Encoding) -> tuple[bytes, int]:
    """The first request at hotness 4, and the length of its header."""
    payload = bench_payloads(SHAPE, "mlp", 4, encoding, 1)[0]
    return payload.body, int(dict(payload.headers).get(HEADER_LENGTH, 0))


def run_command(*arguments: str | Path):
    return CliRunner().invoke(loadtest, ["peers", *map(str, arguments)])


def test_scores_of_one_candidate_are_what_one_reckons_by_hand() -> None:
    rows = torch.tensor([[1.0], [10.0], [100.0]])
    shape = BenchShape(features=2, embedding_dim=1, rows=3, dense=1, candidates="1")
    request = bench_requests(shape, "mlp", 2, 1)[0]
    tensors = {
        "rows": rows,
        "mlp.layers.0.weight": torch.tensor([[0.0, 1.0, 2.0]]),
        "mlp.layers.0.bias": torch.tensor([-1.0]),
        "mlp.layers.1.weight": torch.tensor([[0.01]]),
        "mlp.layers.1.bias": torch.tensor([0.5]),
    }
    first, second = np.split(request.bags.values, request.bags.lengths[:1])
    sums = [sum(10.0**row for row in bag) for bag in (first, second)]
    logit = 0.01 * max(0.0, sums[0] + 2 * sums[1] - 1) + 0.5
    np.testing.assert_allclose(reference_scores(tensors, request), [1 / (1 + np.exp(-logit))], rtol=1e-6)


def test_the_flat_body_is_laid_out_as_documented() -> None:
    request = bench_requests(SHAPE, "mlp", 4, 1)[0]
    body, _ = body_of("flat")
    bags = request.bags
    assert np.frombuffer(body, "<u4", 4).tolist() == [7, 3, bags.num_values, 2]
    ids = np.frombuffer(body, "<i8", bags.num_values, 16)
    lengths = np.frombuffer(body, "<i4", 7 * 3, 16 + ids.nbytes)
    own = np.split(bags.values, np.cumsum(bags.lengths)[:-1])
    # In a request the bags of feature 2 begin after those of two others; here a candidate's bags lie side by side.
    for number, bag in enumerate(np.split(ids, np.cumsum(lengths)[:-1])):
        candidate, feature = divmod(number, 3)
        assert bag.tolist() == own[feature * 7 + candidate].tolist()
    assert len(set(lengths.tolist())) > 1
    dense = np.frombuffer(body[16 + ids.nbytes + lengths.nbytes :], "<f4").reshape(7, 2)
    np.testing.assert_array_equal(dense, request.candidate_dense)


def test_the_tensor_body_has_the_same_numbers_as_the_flat_one() -> None:
    request = bench_requests(SHAPE, "mlp", 4, 1)[0]
    body, header_bytes = body_of("tensors")
    header = json.loads(body[:header_bytes])
    assert body[header_bytes:] == body_of("flat")[0][16:]
    assert [(one["name"], one["shape"]) for one in header["inputs"]] == [
        ("ids", [1, request.bags.num_values]),
        ("lengths", [1, 7, 3]),
        ("dense", [1, 7, 2]),
    ]
    assert sum(one["parameters"]["binary_data_size"] for one in header["inputs"]) == len(body) - header_bytes


def test_a_batch_of_different_requests_is_scored_by_the_peers_model_as_each_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(PEERS["fastapi"].script.parent)
    torch_model = importlib.import_module("torch_model")
    shape, tensors = SHAPE.model_copy(update={"candidates": "2-9:5"}), random_tensors(SHAPE, 3)
    save_file(tensors, tmp_path / "weights")
    requests = [one for hotness in (1, 4) for one in bench_requests(shape, "mlp", hotness, 3)]
    bodies = [one.body for hotness in (1, 4) for one in bench_payloads(shape, "mlp", hotness, "flat", 3)]
    assert any((one.bags.lengths == 0).any() for one in requests)
    threads = torch.get_num_threads()
    scorer = torch_model.Scorer(str(tmp_path / "weights"))
    torch.set_num_threads(threads)
    for request, body, answer in zip(requests, bodies, scorer.answers(bodies), strict=True):
        np.testing.assert_allclose(np.frombuffer(answer, "<f4"), reference_scores(tensors, request), atol=1e-5)
        np.testing.assert_allclose(np.frombuffer(scorer.answer(body), "<f4"), np.frombuffer(answer, "<f4"), atol=1e-6)


def test_an_answer_that_is_not_of_whole_floats_is_refused() -> None:
    pool = bench_payloads(SHAPE, "mlp", 1, "flat", 1)
    assert list(pool.scores(bytes(28))) == [0.0] * 7
    with pytest.raises(AnswerError, match="30 bytes"):
        pool.scores(bytes(30))


def test_scores_that_a_peer_answers_as_a_batch_of_one_request_are_counted_one_by_one() -> None:
    pool = bench_payloads(SHAPE, "mlp", 1, "tensors", 1)
    output = {"name": "scores", "datatype": "FP32", "shape": [1, 7], "parameters": {"binary_data_size": 28}}
    assert len(pool.scores(json.dumps({"outputs": [output]}).encode() + bytes(28))) == 7


def test_the_fastapi_peer_answers_with_the_models_scores_and_others_are_refused(tmp_path: Path) -> None:
    tensors, config = random_tensors(SHAPE, 3), SMALL
    save_file(tensors, tmp_path / "weights")
    expected = [reference_scores(tensors, one) for one in bench_requests(SHAPE, "mlp", 4, 2)]
    assert np.ptp(expected[0]) > 0.01
    with peer_serving(config, PEERS["fastapi"], Path(sys.executable), tmp_path / "weights", tmp_path / "log") as server:
        load = config.load("fastapi", server, 4)
        _, pool = open_payloads(load)
        found = ask_scores(load, pool, 1)
        check_scores("FastAPI", found, expected[1], 1e-5)
        with pytest.raises(ScoresDifferError, match=r"FastAPI, candidate \d: its score is .* allowed is 1e-05"):
            check_scores("FastAPI", found, expected[0], 1e-5)
        with pytest.raises(ScoresDifferError, match="7 scores, 6 expected"):
            check_scores("FastAPI", found, expected[1][:6], 1e-5)
        # A body that is not a request is this server's fault to say, and not taken for scores.
        with pytest.raises(RequestFailedError, match="no scores of request 0: HTTP Error 500"):
            ask_scores(load, bench_payloads(SHAPE, "mlp", 4, "tensors", 1, path="/rank"), 0)
    with pytest.raises(RequestFailedError, match="no scores of request 1"):
        ask_scores(load, pool, 1)


def test_a_peer_that_can_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"no weights")
    with (
        pytest.raises(ServerFailedError, match=r"(?s)FastAPI: its server has ended .*exit code 1.*[Hh]eader"),
        peer_serving(SMALL, PEERS["fastapi"], Path(sys.executable), tmp_path / "weights", tmp_path / "log"),
    ):
        pass


def test_the_command_compares_a_real_peer_with_shardrank(tmp_path: Path, environments: Path) -> None:
    json_file, html_file = tmp_path / "peers.json", tmp_path / "peers.html"
    short = ("--seconds", 0.2, "--warmup", 0.1, "--rounds", 1, "--rows", 500, "--hotness", 2, "--in-flight", 4)
    in_float32 = ("--row-dtype", "fp32", "--dtype", "float32")
    small = ("--peer", "fastapi", "--env-dir", environments, "--workers", 1, "--shardrank-workers", 1)
    result = run_command(*small, *short, *in_float32, "--json", json_file, "--html", html_file)
    assert json_file.exists(), result.output
    found = json.loads(json_file.read_text())
    assert result.exit_code == (0 if found["valid"] else 1)
    assert [arm["name"] for arm in found["arms"]] == ["shardrank", "shardrank, gRPC", "FastAPI"]
    assert [one["name"] for one in found["measures"]][:2] == [
        "throughput, 4 in flight, hotness 2",
        "p50, one in flight, hotness 2",
    ]
    assert [one["name"] for one in found["measures"]][-1] == "p99, equal rate, hotness 2"
    assert all(value > 0 for one in found["measures"] for arm in one["values"] for value in arm)
    assert "to the best peer of each round" in result.output
    assert found["setup"]["shardrank"] == "fp32 rows, --no-verify --workers 1 --dtype float32"
    assert found["setup"]["requests"].startswith("50-500:200 candidates, varied: ragged bags")
    assert "requests: 50-500:200 candidates, varied" in result.output
    assert "FastAPI" in html_file.read_text()


def test_shardrank_is_held_to_a_peers_tolerance_where_all_of_it_is_float32() -> None:
    as_peers = SMALL.model_copy(update={"shape": SHAPE.model_copy(update={"row_dtype": "fp32"}), "dtype": "float32"})
    assert [config.tolerance_of("shardrank") for config in (SMALL, as_peers)] == [0.03, 1e-4]
    assert [config.tolerance_of("fastapi") for config in (SMALL, as_peers)] == [1e-4, 1e-4]


def test_a_peer_without_an_environment_is_named_with_what_to_do(tmp_path: Path, environments: Path) -> None:
    result = run_command("--peer", "fastapi", "--peer", "mosec", "--env-dir", environments)
    assert result.exit_code != 0
    assert "has no environment for mosec; run `shardrank loadtest peers --install`" in str(result.exception)


@pytest.mark.parametrize("text", ["", "1,x", "0", "1,1", "1001"])
def test_hotness_is_a_list_of_different_numbers(text: str) -> None:
    result = run_command("--hotness", text)
    assert result.exit_code == 2
    assert "is not different whole numbers from 1 to 1000" in result.output.replace("\n", " ")


def weighed(requests: int, p50_ms: float, client_cpu_s: float = 0.1) -> Weighed:
    times = {"p50_ms": p50_ms, "p99_ms": 2 * p50_ms}
    return Weighed(
        requests=requests, seconds=2.0, server_cpu={"serve": CpuTime(1.0)}, client_cpu_s=client_cpu_s, **times
    )


def offered(p99_ms: float | None, why: tuple[str, ...] = ()) -> LoadResult:
    latency = example_run().latency_of_due.model_copy(update={"p50_ms": 1.0, "p99_ms": p99_ms})
    return example_run().model_copy(
        update={"rate": 300.0, "latency_of_due": latency, "invalid_because": why, "valid": not why}
    )


def rounds_of(config: PeersConfig, table: dict[str, list[tuple[int, float]]], cpu_s: float = 0.1) -> list[PeerRound]:
    # The p99 at an equal rate is ten times the p50 alone.
    return [
        PeerRound(turn, name, 1, weighed(requests, 9.0, cpu_s), weighed(10, p50_ms), offered(10 * p50_ms))
        for name, of_server in table.items()
        for turn, (requests, p50_ms) in enumerate(of_server)
    ]


CONFIG = PeersConfig(peers=("fastapi", "mosec"), hotness=(1,), rounds=2)
TABLE = {
    "shardrank": [(3000, 1.0), (4000, 1.0)],
    "shardrank-grpc": [(9000, 0.1), (9000, 0.1)],
    "fastapi": [(1000, 2.0), (500, 4.0)],
    "mosec": [(500, 4.0), (1000, 2.5)],
}


def test_shardrank_is_held_against_the_peer_that_was_best_in_each_round_and_measure() -> None:
    (found,) = ahead(CONFIG, compared(CONFIG, rounds_of(CONFIG, TABLE)))
    # Best throughputs: 500/s each; best p50: 2 and 2.5 ms. shardrank over gRPC does not count.
    assert found == Ahead(hotness=1, throughput=3.5, p50=0.45, p99=0.45, offered_p99=0.45)
    assert all(found.met.values())
    behind = Ahead(hotness=1, throughput=2.99, p50=0.61, p99=1.0, offered_p99=0.51)
    assert behind.met == {"throughput": False, "p50": False, "offered_p99": False}


def test_the_comparison_has_every_servers_numbers_as_ratios_to_shardrank() -> None:
    found = compared(CONFIG, rounds_of(CONFIG, TABLE), this_machine())
    throughput = found.measures[0]
    assert throughput.values[2] == (500.0, 250.0)
    assert throughput.ratios[2].value == pytest.approx((1 / 3 * 1 / 8) ** 0.5)
    assert found.valid
    assert found.versions["mosec"] == PEERS["mosec"].pinned


def test_a_client_that_was_the_bottleneck_makes_the_comparison_invalid() -> None:
    found = compared(CONFIG, rounds_of(CONFIG, TABLE, cpu_s=1.9), this_machine())
    assert not found.valid
    assert found.invalid_because[0] == (
        "shardrank, hotness 1, round 1: throughput: the client used 95% of a core; at most 90% is allowed"
    )


def test_a_client_that_came_late_to_its_requests_makes_the_comparison_invalid() -> None:
    rounds = rounds_of(CONFIG, TABLE)
    rounds[3] = replace(rounds[3], offered=offered(20.0, why=("it came late.",)))
    assert compared(CONFIG, rounds, this_machine()).invalid_because == (
        f"shardrank, gRPC, hotness 1, round {rounds[3].round + 1}: it came late.",
    )


def test_a_percentile_without_an_answer_counts_as_the_whole_time_that_was_waited() -> None:
    rounds = [replace(one, offered=offered(None)) for one in rounds_of(CONFIG, TABLE)]
    assert compared(CONFIG, rounds, this_machine()).measures[-1].values[0] == (5000.0, 5000.0)


def test_every_server_is_offered_a_share_of_what_the_best_peer_just_answered() -> None:
    assert best_throughput([weighed(100, 1.0), weighed(300, 1.0)]) == 150.0
    assert compared(CONFIG, rounds_of(CONFIG, TABLE), this_machine()).setup["equal rates"] == (
        "hotness 1: 300 to 300/s (60% of the best peer's throughput)"
    )


def test_every_peer_has_a_server_that_imports_nothing_of_shardrank_and_pinned_requirements() -> None:
    for peer in PEERS.values():
        lines = peer.requirements.read_text().split()
        assert all("==" in line for line in lines)
        assert "torch==2.13.0" in lines
        assert peer.pinned
        for script in peer.script.parent.glob("*.py"):
            imported = {
                name.split(".")[0]
                for node in ast.walk(ast.parse(script.read_text()))
                for name in (
                    [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else []
                )
            }
            assert not imported & {"loader", "shard_node", "router", "serving", "loadtest"}
