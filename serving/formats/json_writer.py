"""Answers to lookups, and errors, as JSON bytes; `json_reader` writes scores."""

from __future__ import annotations

from typing import Any

import msgspec

from loader.errors import ShardrankError
from serving.errors import MAX_FIELD_CHARS, printable
from serving.formats.json_text import many_lists
from serving.formats.requests import FeatureEmbeddings, LookupAnswer

_ENCODER = msgspec.json.Encoder()

MAX_MESSAGE_CHARS = 4096

# Tells a client that was shed when to try again, in seconds.
RETRY_AFTER_S = 1


def lookup_document(answer: LookupAnswer) -> dict[str, Any]:
    """The JSON form of a lookup's answer: [bags][dim], or [bags][ids][dim] for a feature that is not pooled."""
    document: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "embeddings": {name: _nested(feature) for name, feature in answer.embeddings.items()},
    }
    if answer.request_id:
        document["request_id"] = answer.request_id
    return document


def error_document(error: ShardrankError, request_id: str = "") -> dict[str, Any]:
    """The JSON form of an error."""
    # Whatever the text holds, an error must not fail to be told.
    content: dict[str, Any] = {"kind": error.kind, "message": printable(str(error), MAX_MESSAGE_CHARS)}
    if field := getattr(error, "field", ""):
        content["field"] = printable(field, MAX_FIELD_CHARS)
    if request_id:
        content["request_id"] = request_id
    return {"error": content}


def encode(document: Any) -> bytes:
    """JSON bytes."""
    return _ENCODER.encode(document)


def encode_lookup(answer: LookupAnswer) -> bytes:
    """JSON bytes of a lookup's answer, which may be large."""
    with many_lists():
        return encode(lookup_document(answer))


def _nested(feature: FeatureEmbeddings) -> list[Any]:
    rows: list[Any] = feature.values.tolist()
    if feature.lengths is None:
        return rows
    ends = feature.lengths.cumsum().tolist()
    return [rows[end - length : end] for end, length in zip(ends, feature.lengths.tolist(), strict=True)]
