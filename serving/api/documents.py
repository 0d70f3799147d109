"""The HTTP API but for ranking as a FastAPI application: models, probes, metrics, and the OpenAPI page of all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from http import HTTPStatus
from importlib.metadata import version as package_version
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from fastapi import APIRouter, Body, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loader.access_counts import encode_access_counts, merged_by_table
from loader.errors import ShardrankError
from serving.api.bodies import read_json
from serving.api.http_messages import OPEN_INFERENCE, error_reply, internal_error_reply
from serving.api.tokens import Scope as Right
from serving.api.tokens import Tokens
from serving.dashboard.board import Board, add_page, check_host
from serving.description import ModelInfo
from serving.errors import InvalidRequestError, NotFoundError, invalid_field
from serving.formats.infer import BINARY, parse_version
from serving.formats.schema import RequestSchema, TensorSpec
from serving.observe.metrics import CONTENT_TYPE
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion
from shard_node.access_counts import LookupSampler
from shard_node.generation import Generation

API_VERSION = "1"
MAX_INDEX_BODY_BYTES = 4096
SERVER_NAME = "shardrank"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
HIDDEN_PROBLEMS = "it is not ready; a token with the scope 'describe' is told why"

# https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
_CONFIG_TYPES = {"INT64": "TYPE_INT64", "INT32": "TYPE_INT32", "FP32": "TYPE_FP32", "BYTES": "TYPE_STRING"}
_READY_STATES = ("live", "staged")
Document: TypeAlias = dict[str, Any]

RANKING_ROUTE = re.compile(
    r"/v1/models/(?P<model>[^/:]+):(?P<method>rank|lookup)"
    r"|/v2/models/(?P<infer>[^/:]+)(?:/versions/(?P<version>[^/]+))?/infer"
)
"""The paths of the calls that `serving.api.http` answers itself. No colon in a model's name: an action follows it."""


def _drop_defaults(schema: dict[str, Any]) -> None:
    # None stands for what is absent; null itself is refused but for weights.
    for field in schema["properties"].values():
        field.pop("default", None)


class _RequestBody(BaseModel):
    """A part of a request, for the OpenAPI page: what reads requests is `serving.formats`."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_drop_defaults)


Id: TypeAlias = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})] | str
Bags: TypeAlias = Annotated[
    dict[str, list[Id | list[Id]]], Field(description="by feature: a list of bags; a flat list is one id for each bag")
]
Weights: TypeAlias = Annotated[
    dict[str, list[float | list[float]] | None] | None,
    Field(description="by weighted feature: in the shape of its ids; null is as if absent"),
]
Positive: TypeAlias = Annotated[int, Field(ge=1)] | SkipJsonSchema[None]
Count: TypeAlias = Annotated[int, Field(ge=0)] | SkipJsonSchema[None]
Text: TypeAlias = str | SkipJsonSchema[None]


class BodyOptions(_RequestBody):
    """What a request may say beside its numbers."""

    timeout_ms: Positive = Field(None, description="deadline; the server's default if absent")
    version: Positive = Field(None, description="the version that must answer; the live one if absent")
    request_id: Text = Field(None, description="returned with the answer")
    routing_key: Text = Field(None, description="whose it is: while a canary is on, the same key gets the same version")
    max_age_ms: Count = Field(None, description="how old rows may be, else `rows_stale`; any age if absent")
    min_sequence: Count = Field(None, description="rows must be of this delta or a later one, else `rows_stale`")


class ContextBody(_RequestBody):
    """What is looked up once."""

    sparse: dict[str, list[Id]] = Field({}, description="by feature: the ids of its one bag")
    weights: Weights = None
    dense: list[float] = []


class CandidatesBody(_RequestBody):
    """What is looked up once for each candidate, which is a bag."""

    sparse: Bags = {}
    weights: Weights = None
    dense: list[list[float]] = []


class RankBody(BodyOptions):
    """The request of `:rank`."""

    context: ContextBody = ContextBody()
    candidates: CandidatesBody
    top_k: Positive = Field(None, description="positions in `order`; all if absent")


class LookupBody(BodyOptions):
    """The request of `:lookup`."""

    sparse: Bags
    weights: Weights = None


RANK_EXAMPLE: dict[str, Any] = {
    "context": {"sparse": {"user_id": [42], "history": [1, 50, 172]}, "dense": []},
    "candidates": {"sparse": {"film_id": [[3], [9]], "genre": [[1, 5], [2]]}, "dense": []},
    "timeout_ms": 50,
    "top_k": 10,
}
LOOKUP_EXAMPLE: dict[str, Any] = {"sparse": {"film_id": [[3], [9, 11]]}, "timeout_ms": 50}


class RankDocument(BaseModel):
    """The answer of `:rank`."""

    model: str
    version: int = Field(description="the version that gave every score")
    scores: list[float] = Field(description="in the order of the candidates")
    order: list[int] = Field(description="positions by descending score, at most top_k")
    dense_step: int = Field(description="of the dense weights that gave every score; 0 for the version's own")
    delta_sequence: int = Field(description="every row was of this delta or a later one; -1 where that is not known")
    age_ms: int = Field(description="since the last moment whose row updates are all in the rows; -1: not known")
    outputs: dict[str, list[float]] | None = Field(
        default=None, description="by name, in the order of the candidates; of a model that names its outputs"
    )
    request_id: str | None = None


class LookupDocument(BaseModel):
    """The answer of `:lookup`."""

    model: str
    version: int
    delta_sequence: int = Field(description="as of `:rank`")
    age_ms: int = Field(description="as of `:rank`")
    embeddings: dict[str, list[list[float]] | list[list[list[float]]]] = Field(
        description="by feature: [bags][embedding_dim], or [bags][ids][embedding_dim] if it is not pooled"
    )
    request_id: str | None = None


class ErrorContent(BaseModel):
    """What went wrong."""

    kind: str = Field(description="short and stable, to branch on")
    message: str = Field(description="names the field, the value and what is allowed")
    field: str | None = Field(default=None, description="path of the field that is wrong")
    request_id: str | None = None


class ErrorDocument(BaseModel):
    """Every answer that is not a success."""

    error: ErrorContent


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorDocument, "description": "Any error: docs/api.md has the kinds, and the status of each."}
}
PARAMETERS: dict[str, dict[str, Any]] = {
    name: {"name": name, "in": "path", "required": True, "schema": schema, "description": f"the {name}"}
    for name, schema in (("model", {"type": "string"}), ("version", {"type": "integer", "minimum": 1}))
}
INFERENCE_TAGS: list[str | Enum] = ["open inference protocol"]


def rank(model: str, body: Annotated[RankBody, Body(examples=[RANK_EXAMPLE])]) -> None:
    """Give each candidate's score by one version of a model."""


