"""The real tritonclient, unchanged, against a real server. Runs where an interpreter with it is named."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardrank_testing.inference_requests import tensors_of
from shardrank_testing.serving_api import MODEL, api_request, api_service, running_api

VARIABLE = "SHARDRANK_TRITONCLIENT_PYTHON"
CALLS = Path(__file__).with_name("tritonclient_calls.py")

pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no interpreter with tritonclient")


@pytest.fixture(scope="module")
async def told(api_model, tmp_path_factory) -> dict[str, Any]:
    """What tritonclient got, and the scores that the request must have."""
    request = api_request(7)
    file = tmp_path_factory.mktemp("triton") / "tensors.json"
    file.write_text(
        json.dumps([one.description() | {"data": one.array.tolist()} for one in tensors_of(api_model.spec, request)])
    )

    with api_service(api_model) as service:
        async with running_api(service) as api:
            urls = [f"{api.listening.host}:{port}" for port in (api.listening.http_port, api.listening.grpc_port)]
            process = await asyncio.create_subprocess_exec(
                *(os.environ[VARIABLE], str(CALLS), *urls, MODEL, str(file)),
                stdout=asyncio.subprocess.PIPE,
                stderr=sys.stderr,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0
    return json.loads(printed) | {"expected": api_model.scores(request)}


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_every_way_to_ask_gives_the_scores(told, transport):
    for name, answer in told[transport]["answers"].items():
        np.testing.assert_allclose(answer["scores"], told["expected"], rtol=1e-5, atol=1e-6, err_msg=name)
        order = np.lexsort((-np.array(answer["scores"]),))
        if name == "scores only":
            assert answer["order"] is None
        else:
            assert answer["order"] == order[: 2 if "top_k" in name else None].tolist(), name


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_health_metadata_and_configuration_are_understood(told, transport):
    got = told[transport]
    assert (got["live"], got["ready"], got["model ready"]) == (True, True, [True, True, False])
    assert {"binary_tensor_data", "model_configuration", "statistics"} <= set(got["server"]["extensions"])
    assert [one["name"] for one in got["metadata"]["outputs"]] == ["scores", "order"]
    names = [one["name"] for one in got["metadata"]["inputs"]]
    assert {"film", "film.lengths", "tag.weights", "context.dense", "candidates.dense"} <= set(names)
    assert [one["name"] for one in got["config"]["input"]] == names
    assert [one["name"] for one in got["config"]["input"] if not one.get("optional")] == [
        name for name in names if not name.endswith((".lengths", ".weights"))
    ]
    assert [(one["name"], one["version"], one["state"]) for one in got["index"]] == [(MODEL, "1", "READY")]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_statistics_count_what_was_asked(told, transport):
    (stats,) = told[transport]["statistics"]["model_stats"]
    asked = len(told["http"]["answers"]) + (len(told["grpc"]["answers"]) if transport == "grpc" else 0)
    assert int(stats["inference_count"]) == asked
    assert int(stats["inference_stats"]["success"]["count"]) == asked
    assert 0 < int(stats["execution_count"]) <= asked
    assert int(stats["inference_stats"]["compute_infer"]["ns"]) > 0
    assert told[transport]["all statistics"] == told[transport]["statistics"]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_errors_are_tritonclients_own(told, transport):
    errors = told[transport]["errors"]
    assert "'no' is not served here" in errors["no model"]
    assert "needs it" in errors["no input"]
    assert "rollouts" in errors["load"]
    assert "StatusCode.UNIMPLEMENTED" in errors["trace"] or "404" in errors["trace"]
