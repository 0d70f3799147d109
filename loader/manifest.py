"""What a model is made of: the typed description that training writes and the manifest that a snapshot carries.

`ModelSpec` is the part a person writes (tables, features, dense inputs, dense model); `Manifest` is `ModelSpec` plus
what the writer measured (files, sizes, checksums). Names follow TorchRec where it has one: `num_embeddings`,
`embedding_dim`, `feature_names`, `pooling`. The format is documented in docs/snapshot-format.md.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, model_validator

FORMAT_VERSION = 1
NUM_BUCKETS = 256
MAX_NUM_EMBEDDINGS = 2**32 - 1
MAX_EMBEDDING_DIM = 4096
MAX_TABLES = 4096
MAX_FEATURES = 4096
MAX_DENSE_INPUTS = 65_536
# Row files of one table: 16 TiB of files of the default size.
MAX_ROW_FILES = 65_536
# Bytes of all tensors of a file that is read into memory as a whole.
MAX_DENSE_BYTES = 8 << 30
MAX_GOLDEN_BYTES = 256 << 20
# Bytes of UTF-8 of one string id; together at most this many times the ids of a vocabulary.
MAX_STRING_ID_BYTES = 1024

RowDtype = Literal["int8", "int4", "fp16", "fp32"]
Pooling = Literal["sum", "mean", "none"]
Bucketing = Literal["hash", "range"]
UnknownId = Literal["reject", "default_row", "skip"]
Side = Literal["context", "candidate"]

# A name becomes a folder, a metric label and a JSON key: no separators, no leading dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]

# Lists end at their first bad item, so that a list of a million bad ones costs one error.
FAIL_FAST = FailFast()


class Frozen(BaseModel):
    """Immutable, and an unknown key is an error: a misspelt option must not be ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class IdentityMapping(Frozen):
    """The id is the row: 0 <= id < num_embeddings."""

    kind: Literal["identity"] = "identity"


class HashMapping(Frozen):
    """row = floor(top32(splitmix64(id + seed)) * num_embeddings / 2^32). No id is unknown."""

    kind: Literal["hash"] = "hash"
    seed: int = Field(default=0, ge=0, lt=2**63)


class VocabularyMapping(Frozen):
    """An id's position in a stored list is its row. String ids are stored and looked up by a 63-bit fingerprint."""

    kind: Literal["vocabulary"] = "vocabulary"
    id_type: Literal["integer", "string"] = "integer"


IdMapping = Annotated[IdentityMapping | HashMapping | VocabularyMapping, Field(discriminator="kind")]


class TableSpec(Frozen):
    """One embedding table.

    `feature_names` are the features looked up in it (several may share it). `pooling` is the default of its features.
    `unknown_id` says what an id without a row gets: an error, `default_row`'s vector, or nothing (left out of its bag).
    """

    name: Name
    num_embeddings: int = Field(ge=1, le=MAX_NUM_EMBEDDINGS)
    embedding_dim: int = Field(ge=1, le=MAX_EMBEDDING_DIM)
    feature_names: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    pooling: Pooling = "sum"
    dtype: RowDtype = "int8"
    bucketing: Bucketing = "hash"
    id_mapping: IdMapping = IdentityMapping()
    unknown_id: UnknownId = "reject"
    default_row: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.default_row >= self.num_embeddings:
            raise ValueError(
                f"table {self.name!r}: default_row {self.default_row} is not below num_embeddings {self.num_embeddings}"
            )
        if self.dtype == "int4" and self.embedding_dim % 2:
            raise ValueError(f"table {self.name!r}: int4 rows need an even embedding_dim, got {self.embedding_dim}")
        if len(set(self.feature_names)) != len(self.feature_names):
            raise ValueError(f"table {self.name!r}: feature_names has duplicates: {list(self.feature_names)}")
        return self


class FeatureSpec(Frozen):
    """One named sparse input. `side` says whether it comes once per request (context) or once per candidate.

    `pooling` overrides the table's, so that a history (`none`) can share the table of the item it lists (`sum`).
    """

    name: Name
    side: Side
    pooling: Pooling | None = None
    weighted: bool = False


class DenseInputs(Frozen):
    """How many floats a request brings once (`context`) and per candidate (`candidate`)."""

    context: int = Field(default=0, ge=0, le=MAX_DENSE_INPUTS)
    candidate: int = Field(default=0, ge=0, le=MAX_DENSE_INPUTS)


class DenseModelSpec(Frozen):
    """The ranking model: its kind and that kind's typed config, which `serving.models` validates."""

    kind: Name
    config: dict[str, JsonValue] = Field(default_factory=dict)