def lookup(model: str, body: Annotated[LookupBody, Body(examples=[LOOKUP_EXAMPLE])]) -> None:
    """Give the embeddings of each bag, pooled as its feature is."""


def infer() -> None:
    """Give the outputs of a version, as `:rank` does, in the form of the Open Inference Protocol."""


def ranking_routes() -> list[BaseRoute]:
    """Return the routes of rank, lookup and infer, to be described; requests do not come to them."""
    router = APIRouter()
    for handler, summary, response in (
        (rank, "Score candidates", RankDocument),
        (lookup, "Look embeddings up", LookupDocument),
    ):
        path, tags = f"/v1/models/{{model}}:{handler.__name__}", ["ranking"]
        options: dict[str, Any] = {"response_model": response, "responses": ERRORS, "tags": tags}
        router.add_api_route(path, handler, methods=["POST"], summary=summary, **options)
    body: Any = {"content": {"application/json": {}, "application/octet-stream": {}}}
    for path, names in (("{model}", ["model"]), ("{model}/versions/{version}", ["model", "version"])):
        extra = {"parameters": [PARAMETERS[name] for name in names], "requestBody": body}
        options = {"tags": INFERENCE_TAGS, "openapi_extra": extra, "summary": "Score candidates"}
        router.add_api_route(f"/v2/models/{path}/infer", infer, methods=["POST"], **options)
    return list(router.routes)


class ModelName(StringConvertor):
    """A model's name in a path: no colon, so that what follows one can only be an action such as `:rank`."""

    regex = "[^/:]+"


register_url_convertor("model_name", ModelName())
_MODEL = "/v1/models/{model:model_name}"
_VERSIONS = tuple(f"{OPEN_INFERENCE}/models/{{model:model_name}}{version}" for version in ("", "/versions/{version}"))


class _IndexBody(msgspec.Struct):
    ready: bool = False


class ModelsDocument(BaseModel):
    """The answer of `/v1/models`."""

    models: list[ModelInfo] = Field(description="the live version of every model")


class HealthDocument(BaseModel):
    """The answer of `/healthz`."""

    status: Literal["ok"] = "ok"


class ReadyDocument(BaseModel):
    """The answer of `/readyz`."""

    ready: bool
    problems: dict[str, str] = Field(description='why not, by model; the key "" is the process itself')
    degraded: dict[str, str] = Field(description='why rows or weights are old, by model ("": registry); still ready')


