"""Keys that a table has not are counted by feature, and told requests that ask for them, over HTTP and gRPC."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import fingerprint_strings
from loadtest.workloads.prepare import as_golden
from router.id_mapping import NO_IDS
from serving.client import AsyncClient
from serving.embedded import ModelSource, Ranker, load_served_model
from serving.observe.calls import VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.rank.missing_keys import KeyCounter
from serving.rank.service import RankingService
from shardrank_testing.bags import bags_of
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.nodes import until
from shardrank_testing.parsing import parse_json
from shardrank_testing.ranking import random_tensors
from shardrank_testing.serving_api import Api, running_api
from shardrank_testing.snapshots import random_rows, table_of, write_snapshot

FILMS = np.array([-(2**63), -5, 0, 7, 2**63 - 1])
SHOPS = ["corner", "market"]
SPEC = ModelSpec(
    model="keyed",
    tables=(
        table_of("films", 10, 4, "film", "seen", keys="int64"),
        table_of("shops", 10, 4, "shop", keys="string", missing="skip", pooling="mean"),
        table_of("plain", 10, 4, "plain"),
    ),
    features=(
        FeatureSpec(name="seen", side="context"),
        FeatureSpec(name="film", side="candidate"),
        FeatureSpec(name="shop", side="candidate"),
        FeatureSpec(name="plain", side="candidate"),
    ),
    dense_model=DenseModelSpec(kind="mlp", config={"hidden": [8]}),
)
REQUEST = {
    "context": {"sparse": {"seen": [-5, 99, -99]}},
    "candidates": {
        "sparse": {"film": [[7], [-7, 0]], "shop": [["corner"], ["nowhere", "market"]], "plain": [[1], [2]]},
    },
}
ON_CARDS = OnCards(2, "every tier", "as late as can be")
MISSING = {
    "seen": {"bags": [0, 0], "keys": [99, -99]},
    "film": {"bags": [1], "keys": [-7]},
    "shop": {"bags": [1], "keys": fingerprint_strings(["nowhere"]).tolist()},
}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    rng, keys = np.random.default_rng(0), {"films": FILMS, "shops": SHOPS}
    counts = {"films": 5, "shops": 2, "plain": 10}
    tables = {name: random_rows(rng, count, 4) for name, count in counts.items()}
    return write_snapshot(
        tmp_path_factory.mktemp("store"), SPEC, tables=tables, keys=keys, dense=random_tensors(SPEC, 0)
    )


@pytest.fixture(params=[None, *engine_params((ON_CARDS,), (OnCards(2, "peers", "logical"),))], ids=str)
async def api(request, snapshot):
    on, service = request.param, RankingService(expected_models=["keyed"])
    where = {} if on is None else {"cards": on.num_cards, "card_set": on.card_set(SPEC)}
    service.install(load_served_model(ModelSource(snapshot=snapshot[0], dtype="float32", **where), service))
    async with running_api(service) as api:
        yield api
    service.close()


def test_golden_requests_may_have_any_key(snapshot, tmp_path):
    """Such as are missing too: training scores what it would serve."""
    path, tables = snapshot
    service = RankingService()
    served = load_served_model(ModelSource(snapshot=path, dtype="float32"), service)
    with Ranker.open(path, dtype="float32") as ranker:
        scores = ranker.rank("keyed", **REQUEST).scores
    golden = as_golden(served.schema, [parse_json(served.schema, REQUEST)], scores)
    served.close()
    keys, dense = {"films": FILMS, "shops": SHOPS}, random_tensors(SPEC, 0)
    options = {"tables": tables, "keys": keys, "dense": dense, "golden": golden, "golden_tolerance": 1e-4}
    again, _ = write_snapshot(tmp_path, SPEC, **options)
    checked = load_served_model(ModelSource(snapshot=again, dtype="float32"), service)
    assert checked.checked.difference < 1e-5
    checked.close()


def told(missing) -> dict[str, dict[str, list[int]]]:
    return {name: {"bags": one.bags.tolist(), "keys": one.keys.tolist()} for name, one in missing.items()}


async def test_a_request_that_asks_is_told_its_missing_keys(api: Api):
    answered = (await api.http.post("/v1/models/keyed:rank", json=REQUEST | {"return_missing": True})).json()
    assert answered["missing"] == MISSING
    assert "missing" not in (await api.http.post("/v1/models/keyed:rank", json=REQUEST)).json()
    for server in (f"http://{api.http_address}", f"grpc://{api.grpc_address}"):
        async with AsyncClient(server) as client:
            result = await client.rank("keyed", **REQUEST, return_missing=True)
            assert told(result.missing) == MISSING
            np.testing.assert_allclose(result.scores, answered["scores"], rtol=1e-6)
            assert (await client.rank("keyed", **REQUEST)).missing is None
            found = await client.lookup("keyed", {"film": [[7, 8]], "shop": [["nowhere"]]}, return_missing=True)
            assert told(found.missing) == {"film": {"bags": [0], "keys": [8]}, "shop": MISSING["shop"] | {"bags": [0]}}
            assert not found.embeddings["shop"].any()


async def test_requests_of_one_batch_are_told_their_own(api: Api):
    asking = [REQUEST | {"return_missing": True}, REQUEST, REQUEST | {"return_missing": True}]
    async with AsyncClient(f"grpc://{api.grpc_address}") as client:
        results = await asyncio.gather(*(client.rank("keyed", **request) for request in asking * 5))
    assert [None if one.missing is None else told(one.missing) for one in results] == [MISSING, None, MISSING] * 5


async def test_keys_are_counted_by_feature(api: Api):
    await api.http.post("/v1/models/keyed:rank", json=REQUEST)
    labels = 'model="keyed",table="{}",version="1"'

    def counted(feature: str, table: str, found: str) -> float:
        line = f'shardrank_keys_total{{feature="{feature}",found="{found}",{labels.format(table)}}} '
        lines = api.service.metrics.render().decode().splitlines()
        return sum(float(one.removeprefix(line)) for one in lines if one.startswith(line))

    await until(lambda: counted("film", "films", "true"), 10)
    counts = {"film": ("films", 2, 1), "seen": ("films", 1, 2), "shop": ("shops", 2, 1), "plain": ("plain", 0, 0)}
    for feature, (table, found, missing) in counts.items():
        assert (counted(feature, table, "true"), counted(feature, table, "false")) == (found, missing)
    stats = api.service.generations.all()[0].payload.counter.stats()
    assert (stats.keys, stats.missing_keys) == (9, 4)


async def test_a_version_that_is_closed_tells_what_it_counted_and_nothing_later(api: Api, monkeypatch):
    monkeypatch.setattr("serving.rank.missing_keys.FLUSH_S", 0.01)
    schema = api.service.generations.all()[0].payload.schema.features
    metrics, counter = ServingMetrics(), VersionCounter()
    keys = KeyCounter(metrics, counter, schema, 1)
    keys.add(bags_of({schema.index["film"]: [[1, 2], [3]]}), NO_IDS)
    keys.close()
    assert counter.stats().keys == 3
    assert "shardrank_keys_total{" in metrics.render().decode()
    metrics.forget_version(schema.spec.model, 1)
    await asyncio.sleep(0.05)
    assert "shardrank_keys_total{" not in metrics.render().decode()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"film": [[2**63], [1]]}, "candidates.sparse.film"),
        ({"plain": [[1], [-1]]}, "candidates.sparse.plain[1][0]: -1 is not in 0..9223372036854775807"),
        ({"shop": [[1], [2]]}, "candidates.sparse.shop"),
    ],
)
async def test_what_is_no_key_is_refused_in_json(api: Api, change, says):
    request = {**REQUEST, "candidates": {"sparse": REQUEST["candidates"]["sparse"] | change}}
    response = await api.http.post("/v1/models/keyed:rank", json=request)
    assert (response.status_code, says in response.text) == (400, True), response.text
