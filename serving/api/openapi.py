"""The OpenAPI description of the calls that `serving.api.http` answers itself: rank, lookup and infer."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.routing import BaseRoute


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
Text: TypeAlias = str | SkipJsonSchema[None]


class BodyOptions(_RequestBody):
    """What a request may say beside its numbers."""

    timeout_ms: Positive = Field(None, description="deadline; the server's default if absent")
    version: Positive = Field(None, description="the version that must answer; the live one if absent")
    request_id: Text = Field(None, description="returned with the answer")
    routing_key: Text = Field(None, description="whose it is: while a canary is on, the same key gets the same version")


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
    outputs: dict[str, list[float]] | None = Field(
        default=None, description="by name, in the order of the candidates; of a model that names its outputs"
    )
    request_id: str | None = None


class LookupDocument(BaseModel):
    """The answer of `:lookup`."""

    model: str
    version: int
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
