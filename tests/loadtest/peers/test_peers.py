"""Comparing with other servers: the same model and requests, real servers, and what the numbers come to."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadtest.errors import AnswerError, RequestFailedError, ScoresDifferError, ServerFailedError
from loadtest.load.cli import loadtest
from loadtest.load.closed_loop import CpuTime, Weighed
from loadtest.load.generator import ask_scores, open_payloads
from loadtest.load.result import LoadResult, this_machine
from loadtest.peers.catalog import FORMS, PEERS, Form
from loadtest.peers.run import (
    MAX_REPEATS,
    Ahead,
    Aims,
    Bench,
    FormTrial,
    PeerRound,
    PeersConfig,
    ahead,
    best_throughput,
    compared,
    offered_in_time,
    peer_serving,
    random_tensors,
    reference_scores,
)
from loadtest.servers import check_scores
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_requests, bench_workload
from loadtest.workloads.payloads import HEADER_LENGTH, Encoding, SideArrays, side_arrays
from shardrank_testing.load_results import example_run

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates="7")

PRODUCT = BenchShape(
    features=3, context_features=2, embedding_dim=8, rows=200, dense=3, context_dense=2, candidates="2-9:5"
)
SMALL = PeersConfig(shape=SHAPE, hotness=(4,), workers=1, batch=1)


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """FastAPI's is the environment that runs the tests: all that it needs is installed there."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "fastapi").symlink_to(Path(sys.executable).parent.parent, target_is_directory=True)
    return folder


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
    workload = bench_workload(shape, "mlp", 2)
    np.testing.assert_allclose(reference_scores(tensors, workload, request), [1 / (1 + np.exp(-logit))], rtol=1e-6)


def test_the_flat_body_is_laid_out_as_documented() -> None:
    request = bench_requests(SHAPE, "mlp", 4, 1)[0]
    body = bench_payloads(SHAPE, "mlp", 4, "flat", 1)[0].body
    bags = request.bags
    assert np.frombuffer(body, "<u4", 7).tolist() == [7, 0, 0, 0, 3, bags.num_values, 2]
    ids = np.frombuffer(body, "<i8", bags.num_values, 28)
    lengths = np.frombuffer(body, "<i4", 7 * 3, 28 + ids.nbytes)
    own = np.split(bags.values, np.cumsum(bags.lengths)[:-1])
    # In a request the bags of feature 2 begin after those of two others; here a candidate's bags lie side by side.
    for number, bag in enumerate(np.split(ids, np.cumsum(lengths)[:-1])):
        candidate, feature = divmod(number, 3)
        assert bag.tolist() == own[feature * 7 + candidate].tolist()
    assert len(set(lengths.tolist())) > 1
    dense = np.frombuffer(body[28 + ids.nbytes + lengths.nbytes :], "<f4").reshape(7, 2)
    np.testing.assert_array_equal(dense, request.candidate_dense)


def rows_of(side: SideArrays) -> list[list[list[int]]]:
    """The bags of each row."""
    bags = [bag.tolist() for bag in np.split(side.ids, np.cumsum(side.lengths)[:-1])] if side.lengths.size else []
    rows, features = side.lengths.shape
    return [bags[row * features : (row + 1) * features] for row in range(rows)]


@given(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4), st.integers(0, 1000))
def test_the_context_written_for_each_candidate_is_the_context_sent_once(
    context_features: int, context_dense: int, hotness: int, seed: int
) -> None:
    changed = {"context_features": context_features, "context_dense": context_dense}
    workload = bench_workload(PRODUCT.model_copy(update=changed), "mlp", hotness)
    request = workload.request(np.random.default_rng(seed))
    nothing, whole = side_arrays(workload.schema, request, once=False)
    context, candidates = side_arrays(workload.schema, request, once=True)
    assert (nothing.ids.size, nothing.lengths.shape, nothing.dense.shape) == (0, (1, 0), (1, 0))
    assert context.lengths.shape == (1, context_features)
    assert rows_of(whole) == [rows_of(context)[0] + own for own in rows_of(candidates)]
    repeated = np.repeat(context.dense, request.num_candidates, 0)
    np.testing.assert_array_equal(whole.dense, np.concatenate([repeated, candidates.dense], 1))


