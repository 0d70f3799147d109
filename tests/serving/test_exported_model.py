"""A version whose dense model is a program of two tasks: exported, checked, refused without trust, and asked by all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor, nn

from loader.errors import SnapshotCorruptError
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import MANIFEST_NAME, ExportedModelSpec
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.writer import export_snapshot
from serving.cli import main as command
from serving.client.client import AsyncClient
from serving.embedded import ModelSource, Ranker, load_served_model
from serving.models.exported import export_program
from serving.models.inputs import InputShapes
from serving.proto.inference import open_inference_pb2_grpc
from serving.rank.service import RankingService
from serving.training.dataset import (
    FilmsDataset,
    FilmsOptions,
    films_description,
    films_vocabularies,
    labelled_requests,
)
from serving.training.network import RankingNetwork, RequestBatches
from shardrank_testing.errors import raises_kind
from shardrank_testing.inference_requests import json_body, message_of, tensors_of
from shardrank_testing.movielens import small_interactions
from shardrank_testing.serving_api import rank_message, running_api

MODEL = "films_mmoe"
TRUSTED = {"trust_exported": True}


TASKS = {"click": 0.2, "buy": 0.8}


class TwoTasks(nn.Module):
    """A logit for each task, the context's part once a request."""

    def __init__(self, context_width: int, candidate_width: int) -> None:
        super().__init__()
        self.context, self.candidates = nn.Linear(context_width, 2), nn.Linear(candidate_width, 2, bias=False)

    def forward(self, context: Tensor, candidates: Tensor, request_of_candidate: Tensor) -> dict[str, Tensor]:
        logits = self.candidates(candidates) + self.context(context)[request_of_candidate]
        return dict(zip(TASKS, logits.unbind(1), strict=True))


class TwoTasksModel:
    """The program's description, its rows and what it computes in plain torch."""

    def __init__(self) -> None:
        self.dataset = FilmsDataset.split(small_interactions(), seed=0)
        options = FilmsOptions(model=MODEL, kind="mlp", dtype="fp32")
        spec = films_description(self.dataset.interactions, options).compiled()
        shapes = InputShapes.of(spec)
        inputs = {
            "context": {"source": "pooled", "features": shapes.context.features, "per": "request"},
            "candidates": {"source": "pooled", "features": shapes.candidate.features},
            "request_of_candidate": {"source": "request_of_candidate"},
        }
        outputs = {task: {"activation": "sigmoid", "weight": weight} for task, weight in TASKS.items()}
        described = ExportedModelSpec.model_validate({"inputs": inputs, "outputs": outputs})
        self.spec = spec.model_copy(update={"dense_model": described})
        torch.manual_seed(0)
        # The rows are those of the built-in model.
        self.module = TwoTasks(shapes.context.embedding_width, shapes.candidate.embedding_width)
        self.network = RankingNetwork(spec).eval()
        self.vocabularies = films_vocabularies(self.dataset.interactions, self.spec)

    def requests(self, limit: int | None = None) -> GoldenRequests:
        """Requests of the test part with the outputs and scores that the module gives."""
        requests = labelled_requests(self.dataset, self.spec, self.dataset.test, limit).requests
        batches = RequestBatches(self.spec, self.vocabularies, requests)
        with torch.inference_mode():
            inputs = self.network.inputs(batches.select(np.arange(batches.num_requests)))
            context = inputs.context[:, : self.module.context.in_features]
            candidates = inputs.candidates[:, : self.module.candidates.in_features]
            logits = self.module(context, candidates, inputs.request_of_candidate)
        outputs = {task: torch.sigmoid(found).numpy() for task, found in logits.items()}
        scores = sum(np.float32(weight) * outputs[task] for task, weight in TASKS.items())
        return replace(requests, scores=np.asarray(scores, np.float32), outputs=outputs)


@pytest.fixture(scope="module")
def model() -> TwoTasksModel:
    return TwoTasksModel()


