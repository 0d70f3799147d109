"""Comparing with other servers: the same model and requests, a real peer, and what the numbers come to."""

from __future__ import annotations

import importlib
import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load as load_arrays
from safetensors.torch import save_file

from loadtest.cli import PEER_NAMES, loadtest
from loadtest.errors import LoadError
from loadtest.peers.run import FOLDER, PEERS, PeersConfig, check_subjects, compare_peers
from loadtest.servers import Server
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_spec
from loadtest.workloads.payloads import HEADER_LENGTH
from loadtest.workloads.prepare import random_dense

PRODUCT = BenchShape(
    features=3, context_features=2, embedding_dim=8, rows=200, dense=3, context_dense=2, candidates="2-9:5"
)
TWO_PEERS = (PEERS["fastapi"], PEERS["triton"])
CONFIG = PeersConfig(PRODUCT, TWO_PEERS, (4,), in_flight=4, rounds=2, seconds=0.2, workers=1, dtype="auto")


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """FastAPI's is the environment that runs the tests: all that it needs is installed there."""
    (tmp_path / "fastapi").symlink_to(Path(sys.executable).parent.parent, target_is_directory=True)
    return tmp_path


@pytest.fixture
def servers(monkeypatch, tmp_path: Path) -> Path:
    """A file of weights for modules of peers' servers, which can be imported."""
    rows = torch.randn((PRODUCT.rows, PRODUCT.embedding_dim), generator=torch.Generator().manual_seed(3)) * 0.3
    save_file({"rows": rows, **random_dense(bench_spec(PRODUCT, "mlp"), 3)}, tmp_path / "weights")
    monkeypatch.syspath_prepend(FOLDER / "servers")
    monkeypatch.setenv("PEER_WEIGHTS", str(tmp_path / "weights"))
    threads = torch.get_num_threads()
    yield tmp_path / "weights"
    torch.set_num_threads(threads)


def run_command(*arguments: str | Path):
    return CliRunner().invoke(loadtest, ["peers", *map(str, arguments)])


def bodies(encoding: str, hotness: int = 4) -> list[bytes]:
    return [payload.body for payload in bench_payloads(PRODUCT, "mlp", hotness, encoding, 9)]


