from __future__ import annotations

import gzip
import json
import zlib
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from serving.limits import RequestLimits
from shardrank_testing.inference_requests import binary_body, json_body, tensors_of
from shardrank_testing.serving_api import MODEL, api_request, api_service, running_api, served_api, write_api_model

INFER = f"/v2/models/{MODEL}/infer"
DOCS = Path(__file__).resolve().parents[3] / "docs"
DOCUMENT = (DOCS / "open-inference-protocol.md").read_text(encoding="utf-8")
API_DOCUMENT = (DOCS / "api.md").read_text(encoding="utf-8")


def tensors(model, seed=0):
    return tensors_of(model.spec, api_request(seed))


def outputs_of(answer: httpx.Response) -> dict[str, np.ndarray]:
    """Output tensors of an answer, read as the protocol says."""
    length = answer.headers.get("inference-header-content-length")
    header = json.loads(answer.content if length is None else answer.content[: int(length)])
    binary, start, found = answer.content[len(answer.content) if length is None else int(length) :], 0, {}
    for output in header["outputs"]:
        dtype = {"FP32": np.float32, "INT64": np.int64}[output["datatype"]]
        if "data" in output:
            assert "parameters" not in output
            found[output["name"]] = np.array(output["data"], dtype).reshape(output["shape"])
            continue
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = np.frombuffer(binary[start : start + size], dtype).reshape(output["shape"])
        start += size
    assert start == len(binary)
    return found


async def test_scores_are_those_of_the_rank_api_bit_by_bit(api_model, api):
    for seed in range(4):
        request = api_request(seed)
        expected = (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()
        given = tensors_of(api_model.spec, request)
        body, headers = binary_body(given)
        for answer in (
            await api.http.post(INFER, content=json_body(given)),
            await api.http.post(INFER, content=body, headers=headers),
            await api.http.post(f"/v2/models/{MODEL}/versions/1/infer", content=body, headers=headers),
        ):
            assert answer.status_code == 200, answer.text
            got = outputs_of(answer)
            assert got["scores"].tolist() == np.array(expected["scores"], np.float32).tolist()
            assert got["order"].tolist() == expected["order"]
            np.testing.assert_allclose(got["scores"], api_model.scores(request), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("members", "binary"),
    [
        ({}, {"scores": False, "order": False}),
        ({"parameters": {"binary_data_output": True}}, {"scores": True, "order": True}),
        ({"outputs": [{"name": "order", "parameters": {"binary_data": True}}]}, {"order": True}),
        (
            {
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "order", "parameters": {"binary_data": False}}, {"name": "scores"}],
            },
            {"order": False, "scores": True},
        ),
        (
            {"outputs": [{"name": "scores"}, {"name": "order", "parameters": {"binary_data": True}}]},
            {"scores": False, "order": True},
        ),
        ({"outputs": [], "parameters": None, "id": None}, {"scores": False, "order": False}),
    ],
)
async def test_binary_is_chosen_by_output_and_by_request(api_model, api, members, binary):
    body, headers = binary_body(tensors(api_model), **members)
    answer = await api.http.post(INFER, content=body, headers=headers)
    length = answer.headers.get("inference-header-content-length")
    header = json.loads(answer.content[: None if length is None else int(length)])
    assert {one["name"]: "data" not in one for one in header["outputs"]} == binary
    assert (length is not None) == any(binary.values())
    kind = "application/octet-stream" if any(binary.values()) else "application/json"
    assert answer.headers["content-type"] == kind
    assert set(outputs_of(answer)) == set(binary)


async def test_bodies_may_be_compressed_within_their_limit(api_model):
    limits = RequestLimits(max_body_bytes=100_000)

    async with served_api(api_model, limits) as api:
        body, headers = binary_body(tensors(api_model))
        plain = outputs_of(await api.http.post(INFER, content=body, headers=headers))
        packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}
        for coding, content in packed.items():
            coded = headers | {"content-encoding": coding}
            answer = await api.http.post(INFER, content=content, headers=coded)
            assert outputs_of(answer)["scores"].tolist() == plain["scores"].tolist()
        coded = headers | {"content-encoding": "gzip"}
        bad = {
            gzip.compress(bytes(10_000_000)): (413, "max_body_bytes = 100000"),
            packed["gzip"][:-5]: (400, "ends before it is complete"),
            packed["gzip"] + b"more": (400, "4 bytes follow"),
            body: (400, "neither gzip nor deflate"),
        }
        for content, (status, message) in bad.items():
            answer = await api.http.post(INFER, content=content, headers=coded)
            assert answer.status_code == status
            assert message in answer.json()["error"]
        answer = await api.http.post(INFER, content=body, headers=headers | {"content-encoding": "br"})
        assert answer.status_code == 400
        assert "gzip or deflate" in answer.json()["error"]