@pytest.fixture(scope="module")
def folder(model: TwoTasksModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_snapshot(
        tmp_path_factory.mktemp("store"),
        model.spec,
        rows={name: ArrayRows(rows) for name, rows in model.network.rows().items()},
        dense=export_program(model.spec, model.module),
        vocabularies=model.vocabularies,
        golden=model.requests(32),
        golden_tolerance=1e-4,
    )


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[RankingService]:
    with closing(RankingService(expected_models=[MODEL])) as made:
        made.install(load_served_model(ModelSource(snapshot=folder, **TRUSTED), made))
        yield made


def request_of(requests: GoldenRequests, number: int) -> dict[str, Any]:
    one = requests.request(number)
    bags = {name: np.split(ids, np.cumsum(one.lengths[name])[:-1]) for name, ids in one.values.items()}
    return {
        "context": {"sparse": {name: bags[name][0].tolist() for name in ("user_id", "history")}},
        "candidates": {"sparse": {name: [bag.tolist() for bag in bags[name]] for name in ("film_id", "genre")}},
    }


def test_what_is_served_is_what_the_module_computes(model: TwoTasksModel, folder: Path) -> None:
    requests = model.requests()
    with Ranker.open(folder, **TRUSTED) as ranker:
        answers = [ranker.rank(MODEL, **request_of(requests, number)) for number in range(requests.num_requests)]
    for task, expected in (requests.outputs or {}).items():
        served = np.concatenate([answer.outputs[task] for answer in answers])
        np.testing.assert_allclose(served, expected, atol=1e-5)
    for answer in answers:
        expected = 0.2 * answer.outputs["click"] + 0.8 * answer.outputs["buy"]
        np.testing.assert_allclose(answer.scores, expected, rtol=1e-6)
        assert answer.order.tolist() == np.argsort(-answer.scores, kind="stable").tolist()


async def test_every_api_gives_the_same_bits_of_every_output(model: TwoTasksModel, service: RankingService) -> None:
    async with running_api(service) as api:
        address = f"grpc://{api.listening.host}:{api.listening.grpc_port}"
        oip = open_inference_pb2_grpc.GRPCInferenceServiceStub(api.channel)
        async with AsyncClient(address) as client:
            requests = model.requests(4)
            for number in range(4):
                request = request_of(requests, number)
                http = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
                expected = {name: np.array(values, "f4").tobytes() for name, values in http["outputs"].items()}
                assert (list(expected), http["dense_step"]) == (list(TASKS), 0)
                embedded = Ranker(service).rank(MODEL, **request)
                assert {name: values.tobytes() for name, values in embedded.outputs.items()} == expected
                by_name = await api.stub.Rank(rank_message(request | {"model": MODEL}, MODEL))
                assert {name: np.array(one.values, "f4").tobytes() for name, one in by_name.outputs.items()} == expected
                packed = await client.rank(
                    MODEL, context=request["context"]["sparse"], candidates=request["candidates"]["sparse"]
                )
                assert {name: values.tobytes() for name, values in packed.outputs.items()} == expected
                tensors = tensors_of(model.spec, request)
                answer = await oip.ModelInfer(message_of(tensors, MODEL))
                raw = {
                    one.name: content for one, content in zip(answer.outputs, answer.raw_output_contents, strict=True)
                }
                assert {name: raw[name] for name in TASKS} == expected
                infer = await api.http.post(f"/v2/models/{MODEL}/infer", content=json_body(tensors))
                found = {one["name"]: one["data"] for one in infer.json()["outputs"]}
                assert {name: np.array(found[name], "f4").tobytes() for name in TASKS} == expected
                assert list(found) == ["scores", "order", *TASKS]


def test_a_store_that_is_not_trusted_is_refused(folder: Path) -> None:
    with raises_kind("untrusted_program", match="mark it with --trust-exported"):
        Ranker.open(folder)
    verify = ["verify", "--snapshot", str(folder)]
    refused = CliRunner().invoke(command, verify)
    assert refused.exit_code == 1
    assert "bad: untrusted_program: " in refused.output
    accepted = CliRunner().invoke(command, [*verify, "--trust-exported"])
    assert accepted.exit_code == 0, accepted.output
    assert "ok: exported program: nothing in it is pickled" in accepted.output
    assert "dense model: exported is built and gives ['click', 'buy']" in accepted.output
    assert "candidates, every score within 0.0001" in accepted.output


def test_a_program_is_published_unchecked_unless_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    publish = ["publish", str(folder), "--store", str(tmp_path), "--json"]
    for flags, reason in (([], "its exported program is run only with --trust-exported"), (["--trust-exported"], None)):
        published = CliRunner().invoke(command, [*publish, *flags])
        assert published.exit_code == 0, published.output
        document = json.loads(published.stdout)
        assert (document["golden_checked"], document["unchecked"]) == (reason is None, reason)


def test_a_program_is_exported_from_the_command_line(model: TwoTasksModel, tmp_path: Path) -> None:
    torch.export.save(export_program(model.spec, model.module), tmp_path / "mmoe.pt2")
    tables = {f"embedding_bags.{name}.weight": torch.from_numpy(rows) for name, rows in model.network.rows().items()}
    save_file(tables, tmp_path / "rows.safetensors")
    (tmp_path / "films.json").write_text(model.spec.model_dump_json())
    (tmp_path / "users.txt").write_text("".join(f"{one}\n" for one in model.dataset.interactions.users.ids.tolist()))
    golden = model.requests(4)
    save_arrays(golden.to_tensors(), tmp_path / "golden.safetensors")
    arguments = [
        "export", "--checkpoint", tmp_path / "rows.safetensors", "--model", tmp_path / "films.json",
        "--store", tmp_path / "models", "--vocabulary", f"users={tmp_path / 'users.txt'}",
        "--golden", tmp_path / "golden.safetensors", "--golden-tolerance", "0.001",
    ]  # fmt: skip
    without = CliRunner().invoke(command, list(map(str, arguments)))
    assert "--program goes with a dense_model of kind exported" in without.output
    result = CliRunner().invoke(command, [*map(str, arguments), "--program", str(tmp_path / "mmoe.pt2")])
    assert result.exit_code == 0, result.output
    with Ranker.open(tmp_path / "models" / MODEL / "1", **TRUSTED) as ranker:
        assert list(ranker.rank(MODEL, **request_of(golden, 0)).outputs) == list(TASKS)


@pytest.mark.parametrize(
    ("file", "old", "new", "error", "says"),
    [
        ("dense.pt2", b"PK", b"pk", SnapshotCorruptError, r"dense.pt2: SHA-256 is "),
        (
            MANIFEST_NAME,
            b'"path": "dense.pt2"',
            b'"path": "dense.safetensors"',
            SnapshotCorruptError,
            "goes with an exported model, only with it",
        ),
    ],
)
def test_a_changed_program_or_manifest_is_refused(folder, tmp_path, file, old, new, error, says) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / MODEL / folder.name))
    assert verify_snapshot(copy).ok
    (copy / file).write_bytes((copy / file).read_bytes().replace(old, new, 1))
    with pytest.raises(error, match=says):
        Snapshot.open(copy)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"outputs": {}}, "outputs"),
        ({"outputs": {"scores": {}}}, "are names of what every answer has"),
        ({"outputs": {"click": {"weight": 0}}}, "there is no score to order by"),
        ({"file": "../dense.pt2"}, "dense.pt2"),
        ({"inputs": {"x": {"source": "everything"}}}, "inputs.x"),
        ({"config": {}}, "config"),
    ],
)
def test_a_description_of_a_program_is_checked(model: TwoTasksModel, changed: dict[str, Any], says: str) -> None:
    described = json.loads(model.spec.model_dump_json())
    described["dense_model"] |= changed
    with pytest.raises(ValueError, match=says):
        type(model.spec).model_validate(described)
