"""Answers as protobuf bytes. Arrays are written as they lie, see ranking_wire.proto."""

from __future__ import annotations

from serving.description import ModelDescription
from serving.proto.shardrank.v1 import ranking_pb2, ranking_wire_pb2
from serving.request import LookupAnswer, RankAnswer


def encode_rank(answer: RankAnswer) -> bytes:
    """A RankResponse."""
    return ranking_wire_pb2.RankResponse(
        model=answer.model,
        version=answer.version,
        scores=[answer.scores.astype("<f4", copy=False).tobytes()],
        order=[answer.order.astype("<u4").tobytes()],
        request_id=answer.request_id,
    ).SerializeToString()


def encode_lookup(answer: LookupAnswer) -> bytes:
    """A LookupResponse."""
    message = ranking_wire_pb2.LookupResponse(model=answer.model, version=answer.version, request_id=answer.request_id)
    for name, feature in answer.embeddings.items():
        embedding = message.embeddings[name]
        embedding.embedding_dim = feature.values.shape[1]
        embedding.values.append(feature.values.astype("<f4", copy=False).tobytes())
        if feature.lengths is not None:
            embedding.lengths.append(feature.lengths.astype("<u4").tobytes())
    return message.SerializeToString()


def encode_model(description: ModelDescription) -> bytes:
    """A GetModelResponse."""
    return ranking_pb2.GetModelResponse(
        model=description.model,
        version=description.version,
        identity=description.identity,
        features=[ranking_pb2.FeatureInfo(**one.model_dump()) for one in description.features],
        tables=[ranking_pb2.TableInfo(**one.model_dump()) for one in description.tables],
        dense_inputs=ranking_pb2.DenseInputsInfo(**description.dense_inputs.model_dump()),
        dense_model=ranking_pb2.DenseModelInfo(**description.dense_model.model_dump()),
        schema_digest=description.schema_digest,
        # Numbers alone: which proxies are trusted is nobody's business.
        limits={
            name: float(value)
            for name, value in description.limits.model_dump().items()
            if isinstance(value, int | float)
        },
    ).SerializeToString()
