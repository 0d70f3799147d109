"""The FastAPI application: descriptions, health and metadata, the documentation of every path, errors in one form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loader.errors import ShardrankError
from serving.api import inference_documents as inference
from serving.api.openapi import (
    LOOKUP_EXAMPLE,
    LOOKUP_SCHEMA,
    RANK_EXAMPLE,
    RANK_SCHEMA,
    ErrorDocument,
    HealthDocument,
    LookupDocument,
    ModelsDocument,
    RankDocument,
    ReadyDocument,
    json_body,
)
from serving.api.probes import Probes
from serving.api.replies import (
    OPEN_INFERENCE,
    REQUEST_ID,
    Reply,
    defect_reply,
    error_reply,
    header_lines,
    header_of,
)
from serving.api.tokens import Scope as TokenScope
from serving.api.tokens import Tokens
from serving.description import ModelDescription
from serving.errors import (
    BodyTooLargeError,
    ClientGoneError,
    MalformedRequestError,
    MethodNotAllowedError,
    NoSuchRouteError,
    RepositoryControlError,
)
from serving.formats.infer import parse_version
from serving.formats.json_writer import encode
from serving.observe.times import Call
from serving.rank.service import RankingService

API_VERSION = "1"
MAX_INDEX_BODY_BYTES = 4096
_INFERENCE_TAG = ["open inference protocol"]
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorDocument, "description": "The request is wrong; the message names the field and the limit."},
    404: {"model": ErrorDocument, "description": "No such model, or version of it, is served."},
    408: {"model": ErrorDocument, "description": "The request was not complete within `receive_timeout_s`."},
    413: {"model": ErrorDocument, "description": "The body is longer than `max_body_bytes`."},
    431: {"model": ErrorDocument, "description": "The headers are longer than `max_header_bytes`."},
    500: {"model": ErrorDocument, "description": "The model gave NaN or inf, or a defect of the server."},
    503: {"model": ErrorDocument, "description": "Overloaded, not ready, or a shard is away; try again."},
    504: {"model": ErrorDocument, "description": "The deadline passed."},
}

Rank: TypeAlias = Callable[[Scope, Receive], Awaitable[Reply]]
Tell: TypeAlias = Callable[[Call, Request], Awaitable[Reply]]
Handler: TypeAlias = Callable[[Request], Awaitable[Reply]]


class ModelName(Convertor[str]):
    """A model's name in a path: no colon, so that what follows one can only be an action such as `:rank`."""

    NAME = "model_name"
    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        """Take it as it is."""
        return value

    def to_string(self, value: str) -> str:
        """Give it as it is."""
        return value


register_url_convertor(ModelName.NAME, ModelName())
_MODEL = f"/v1/models/{{model:{ModelName.NAME}}}"
_INFERENCE_MODEL = f"{OPEN_INFERENCE}/models/{{model:{ModelName.NAME}}}"
_VERSIONS = (_INFERENCE_MODEL, f"{_INFERENCE_MODEL}/versions/{{version}}")


class RawRoute(APIRoute):
    """A documented route whose endpoint takes the raw request: no dependencies, no body validated twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Give the endpoint itself."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _Descriptions:
    """Handlers of paths that tell of models. Each counts its call, checks who asks, and answers errors too."""

    def __init__(self, service: RankingService, tokens: Tokens | None) -> None:
        self._service = service
        self._tokens = tokens

    def counted(self, api: str, method: str, tell: Tell, right: TokenScope | None = "describe") -> Handler:
        """Make a handler that counts; without a `right` to check it is a probe, which is never shed."""

        async def handler(request: Request) -> Reply:
            try:
                self.check(request, right)
                with self._service.call(api, method) as call:
                    if right is not None:
                        self._service.admit(call)
                    return await tell(call, request)
            except ShardrankError as error:
                return error_reply(request.url.path, _request_id(request), error)
            except Exception:
                return defect_reply(request.url.path, _request_id(request))

        return handler

    def check(self, request: Request, right: TokenScope | None) -> None:
        """Raise a ServingError unless whoever asks has the right to."""
        if self._tokens is not None and right is not None:
            self._tokens.check(header_of(request.scope, b"authorization"), right)

    def guard_pages(self, app: FastAPI) -> None:
        """Keep the framework's own pages, which describe the API, for those who may see descriptions."""
        for page in app.routes:
            if isinstance(page, Route):
                page.app = self._guarded(page.app)

    def _guarded(self, page: ASGIApp) -> ASGIApp:
        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope)
            try:
                self.check(request, "describe")
            except ShardrankError as error:
                await _response(request, error_reply(request.url.path, _request_id(request), error))(
                    scope, receive, send
                )
            else:
                await page(scope, receive, send)

        return guard

    async def models(self, call: Call, request: Request) -> Reply:
        """Describe the live version of every model."""
        del call, request
        return Reply(200, encode({"models": [one.model_dump() for one in self._service.models()]}))

    async def model(self, call: Call, request: Request) -> Reply:
        """Describe one model."""
        description = self._service.describe(request.path_params["model"])
        call.model = description.model
        return Reply(200, description.model_dump_json().encode())

    async def server_metadata(self, call: Call, request: Request) -> Reply:
        """`GET /v2`."""
        del call, request
        return Reply(200, encode(inference.server_metadata()))

    async def model_metadata(self, call: Call, request: Request) -> Reply:
        """`GET /v2/models/{model}[/versions/{version}]`."""
        del call
        return Reply(200, encode(inference.model_metadata(self._service, *_target(request))))

    async def model_config(self, call: Call, request: Request) -> Reply:
        """`GET /v2/models/{model}[/versions/{version}]/config`."""
        del call
        return Reply(200, encode(inference.model_config(self._service, *_target(request))))

    async def statistics(self, call: Call, request: Request) -> Reply:
        """`GET /v2/models[/{model}[/versions/{version}]]/stats`."""
        del call
        return Reply(200, encode(inference.model_statistics(self._service, *_target(request))))

    async def model_ready(self, call: Call, request: Request) -> Reply:
        """`GET /v2/models/{model}[/versions/{version}]/ready`."""
        del call
        model, version = _target(request)
        is_ready = inference.model_is_ready(self._service, model, version)
        if not is_ready:
            # Says why, unless the version is here and something else keeps it from answering.
            self._service.lease(model, parse_version(version)).release()
        return Reply(200 if is_ready else 503, b"")

    async def repository_index(self, call: Call, request: Request) -> Reply:
        """`POST /v2/repository/index`."""
        del call
        body = await _short_body(request.receive)
        try:
            ready_only = bool(body) and msgspec.json.decode(body, type=_IndexBody).ready
        except msgspec.MsgspecError as error:
            raise MalformedRequestError("", f'the body must be empty, or such as {{"ready": true}}: {error}') from error
        return Reply(200, encode(inference.repository_index(self._service, ready_only=ready_only)))

    async def repository_control(self, call: Call, request: Request) -> Reply:
        """`POST /v2/repository/models/{model}/load` and `unload`, which are refused."""
        raise RepositoryControlError()


