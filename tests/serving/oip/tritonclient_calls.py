"""Calls a server by the real `tritonclient`, in an interpreter that has it: HTTP_URL GRPC_URL MODEL REQUEST_FILE.

Prints what it got as one JSON object. Needs nothing of shardrank: tritonclient[grpc] pins an older protobuf than ours,
so it lives in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException


def inputs_of(client: Any, tensors: list[dict[str, Any]], **options: Any) -> list[Any]:
    dtypes = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "BYTES": object}
    inputs = []
    for one in tensors:
        array = np.array(one["data"], dtype=dtypes[one["datatype"]]).reshape(one["shape"])
        given = client.InferInput(one["name"], list(array.shape), one["datatype"])
        given.set_data_from_numpy(array, **options)
        inputs.append(given)
    return inputs


def answer_of(result: Any) -> dict[str, Any]:
    order = result.as_numpy("order")
    return {"scores": result.as_numpy("scores").tolist(), "order": None if order is None else order.tolist()}


def error_of(call: Any) -> str:
    try:
        call()
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return "no error"


def documents_of(client: Any, model: str, tensors: list[Any], **as_json: Any) -> dict[str, Any]:
    """What both clients are asked alike; the one over gRPC gives JSON if it is told so."""
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model ready": [client.is_model_ready(*names) for names in ((model,), (model, "1"), ("no",))],
        "server": client.get_server_metadata(**as_json),
        "metadata": client.get_model_metadata(model, **as_json),
        "config": client.get_model_config(model, **as_json),
        "index": client.get_model_repository_index(**as_json),
        "statistics": client.get_inference_statistics(model, **as_json),
        "all statistics": client.get_inference_statistics(**as_json),
        "errors": {
            "no model": error_of(lambda: client.infer("no", tensors)),
            "no input": error_of(lambda: client.infer(model, tensors[1:])),
            "load": error_of(lambda: client.load_model(model)),
            "trace": error_of(lambda: client.get_trace_settings(model)),
        },
    }


def over_http(url: str, model: str, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    http = tritonclient.http
    with http.InferenceServerClient(url) as client:
        inputs = inputs_of(http, tensors)
        as_json = inputs_of(http, tensors, binary_data=False)
        scores = [http.InferRequestedOutput("scores", binary_data=True)]
        mixed = [http.InferRequestedOutput("scores", binary_data=False), http.InferRequestedOutput("order")]
        named = {"model_version": "1", "request_id": "mine", "timeout": 5_000_000, "parameters": {"top_k": 2}}
        answers = {
            "binary": client.infer(model, inputs),
            "json": client.infer(model, as_json),
            "scores only": client.infer(model, inputs, outputs=scores),
            "mixed outputs": client.infer(model, inputs, outputs=mixed),
            "gzip": client.infer(model, inputs, request_compression_algorithm="gzip"),
            "deflate": client.infer(model, inputs, request_compression_algorithm="deflate"),
            "accepts gzip": client.infer(model, inputs, response_compression_algorithm="gzip"),
            "asynchronous": client.async_infer(model, inputs).get_result(),
            "version, id, top_k": client.infer(model, inputs, **named),
        }
        documents = documents_of(client, model, inputs)
        return documents | {"answers": {name: answer_of(answer) for name, answer in answers.items()}}


def over_grpc(url: str, model: str, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    rpc = tritonclient.grpc
    with rpc.InferenceServerClient(url) as client:
        inputs = inputs_of(rpc, tensors)
        named = {"model_version": "1", "request_id": "mine", "client_timeout": 5.0, "parameters": {"top_k": 2}}
        answers = {
            "all outputs": client.infer(model, inputs),
            "scores only": client.infer(model, inputs, outputs=[rpc.InferRequestedOutput("scores")]),
            "compressed": client.infer(model, inputs, compression_algorithm="gzip"),
            "version, id, top_k": client.infer(model, inputs, **named),
        }
        documents = documents_of(client, model, inputs, as_json=True)
        documents |= {"config": documents["config"]["config"], "index": documents["index"]["models"]}
        return documents | {"answers": {name: answer_of(answer) for name, answer in answers.items()}}


if __name__ == "__main__":
    http_url, grpc_url, model_name, file = sys.argv[1:]
    with open(file, encoding="utf-8") as opened:
        given_tensors = json.load(opened)
    told = {
        "http": over_http(http_url, model_name, given_tensors),
        "grpc": over_grpc(grpc_url, model_name, given_tensors),
    }
    sys.stdout.write(json.dumps(told))
