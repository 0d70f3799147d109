from __future__ import annotations

import asyncio
import gc
import json
import re

import pytest

from serving.api.documents import LOOKUP_EXAMPLE, RANK_EXAMPLE
from serving.api.http import HttpApp
from serving.limits import RequestLimits
from serving.observe.calls import Call
from serving.rank.service import RankingService
from shardrank_testing.serving_api import (
    MODEL,
    api_request,
    api_service,
    gated_api,
    running_api,
    served_api,
    served_service,
    until,
)


def test_the_openapi_page_describes_every_route():
    document = HttpApp(RankingService()).documents.openapi()
    assert {path for path in document["paths"] if not path.startswith("/v2")} == {
        "/v1/models/{model}:rank",
        "/v1/models/{model}:lookup",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/models/{model}/access-counts",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    for name, body, example in (("rank", "RankBody", RANK_EXAMPLE), ("lookup", "LookupBody", LOOKUP_EXAMPLE)):
        post = document["paths"][f"/v1/models/{{model}}:{name}"]["post"]
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body}", "examples": [example]}
        assert [one["name"] for one in post["parameters"]] == ["model"]
        assert set(post["responses"]) == {"200", "default"}
    for path, media_type in (("/v1/models", "application/json"), ("/healthz", "application/json")):
        assert "$ref" in document["paths"][path]["get"]["responses"]["200"]["content"][media_type]["schema"]
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    # Every reference leads somewhere.
    text = json.dumps(document)
    for reference in set(re.findall(r'"#/components/schemas/(\w+)"', text)):
        assert reference in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("method", "path", "kind", "allow"),
    [
        ("GET", "/v3/nothing", "no_such_route", None),
        ("GET", "/v1/models/", "no_such_route", None),
        ("GET", f"/v1/models/{MODEL}:erase", "no_such_route", None),
        ("POST", f"/v1/models/{MODEL}:rank%0A", "no_such_route", None),
        ("GET", f"/v1/models/{MODEL}:rank", "method_not_allowed", "POST"),
        ("POST", f"/v1/models/{MODEL}", "method_not_allowed", "GET"),
    ],
)
async def test_the_framework_answers_errors_in_the_same_form(api, method, path, kind, allow):
    answer = await api.http.request(method, path, headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (405 if allow else 404, kind)
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"] == "abc"
    assert answer.headers.get("allow") == allow


async def test_a_coded_body_is_refused_where_none_is_taken(api):
    answer = await api.http.post(f"/v1/models/{MODEL}:rank", content=b"x", headers={"content-encoding": "gzip"})
    assert answer.json()["error"]["field"] == "content-encoding"


async def test_a_defect_is_logged_once_and_ends_no_connection(api_model, caplog):
    with api_service(api_model) as service:

        def broken(model: str) -> object:
            raise RuntimeError("secret of the house")

        service.describe = broken  # type: ignore[method-assign, assignment]
        async with running_api(service) as api:
            answer = await api.http.get("/v1/models", headers={"x-request-id": "abc"})
            assert (answer.status_code, answer.json()["error"]["kind"]) == (500, "internal")
            assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"] == "abc"
            assert "secret" not in answer.text
            assert (await api.http.get("/healthz")).status_code == 200
    (record,) = [record for record in caplog.records if record.name == "serving.api.http_messages"]
    assert record.getMessage() == "/v1/models failed"
    assert "secret of the house" in str(record.exc_info)


async def test_a_model_describes_itself(api_model):
    async with served_api(api_model, RequestLimits(max_candidates=77)) as api:
        document = (await api.http.get(f"/v1/models/{MODEL}")).json()
        assert (await api.http.get("/v1/models")).json() == {"models": [document]}
        assert (await api.http.get("/v1/models/none")).status_code == 404
    assert (document["model"], document["version"], len(document["identity"])) == (MODEL, 1, 64)
    features = {one["name"]: one for one in document["features"]}
    history = {"name": "history", "side": "context", "pooling": "none", "table": "films"}
    assert features["history"] == history | {"weighted": False, "id_type": "integer"}
    assert features["city"]["id_type"] == "string"
    assert features["tag"]["weighted"] is True
    tables = {one["name"]: one for one in document["tables"]}
    genres = {"name": "genres", "num_embeddings": 19, "embedding_dim": 4, "dtype": "fp32"}
    assert tables["genres"] == genres | {"id_mapping": "identity", "unknown_id": "skip"}
    assert document["dense_inputs"] == {"context": 2, "candidate": 3}
    assert document["dense_model"]["kind"] == "target_attention"
    assert document["dense_model"]["dtype"] == "float32"
    assert document["limits"]["max_candidates"] == 77


async def test_a_process_is_ready_from_its_first_model_to_its_end(api_model):
    empty = RankingService(expected_models=[MODEL])
    async with running_api(empty) as api:
        assert (await api.http.get("/healthz")).status_code == 200
        for path, status in (("/healthz", 200), ("/readyz", 503)):
            answer = await api.http.head(path)
            assert (answer.status_code, answer.content) == (status, b"")
        answer = await api.http.get("/readyz")
        assert (answer.status_code, answer.json()) == (
            503,
            {"ready": False, "problems": {MODEL: "no live version"}, "degraded": {}},
        )
        answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "not_ready")
        assert answer.headers["retry-after"] == "1"
    service = served_service(api_model)
    async with running_api(service) as api:
        assert (await api.http.get("/readyz")).json() == {"ready": True, "problems": {}, "degraded": {}}
        service.watch.begin_shutdown()
        answer = await api.http.get("/readyz")
        assert (answer.status_code, list(answer.json()["problems"])) == (503, [""])
    await asyncio.to_thread(service.close)


