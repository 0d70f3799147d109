"""What `shardrank inspect` tells of a snapshot, as one typed document."""

from __future__ import annotations

from typing import Self

from loader.manifest import DenseInputs, DenseModelSpec, Frozen, GoldenEntry, Pooling, RowDtype, Side
from loader.reader import Snapshot


class InspectedTable(Frozen):
    """One table. `size_bytes` is that of its row files; `access_counts` is whether it says how often rows were used."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: RowDtype
    pooling: Pooling
    id_mapping: str
    unknown_id: str
    bucketing: str
    files: int
    size_bytes: int
    access_counts: bool


class InspectedFeature(Frozen):
    """One feature, with the pooling that holds for it."""

    name: str
    side: Side
    table: str
    pooling: Pooling
    weighted: bool


class Inspection(Frozen):
    """A snapshot. `float32_bytes` is what the rows would take unquantised."""

    path: str
    model: str
    version: int
    identity: str
    created_at: str
    snapshot_bytes: int
    float32_bytes: int
    tables: tuple[InspectedTable, ...]
    features: tuple[InspectedFeature, ...]
    dense_inputs: DenseInputs
    dense_model: DenseModelSpec
    golden: GoldenEntry | None
    metadata: dict[str, str]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Describes an opened snapshot."""
        spec, manifest = snapshot.spec, snapshot.manifest
        tables = tuple(
            InspectedTable(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                dtype=table.dtype,
                pooling=table.pooling,
                id_mapping=table.id_mapping.kind,
                unknown_id=table.unknown_id,
                bucketing=table.bucketing,
                files=len(files.rows),
                size_bytes=sum(entry.size_bytes for entry in files.rows),
                access_counts=files.access_counts is not None,
            )
            for table, files in zip(spec.tables, manifest.tables, strict=True)
        )
        features = tuple(
            InspectedFeature(
                name=feature.name,
                side=feature.side,
                table=spec.table_of(feature.name).name,
                pooling=spec.pooling_of(feature.name),
                weighted=feature.weighted,
            )
            for feature in spec.features
        )
        return cls(
            path=str(snapshot.path),
            model=spec.model,
            version=snapshot.version,
            identity=snapshot.identity,
            created_at=manifest.created_at,
            snapshot_bytes=snapshot.size_bytes,
            float32_bytes=snapshot.float32_bytes,
            tables=tables,
            features=features,
            dense_inputs=spec.dense_inputs,
            dense_model=spec.dense_model,
            golden=manifest.golden,
            metadata=manifest.metadata,
        )
