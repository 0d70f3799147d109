"""A model with sliced tables from a checkpoint to scores: users see its tables whole, and only rounding changes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_source import rows_of
from loader.snapshot.writer import export_snapshot
from serving.cli import main
from serving.client import Client
from serving.rank.ranking import MergedBatch
from serving.versions.served_model import ServedModel
from shardrank_testing.card_engines import OnCards
from shardrank_testing.card_ranking import DENSE, ranking_of, score, served_on, shop_batch, shop_spec
from shardrank_testing.client_calls import calling, rank_arguments
from shardrank_testing.golden import golden_of
from shardrank_testing.ranking import random_tensors
from shardrank_testing.serving_api import (
    MODEL,
    api_request,
    api_spec,
    running_api,
    served_service,
    write_api_model,
)
from shardrank_testing.snapshots import random_tables, with_slices
from shardrank_testing.topologies import decoded_tables

SLICES = {
    "dlrm": {"users": (4, 4), "films": (6, 2), "genres": (3, 5), "tags": (2, 2, 4), "cities": (1, 7)},
    "other": {"users": (4, 4), "films": (6, 6, 4), "genres": (3, 5), "tags": (2, 10), "cities": (1, 3)},
}
ON = (OnCards(1, "peers"), OnCards(3, "every tier"))


def sliced_shop(kind: str) -> ModelSpec:
    return with_slices(shop_spec(kind), SLICES.get(kind, SLICES["other"]))


def command(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments], prog_name="shardrank")
    assert result.exit_code == 0, result.output
    return result.stdout


def exported(folder: Path, spec: ModelSpec) -> Path:
    """The version that `shardrank export` makes of a checkpoint whose tables are whole."""
    tensors = {f"ebc.embeddings.{name}.weight": torch.from_numpy(rows) for name, rows in random_tables(spec, 5).items()}
    dense = {f"over.{name}": tensor.contiguous() for name, tensor in random_tensors(spec, 5).items()}
    save_file(tensors | dense, folder / "model.safetensors")
    (folder / "shop.json").write_text(spec.model_dump_json())
    command(
        "export", "--checkpoint", folder / "model.safetensors", "--model", folder / "shop.json",
        "--store", folder / "models", "--dense-prefix", "over.",
    )  # fmt: skip
    return folder / "models" / spec.model / "1"


def whole_twin(folder: Path, spec: ModelSpec) -> Path:
    """The same model with its tables whole, as float32 of what the slices' rows are worth."""
    tables = [{**one.model_dump(), "dtype": "fp32", "column_dims": ()} for one in spec.tables]
    twin = ModelSpec(**{**spec.model_dump(), "tables": tables})
    rows = decoded_tables(spec, random_tables(spec, 5))
    sources = {name: rows_of(one) for name, one in rows.items()}
    return export_snapshot(folder / "twin", twin, rows=sources, dense=random_tensors(spec, 5))


def batches_of(served: ServedModel) -> list[MergedBatch]:
    """The same requests for every model of that shape, in its own order of features."""
    rng = np.random.default_rng(3)
    return [shop_batch(served, rng, counts) for counts in ((1,), (7, 3), (5, 1, 20))]


@pytest.mark.parametrize("kind", DENSE)
def test_sliced_tables_give_the_scores_of_whole_ones_on_the_cpu_and_on_cards(tmp_path, kind):
    spec = sliced_shop(kind)
    path = exported(tmp_path, spec)
    with (
        served_on(path, None) as sliced,
        served_on(whole_twin(tmp_path, spec), None) as whole,
        served_on(path, None, local_shards=3, cards=2, sharding="table", replicate_bytes=0) as divided,
    ):
        expected = [score(whole, batch) for batch in batches_of(whole)]
        for served in (sliced, divided):
            for batch, scores in zip(batches_of(served), expected, strict=True):
                np.testing.assert_allclose(score(served, batch), scores, rtol=1e-4, atol=1e-6)
    for on in ON:
        with served_on(path, on) as cards:
            ranking_of(cards)
            # Again and again: by a graph too.
            for batch, scores in [*zip(batches_of(cards), expected, strict=True)] * 3:
                np.testing.assert_allclose(score(cards, batch), scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"local_shards": 3, "sharding": "table", "replicate_bytes": 0}], ids=str)
async def test_the_service_ranks_and_looks_up_over_its_apis_as_if_nothing_were_sliced(tmp_path, options):
    slices = {"users": (3, 5), "films": (4, 4), "genres": (1, 3), "tags": (2, 2), "cities": (1, 3), "devices": (2, 2)}
    spec = with_slices(api_spec(), slices)
    plain = write_api_model(tmp_path / "plain", spec=spec)
    # Golden requests are of features: they do not know of slices.
    model = write_api_model(tmp_path / "golden", spec=spec, golden=golden_of(plain))

    with closing(served_service(model, **options)) as service:
        async with running_api(service) as api:
            address = f"http://{api.listening.host}:{api.listening.http_port}"
            async with (
                calling(Client, address) as call,
                calling(Client, f"grpc://{api.listening.host}:{api.listening.grpc_port}") as over_grpc,
            ):
                described = (await api.http.get(f"/v1/models/{MODEL}")).json()
                assert {one["name"]: one["embedding_dim"] for one in described["tables"]} == {
                    one.name: one.embedding_dim for one in spec.tables
                }
                for seed in range(3):
                    request = api_request(seed, num_candidates=7)
                    scores = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()["scores"]
                    np.testing.assert_allclose(scores, model.scores(request), rtol=1e-4)
                    for one in (call, over_grpc):
                        result = await one("rank", MODEL, **rank_arguments(request))
                        np.testing.assert_allclose(result.scores, model.scores(request), rtol=1e-4)
                features = {"film": [[3], [9, 11], []], "genre": [[1, 2]], "history": [[7, 7, 5]]}
                for one in (call, over_grpc):
                    found = (await one("lookup", MODEL, features)).embeddings
                    for name in ("film", "genre"):
                        expected = np.stack([model.pooled(name, bag, None) for bag in features[name]])
                        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