async def test_errors_are_texts_with_a_status_and_a_kind(api_model, api):
    body, headers = binary_body(tensors(api_model))
    whole = {"content": body, "headers": headers}
    unknown = tensors(api_model)
    next(tensor for tensor in unknown if tensor.name == "film").array[2] = 10**6
    too_long = {"inference-header-content-length": str(len(body) + 1)}
    versions = f"/v2/models/{MODEL}/versions"
    post, get = partial(api.http.request, "POST"), partial(api.http.request, "GET")
    cases = [
        (post(INFER, content=b"{"), 400, "malformed", "not JSON"),
        (post(INFER, content=b"{}"), 400, "invalid_field", "inputs"),
        (post(INFER, content=body, headers=too_long), 400, "invalid_field", "content-length"),
        (post(INFER, content=body), 400, "malformed", "not JSON"),
        (post(INFER, content=json_body(tensors(api_model)[1:])), 400, "missing_feature", "inputs.user"),
        (post(INFER, content=json_body(unknown)), 400, "unknown_id", "candidates.sparse.film[2][0]"),
        (post("/v2/models/no/infer", **whole), 404, "model_not_found", "'no'"),
        (post(f"{versions}/9/infer", **whole), 404, "model_not_found", "9"),
        (post(f"{versions}/x/infer", **whole), 400, "invalid_field", "'x'"),
        *[
            (get(f"/v2/models/no{path}"), 404, "model_not_found", "'no'")
            for path in ("", "/config", "/stats", "/ready")
        ],
        (get("/v2/nothing"), 404, "no_such_route", "/v2/nothing"),
        (get(INFER), 405, "method_not_allowed", "GET"),
        (post(f"/v2/repository/models/{MODEL}/load"), 404, "no_such_route", "no such path"),
        (post("/v2/repository/index", content=b"["), 400, "malformed", "ready"),
        (post("/v2/repository/index", content=b'{"a":' + b"[" * 2000), 400, "malformed", "ready"),
    ]
    for asked, status, kind, text in cases:
        answer = await asked
        assert (answer.status_code, answer.headers["shardrank-error-kind"]) == (status, kind)
        document = answer.json()
        assert list(document) == ["error"]
        assert text in document["error"]
        assert f"`{kind}`" in DOCUMENT + API_DOCUMENT


async def test_health_metadata_and_index(api_model):
    async with served_api(api_model) as api:
        get = api.http.get
        for path in ("health/live", "health/ready", f"models/{MODEL}/ready", f"models/{MODEL}/versions/1/ready"):
            answer = await get(f"/v2/{path}")
            assert (answer.status_code, answer.content) == (200, b"")
        for path in ("/v2", "/v2/"):
            server = (await get(path)).json()
            assert server["name"] == "shardrank"
            assert {"binary_tensor_data", "model_configuration", "statistics"} <= set(server["extensions"])
        metadata = (await get(f"/v2/models/{MODEL}")).json()
        assert (await get(f"/v2/models/{MODEL}/versions/1")).json() == metadata
        assert (metadata["name"], metadata["versions"]) == (MODEL, ["1"])
        inputs = {one["name"]: (one["datatype"], one["shape"]) for one in metadata["inputs"]}
        assert inputs["film"] == ("INT64", [-1, -1])
        assert inputs["history"] == ("INT64", [-1])
        assert inputs["city"] == ("BYTES", [-1])
        assert inputs["candidates.dense"] == ("FP32", [-1, 3])
        assert {one.name for one in tensors(api_model)} <= set(inputs)
        config = (await get(f"/v2/models/{MODEL}/config")).json()
        assert config["max_batch_size"] == 0
        assert [one["name"] for one in config["input"]] == list(inputs)
        required = {one["name"] for one in config["input"] if not one.get("optional")}
        assert required == {name for name in inputs if not name.endswith((".lengths", ".weights"))}
        for content in (b"", b"{}", b'{"ready": true}'):
            index = (await api.http.post("/v2/repository/index", content=content)).json()
            assert index == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
        api.service.watch.begin_shutdown()
        for path in ("health/ready", f"models/{MODEL}/ready"):
            assert (await get(f"/v2/{path}")).status_code == 503
        assert (await get("/v2/health/live")).status_code == 200


async def test_a_staged_version_and_a_draining_one_are_in_the_index(api_model, tmp_path):
    from serving.embedded import ModelSource, load_served_model

    second = write_api_model(tmp_path, version=2, seed=1)

    with api_service(api_model) as service:
        service.install_staged(load_served_model(ModelSource(snapshot=second.path, dtype="float32"), service))
        async with running_api(service) as api:
            metadata = (await api.http.get(f"/v2/models/{MODEL}")).json()
            assert metadata["versions"] == ["1", "2"]
            body, headers = binary_body(tensors(api_model))
            answer = await api.http.post(f"/v2/models/{MODEL}/versions/2/infer", content=body, headers=headers)
            assert answer.json()["model_version"] == "2"
            stats = (await api.http.get(f"/v2/models/{MODEL}/stats")).json()["model_stats"]
            assert [(one["version"], one["inference_count"]) for one in stats] == [("1", 0), ("2", 1)]
            (only,) = (await api.http.get(f"/v2/models/{MODEL}/versions/2/stats")).json()["model_stats"]
            assert only == stats[1]
            lease = service.lease(MODEL, 2)
            service.retire(MODEL, 2)
            index = (await api.http.post("/v2/repository/index")).json()
            assert [(one["version"], one["state"]) for one in index] == [("1", "READY"), ("2", "UNAVAILABLE")]
            index = (await api.http.post("/v2/repository/index", content=b'{"ready": true}')).json()
            assert [one["version"] for one in index] == ["1"]
            lease.release()