async def test_a_deadline_that_passes_is_504_and_a_full_queue_503(api_model):
    async with gated_api(api_model, RequestLimits(max_queue=1)) as api:
        ranked = asyncio.create_task(api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(0)))
        await api.gate.wait_until_busy()
        answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(0) | {"timeout_ms": 20})
        assert (answer.status_code, answer.json()["error"]["kind"]) == (504, "deadline_exceeded")
        waiting = asyncio.create_task(api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1)))
        queue = api.service.generations.all()[0].payload.batcher
        await until(lambda: any(not call.is_abandoned for call in queue._queue))
        answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(2))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        api.gate.open.set()
        assert [(await answer).status_code for answer in (ranked, waiting)] == [200, 200]


async def test_the_metrics_tell_requests_errors_memory_and_lookups(api_model):
    async with served_api(api_model, cards=2) as api:
        await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
        await api.http.post(f"/v1/models/{MODEL}:rank", content=b"{")
        await api.http.post("/v1/models/made-up-by-a-client:rank", json=api_request(1))
        await api.http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": [[1, 2, 3], [4]]}})
        await api.service.watch.refresh()
        answer = await api.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.text
    for line in (
        'shardrank_requests_total{api="http",method="rank",model="films",status="ok"} 1.0',
        'shardrank_requests_total{api="http",method="rank",model="",status="malformed"} 1.0',
        'shardrank_requests_total{api="http",method="rank",model="",status="model_not_found"} 1.0',
        'shardrank_errors_total{api="http",kind="malformed",method="rank"} 1.0',
        'shardrank_batch_candidates_sum{model="films"} 5.0',
        "shardrank_requests_in_flight 0.0",
    ):
        assert line in text.splitlines()
    assert "made-up" not in text
    labels = r'model="films",replica="local",shard="0",table="(\w+)",tier="ram",version="1"'
    lookups = re.findall(r"rows_looked_up_total\{" + labels + r"\} (\S+)", text)
    assert dict(lookups)["films"] == f"{4 + 5 + 4}.0"
    labels = r'card="(\d)",model="films",replica="local",shard="0",tier="ram",version="1"'
    cards = re.findall(r"memory_bytes\{" + labels + r"\} (\S+)", text)
    assert [card for card, _ in cards] == ["0", "1"]
    assert all(float(size) > 0 for _, size in cards)


@pytest.mark.parametrize("method", ["rank", "lookup"])
async def test_an_idle_connection_keeps_nothing_of_its_last_request(api_model, method):
    """Neither the request nor its response, nor the version that answered."""
    with api_service(api_model) as service:
        async with running_api(service) as api:
            body = api_request(0) if method == "rank" else {"sparse": {"film": [[1], [2]]}}
            started_at = service.clock()
            assert (await api.http.post(f"/v1/models/{MODEL}:{method}", json=body)).status_code == 200
            await until(lambda: service.in_flight == 0)
            gc.collect()
            calls = [each for each in gc.get_objects() if isinstance(each, Call) and each.started_at >= started_at]
            assert calls == []
