"""Describe a model and a snapshot: what training writes, and `manifest.json` on disk with its checksum.

`ModelSpec` is the part a person writes (tables, features, dense inputs, dense model); `Manifest` is `ModelSpec` plus
what the writer measured (files, sizes, checksums). Names follow TorchRec where it has one. The format is documented in
docs/snapshot-format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)

from loader.errors import SnapshotCorruptError, SnapshotFormatError, SnapshotPathError, cut, file_error
from loader.snapshot.schema_errors import quoted_errors

FORMAT_VERSION = 1
MAX_NUM_EMBEDDINGS = 2**32 - 1
MAX_EMBEDDING_DIM = 4096
MAX_COLUMN_SLICES = 32
MAX_TABLES = 4096
MAX_FEATURES = 4096
MAX_DENSE_INPUTS = 65_536
MAX_PROGRAM_INPUTS = 1024
MAX_OUTPUTS = 64
PROGRAM_PATH: Final = "dense.pt2"
RESERVED_OUTPUTS = frozenset({"score", "scores", "order"})
# Row files of one table: 16 TiB of files of the default size.
MAX_ROW_FILES = 65_536
# Bytes of all tensors of a file that is read into memory as a whole.
MAX_DENSE_BYTES = 8 << 30
MAX_GOLDEN_BYTES = 256 << 20
MAX_PLAN_BYTES = 64 << 20
PLAN_TENSOR = "plan"
"""The text of the plan file, as uint8."""
# Bytes of UTF-8 of one string id; together at most this many times the ids of a vocabulary.
MAX_STRING_ID_BYTES = 1024

RowDtype = Literal["int8", "int4", "fp16", "fp32"]
Pooling = Literal["sum", "mean", "none"]
Bucketing = Literal["mixed", "hash", "range"]
NUM_BUCKETS: dict[Bucketing, int] = {"mixed": 4096, "hash": 256, "range": 256}
UnknownId = Literal["reject", "default_row", "skip"]
Side = Literal["context", "candidate"]

# A name becomes a folder, a metric label and a JSON key: no separators, no leading dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]
MAX_NAME_LENGTH = 128
OutputName: TypeAlias = Annotated[Name, Field(max_length=64)]
# Whether a program gets a thing of the context once for each request, or with each candidate.
Per: TypeAlias = Literal["request", "candidate"]

# Lists end at their first bad item, so that a list of a million bad ones costs one error.
FAIL_FAST = FailFast()

_ID_MASK = (1 << 63) - 1
MANIFEST_NAME = "manifest.json"
CHECKSUM_NAME = "manifest.json.sha256"
MAX_MANIFEST_BYTES = 16 << 20
# Keys of one JSON object: bounds how many errors the schema can find in one.
MAX_OBJECT_KEYS = 4096


class Frozen(BaseModel):
    """Immutable, and an unknown key is an error: a misspelt option must not be ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class IdentityMapping(Frozen):
    """The id is the row: 0 <= id < num_embeddings."""

    kind: Literal["identity"] = "identity"


class HashMapping(Frozen):
    """row = floor(top32(splitmix64(id + seed)) * num_embeddings / 2^32). No id is unknown.

    With `salt` per_feature each feature of the table has a seed of its own (`seed_of`), so that equal ids of different
    features are in the same row by chance only. By default they share it: as a history and the item that it lists must.
    """

    kind: Literal["hash"] = "hash"
    seed: int = Field(default=0, ge=0, lt=2**63)
    salt: Literal["none", "per_feature"] = "none"

    def seed_of(self, feature: str) -> int:
        """Return the seed that a feature's ids are hashed with: below 2^63."""
        return self.seed if self.salt == "none" else self.seed ^ int(fingerprint_strings([feature])[0])


class VocabularyMapping(Frozen):
    """An id's position in a stored list is its row. String ids are stored and looked up by a 63-bit fingerprint."""

    kind: Literal["vocabulary"] = "vocabulary"
    id_type: Literal["integer", "string"] = "integer"


IdMapping = Annotated[IdentityMapping | HashMapping | VocabularyMapping, Field(discriminator="kind")]


