"""Requests as the JSON of docs/api.md."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from loadtest.workloads.errors import AnswerError
from loadtest.workloads.workload import FeatureBags, WorkloadRequest, features_of
from router.feature_schema import FeatureSchema
from shard_node.bags import Float32Array, Int64Array


class _Answer(msgspec.Struct):
    scores: list[float]


_ANSWER = msgspec.json.Decoder(_Answer)
_ENCODER = msgspec.json.Encoder()


def rank_path(model: str) -> str:
    """Where rank requests are sent."""
    return f"/v1/models/{model}:rank"


def encode_request(schema: FeatureSchema, request: WorkloadRequest, timeout_ms: int | None) -> bytes:
    """The body of a rank request. A candidate feature with one id each is a flat list, as a client would write it."""
    sparse: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    weights: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for feature in features_of(schema, request):
        ids: list[Any] = feature.values.tolist() if feature.texts is None else list(feature.texts)
        sparse[feature.is_context][feature.name] = _shaped(ids, feature)
        if feature.weights is not None:
            weights[feature.is_context][feature.name] = _shaped(_shortest(feature.weights), feature)
    dense = {True: _shortest(request.context_dense), False: _shortest(request.candidate_dense)}
    document: dict[str, Any] = {}
    for part, is_context in (("context", True), ("candidates", False)):
        if sparse[is_context] or dense[is_context]:
            document[part] = {"sparse": sparse[is_context], "dense": dense[is_context]}
            if weights[is_context]:
                document[part]["weights"] = weights[is_context]
    if timeout_ms is not None:
        document["timeout_ms"] = timeout_ms
    return _ENCODER.encode(document)


def count_scores(answer: bytes) -> int:
    """How many scores an answer has. Raises AnswerError."""
    try:
        return len(_ANSWER.decode(answer).scores)
    except msgspec.MsgspecError as error:
        raise AnswerError(f"the answer is not one to a rank request: {error}") from error


def _shaped(items: list[Any], feature: FeatureBags) -> list[Any]:
    """A list for each bag; the flat list for a context feature, and where every candidate has one."""
    if feature.is_context or feature.is_single:
        return items
    return _nested(items, feature.lengths)


def _nested(items: list[Any], lengths: Int64Array) -> list[list[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [items[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _shortest(values: Float32Array) -> list[Any]:
    """The shortest decimals that read back as the same float32: what a client that has float32 writes."""
    numbers: list[Any] = values.astype("U32").astype(np.float64).tolist()
    return numbers if values.size else []