@pytest.mark.parametrize(("flat", "tensors"), [("flat", "tensors"), ("flat-once", "tensors-once")])
def test_the_tensor_body_has_the_same_numbers_as_the_flat_one(flat: Encoding, tensors: Encoding) -> None:
    flat_body = bench_payloads(PRODUCT, "mlp", 4, flat, 1)[0].body
    payload = bench_payloads(PRODUCT, "mlp", 4, tensors, 1)[0]
    header_bytes = int(dict(payload.headers)[HEADER_LENGTH])
    inputs, data = json.loads(payload.body[:header_bytes])["inputs"], payload.body[header_bytes:]
    count, *sizes = np.frombuffer(flat_body, "<u4", 7).tolist()
    expected = [
        (f"{prefix}{name}", [1, *shape])
        for prefix, rows, (features, ids, dense) in (("", count, sizes[3:]), ("context_", 1, sizes[:3]))
        for name, shape in (("ids", [ids]), ("lengths", [rows, features]), ("dense", [rows, dense]))
    ]
    assert [(one["name"], one["shape"]) for one in inputs] == expected[: 3 if tensors == "tensors" else 6]
    # The flat body has the context first.
    of_candidates = sum(one["parameters"]["binary_data_size"] for one in inputs[:3])
    assert flat_body[28:] == data[of_candidates:] + data[:of_candidates]


@pytest.mark.parametrize("forms", [FORMS[:1], FORMS[1:], FORMS])
def test_a_batch_of_different_requests_is_scored_by_the_peers_model_as_each_alone(
    tmp_path: Path, monkeypatch, forms: tuple[Form, ...]
) -> None:
    monkeypatch.syspath_prepend(PEERS["fastapi"].script.parent)
    torch_model = importlib.import_module("torch_model")
    tensors = random_tensors(PRODUCT, 3)
    save_file(tensors, tmp_path / "weights")
    drawn = [(form, hotness, bench_workload(PRODUCT, "mlp", hotness)) for form in forms for hotness in (1, 4)]
    requests = [(of, one) for _, hotness, of in drawn for one in bench_requests(PRODUCT, "mlp", hotness, 9)]
    encodings = PEERS["fastapi"].forms
    bodies = [
        one.body for form, hotness, _ in drawn for one in bench_payloads(PRODUCT, "mlp", hotness, encodings[form], 9)
    ]
    assert any((one.bags.lengths == 0).any() for _, one in requests)
    threads = torch.get_num_threads()
    scorer = torch_model.Scorer(str(tmp_path / "weights"))
    torch.set_num_threads(threads)
    for (workload, one), body, answer in zip(requests, bodies, scorer.answers(bodies), strict=True):
        scores = np.frombuffer(answer, "<f4")
        np.testing.assert_allclose(scores, reference_scores(tensors, workload, one), atol=1e-5)
        np.testing.assert_allclose(np.frombuffer(scorer.answer(body), "<f4"), scores, atol=1e-6)


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
    workload = bench_workload(SHAPE, "mlp", 4)
    expected = [reference_scores(tensors, workload, one) for one in bench_requests(SHAPE, "mlp", 4, 2)]
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
        with pytest.raises(RequestFailedError, match="no scores of request 0: http_500"):
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
    small = ("--peer", "fastapi", "--env-dir", environments, "--workers", 1, "--shardrank-workers", 1)
    result = run_command(*small, *short, "--json", json_file, "--html", html_file)
    assert json_file.exists(), result.output
    found = json.loads(json_file.read_text())
    assert result.exit_code == (0 if found["valid"] else 1)
    assert [arm["name"] for arm in found["arms"]] == ["shardrank", "shardrank, gRPC", "shardrank, float32", "FastAPI"]
    assert [one["name"] for one in found["measures"]][:2] == [
        "throughput, 4 in flight, hotness 2",
        "p50, one in flight, hotness 2",
    ]
    assert [one["name"] for one in found["measures"]][-1] == "p99, equal rate, hotness 2"
    assert all(value > 0 for one in found["measures"] for arm in one["values"] for value in arm)
    assert "to the best peer of each round" in result.output
    told = "50-500:200 candidates, 20 features and 10 floats once a request, 6 and 3 a candidate, varied: ragged bags"
    assert found["setup"]["requests"].startswith(told)
    form = found["setup"]["form of FastAPI, hotness 2"]
    assert re.fullmatch(r"all columns for each candidate \d+/s, context once \d+/s; taken: .*", form)
    assert "shardrank, float32, hotness 2, to the best peer" in result.output
    assert "FastAPI" in html_file.read_text()


