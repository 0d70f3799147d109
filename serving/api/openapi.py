"""Schemas and examples of the OpenAPI page. Requests are not validated by them: `serving.parse_json` does that."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from serving.description import ModelDescription

RANK_EXAMPLE: dict[str, Any] = {
    "context": {"sparse": {"user_id": [42], "history": [1, 50, 172]}, "dense": []},
    "candidates": {"sparse": {"film_id": [[3], [9]], "genre": [[1, 5], [2]]}, "dense": []},
    "timeout_ms": 50,
    "top_k": 10,
}
LOOKUP_EXAMPLE: dict[str, Any] = {"sparse": {"film_id": [[3], [9, 11]]}, "timeout_ms": 50}

_ID: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, {"type": "string"}]}
_BAG: dict[str, Any] = {"type": "array", "items": _ID}
_BAGS: dict[str, Any] = {"type": "array", "items": {"anyOf": [_ID, _BAG]}}
_NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "number"}}
_WEIGHTS: dict[str, Any] = {"type": "array", "items": {"anyOf": [{"type": "number"}, _NUMBERS]}}
_OPTIONS: dict[str, Any] = {
    "timeout_ms": {"type": "integer", "minimum": 1, "description": "deadline; the server's default if absent"},
    "version": {"type": "integer", "minimum": 1, "description": "the version that must answer; the live one if absent"},
    "request_id": {"type": "string", "description": "returned with the answer"},
    "routing_key": {
        "type": "string",
        "description": "whose request it is: while a canary is on, the same key gets the same version",
    },
}


def _map_of(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema, "description": description}


def _weights_of(schema: dict[str, Any], description: str) -> dict[str, Any]:
    null = {"type": "null"}
    return {"anyOf": [_map_of({"anyOf": [schema, null]}, f"{description}; null is as if absent"), null]}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_CONTEXT = _object(
    {
        "sparse": _map_of(_BAG, "by feature: the ids of its one bag"),
        "weights": _weights_of(_NUMBERS, "by weighted feature: one for each id"),
        "dense": {"type": "array", "items": {"type": "number"}},
    },
    [],
)
_CANDIDATES = _object(
    {
        "sparse": _map_of(_BAGS, "by feature: one list of ids, or one id, for each candidate"),
        "weights": _weights_of(_WEIGHTS, "by weighted feature: in the shape of its ids"),
        "dense": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    },
    [],
)
RANK_SCHEMA = _object(
    {
        "context": _CONTEXT,
        "candidates": _CANDIDATES,
        "top_k": {"type": "integer", "minimum": 1, "description": "positions in `order`; all if absent"},
        **_OPTIONS,
    },
    ["candidates"],
)
LOOKUP_SCHEMA = _object(
    {
        "sparse": _map_of(_BAGS, "by feature: a list of bags; a flat list is one id for each bag"),
        "weights": _weights_of(_WEIGHTS, "by weighted feature: in the shape of its ids"),
        **_OPTIONS,
    },
    ["sparse"],
)


def json_body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


class RankDocument(BaseModel):
    """The answer of `:rank`."""

    model: str
    version: int = Field(description="the version that gave every score")
    scores: list[float] = Field(description="in the order of the candidates")
    order: list[int] = Field(description="positions by descending score, at most top_k")
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


class ModelsDocument(BaseModel):
    """The answer of `/v1/models`."""

    models: list[ModelDescription] = Field(description="the live version of every model")


class HealthDocument(BaseModel):
    """The answer of `/healthz`."""

    status: Literal["ok"]


class ReadyDocument(BaseModel):
    """The answer of `/readyz`."""

    ready: bool
    problems: dict[str, str] = Field(description='why not, by model; the key "" is the process itself')
    degraded: dict[str, str] = Field(description="why rows are older than they may be, by model; still ready")
