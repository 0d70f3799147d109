"""The same request gives the same scores through every API, and they are those of the float32 torch model."""

from __future__ import annotations

import numpy as np

from serving.embedded import Ranker
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.serving_api import (
    CITIES,
    MODEL,
    api_request,
    rank_message,
    running_api,
    sparse_message,
)


async def test_http_grpc_and_the_in_process_call_give_identical_scores(api_model, api_service):
    async with running_api(api_service) as api:
        for seed in range(8):
            request = api_request(seed, 1 + 3 * seed) | {"top_k": 4}
            http = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
            grpc = await api.stub.Rank(rank_message(request))
            embedded = Ranker(api_service).rank(MODEL, **request)
            scores = np.array(http["scores"], np.float32)
            assert scores.tolist() == http["scores"]
            assert list(grpc.scores) == http["scores"] == embedded.scores.tolist()
            assert list(grpc.order) == http["order"] == embedded.order.tolist()
            assert (grpc.model, grpc.version) == (http["model"], http["version"]) == (MODEL, 1)
            np.testing.assert_allclose(scores, api_model.scores(request), rtol=1e-5)


LOOKUP = {
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


async def test_a_lookup_is_the_same_in_every_api(api_model, api_service):
    """Pooled embeddings, and the rows of sequences one after the other."""
    message = ranking_pb2.LookupRequest(model=MODEL, request_id="r-7")
    for name, bags in LOOKUP["sparse"].items():
        message.sparse[name].CopyFrom(sparse_message(bags, LOOKUP["weights"].get(name), is_context=False))
    async with running_api(api_service) as api:
        http = (await api.http.post(f"/v1/models/{MODEL}:lookup", json=LOOKUP)).json()
        grpc = await api.stub.Lookup(message)
        embedded = Ranker(api_service).lookup(MODEL, **LOOKUP)
    assert grpc.request_id == http["request_id"] == embedded.request_id == "r-7"
    assert set(grpc.embeddings) == set(http["embeddings"]) == set(LOOKUP["sparse"])
    for name, embedding in grpc.embeddings.items():
        rows = np.array(embedding.values, np.float32).reshape(-1, embedding.embedding_dim)
        found, bags = http["embeddings"][name], LOOKUP["sparse"][name]
        if name == "history":
            assert list(embedding.lengths) == [len(bag) for bag in found] == [len(bag) for bag in bags]
            found = [row for bag in found for row in bag]
            expected = api_model.tables["films"][[row for bag in bags for row in bag]]
        else:
            weights = LOOKUP["weights"].get(name, [None] * len(bags))
            bags = [bag if isinstance(bag, list) else [bag] for bag in bags]
            expected = [api_model.pooled(name, bag, weight) for bag, weight in zip(bags, weights, strict=True)]
        np.testing.assert_array_equal(rows, np.array(found, np.float32))
        np.testing.assert_array_equal(rows, getattr(embedded.embeddings[name], "values", embedded.embeddings[name]))
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