def test_the_command_compares_varied_requests_with_equal_ones(tmp_path: Path, environments: Path) -> None:
    json_file = tmp_path / "varied.json"
    short = ("--seconds", 0.2, "--warmup", 0.1, "--rounds", 1, "--rows", 500, "--hotness", 2, "--in-flight", 4)
    small = ("--peer", "fastapi", "--env-dir", environments, "--workers", 1, "--shardrank-workers", 1)
    result = run_command("--against-equal", "--no-beside-float32", *small, *short, "--json", json_file)
    assert json_file.exists(), result.output
    found = json.loads(json_file.read_text())
    assert [arm["name"] for arm in found["arms"]] == ["shardrank", "shardrank, gRPC", "FastAPI"]
    values = {one["name"]: one["values"] for one in found["measures"]}
    equal, varied = (values[f"throughput, {kind} requests, hotness 2"] for kind in ("equal", "varied"))
    shares = values["varied to equal requests/s, hotness 2"]
    assert shares == [[pytest.approx(one[0] / other[0])] for one, other in zip(varied, equal, strict=True)]
    assert found["setup"]["requests"].startswith("50-150:100 candidates, 20 features and 10 floats once a request")
    assert "the best peer (FastAPI)" in result.output


def test_the_better_form_of_a_peer_is_the_one_with_more_answers() -> None:
    trial = FormTrial("mosec", 1, {FORMS[0]: 410.4, FORMS[1]: 702.0})
    assert trial.better == "context once"
    assert trial.told == "all columns for each candidate 410/s, context once 702/s; taken: context once"
    bench = Bench(CONFIG, None, None, print, (trial,))
    assert [bench.form(*of) for of in (("mosec", 1), ("mosec", 20), ("shardrank", 1))] == [FORMS[1], FORMS[0], FORMS[0]]


def test_a_load_in_which_the_client_was_late_is_repeated_until_it_was_not_or_there_were_enough() -> None:
    late, in_time, said = offered(20.0, why=("it came late.",)), offered(10.0), list[str]()
    given = iter([late, late, in_time])
    assert offered_in_time(lambda: next(given), said.append) == (in_time, 2)
    assert said == ["repeated: it came late."] * 2
    assert offered_in_time(lambda: late, said.append) == (late, MAX_REPEATS)


def test_one_way_to_ask_a_peer_is_left_where_nothing_comes_once_a_request() -> None:
    assert (SMALL.forms, PeersConfig(shape=PRODUCT).forms) == (FORMS[:1], FORMS)


def test_shardrank_is_held_to_a_peers_tolerance_where_all_of_it_is_float32() -> None:
    as_peers = SMALL.model_copy(update={"shape": SHAPE.model_copy(update={"row_dtype": "fp32"}), "dtype": "float32"})
    assert SMALL.tolerance_of("shardrank-float32") == 1e-4
    assert ("shardrank-float32" in SMALL.own, "shardrank-float32" in as_peers.own) == (True, False)
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
AIMS = Aims(throughput=3.0, p50=0.6, offered_p99=0.5)
TABLE = {
    "shardrank": [(3000, 1.0), (4000, 1.0)],
    "shardrank-grpc": [(9000, 0.1), (9000, 0.1)],
    "shardrank-float32": [(500, 2.0), (500, 2.5)],
    "fastapi": [(1000, 2.0), (500, 4.0)],
    "mosec": [(500, 4.0), (1000, 2.5)],
}


def test_shardrank_is_held_against_the_peer_that_was_best_in_each_round_and_measure() -> None:
    found, in_float32 = ahead(CONFIG, compared(CONFIG, rounds_of(CONFIG, TABLE)))
    # Best throughputs: 500/s each; best p50: 2 and 2.5 ms. shardrank over gRPC does not count.
    assert found == Ahead(hotness=1, throughput=3.5, p50=0.45, p99=0.45, offered_p99=0.45)
    assert (in_float32.server, in_float32.throughput, in_float32.p50) == ("shardrank-float32", 0.5, 1.0)
    assert all(found.met(AIMS).values())
    behind = Ahead(hotness=1, throughput=2.99, p50=0.61, p99=1.0, offered_p99=0.51)
    assert behind.met(AIMS) == {"throughput": False, "p50": False, "offered_p99": False}


def test_the_comparison_has_every_servers_numbers_as_ratios_to_shardrank() -> None:
    found = compared(CONFIG, rounds_of(CONFIG, TABLE), this_machine())
    throughput = found.measures[0]
    assert throughput.values[3] == (500.0, 250.0)
    assert throughput.ratios[3].value == pytest.approx((1 / 3 * 1 / 8) ** 0.5)
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
        "hotness 1: 300 to 300/s (50% of the best peer's throughput)"
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
