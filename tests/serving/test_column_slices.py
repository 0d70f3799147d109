"""A service with sliced tables: its clients see tables whole."""

from __future__ import annotations

import numpy as np
import pytest

from serving.client import Client
from shardrank_testing.client_calls import calling
from shardrank_testing.golden import golden_of
from shardrank_testing.serving_api import MODEL, api_request, api_service, api_spec, running_api, write_api_model
from shardrank_testing.snapshots import with_slices

SLICES = {"users": (3, 5), "films": (4, 4), "genres": (1, 3), "tags": (2, 2), "cities": (1, 3), "devices": (2, 2)}


@pytest.mark.parametrize(
    "options", [{}, {"local_shards": 3, "sharding": "table", "replicate_bytes": 0, "memory_budget_bytes": 0}], ids=str
)
async def test_apis_rank_and_look_up_as_if_nothing_were_sliced(tmp_path, options):
    """Each kind of ids is mapped once, whatever the slices."""
    spec = with_slices(api_spec(), SLICES)
    # Golden requests are of features: they do not know of slices.
    golden = golden_of(write_api_model(tmp_path / "plain", spec=spec))
    model = write_api_model(tmp_path / "golden", spec=spec, golden=golden)
    features = {"film": [[3], [9, 11], []], "genre": [[1, 2]], "history": [[7, 7, 5]]}
    with api_service(model, **options) as service:
        async with running_api(service) as api:
            described = (await api.http.get(f"/v1/models/{MODEL}")).json()
            assert {table["name"]: table["embedding_dim"] for table in described["tables"]} == {
                table.name: table.embedding_dim for table in spec.tables
            }
            for seed in range(3):
                request = api_request(seed, num_candidates=7)
                scores = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()["scores"]
                np.testing.assert_allclose(scores, model.scores(request), rtol=1e-4)
            async with calling(Client, f"http://{api.listening.host}:{api.listening.http_port}") as call:
                found = (await call("lookup", MODEL, features)).embeddings
            for name in ("film", "genre"):
                expected = np.stack([model.pooled(name, bag, None) for bag in features[name]])
                np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