@pytest.mark.parametrize("once", ["", "-once"])
def test_triton_gets_the_bytes_of_the_others(once):
    (flat, *_), payload = bodies(f"flat{once}"), bench_payloads(PRODUCT, "mlp", 4, f"tensors{once}", 1)[0]
    header_bytes = int(dict(payload.headers)[HEADER_LENGTH])
    (tensor,) = json.loads(payload.body[:header_bytes])["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("body", "UINT8", [1, len(flat)])
    assert payload.body[header_bytes:] == flat


@pytest.mark.parametrize("hotness", [1, 4])
def test_batches_are_scored_as_each_request_alone(servers, monkeypatch, hotness):
    """In both forms, by mosec, which hands over a bytearray, and by Triton; what they import of these is replaced."""
    monkeypatch.setitem(sys.modules, "mosec", SimpleNamespace(Server=None, Worker=object))
    tensors = SimpleNamespace(
        get_input_tensor_by_name=lambda request, name: request[name],
        Tensor=lambda name, array: {name: array},
        InferenceResponse=lambda tensors: tensors[0],
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", tensors)
    mosec = importlib.import_module("mosec_server").MosecRanking()
    model = importlib.import_module("triton_server").TritonPythonModel()
    model.initialize({})
    scorer = importlib.import_module("torch_model").Scorer(str(servers))
    alone = [np.frombuffer(scorer.answers([body])[0], "<f4") for body in bodies("flat", hotness)]
    assert np.ptp(np.concatenate(alone)) > 0.01
    for encoding in ("flat", "flat-once"):
        batch = bodies(encoding, hotness)
        assert any((load_arrays(body)["lengths"] == 0).any() for body in batch) == (hotness == 1)
        inputs = [SimpleNamespace(as_numpy=lambda body=body: np.frombuffer(body, np.uint8)[None]) for body in batch]
        of_triton = [response["scores"].tobytes() for response in model.execute([{"body": each} for each in inputs])]
        for answers in (of_triton, mosec.forward([mosec.deserialize(bytearray(body)) for body in batch])):
            for answer, scores in zip(answers, alone, strict=True):
                np.testing.assert_allclose(np.frombuffer(answer, "<f4"), scores, atol=1e-5)


def test_the_command_compares_with_fastapi(tmp_path: Path, environments: Path):
    """Scores of shardrank and of FastAPI in both forms are the same, to 1e-4, before anything is measured."""
    json_file, html_file = tmp_path / "peers.json", tmp_path / "peers.html"
    small = ("--peer", "fastapi", "--env-dir", environments, "--rows", 500, "--workers", 1, "--in-flight", 4)
    files = ("--json", json_file, "--html", html_file)
    exact = ("--row-dtype", "fp32", "--dtype", "float32")
    result = run_command(*small, *exact, "--seconds", 0.2, "--rounds", 1, "--hotness", 2, *files)
    assert json_file.exists(), result.output
    comparison = json.loads(json_file.read_text())
    assert result.exit_code == (0 if comparison["valid"] else 1)
    arms = [arm["name"] for arm in comparison["arms"]]
    assert arms == ["best peer", "shardrank", "shardrank, gRPC", "FastAPI", "FastAPI, context once"]
    assert [measure["name"] for measure in comparison["measures"]] == [
        f"{name}, hotness 2" for name in ("throughput", "p50", "p99", "p50, one in flight", "p99, one in flight")
    ]
    for measure in comparison["measures"]:
        best, *_, flat, once = (rounds[0] for rounds in measure["values"])
        assert 0 < best == (max if measure["unit"] == "/s" else min)(flat, once)
    assert comparison["setup"]["requests"].startswith("50-500:200 candidates, 20 features and 10 floats once a request")
    assert "FastAPI" in html_file.read_text()


@pytest.mark.parametrize(
    ("row_dtype", "dtype", "who", "difference", "refused"),
    [
        ("int8", "auto", "shardrank", 0.02, False),
        ("int8", "auto", "shardrank, gRPC", 0.04, True),
        ("fp32", "float32", "shardrank", 0.001, True),
        ("int8", "auto", "FastAPI", 0.001, True),
    ],
)
def test_other_scores_are_refused(row_dtype, dtype, who, difference, refused):
    config = replace(CONFIG, shape=PRODUCT.model_copy(update={"row_dtype": row_dtype}), dtype=dtype)
    ports = {peer: Server(port, port, ()) for port, peer in enumerate((None, *config.peers), 1)}
    subjects = iter(subject.title for subject in (*reversed(config.subjects),) * 2)
    generators = SimpleNamespace(scores=lambda load, number: np.full(3, 0.5 + difference * (next(subjects) == who)))
    with pytest.raises(LoadError, match=who) if refused else nullcontext():
        check_subjects(config, generators, ports)


def test_ratios_are_to_the_best_peer_of_each_round_and_measure():
    throughput, p50 = ("throughput, hotness 4", "/s"), ("p50, hotness 4", "ms")
    table = {  # By round, throughput and p50.
        "shardrank": [(3000, 1.0), (4000, 1.0)],
        "shardrank, gRPC": [(9000, 0.1), (9000, 0.1)],
        "FastAPI": [(1000, 4.0), (500, 2.0)],
        "FastAPI, context once": [(1, 8.0), (1, 8.0)],
        "Triton": [(500, 2.0), (1000, 4.0)],
        "Triton, context once": [(1, 8.0), (1, 8.0)],
    }
    figures = {
        subject: [{throughput: each[0], p50: each[1]} for each in table[subject.title]] for subject in CONFIG.subjects
    }
    comparison = compare_peers(CONFIG, figures, ["shardrank: the client was late"])
    assert [arm.name for arm in comparison.arms] == ["best peer", *table]
    assert [measure.values[0] for measure in comparison.measures] == [(1000, 1000), (2.0, 2.0)]
    ratios = [measure.ratios[1].value for measure in comparison.measures]
    assert ratios == pytest.approx([12**0.5, 0.5])
    assert (comparison.valid, comparison.invalid_because) == (False, ("shardrank: the client was late",))


def test_a_missing_environment_is_named_with_what_to_do(environments: Path):
    result = run_command("--peer", "fastapi", "--peer", "mosec", "--env-dir", environments)
    assert "has no environment for mosec; run `shardrank loadtest peers --install`" in str(result.exception)


def test_servers_import_nothing_of_shardrank_and_pin_packages():
    assert tuple(PEERS) == PEER_NAMES
    for peer in PEERS.values():
        lines = peer.requirements.read_text().split()
        assert "torch==2.13.0" in lines
        assert all("==" in line for line in lines)
    for script in (FOLDER / "servers").glob("*.py"):
        modules = re.findall(r"^ *(?:from|import) +(\w+)", script.read_text(), re.MULTILINE)
        assert "os" in modules or "torch" in modules
        assert not {*modules} & {"loader", "shard_node", "router", "serving", "loadtest"}
