"""Requests as messages of serving/proto/shardrank/v1/ranking.proto."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from loadtest.workloads.errors import AnswerError
from loadtest.workloads.workload import FeatureBags, WorkloadRequest, features_of
from router.feature_schema import FeatureSchema
from serving.proto.shardrank.v1 import ranking_pb2

RANK_METHOD = "/shardrank.v1.RankingService/Rank"


def encode_request(schema: FeatureSchema, request: WorkloadRequest, model: str, timeout_ms: int | None) -> bytes:
    """A RankRequest whose features lie in maps by name."""
    message = ranking_pb2.RankRequest(model=model, num_candidates=request.num_candidates, timeout_ms=timeout_ms or 0)
    for feature in features_of(schema, request):
        part = message.context if feature.is_context else message.candidates
        _set(part.sparse[feature.name], feature)
    for part, dense in ((message.context, request.context_dense), (message.candidates, request.candidate_dense)):
        if dense.size:
            part.dense.extend(dense.ravel().tolist())
    # The same request is the same bytes, whatever order a process keeps the features in.
    return message.SerializeToString(deterministic=True)


def encode_packed(schema: FeatureSchema, request: WorkloadRequest, model: str, timeout_ms: int | None) -> bytes:
    """A RankRequest whose features are `PackedFeatures`: arrays in the order of the schema, under its digest."""
    bags = request.bags
    key = np.repeat(np.repeat(bags.keys, bags.bags_per_key), bags.lengths)
    is_string = np.array([feature.name in schema.string_features for feature in schema.features])
    packed = ranking_pb2.PackedFeatures(
        schema_digest=schema.digest,
        ids=bags.values[~is_string[key]].astype("<i8", copy=False).tobytes(),
        lengths=b"" if (bags.lengths == 1).all() else bags.lengths.astype("<i4").tobytes(),
        weights=b"" if bags.weights is None else bags.weights.astype("<f4", copy=False).tobytes(),
        context_dense=request.context_dense.astype("<f4", copy=False).tobytes(),
        candidate_dense=request.candidate_dense.astype("<f4", copy=False).tobytes(),
    )
    for feature in features_of(schema, request):
        packed.string_ids.extend(feature.texts or ())
    message = ranking_pb2.RankRequest(
        model=model, num_candidates=request.num_candidates, timeout_ms=timeout_ms or 0, packed=packed
    )
    return message.SerializeToString(deterministic=True)


def count_scores(answer: bytes) -> int:
    """How many scores a RankResponse has. Raises AnswerError."""
    try:
        message = ranking_pb2.RankResponse.FromString(answer)
    except DecodeError as error:
        raise AnswerError(f"the answer is not a RankResponse: {error}") from error
    return len(message.scores)


def _set(sparse: ranking_pb2.SparseFeature, feature: FeatureBags) -> None:
    if feature.texts is None:
        sparse.ids.extend(feature.values.tolist())
    else:
        sparse.string_ids.extend(feature.texts)
    if not feature.is_context and not feature.is_single:
        sparse.lengths.extend(feature.lengths.tolist())
    if feature.weights is not None:
        sparse.weights.extend(feature.weights.tolist())