class ModelSpec(Frozen):
    """Everything about a model that does not change from one training run to the next.

    `features` fixes the order in which pooled embeddings enter the dense model.
    """

    model: Name
    tables: Annotated[tuple[TableSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_TABLES)
    features: Annotated[tuple[FeatureSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    dense_inputs: DenseInputs = DenseInputs()
    dense_model: DenseModelSpec

    @model_validator(mode="after")
    def _check(self) -> Self:
        table_names = [table.name for table in self.tables]
        _refuse_duplicates("table", table_names)
        feature_names = [feature.name for feature in self.features]
        _refuse_duplicates("feature", feature_names)
        placed = [name for table in self.tables for name in table.feature_names]
        _refuse_duplicates("feature_names entry", placed)
        if missing := sorted(set(feature_names) - set(placed)):
            raise ValueError(f"features without a table: {missing}")
        if unknown := sorted(set(placed) - set(feature_names)):
            raise ValueError(f"feature_names that are not in features: {unknown}")
        for feature in self.features:
            if feature.weighted and self.pooling_of(feature.name) != "sum":
                raise ValueError(f"feature {feature.name!r}: weights need pooling sum")
        return self

    @cached_property
    def _table_by_feature(self) -> dict[str, TableSpec]:
        return {name: table for table in self.tables for name in table.feature_names}

    @cached_property
    def _feature_by_name(self) -> dict[str, FeatureSpec]:
        return {feature.name: feature for feature in self.features}

    def feature(self, name: str) -> FeatureSpec:
        """The feature of that name. Raises KeyError."""
        return self._feature_by_name[name]

    def table_of(self, feature_name: str) -> TableSpec:
        """The table that a feature is looked up in. Raises KeyError."""
        return self._table_by_feature[feature_name]

    def pooling_of(self, feature_name: str) -> Pooling:
        """The feature's own pooling, or its table's."""
        return self.feature(feature_name).pooling or self.table_of(feature_name).pooling


class FileEntry(Frozen):
    """One file of a snapshot: its path relative to the snapshot's folder ('/'-separated), size and SHA-256 (hex)."""

    path: str = Field(min_length=1, max_length=1024)
    size_bytes: int = Field(ge=0, lt=2**63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TableFiles(Frozen):
    """Where one table's rows lie. File i holds rows [i * rows_per_file, (i + 1) * rows_per_file), in bucket order.

    `access_counts` says how often each row was looked up, if that is known.
    """

    table: Name
    rows_per_file: int = Field(ge=1, lt=2**63)
    rows: Annotated[tuple[FileEntry, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_ROW_FILES)
    vocabulary: FileEntry | None = None
    access_counts: FileEntry | None = None


class GoldenEntry(Frozen):
    """Requests with the float32 scores that training computed; `tolerance` bounds |served - expected|."""

    file: FileEntry
    tolerance: float = Field(gt=0)
    num_requests: int = Field(ge=1)
    num_candidates: int = Field(ge=1)


class Manifest(Frozen):
    """`manifest.json`: one immutable version of a model.

    `last_delta` is the sequence number of the last delta whose rows are in the tables already; None if there is none.
    It counts in the stream of deltas that began with the version `delta_base`; None stands for this version itself.
    """

    format_version: Literal[1] = 1
    spec: ModelSpec
    version: int = Field(ge=1, lt=2**63)
    created_at: str
    tables: Annotated[tuple[TableFiles, ...], FAIL_FAST] = Field(max_length=MAX_TABLES)
    dense: FileEntry
    golden: GoldenEntry | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    last_delta: int | None = Field(default=None, ge=0, lt=2**63)
    delta_base: int | None = Field(default=None, ge=1, lt=2**63)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [files.table for files in self.tables] != [table.name for table in self.spec.tables]:
            raise ValueError("tables and spec.tables must name the same tables in the same order")
        for files, table in zip(self.tables, self.spec.tables, strict=True):
            expected = -(-table.num_embeddings // files.rows_per_file)
            if len(files.rows) != expected:
                raise ValueError(f"table {table.name!r}: {len(files.rows)} row files, expected {expected}")
            if table.bucketing == "hash" and files.rows_per_file % NUM_BUCKETS:
                raise ValueError(f"table {table.name!r}: rows_per_file must be a multiple of {NUM_BUCKETS}")
            if files.rows_per_file & (files.rows_per_file - 1):
                raise ValueError(f"table {table.name!r}: rows_per_file must be a power of two")
            if (table.id_mapping.kind == "vocabulary") != (files.vocabulary is not None):
                raise ValueError(
                    f"table {table.name!r}: a vocabulary file goes with the vocabulary mapping, and only with it"
                )
        if self.delta_base is not None:
            if self.last_delta is None:
                raise ValueError("delta_base needs last_delta: which of its deltas the tables contain already")
            if self.delta_base > self.version:
                raise ValueError(f"delta_base: {self.delta_base} is later than version {self.version}")
        paths = [entry.path for entry in self.files()]
        _refuse_duplicates("file path", paths)
        return self

    @property
    def delta_start(self) -> tuple[int, int]:
        """(delta_base, last_delta): the version whose stream of deltas this one follows, and after which of them.

        A snapshot that does not say begins a stream of its own, with nothing of it contained.
        """
        return self.delta_base or self.version, self.last_delta or 0

    def files(self) -> tuple[FileEntry, ...]:
        """Every file of the snapshot but the manifest itself."""
        entries: list[FileEntry] = []
        for table in self.tables:
            entries.extend(table.rows)
            if table.vocabulary is not None:
                entries.append(table.vocabulary)
            if table.access_counts is not None:
                entries.append(table.access_counts)
        entries.append(self.dense)
        if self.golden is not None:
            entries.append(self.golden.file)
        return tuple(entries)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return self.model_dump_json(indent=2) + "\n"


def _refuse_duplicates(what: str, names: list[Any]) -> None:
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"duplicate {what}: {name!r}")
        seen.add(name)
