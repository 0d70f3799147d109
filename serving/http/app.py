"""The FastAPI application: routes, their documentation, and errors in one form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loader.errors import ShardrankError
from serving.description import ModelDescription
from serving.errors import MethodNotAllowedError, NoSuchRouteError
from serving.http.asgi import endpoint_of, exchange_of, response_of
from serving.http.direct import DirectRoutes
from serving.http.documents import (
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
from serving.http.endpoints import Endpoints, error_reply
from serving.http.exchange import Handler
from serving.http.large_work import LargeWork
from serving.oip.http_endpoints import HEADER_LENGTH_NAME, InferEndpoints
from serving.oip.http_endpoints import error_reply as oip_error_reply
from serving.oip.http_routes import INFER_PATHS, add_routes, is_inference_path
from serving.rank.service import RankingService

API_VERSION = "1"
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


class ModelName(Convertor[str]):
    """A model's name in a path: no colon, so that what follows one can only be an action such as `:rank`."""

    NAME = "model_name"
    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        """As it is."""
        return value

    def to_string(self, value: str) -> str:
        """As it is."""
        return value


register_url_convertor(ModelName.NAME, ModelName())
_MODEL = f"/v1/models/{{model:{ModelName.NAME}}}"


class RawRoute(APIRoute):
    """A documented route whose endpoint takes the raw request: no dependencies, no body validated twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


@dataclass(frozen=True, slots=True)
class Handlers:
    """What answers the requests of a process.

    Attributes:
        ranking: the API's own.
        inference: the Open Inference Protocol's.
    """

    ranking: Endpoints
    inference: InferEndpoints

    @classmethod
    def of(cls, service: RankingService, large: LargeWork) -> Self:
        """Over a service; `large` takes long bodies and answers off the event loop."""
        return cls(Endpoints(service, large), InferEndpoints(service, large))

    def direct_routes(self) -> DirectRoutes:
        """Those that connections call without the application."""
        return DirectRoutes(
            {"/v1/models/{model}:rank": self.ranking.rank, "/v1/models/{model}:lookup": self.ranking.lookup}
            | dict.fromkeys(INFER_PATHS, self.inference.infer),
            dict.fromkeys(INFER_PATHS, HEADER_LENGTH_NAME),
        )


def create_app(service: RankingService, handlers: Handlers | None = None) -> FastAPI:
    """The HTTP API of a service, for any ASGI server. `handlers` answer its requests; by default its own."""
    app = FastAPI(
        title="shardrank",
        version=API_VERSION,
        description="Online ranking from sharded embeddings: ids in, scores out.",
        redirect_slashes=False,
    )
    handlers = handlers or Handlers.of(service, LargeWork())
    endpoints = handlers.ranking

    def route(path: str, handler: Handler, method: str, **options: Any) -> None:
        app.router.add_api_route(path, endpoint_of(handler), methods=[method], route_class_override=RawRoute, **options)

    # The first ones are tried first.
    route(
        f"{_MODEL}:rank", endpoints.rank, "POST", tags=["ranking"], summary="Score candidates",
        responses={200: {"model": RankDocument}, **_ERRORS}, openapi_extra=_raw(json_body(RANK_SCHEMA, RANK_EXAMPLE)),
    )  # fmt: skip
    route(
        f"{_MODEL}:lookup", endpoints.lookup, "POST", tags=["ranking"], summary="Look embeddings up",
        responses={200: {"model": LookupDocument}, **_ERRORS},
        openapi_extra=_raw(json_body(LOOKUP_SCHEMA, LOOKUP_EXAMPLE)),
    )  # fmt: skip
    add_routes(route, handlers.inference, ModelName.NAME)
    route(
        "/v1/models", endpoints.models, "GET", tags=["models"], summary="The live version of every model",
        responses={200: {"model": ModelsDocument}},
    )  # fmt: skip
    route(
        _MODEL, endpoints.model, "GET", tags=["models"], summary="What a model takes and is made of",
        responses={200: {"model": ModelDescription}, 404: _ERRORS[404]}, openapi_extra=_raw({}),
    )  # fmt: skip
    route(
        "/healthz", endpoints.healthz, "GET", tags=["operations"], summary="The process runs",
        responses={200: {"model": HealthDocument}},
    )  # fmt: skip
    route(
        "/readyz", endpoints.readyz, "GET", tags=["operations"], summary="Every model is live and its shards answer",
        responses={200: {"model": ReadyDocument}, 503: {"model": ReadyDocument}},
    )  # fmt: skip
    route(
        "/metrics", endpoints.metrics, "GET", tags=["operations"], summary="Metrics in Prometheus' text format",
        response_class=PlainTextResponse,
    )  # fmt: skip
    for path, probe in (("/healthz", endpoints.healthz), ("/readyz", endpoints.readyz)):
        route(path, probe, "HEAD", include_in_schema=False)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _defect)
    return app


def _raw(extra: dict[str, Any]) -> dict[str, Any]:
    # The endpoints take the raw request, so the path parameter is not seen in their signature.
    parameter = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": "its name",
    }
    return {"parameters": [parameter], **extra}


def _error_response(request: Request, error: ShardrankError) -> Response:
    reply = oip_error_reply if is_inference_path(request.url.path) else error_reply
    return response_of(reply(exchange_of(request), error))


async def _defect(request: Request, error: Exception) -> Response:
    """What should never happen, in the form of every other error. The framework raises it again for the log."""
    del error
    return _error_response(request, ShardrankError("internal error; the server's log says more"))


async def _framework_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the form of every other error."""
    where = f"{request.method} {request.url.path[:200]}"
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _error_response(request, NoSuchRouteError(f"{where}: there is no such path; see /docs"))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response = _error_response(request, MethodNotAllowedError(f"{where}: this method is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    raise error
