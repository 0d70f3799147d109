"""The paths of the protocol's HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serving.oip.http_endpoints import InferEndpoints

PREFIX = "/v2"
INFER_PATHS = (f"{PREFIX}/models/{{model}}/infer", f"{PREFIX}/models/{{model}}/versions/{{version}}/infer")
"""For what goes to their handler directly."""
_TAG = ["open inference protocol"]
_BODIES: dict[str, Any] = {"requestBody": {"content": {"application/json": {}, "application/octet-stream": {}}}}
AddRoute = Callable[..., None]


def is_inference_path(path: str) -> bool:
    """Whether a path is the protocol's, so that its errors are in the protocol's form."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def add_routes(route: AddRoute, endpoints: InferEndpoints, model_name: str) -> None:
    """Adds all paths.

    Args:
        route: takes a path, a handler, a method, and options of the documentation.
        endpoints: the handlers.
        model_name: the name of the path convertor for models' names.
    """
    model = f"{PREFIX}/models/{{model:{model_name}}}"
    versions = (model, f"{model}/versions/{{version}}")

    def add(path: str, handler: Any, method: str, summary: str, **extra: Any) -> None:
        parameters = [_parameter(name) for name in ("model", "version") if f"{{{name}" in path]
        route(path, handler, method, tags=_TAG, summary=summary, openapi_extra={"parameters": parameters, **extra})

    for path in versions:
        add(f"{path}/infer", endpoints.infer, "POST", "Score candidates", **_BODIES)
    for path in (PREFIX, f"{PREFIX}/"):
        add(path, endpoints.server_metadata, "GET", "Server and its extensions")
    # Before the models: no model can be called `stats`, to these clients.
    add(f"{PREFIX}/models/stats", endpoints.statistics, "GET", "Statistics of all models")
    add(f"{PREFIX}/health/live", endpoints.live, "GET", "The process runs")
    add(f"{PREFIX}/health/ready", endpoints.ready, "GET", "Every model is live and its shards answer")
    for path in versions:
        add(path, endpoints.model_metadata, "GET", "Inputs and outputs of a model")
        add(f"{path}/ready", endpoints.model_ready, "GET", "The model would answer")
        add(f"{path}/config", endpoints.model_config, "GET", "Configuration of a model")
        add(f"{path}/stats", endpoints.statistics, "GET", "Statistics of a model")
    add(f"{PREFIX}/repository/index", endpoints.repository_index, "POST", "All versions of all models")
    for action in ("load", "unload"):
        path = f"{PREFIX}/repository/models/{{model:{model_name}}}/{action}"
        add(path, endpoints.repository_control, "POST", "Refused: versions come and go by rollouts")


def _parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string"} if name == "model" else {"type": "integer", "minimum": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": f"the {name}"}
