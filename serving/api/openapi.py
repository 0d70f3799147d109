"""The OpenAPI description of the calls that `serving.api.http` answers itself: rank, lookup and infer."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from fastapi.encoders import jsonable_encoder
from fastapi.openapi.models import OpenAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema, models_json_schema


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


WRONG: dict[int | str, str] = {
    400: "The request is wrong; the message names the field and the limit.",
    404: "No such model, or version of it, is served.",
    408: "The request was not complete within `receive_timeout_s`.",
    413: "The body is longer than `max_body_bytes`.",
    431: "The headers are longer than `max_header_bytes`.",
    500: "The model gave NaN or inf, or a defect of the server.",
    503: "Overloaded, not ready, or a shard is away; try again.",
    504: "The deadline passed.",
    "default": "Any other error, in the same form.",
}
_MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
    *((model, "validation") for model in (RankBody, LookupBody)),
    *((model, "serialization") for model in (RankDocument, LookupDocument, ErrorDocument)),
]
_REFERENCE = "#/components/schemas/{model}"


def with_ranking_calls(document: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI document with the calls that FastAPI does not serve."""

    def json_of(model: str, **more: Any) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model), **more}}}

    paths, ok, model_name = document["paths"], "Successful Response", {"type": "string", "title": "Model"}
    errors = {status: {"description": says, "content": json_of("ErrorDocument")} for status, says in WRONG.items()}
    for name, example, summary, description in (
        ("rank", RANK_EXAMPLE, "Score candidates", "Give each candidate's score by one version of a model."),
        ("lookup", LOOKUP_EXAMPLE, "Look embeddings up", "Give the embeddings of each bag, pooled as its feature is."),
    ):
        body, answer = f"{name.title()}Body", f"{name.title()}Document"
        paths[f"/v1/models/{{model}}:{name}"] = {"post": {
            "tags": ["ranking"], "summary": summary, "description": description,
            "operationId": f"{name}_v1_models__model__{name}_post",
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": model_name}],
            "requestBody": {"required": True, "content": json_of(body, examples=[example])},
            "responses": {200: {"description": ok, "content": json_of(answer)}, **errors},
        }}  # fmt: skip
    for metadata in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        path = f"{metadata}/infer"
        paths[path] = {"post": {
            "tags": paths[metadata]["get"]["tags"], "summary": "Score candidates",
            "operationId": "infer" + re.sub(r"\W", "_", path) + "_post",
            "parameters": paths[metadata]["get"]["parameters"],
            "requestBody": {"content": {"application/json": {}, "application/octet-stream": {}}},
            "responses": {200: {"description": ok, "content": {"application/json": {"schema": {}}}}},
        }}  # fmt: skip
    _, definitions = models_json_schema(_MODELS, ref_template=_REFERENCE)
    document["components"]["schemas"] |= definitions["$defs"]
    complete: dict[str, Any] = jsonable_encoder(OpenAPI(**document), by_alias=True, exclude_none=True)
    return complete