def create_documents(service: RankingService, rank: Rank, tokens: Tokens | None = None) -> FastAPI:
    """Make the application.

    Args:
        service: answers.
        rank: answers the paths that rank, which the application describes.
        tokens: says who may do what; None lets everybody.
    """
    app = FastAPI(
        title="shardrank",
        version=API_VERSION,
        description="Online ranking from sharded embeddings: ids in, scores out.",
        redirect_slashes=False,
    )
    probes, descriptions = Probes(service, service.watch.refresh), _Descriptions(service, tokens)
    descriptions.guard_pages(app)

    def route(path: str, name: str, method: str, handler: Handler, summary: str = "", **options: Any) -> None:
        app.router.add_api_route(
            path, _endpoint(handler, name), methods=[method], route_class_override=RawRoute, summary=summary, **options
        )

    async def ranking(request: Request) -> Reply:
        return await rank(request.scope, request.receive)

    async def metrics(request: Request) -> Reply:
        try:
            descriptions.check(request, "admin")
        except ShardrankError as error:
            return error_reply(request.url.path, _request_id(request), error)
        return await probes.metrics()

    # The first ones are tried first.
    route(
        f"{_MODEL}:rank", "rank", "POST", ranking, "Score candidates", tags=["ranking"],
        responses={200: {"model": RankDocument}, **_ERRORS}, openapi_extra=_raw(json_body(RANK_SCHEMA, RANK_EXAMPLE)),
    )  # fmt: skip
    route(
        f"{_MODEL}:lookup", "lookup", "POST", ranking, "Look embeddings up", tags=["ranking"],
        responses={200: {"model": LookupDocument}, **_ERRORS},
        openapi_extra=_raw(json_body(LOOKUP_SCHEMA, LOOKUP_EXAMPLE)),
    )  # fmt: skip
    _add_inference(route, ranking, descriptions, probes)
    route(
        "/v1/models", "models", "GET", descriptions.counted("http", "models", descriptions.models),
        "The live version of every model", tags=["models"], responses={200: {"model": ModelsDocument}},
    )  # fmt: skip
    route(
        _MODEL, "model", "GET", descriptions.counted("http", "model", descriptions.model),
        "What a model takes and is made of", tags=["models"],
        responses={200: {"model": ModelDescription}, 404: _ERRORS[404]}, openapi_extra=_raw({}),
    )  # fmt: skip
    health, ready = _probe(probes.healthz), _probe(probes.readyz)
    route(
        "/healthz", "healthz", "GET", health, "The process runs", tags=["operations"],
        responses={200: {"model": HealthDocument}},
    )  # fmt: skip
    route(
        "/readyz", "readyz", "GET", ready, "Every model is live and its shards answer", tags=["operations"],
        responses={200: {"model": ReadyDocument}, 503: {"model": ReadyDocument}},
    )  # fmt: skip
    route(
        "/metrics", "metrics", "GET", metrics, "Metrics in Prometheus' text format", tags=["operations"],
        response_class=PlainTextResponse,
    )  # fmt: skip
    for path, probe in (("/healthz", health), ("/readyz", ready)):
        route(path, path[1:], "HEAD", probe, include_in_schema=False)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _defect)
    return app


