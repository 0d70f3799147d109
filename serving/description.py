"""What a served model tells of itself: the answer of `GET /v1/models/{model}` and `GetModel`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from loader.snapshot.manifest import DenseInputs, Side
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import Frozen, Pooling, UnknownId
from router.feature_schema import FeatureSchema
from serving.limits import RequestLimits

NumberFormat: TypeAlias = Literal["float32", "bfloat16", "int8"]
"""Of a ranking model's products. With `int8`, layers that gain nothing by it are in bfloat16, or in float32."""


class FeatureInfo(Frozen):
    """One feature of a request."""

    name: str
    side: Side
    pooling: Pooling
    table: str
    weighted: bool
    id_type: Literal["integer", "string"]


class TableInfo(Frozen):
    """One embedding table, as features see it."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str = Field(description="of the stored rows; of a table that is stored in parts, each, such as fp16+int4")
    id_mapping: Literal["identity", "hash", "vocabulary"]
    unknown_id: UnknownId


class DenseModelInfo(Frozen):
    """The ranking model."""

    kind: str
    dtype: NumberFormat = Field(description="what it is computed in; int8: the layers that gain by it")
    dtype_fallback: str = Field(default="", description="why it is not the dtype that was asked for; empty if it is")
    outputs: tuple[str, ...] = Field(default=(), description="names of the outputs that an answer has beside scores")


class ModelInfo(Frozen):
    """A served version of a model."""

    model: str
    version: int
    identity: str = Field(description="SHA-256 (hex) of the manifest")
    schema_digest: str = Field(description="of what a packed request depends on; see docs/api.md")
    features: tuple[FeatureInfo, ...] = Field(description="in the order that a packed request has them in")
    tables: tuple[TableInfo, ...]
    dense_inputs: DenseInputs
    dense_model: DenseModelInfo
    limits: RequestLimits

    @classmethod
    def of(cls, snapshot: Snapshot, limits: RequestLimits, dtype: NumberFormat, dtype_fallback: str) -> ModelInfo:
        """Describe a version whose dense model is computed in `dtype`, and why that is not what was asked for."""
        spec = snapshot.spec
        schema = FeatureSchema.of(spec)
        features = tuple(
            FeatureInfo(
                **feature.model_dump(include={"name", "side", "weighted"}),
                pooling=spec.pooling_of(feature.name),
                table=spec.table_of(feature.name).name,
                id_type=getattr(spec.table_of(feature.name).id_mapping, "id_type", "integer"),
            )
            for feature in schema.features
        )
        return cls(
            model=spec.model,
            version=snapshot.version,
            identity=snapshot.identity,
            schema_digest=schema.digest,
            features=features,
            tables=tuple(
                TableInfo(
                    id_mapping=table.id_mapping.kind,
                    dtype="+".join(dict.fromkeys(part.dtype for part in spec.parts(table))),
                    **table.model_dump(include={"name", "num_embeddings", "embedding_dim", "unknown_id"}),
                )
                for table in spec.logical_tables
            ),
            dense_inputs=spec.dense_inputs,
            dense_model=DenseModelInfo(
                kind=spec.dense_model.kind,
                dtype=dtype,
                dtype_fallback=dtype_fallback,
                outputs=tuple(spec.dense_model.outputs),
            ),
            limits=limits,
        )
