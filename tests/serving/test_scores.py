"""The same request gives the same scores through every API, and they are those of the float32 torch model."""

from __future__ import annotations

import numpy as np
import pytest

from serving.embedded import Ranker
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.serving_api import CITIES, MODEL, api_request, api_service, rank_message, running_api


async def test_http_grpc_and_the_in_process_call_give_identical_scores(api_model):
    with api_service(api_model) as service:
        async with running_api(service) as api:
            for seed in range(8):
                request = api_request(seed, 1 + 3 * seed) | {"top_k": 4}
                http = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
                grpc = await api.stub.Rank(rank_message(request))
                embedded = Ranker(service, MODEL).rank(request)
                scores = np.array(http["scores"], np.float32)
                assert scores.tolist() == http["scores"]
                assert list(grpc.scores) == http["scores"] == embedded["scores"]
                assert list(grpc.order) == http["order"] == embedded["order"]
                assert (grpc.model, grpc.version) == (http["model"], http["version"]) == (MODEL, 1)
                np.testing.assert_allclose(scores, api_model.scores(request), rtol=1e-5)


@pytest.mark.parametrize("topology", [{"local_shards": 2, "cards": 2}, {"local_shards": 3, "memory_budget_bytes": 0}])
def test_the_topology_does_not_change_the_scores(api_model, topology):
    with api_service(api_model, replicate_bytes=0, **topology) as service:
        for seed in range(4):
            answer = Ranker(service, MODEL).rank(api_request(seed))
            np.testing.assert_allclose(answer["scores"], api_model.scores(api_request(seed)), rtol=1e-4)


def lookup_body() -> dict:
    return {
        "sparse": {
            "film": [[3, 4, 4], [], [776]],
            "history": [[1], [2, 3], []],
            "genre": [[1, 2], [400]],
            "city": CITIES[:2],
            "tag": [[5, 6]],
        },
        "weights": {"tag": [[0.5, -2.0]]},
        "request_id": "r-7",
    }


def test_a_lookup_gives_pooled_rows_and_those_of_sequences(api_model, api_service):
    body = lookup_body()
    answer = Ranker(api_service, MODEL).lookup(body)
    assert answer["request_id"] == "r-7"
    assert set(answer["embeddings"]) == set(body["sparse"])
    for name, given in body["sparse"].items():
        bags = [bag if isinstance(bag, list) else [bag] for bag in given]
        found = answer["embeddings"][name]
        if name == "history":
            table = api_model.tables["films"]
            assert [len(bag) for bag in found] == [len(bag) for bag in bags]
            rows = [row for bag in found for row in bag]
            np.testing.assert_allclose(rows, table[[one for bag in bags for one in bag]], rtol=1e-5)
            continue
        weights = body["weights"].get(name, [None] * len(bags))
        expected = [api_model.pooled(name, bag, weight) for bag, weight in zip(bags, weights, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


async def test_a_lookup_is_the_same_in_every_api(api_model):
    body = lookup_body()
    message = ranking_pb2.LookupRequest(model=MODEL, request_id="r-7")
    for name, bags in body["sparse"].items():
        feature = message.sparse[name]
        if name == "city":
            feature.string_ids.extend(bags)
        else:
            feature.ids.extend(one for bag in bags for one in bag)
            feature.lengths.extend(len(bag) for bag in bags)
    message.sparse["tag"].weights.extend([0.5, -2.0])

    with api_service(api_model) as service:
        async with running_api(service) as api:
            http = (await api.http.post(f"/v1/models/{MODEL}:lookup", json=body)).json()
            grpc = await api.stub.Lookup(message)
            assert http == Ranker(service, MODEL).lookup(body)
    assert grpc.request_id == http["request_id"] == "r-7"
    assert set(grpc.embeddings) == set(http["embeddings"])
    for name, embedding in grpc.embeddings.items():
        rows = np.array(embedding.values, np.float32).reshape(-1, embedding.embedding_dim)
        theirs = http["embeddings"][name]
        if name == "history":
            assert list(embedding.lengths) == [len(bag) for bag in theirs]
            theirs = [row for bag in theirs for row in bag]
        np.testing.assert_array_equal(rows, np.array(theirs, np.float32).reshape(rows.shape))