def _add_inference(route: Callable[..., None], ranking: Handler, tells: _Descriptions, probes: Probes) -> None:
    """Add the paths of the Open Inference Protocol."""

    def add(path: str, name: str, method: str, handler: Handler, summary: str, **extra: Any) -> None:
        parameters = [_parameter(name) for name in ("model", "version") if f"{{{name}" in path]
        route(
            path, name, method, handler, summary, tags=_INFERENCE_TAG, openapi_extra={"parameters": parameters, **extra}
        )

    def tell(tell: Tell, right: TokenScope | None = "describe") -> Handler:
        return tells.counted("oip_http", "model", tell, right)

    bodies: dict[str, Any] = {"requestBody": {"content": {JSON_TYPE: {} for JSON_TYPE in _INFER_TYPES}}}
    for path in _VERSIONS:
        add(f"{path}/infer", "infer", "POST", ranking, "Score candidates", **bodies)
    for path in (OPEN_INFERENCE, f"{OPEN_INFERENCE}/"):
        add(path, "server_metadata", "GET", tell(tells.server_metadata), "Server and its extensions")
    # Before the models: no model can be called `stats`, to these clients.
    add(f"{OPEN_INFERENCE}/models/stats", "statistics", "GET", tell(tells.statistics), "Statistics of all models")
    add(f"{OPEN_INFERENCE}/health/live", "live", "GET", _probe(probes.live), "The process runs")
    ready = "Every model is live and its shards answer"
    add(f"{OPEN_INFERENCE}/health/ready", "ready", "GET", _probe(probes.ready), ready)
    for path in _VERSIONS:
        add(path, "model_metadata", "GET", tell(tells.model_metadata), "Inputs and outputs of a model")
        add(f"{path}/ready", "model_ready", "GET", tell(tells.model_ready, None), "The model would answer")
        add(f"{path}/config", "model_config", "GET", tell(tells.model_config), "Configuration of a model")
        add(f"{path}/stats", "statistics", "GET", tell(tells.statistics), "Statistics of a model")
    index = tell(tells.repository_index)
    add(f"{OPEN_INFERENCE}/repository/index", "repository_index", "POST", index, "All versions of all models")
    for action in ("load", "unload"):
        path = f"{OPEN_INFERENCE}/repository/models/{{model:{ModelName.NAME}}}/{action}"
        refused = "Refused: versions come and go by rollouts"
        add(path, "repository_control", "POST", tell(tells.repository_control, "admin"), refused)


_INFER_TYPES = ("application/json", "application/octet-stream")


def _parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string"} if name == "model" else {"type": "integer", "minimum": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": f"the {name}"}


def _raw(extra: dict[str, Any]) -> dict[str, Any]:
    # The endpoints take the raw request, so the path parameter is not seen in their signature.
    return {"parameters": [{**_parameter("model"), "description": "its name"}], **extra}


def _endpoint(handler: Handler, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return _response(request, await handler(request))

    endpoint.__name__ = name
    return endpoint


def _probe(reply: Callable[[], Reply]) -> Handler:
    async def handler(request: Request) -> Reply:
        del request
        return reply()

    return handler


def _response(request: Request, reply: Reply) -> Response:
    response = Response(reply.body, reply.status)
    request_id = header_of(request.scope, REQUEST_ID)
    response.raw_headers = header_lines(reply, None if request_id is None else request_id.encode("latin-1"))
    return response


def _request_id(request: Request) -> str:
    return header_of(request.scope, REQUEST_ID) or ""


def _target(request: Request) -> tuple[str, str]:
    parameters = request.path_params
    return parameters.get("model", ""), parameters.get("version", "")


async def _short_body(receive: Receive) -> bytes:
    body, is_more = b"", True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection before its request was complete")
        body += message.get("body", b"")
        if len(body) > MAX_INDEX_BODY_BYTES:
            unit = "bytes in the body"
            raise BodyTooLargeError("", "MAX_INDEX_BODY_BYTES", MAX_INDEX_BODY_BYTES, f"at least {len(body)}", unit)
        is_more = message.get("more_body", False)
    return body


async def _defect(request: Request, error: Exception) -> Response:
    """Answer what should never happen; the framework raises it again."""
    reply = error_reply(
        request.url.path, _request_id(request), ShardrankError("internal error; the server's log says more")
    )
    del error
    return _response(request, reply)


async def _framework_error(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 of the router in the form of every other error."""
    if not isinstance(error, HTTPException):
        raise error
    path, where = request.url.path, f"{request.method} {request.url.path[:200]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        wrong: ShardrankError = NoSuchRouteError(f"{where}: there is no such path; see /docs")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        wrong = MethodNotAllowedError(f"{where}: this method is not allowed here")
    else:
        raise error
    response = _response(request, error_reply(path, _request_id(request), wrong))
    response.headers.update(error.headers or {})
    return response
