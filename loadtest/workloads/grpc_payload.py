"""Requests as messages of serving/proto/shardrank/v1/ranking.proto."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from loadtest.workloads.errors import AnswerError
from loadtest.workloads.workload import FeatureBags, WorkloadRequest, features_of
from router.feature_schema import FeatureSchema
from serving.proto.shardrank.v1 import ranking_wire_pb2

RANK_METHOD = "/shardrank.v1.RankingService/Rank"


def encode_request(schema: FeatureSchema, request: WorkloadRequest, model: str, timeout_ms: int | None) -> bytes:
    """A RankRequest."""
    message = ranking_wire_pb2.RankRequest(
        model=model, num_candidates=request.num_candidates, timeout_ms=timeout_ms or 0
    )
    for feature in features_of(schema, request):
        part = message.context if feature.is_context else message.candidates
        _set(part.sparse[feature.name], feature)
    for part, dense in ((message.context, request.context_dense), (message.candidates, request.candidate_dense)):
        if dense.size:
            part.dense.append(dense.astype("<f4", copy=False).tobytes())
    # The same request is the same bytes, whatever order a process keeps the features in.
    return message.SerializeToString(deterministic=True)


def count_scores(answer: bytes) -> int:
    """How many scores a RankResponse has. Raises AnswerError."""
    try:
        message = ranking_wire_pb2.RankResponse.FromString(answer)
    except DecodeError as error:
        raise AnswerError(f"the answer is not a RankResponse: {error}") from error
    return sum(map(len, message.scores)) // np.dtype(np.float32).itemsize


def _set(sparse: ranking_wire_pb2.SparseFeature, feature: FeatureBags) -> None:
    if feature.texts is None:
        sparse.ids.append(feature.values.astype("<i8", copy=False).tobytes())
    else:
        sparse.string_ids.extend(feature.texts)
    if not feature.is_context and not feature.is_single:
        sparse.lengths.append(feature.lengths.astype("<u4").tobytes())
    if feature.weights is not None:
        sparse.weights.append(feature.weights.astype("<f4", copy=False).tobytes())