class TableSpec(Frozen):
    """One embedding table.

    `feature_names` are the features looked up in it (several may share it). `pooling` is the default of its features.
    `unknown_id` says what an id without a row gets: an error, `default_row`'s vector, or nothing (left out of its bag).

    `column_dims` cuts a wide table into slices of so many columns each, which are stored, quantised and placed like
    tables of their own (`slices`); features still see one table of `embedding_dim`. Empty: it is stored whole.
    """

    name: Name
    num_embeddings: int = Field(ge=1, le=MAX_NUM_EMBEDDINGS)
    embedding_dim: int = Field(ge=1, le=MAX_EMBEDDING_DIM)
    feature_names: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    pooling: Pooling = "sum"
    dtype: RowDtype = "int8"
    bucketing: Bucketing = "mixed"
    id_mapping: IdMapping = IdentityMapping()
    unknown_id: UnknownId = "reject"
    default_row: int = Field(default=0, ge=0)
    column_dims: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_EMBEDDING_DIM)], ...], FAIL_FAST] = Field(
        default=(), max_length=MAX_COLUMN_SLICES
    )

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
        if self.column_dims:
            self._check_column_dims()
        return self

    @property
    def slice_dims(self) -> tuple[int, ...]:
        """Return the columns of each slice, in order; of a table that is stored whole, its one `embedding_dim`."""
        return self.column_dims or (self.embedding_dim,)

    @property
    def slices(self) -> tuple[TableSpec, ...]:
        """Return the tables that it is stored as, in column order: `<name>.c0`, `<name>.c1`, ...; or itself, if whole.

        Each has all rows, in the same order of ids, and `slice_dims` of the columns.
        """
        if not self.column_dims:
            return (self,)
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return tuple(
            TableSpec(**{**fields, "name": f"{self.name}.c{number}", "embedding_dim": dim, "column_dims": ()})
            for number, dim in enumerate(self.column_dims)
        )

    def _check_column_dims(self) -> None:
        where = f"table {self.name!r}: column_dims {list(self.column_dims)}"
        if len(self.column_dims) < 2:
            raise ValueError(f"{where}: at least 2 slices, or none for a table that is stored whole")
        if (total := sum(self.column_dims)) != self.embedding_dim:
            raise ValueError(f"{where}: they add up to {total}, embedding_dim is {self.embedding_dim}")
        if self.dtype == "int4" and any(dim % 2 for dim in self.column_dims):
            raise ValueError(f"{where}: slices of int4 rows need an even number of columns")
        if len(self.name) + len(f".c{len(self.column_dims) - 1}") > MAX_NAME_LENGTH:
            raise ValueError(f"{where}: names of slices, the table's and '.c0', pass {MAX_NAME_LENGTH} characters")


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
    """A built-in ranking model: its kind and that kind's typed config, which `serving.models` validates."""

    kind: Name
    config: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def outputs(self) -> Mapping[str, OutputSpec]:
        """Return the outputs that it names: none."""
        return {}


class SideInput(Frozen):
    """All columns of a side: its pooled features in the spec's order, its dense inputs, zeros up to a multiple of 32.

    Float [N, columns]; of the context with `per` request [R, columns]. It is what servers assemble: nothing is copied.
    """

    source: Literal["side"] = "side"
    side: Side
    per: Per = "candidate"


class PooledInput(Frozen):
    """Pooled embeddings of features of one side, one behind the other: float [N, sum of their embedding_dim].

    Of the context with `per` request: [R, sum], one row for each of R requests, which `request_of_candidate` counts;
    with `per` candidate each candidate has its request's.
    """

    source: Literal["pooled"] = "pooled"
    features: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    per: Per = "candidate"


class SequenceSource(Frozen):
    """A context feature with pooling none.

    Its `part`: `rows`, float [N or R, L, embedding_dim], zeros behind the last; `lengths`, int64 [N or R]; or `mask`,
    bool [N or R, L], False behind the last. L is the longest sequence of the batch.
    """

    source: Literal["sequence"] = "sequence"
    feature: Name
    part: Literal["rows", "lengths", "mask"] = "rows"
    per: Per = "candidate"


class ContextFloats(Frozen):
    """The request's dense inputs: float [N or R, Kc]."""

    source: Literal["context_floats"] = "context_floats"
    per: Per = "candidate"