def create_documents(service: RankingService, tokens: Tokens | None = None) -> FastAPI:
    """Make the application of the public port; `tokens` say who may do what, None lets everybody."""
    documents = _Documents(service, tokens)
    documents.add_models()
    documents.add_inference()
    documents.add_probes()
    return documents


def create_probes(service: RankingService, tokens: Tokens | None, board: Board | None, *, is_loopback: bool) -> FastAPI:
    """Make the application of the port for operators: probes, metrics, and the page."""
    documents = _Documents(service, tokens, openapi_url=None, dependencies=[Depends(check_host)] * is_loopback)
    documents.add_probes()
    if board is not None:
        add_page(documents, board, tokens)
    return documents


class _Documents(FastAPI):
    """An application to be, which answers every error in one form."""

    def __init__(self, service: RankingService, tokens: Tokens | None, **options: Any) -> None:
        description = "Online ranking from sharded embeddings: ids in, scores out."
        super().__init__(
            title="shardrank", version=API_VERSION, description=description, redirect_slashes=False, **options
        )
        self._service, self._tokens = service, tokens
        for page in self.routes:
            if isinstance(page, Route):
                page.app = self._described(page.app)
        for kind in (ShardrankError, HTTPException, Exception):
            self.add_exception_handler(kind, _failed)

    def openapi(self) -> Document:
        """Describe the calls that `serving.api.http` answers itself, too."""
        about: Document = {"title": self.title, "version": self.version, "description": self.description}
        self.openapi_schema = self.openapi_schema or get_openapi(routes=[*ranking_routes(), *self.routes], **about)
        return self.openapi_schema

    def add_models(self) -> None:
        service = self._service

        def models(model: str, version: str) -> Any:
            return ModelsDocument(models=[service.describe(live) for live in service.generations.live_versions()])

        def model(model: str, version: str) -> ModelInfo:
            return service.describe(model)

        add = partial(self._add, api="http", tags=["models"])
        add("/v1/models", models, "The live version of every model", counted="models", response_model=ModelsDocument)
        what = "What a model takes and is made of"
        add(_MODEL, model, what, response_model=ModelInfo, responses=ERRORS)

        async def counts(request: Request) -> Response:
            if unknown := sorted(request.query_params.keys() - {"version"}):
                problem = "there is no such parameter, only version: an answer has all rows of all tables"
                raise invalid_field(unknown[0], problem)
            version = request.query_params.get("version", "0")

            def file(samplers: Sequence[LookupSampler]) -> bytes:
                return encode_access_counts(merged_by_table(sampler.estimated_lookups() for sampler in samplers))

            with service.lease(request.path_params["model"], parse_version("" if version == "0" else version)) as lease:
                return Response(await asyncio.to_thread(file, lease.payload.access()), media_type=BINARY)

        what = "How often rows were looked up in this process's memory, as a file of docs/snapshot-format.md"
        add(f"{_MODEL}/access-counts", counts, what, reads_body=True, right="admin", response_class=Response)

    def add_inference(self) -> None:
        service = self._service

        def model_ready(model: str, version: str) -> Response:
            if model_is_ready(service, model, version):
                return Response()
            # Says why, unless the version is here and something else keeps it from answering.
            service.lease(model, parse_version(version)).release()
            return Response(status_code=503)

        async def repository_index(request: Request) -> Any:
            form = 'be empty, or such as {"ready": true}'
            body = await read_json(request.receive, "MAX_INDEX_BODY_BYTES", MAX_INDEX_BODY_BYTES, _IndexBody, form)
            return version_index(service, ready_only=body.ready)

        server, metadata, config, statistics = (
            partial(handler, service) for handler in (server_metadata, model_metadata, model_config, model_statistics)
        )
        add = partial(self._add, tags=INFERENCE_TAGS)
        for path in (OPEN_INFERENCE, f"{OPEN_INFERENCE}/"):
            add(path, server, "Server and its extensions")
        # Before the models: no model can be called `stats`, to these clients.
        add(f"{OPEN_INFERENCE}/models/stats", statistics, "Statistics of all models")
        for path in _VERSIONS:
            add(path, metadata, "Inputs and outputs of a model")
            add(f"{path}/config", config, "Configuration of a model")
            add(f"{path}/stats", statistics, "Statistics of a model")
            add(f"{path}/ready", model_ready, "The model would answer", is_probe=True)
        index = "All versions of all models"
        add(f"{OPEN_INFERENCE}/repository/index", repository_index, index, method="POST", reads_body=True)

    def add_probes(self) -> None:
        watch = self._service.watch
        rendering: asyncio.Task[bytes] | None = None

        async def healthz() -> HealthDocument:
            return HealthDocument()

        async def readyz(request: Request, response: Response) -> ReadyDocument:
            problems, degraded, tokens = watch.problems(), watch.degraded(), self._tokens
            response.status_code = 503 if problems else 200
            if tokens is not None and not tokens.allows(request.headers.get("authorization"), "describe"):
                problems, degraded = {"": HIDDEN_PROBLEMS} if problems else {}, {}
            return ReadyDocument(ready=response.status_code == 200, problems=problems, degraded=degraded)

        async def live() -> Response:
            return Response()

        async def ready() -> Response:
            return Response(status_code=503 if watch.problems() else 200)

        async def metrics(request: Request) -> Response:
            nonlocal rendering
            self._check(request, "admin")
            # On a thread, once for all who ask meanwhile.
            if rendering is None or rendering.done():
                rendering = asyncio.create_task(asyncio.to_thread(self._service.metrics.render))
            return Response(await asyncio.shield(rendering), media_type=CONTENT_TYPE)

        runs, is_ready, text = "The process runs", "Every model is live and its shards answer", PlainTextResponse
        operations = ["operations"]
        rows: list[tuple[str, Callable[..., Any], str, dict[str, Any]]] = [
            ("/healthz", healthz, runs, {"tags": operations}),
            ("/readyz", readyz, is_ready, {"tags": operations, "responses": {503: {"model": ReadyDocument}}}),
            (f"{OPEN_INFERENCE}/health/live", live, runs, {"tags": INFERENCE_TAGS}),
            (f"{OPEN_INFERENCE}/health/ready", ready, is_ready, {"tags": INFERENCE_TAGS}),
            ("/metrics", metrics, "Metrics in Prometheus' text format", {"tags": operations, "response_class": text}),
        ]
        for path, endpoint, summary, options in rows:
            self.add_api_route(path, endpoint, methods=["GET"], summary=summary, **options)
            self.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    def _described(self, page: ASGIApp) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            self._check(Request(scope), "describe")
            await page(scope, receive, send)

        return checked

    def _check(self, request: Request, right: Right) -> None:
        if self._tokens is not None:
            self._tokens.check(request.headers.get("authorization"), right)

    def _add(
        self,
        path: str,
        handler: Callable[..., Any],
        summary: str,
        *,
        method: str = "GET",
        api: str = "oip_http",
        counted: str = "model",
        right: Right = "describe",
        is_probe: bool = False,
        reads_body: bool = False,
        **options: Any,
    ) -> None:
        """Add a path whose calls are counted. `handler` gets model and version, or, with `reads_body`, a request."""

        async def endpoint(request: Request) -> Any:
            model = request.path_params.get("model", "")
            self._check(request, right)
            with self._service.call(api, counted, request.headers.get("x-request-id", "")) as call:
                if not is_probe:
                    self._service.complete(call)
                if reads_body:
                    return await handler(request)
                document = handler(model, request.path_params.get("version", ""))
                if api == "http":
                    # One that is served: metrics have no others.
                    call.model = model
                return document

        name = getattr(handler, "func", handler).__name__
        extra = {"parameters": [parameter for field, parameter in PARAMETERS.items() if f"{{{field}" in path]}
        self.add_api_route(path, endpoint, name=name, methods=[method], summary=summary, openapi_extra=extra, **options)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer an error, the framework's own too, in the form of its API. What is a defect is raised again after it."""
    path, request_id, headers = request.scope["path"], request.headers.get("x-request-id", ""), {}
    where = f"{request.method} {path[:200]}"
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        is_ranking = request.method != "POST" and RANKING_ROUTE.fullmatch(path) is not None
        if is_ranking:
            headers["allow"] = "POST"
        if is_ranking or error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            error = InvalidRequestError("", f"{where}: this method is not allowed here", kind="method_not_allowed")
        else:
            error = NotFoundError(
                f"{where}: there is no such path on this port; /docs of the API lists its paths", kind="no_such_route"
            )
    if isinstance(error, ShardrankError):
        reply = error_reply(path, request_id, error)
    else:
        reply = internal_error_reply(path, request_id)
    return Response(reply.body, reply.status, headers | dict(reply.headers), reply.content_type)


