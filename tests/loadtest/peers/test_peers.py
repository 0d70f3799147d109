"""Comparing with other servers: the same model and requests, a real peer, and what the numbers come to."""

from __future__ import annotations

import importlib
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load as load_arrays
from safetensors.torch import save_file

from loadtest.cli import loadtest
from loadtest.errors import LoadError
from loadtest.peers.run import FOLDER, MEASURES, PEERS, best_of, check_subjects, subjects_of
from loadtest.servers import Server
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_payloads, bench_spec
from loadtest.workloads.payloads import HEADER_LENGTH
from loadtest.workloads.prepare import random_dense

PRODUCT = BenchShape(
    features=3, context_features=2, embedding_dim=8, rows=200, dense=3, context_dense=2, candidates="2-9:5"
)
TWO_PEERS = (PEERS["fastapi"], PEERS["triton"])


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


def product(hotness: int) -> BenchWorkload:
    return BenchWorkload(shape=PRODUCT, head="mlp", hotness=hotness)


def bodies(encoding: str, hotness: int = 4) -> list[bytes]:
    return [payload.body for payload in bench_payloads(product(hotness), encoding, 9)]


@pytest.mark.parametrize("once", ["", "-once"])
def test_triton_gets_the_bytes_of_the_others(once):
    (flat, *_), payload = bodies(f"flat{once}"), bench_payloads(product(4), f"tensors{once}", 1)[0]
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


@pytest.mark.nightly
def test_the_command_compares_with_fastapi(tmp_path: Path, environments: Path):
    """Scores of shardrank and of FastAPI in both forms are the same, to 1e-4, before anything is measured."""
    json_file = tmp_path / "peers.json"
    small = ("--peer", "fastapi", "--env-dir", environments, "--rows", 500, "--workers", 1, "--in-flight", 4)
    exact = ("--row-dtype", "fp32", "--dtype", "float32")
    result = run_command(*small, *exact, "--seconds", 0.2, "--rounds", 1, "--hotness", 2, "--json", json_file)
    assert json_file.exists(), result.output
    document = json.loads(json_file.read_text())
    assert result.exit_code == (1 if document["problems"] else 0)
    table = document["tables"]["shardrank and what else could serve the model, hotness 2"]
    assert list(table["subjects"]) == ["best peer", "shardrank", "shardrank, gRPC", "FastAPI", "FastAPI, context once"]
    for measure in MEASURES:
        best, *_, flat, once = (measures[measure.name]["values"][0] for measures in table["subjects"].values())
        assert 0 < best == (max if measure.better == "higher" else min)(flat, once)
    assert table["setup"]["requests"].startswith("50-500:200 candidates, 20 features and 10 floats once a request")


@pytest.mark.parametrize(
    ("row_dtype", "dtype", "who", "difference", "refused"),
    [
        ("int8", "auto", "shardrank", 0.02, False),
        ("int8", "auto", "shardrank, gRPC", 0.07, True),
        ("fp32", "float32", "shardrank", 0.001, True),
        ("int8", "auto", "FastAPI", 0.001, True),
    ],
)
def test_other_scores_are_refused(row_dtype, dtype, who, difference, refused):
    shape, subjects = PRODUCT.model_copy(update={"row_dtype": row_dtype}), subjects_of(PRODUCT, TWO_PEERS)
    ports = {peer: Server(port, port, ()) for port, peer in enumerate((None, *TWO_PEERS), 1)}
    titles = iter(subject.title for subject in reversed(subjects) for _ in range(2))
    generators = SimpleNamespace(scores=lambda load, number: np.full(3, 0.5 + difference * (next(titles) == who)))
    with pytest.raises(LoadError, match=who) if refused else nullcontext():
        check_subjects(shape, subjects, (4,), dtype, generators, ports)


def test_the_best_peer_is_that_of_each_measure():
    values = {
        "shardrank": {measure.name: 0.0 if measure.better == "lower" else 9.0 for measure in MEASURES},
        "FastAPI": {measure.name: 1.0 for measure in MEASURES},
        "Triton": {measure.name: 2.0 for measure in MEASURES},
    }
    best = best_of(["FastAPI", "Triton"], values)
    assert (best["requests"], best["p50"], best["p50, one in flight"]) == (2, 1, 1)


def test_a_missing_environment_is_named_with_what_to_do(environments: Path):
    result = run_command("--peer", "fastapi", "--peer", "mosec", "--env-dir", environments)
    assert "has no environment for mosec: `python -m venv" in str(result.exception)
    assert f"/mosec/bin/python -m pip install -r {PEERS['mosec'].requirements}`" in str(result.exception)


def test_servers_import_nothing_of_shardrank_and_pin_packages():
    for peer in PEERS.values():
        lines = peer.requirements.read_text().split()
        assert "torch==2.13.0" in lines
        assert all("==" in line for line in lines)
    for script in (FOLDER / "servers").glob("*.py"):
        modules = re.findall(r"^ *(?:from|import) +(\w+)", script.read_text(), re.MULTILINE)
        assert "os" in modules or "torch" in modules
        assert not {*modules} & {"loader", "shard_node", "router", "serving", "loadtest"}