class CandidateFloats(Frozen):
    """Each candidate's dense inputs: float [N, Kd]."""

    source: Literal["candidate_floats"] = "candidate_floats"


class RequestOfCandidate(Frozen):
    """Which of the batch's R requests each candidate belongs to: int64 [N]."""

    source: Literal["request_of_candidate"] = "request_of_candidate"


InputSource: TypeAlias = Annotated[
    SideInput | PooledInput | SequenceSource | ContextFloats | CandidateFloats | RequestOfCandidate,
    Field(discriminator="source"),
]


class OutputSpec(Frozen):
    """What is made of an output of the program: its `activation`, and its `weight` within the score to order by."""

    activation: Literal["none", "sigmoid", "softplus", "exp"] = "none"
    weight: float = Field(default=1.0, gt=-3e38, lt=3e38)


class ExportedModelSpec(Frozen):
    """A `torch.export` program, or a package that AOTInductor made of one.

    Attributes:
        inputs: by the name of the program's argument, what it gets.
        outputs: by name, what each output means, in the order in which the program returns them; a program that returns
            a dict has these keys. Each is a float [N] or [N, 1].
    """

    kind: Literal["exported"] = "exported"
    file: Literal["dense.pt2"] = PROGRAM_PATH
    inputs: dict[Name, InputSource] = Field(min_length=1, max_length=MAX_PROGRAM_INPUTS)
    outputs: dict[OutputName, OutputSpec] = Field(min_length=1, max_length=MAX_OUTPUTS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if taken := sorted(RESERVED_OUTPUTS & self.outputs.keys()):
            raise ValueError(f"outputs: {taken} are names of what every answer has; call them otherwise")
        if not any(one.weight for one in self.outputs.values()):
            raise ValueError("outputs: every weight is 0, so that there is no score to order by")
        return self


def _dense_model_kind(described: Any) -> str:
    kind = described.get("kind") if isinstance(described, dict) else getattr(described, "kind", None)
    return "exported" if kind == "exported" else "built-in"


AnyDenseModel: TypeAlias = Annotated[
    Annotated[ExportedModelSpec, Tag("exported")] | Annotated[DenseModelSpec, Tag("built-in")],
    Discriminator(_dense_model_kind),
]


class ModelSpec(Frozen):
    """Everything about a model that does not change from one training run to the next.

    `features` fixes the order in which pooled embeddings enter the dense model.
    """

    model: Name
    tables: Annotated[tuple[TableSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_TABLES)
    features: Annotated[tuple[FeatureSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    dense_inputs: DenseInputs = DenseInputs()
    dense_model: AnyDenseModel

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_duplicates("table", [table.name for table in self.tables])
        if any(table.column_dims for table in self.tables):
            self._check_stored_tables()
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

    @property
    def stored_tables(self) -> tuple[TableSpec, ...]:
        """Return the tables as they are stored and placed: each one's `slices`, in the order of `tables`."""
        return tuple(stored for table in self.tables for stored in table.slices)

    def _check_stored_tables(self) -> None:
        stored = [table.name for table in self.stored_tables]
        if len(stored) > MAX_TABLES:
            raise ValueError(f"column_dims make {len(stored)} stored tables; at most {MAX_TABLES} are allowed")
        # A slice named like a sliced table would be told apart by nobody who reads a metric.
        _refuse_duplicates("table", [*stored, *(table.name for table in self.tables if table.column_dims)])

    @cached_property
    def _table_by_feature(self) -> dict[str, TableSpec]:
        return {name: table for table in self.tables for name in table.feature_names}

    @cached_property
    def _feature_by_name(self) -> dict[str, FeatureSpec]:
        return {feature.name: feature for feature in self.features}

    def feature(self, name: str) -> FeatureSpec:
        """Return the feature of that name. Raises KeyError."""
        return self._feature_by_name[name]

    def table_of(self, feature_name: str) -> TableSpec:
        """Return the table that a feature is looked up in. Raises KeyError."""
        return self._table_by_feature[feature_name]

    def pooling_of(self, feature_name: str) -> Pooling:
        """Return the feature's own pooling, or its table's."""
        return self.feature(feature_name).pooling or self.table_of(feature_name).pooling


class FileEntry(Frozen):
    """One file of a snapshot: its path relative to the snapshot's folder ('/'-separated), size and SHA-256 (hex)."""

    path: str = Field(min_length=1, max_length=1024)
    size_bytes: int = Field(ge=0, lt=2**63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TableFiles(Frozen):
    """Where a stored table's rows lie. File i holds rows [i * rows_per_file, (i + 1) * rows_per_file), in bucket order.

    `access_counts` says how often each row was looked up, if that is known. What a table has once, vocabulary and
    access counts, stands with the first of its slices.
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
    `plan` says which shard and card own which rows, for fleets of the number of shards that it is for.
    """

    format_version: Literal[1] = 1
    spec: ModelSpec
    version: int = Field(ge=1, lt=2**63)
    created_at: str
    tables: Annotated[tuple[TableFiles, ...], FAIL_FAST] = Field(max_length=MAX_TABLES)
    dense: FileEntry
    golden: GoldenEntry | None = None
    plan: FileEntry | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    last_delta: int | None = Field(default=None, ge=0, lt=2**63)
    delta_base: int | None = Field(default=None, ge=1, lt=2**63)

    @model_validator(mode="after")
    def _check(self) -> Self:
        stored = self.spec.stored_tables
        if [files.table for files in self.tables] != [table.name for table in stored]:
            raise ValueError("tables and spec.tables must name the same tables, or slices of them, in the same order")
        firsts = {table.slices[0].name for table in self.spec.tables}
        for files, table in zip(self.tables, stored, strict=True):
            expected = -(-table.num_embeddings // files.rows_per_file)
            if len(files.rows) != expected:
                raise ValueError(f"table {table.name!r}: {len(files.rows)} row files, expected {expected}")
            if table.bucketing != "range" and files.rows_per_file % (least := NUM_BUCKETS[table.bucketing]):
                raise ValueError(f"table {table.name!r}: rows_per_file must be a multiple of {least}")
            if files.rows_per_file & (files.rows_per_file - 1):
                raise ValueError(f"table {table.name!r}: rows_per_file must be a power of two")
            is_first = table.name in firsts
            if (table.id_mapping.kind == "vocabulary" and is_first) != (files.vocabulary is not None):
                raise ValueError(
                    f"table {table.name!r}: a vocabulary file goes with the vocabulary mapping, and only with it"
                    f"{'' if is_first else ', and with the first slice'}"
                )
            if files.access_counts is not None and not is_first:
                raise ValueError(f"table {table.name!r}: access counts go with the table's first slice")
        is_program = isinstance(self.spec.dense_model, ExportedModelSpec)
        if is_program != (self.dense.path == PROGRAM_PATH):
            raise ValueError(f"dense: {self.dense.path!r}; {PROGRAM_PATH!r} goes with an exported model, only with it")
        if self.delta_base is not None:
            if self.last_delta is None:
                raise ValueError("delta_base needs last_delta: which of its deltas the tables contain already")
            if self.delta_base > self.version:
                raise ValueError(f"delta_base: {self.delta_base} is later than version {self.version}")
        _refuse_duplicates("file path", [entry.path for entry in self.files()])
        return self

    @property
    def delta_start(self) -> tuple[int, int]:
        """(delta_base, last_delta): the version whose stream of deltas this one follows, and after which of them.

        A snapshot that does not say begins a stream of its own, with nothing of it contained.
        """
        return self.delta_base or self.version, self.last_delta or 0

    def files(self) -> tuple[FileEntry, ...]:
        """Return every file of the snapshot but the manifest itself."""
        entries: list[FileEntry | None] = []
        for table in self.tables:
            entries += (*table.rows, table.vocabulary, table.access_counts)
        entries += (self.dense, self.golden.file if self.golden is not None else None, self.plan)
        return tuple(entry for entry in entries if entry is not None)

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        return self.model_dump_json(indent=2) + "\n"


def _refuse_duplicates(what: str, names: list[Any]) -> None:
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"duplicate {what}: {duplicates[0]!r}")


def fingerprint_strings(strings: Sequence[str]) -> npt.NDArray[np.int64]:
    """Hashes with XXH3-64 (seed 0) each string's UTF-8 bytes with the top bit cleared, int64 [len(strings)].

    Source of the hash: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
    """
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(text.encode()) & _ID_MASK for text in strings), np.int64, count=len(strings))


def snapshot_file(root: Path, relative_path: str) -> Path:
    """Return the plain file at `relative_path` ('/'-separated) in the snapshot's folder `root`.

    Raises SnapshotPathError for an absolute path, an empty, '.' or '..' part, a backslash, a control character, or a
    link that leaves the folder, SnapshotCorruptError if there is no such plain file.
    """
    parts = relative_path.split("/")
    if "\\" in relative_path or any(ord(char) < 32 for char in relative_path) or not {"", ".", ".."}.isdisjoint(parts):
        raise SnapshotPathError(f"{root}: path {relative_path!r} is not a plain relative path")
    path = root.joinpath(*parts)
    try:
        real_path = path.resolve(strict=True)
        is_file = real_path.is_file()
    except OSError as error:
        raise file_error(path, "read", error) from error
    except (RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise SnapshotCorruptError(f"{path}: {error}") from error
    if not real_path.is_relative_to(root.resolve()):
        raise SnapshotPathError(f"{root}: path {relative_path!r} leaves the folder by a link")
    if not is_file:
        raise SnapshotCorruptError(f"{path}: not a plain file")
    return path


def manifest_texts(manifest: Manifest) -> dict[str, str]:
    """Return the two files' texts by name. The second is what `sha256sum --check` reads."""
    text = manifest.to_json()
    return {MANIFEST_NAME: text, CHECKSUM_NAME: _checksum_line(hashlib.sha256(text.encode()).hexdigest())}


def read_manifest(root: Path) -> tuple[Manifest, str]:
    """Read the manifest of the snapshot in `root`, and its identity: the SHA-256 (hex) of `manifest.json`.

    The checksum beside it is left to `check_manifest_checksum`. Raises SnapshotError as `snapshot_file`,
    `parse_manifest`, or if it is too large.
    """
    path = snapshot_file(root, MANIFEST_NAME)
    content = _read_bounded(path, MAX_MANIFEST_BYTES)
    return parse_manifest(str(path), content), hashlib.sha256(content).hexdigest()


def parse_manifest(where: str, content: bytes) -> Manifest:
    """Return the manifest in a text of `manifest.json`, by strict types; `where` names it in errors.

    Raises SnapshotFormatError if it is not JSON, has an unknown format version, or is not what the schema says.
    """
    try:
        document = json.loads(content, object_pairs_hook=_bounded_object)
    except (ValueError, RecursionError) as error:
        raise SnapshotFormatError(f"{where}: not JSON: {cut(error)}") from error
    if not isinstance(document, dict) or "format_version" not in document:
        raise SnapshotFormatError(f"{where}: has no format_version")
    found = document["format_version"]
    if type(found) is not int or found != FORMAT_VERSION:
        stated = cut(repr(found))
        raise SnapshotFormatError(f"{where}: format_version {stated}; this release reads only {FORMAT_VERSION}")
    try:
        return Manifest.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise SnapshotFormatError(f"{where}: {quoted_errors(error)}") from error


def check_manifest_checksum(root: Path, identity: str) -> None:
    """Raise SnapshotCorruptError unless `manifest.json`, of SHA-256 `identity`, is byte for byte what was written."""
    stated = _read_bounded(snapshot_file(root, CHECKSUM_NAME), 4096)
    if stated != _checksum_line(identity).encode():
        raise SnapshotCorruptError(f"{root / MANIFEST_NAME}: SHA-256 is not the one in {CHECKSUM_NAME}")


def _bounded_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object of {len(pairs)} keys; at most {MAX_OBJECT_KEYS} are allowed")
    return dict(pairs)


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise file_error(path, "read", error) from error
    if len(content) > max_bytes:
        raise SnapshotCorruptError(f"{path}: larger than {max_bytes} bytes")
    return content


def _checksum_line(digest: str) -> str:
    return f"{digest}  {MANIFEST_NAME}\n"