# The Open Inference Protocol: as JSON, and with the same fields as messages.


def server_metadata(service: RankingService, model: str = "", version: str = "") -> Document:
    """Name, version and extensions of the server."""
    return {"name": SERVER_NAME, "version": package_version("shardrank"), "extensions": list(EXTENSIONS)}


def model_metadata(service: RankingService, model: str, version: str) -> Document:
    """Return inputs and outputs of a version ("": the live one). Raises NotFoundError, InvalidRequestError."""
    schema = _schema(service, model, version)
    return {
        "name": model,
        "versions": [str(each.version) for each in _generations(service) if each.model == model],
        "platform": SERVER_NAME,
        "inputs": [_tensor(spec) for spec in schema.inputs.values()],
        "outputs": [_tensor(spec) for spec in schema.outputs.values()],
    }


def model_config(service: RankingService, model: str, version: str) -> Document:
    """Return the configuration of a model version, as far as a ranking model has one. Raises as `model_metadata`."""
    schema = _schema(service, model, version)
    return {
        "name": model,
        "platform": SERVER_NAME,
        "backend": SERVER_NAME,
        # Requests are joined by this server's own batcher, whatever their shapes; clients don't batch for it.
        "max_batch_size": 0,
        "input": [_configured(spec) | ({"optional": True} if spec.optional else {}) for spec in schema.inputs.values()],
        "output": [_configured(spec) for spec in schema.outputs.values()],
        "model_transaction_policy": {"decoupled": False},
    }


def model_is_ready(service: RankingService, model: str, version: str) -> bool:
    """Whether a version (the live one for "") would answer now. Raises InvalidRequestError for a wrong one."""
    number, problems = parse_version(version), service.watch.problems()
    if "" in problems or model in problems:
        return False
    present = [each for each in _generations(service) if each.model == model]
    return any(each.state == "live" if number is None else each.version == number for each in present)


def model_statistics(service: RankingService, model: str, version: str) -> Document:
    """Count and times of versions since they are here, in this process; "" for all. Raises as `model_metadata`."""
    number = parse_version(version)
    chosen = [
        each
        for each in _generations(service)
        if model in ("", each.model) and (number is None or each.version == number)
    ]
    if not chosen and model:
        # Says what is served instead.
        service.lease(model, number).release()
    clock_zero_s = service.wall_clock() - service.clock()
    return {"model_stats": [_statistics(each, clock_zero_s) for each in chosen]}


def version_index(service: RankingService, *, ready_only: bool) -> list[Document]:
    """All versions that are here, by model; those that drain are not ready, and models without a version have none."""
    index = []
    for each in _generations(service, ("live", "staged", "draining")):
        is_ready = each.state in _READY_STATES
        if is_ready or not ready_only:
            state = {"name": each.model, "version": str(each.version), "state": "READY" if is_ready else "UNAVAILABLE"}
            index.append(state | {"reason": "" if is_ready else "it was withdrawn and drains"})
    for model, problem in service.watch.problems().items():
        if model and not ready_only and all(each["name"] != model for each in index):
            index.append({"name": model, "version": "", "state": "UNAVAILABLE", "reason": problem})
    return index


def _generations(service: RankingService, states: tuple[str, ...] = _READY_STATES) -> list[Generation[LoadedVersion]]:
    return [each for each in service.generations.all() if each.state in states]


def _schema(service: RankingService, model: str, version: str) -> RequestSchema:
    with service.lease(model, parse_version(version)) as lease:
        return lease.payload.schema


def _tensor(spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _configured(spec: TensorSpec) -> Document:
    return {"name": spec.name, "data_type": _CONFIG_TYPES[spec.datatype], "dims": list(spec.shape)}


def _statistics(generation: Generation[LoadedVersion], clock_zero_s: float) -> Document:
    totals = generation.payload.counter.totals()
    durations = {
        "success": (totals.succeeded, totals.succeeded_s),
        "fail": (totals.failed, totals.failed_s),
        "queue": (totals.succeeded, totals.queue_s),
        "compute_input": (totals.succeeded, totals.input_s),
        "compute_infer": (totals.succeeded, totals.infer_s),
        "compute_output": (totals.succeeded, totals.output_s),
        "cache_hit": (0, 0.0),
        "cache_miss": (0, 0.0),
    }
    return {
        "name": generation.model,
        "version": str(generation.version),
        "last_inference": 0 if totals.last is None else round(1000 * (clock_zero_s + totals.last)),
        "inference_count": totals.succeeded,
        "execution_count": round(totals.batches),
        "inference_stats": {name: {"count": count, "ns": round(1e9 * s)} for name, (count, s) in durations.items()},
        "batch_stats": [],
    }
