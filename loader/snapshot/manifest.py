"""Describe a model and a snapshot: what training writes, and `manifest.json` on disk with its checksum.

`ModelSpec` is the part a person writes (tables, features, dense inputs, dense model); `Manifest` is `ModelSpec` plus
what the writer measured (files, sizes, checksums). Names follow TorchRec where it has one. The format is documented in
docs/snapshot-format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from loader.errors import SnapshotCorruptError, cut, file_errors
from loader.snapshot.tables import (
    FAIL_FAST,
    MAX_FEATURES,
    MAX_NUM_EMBEDDINGS,
    NUM_BUCKETS,
    AnyTable,
    DividedTable,
    Frozen,
    Name,
    Pooling,
    TableSpec,
    refused_as,
)

FORMAT_VERSION = 1
MAX_TABLES = 4096
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

Side = Literal["context", "candidate"]

OutputName: TypeAlias = Annotated[Name, Field(max_length=64)]
# Whether a program gets a thing of the context once for each request, or with each candidate.
Per: TypeAlias = Literal["request", "candidate"]

MANIFEST_NAME = "manifest.json"
CHECKSUM_NAME = "manifest.json.sha256"
MAX_MANIFEST_BYTES = 16 << 20
# Keys of one JSON object: bounds how many errors the schema can find in one.
MAX_OBJECT_KEYS = 4096


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
    """Float [N, columns], of the context with `per` request [R, columns]; what servers assemble: nothing is copied.

    The columns of a side: its pooled features in the spec's order, its dense inputs, zeros up to a multiple of 32.
    """

    source: Literal["side"] = "side"
    side: Side
    per: Per = "candidate"


class PooledInput(Frozen):
    """Pooled embeddings of features of one side, concatenated: float [N, sum of their embedding_dim].

    Of the context with `per` request: [R, sum], one row for each request, which `request_of_candidate` counts.
    """

    source: Literal["pooled"] = "pooled"
    features: Annotated[tuple[Name, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    per: Per = "candidate"


class SequenceSource(Frozen):
    """A context feature with pooling none, whose longest sequence in the batch has L rows.

    Its `part`: `rows`, float [N or R, L, embedding_dim], zeros after the last; `lengths`, int64 [N or R]; or `mask`,
    bool [N or R, L], False after the last.
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
    """A `torch.export` program.

    Attributes:
        inputs: by the name of the program's argument.
        outputs: by name, each a float [N] or [N, 1], in the order in which the program returns them, or by the keys of
            the dict that it returns.
    """

    kind: Literal["exported"] = "exported"
    file: Literal["dense.pt2"] = PROGRAM_PATH
    inputs: dict[Name, InputSource] = Field(min_length=1, max_length=MAX_PROGRAM_INPUTS)
    outputs: dict[OutputName, OutputSpec] = Field(min_length=1, max_length=MAX_OUTPUTS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if reserved := sorted(RESERVED_OUTPUTS & self.outputs.keys()):
            raise ValueError(f"outputs: {reserved} are names of what every answer has; call them otherwise")
        if not any(output.weight for output in self.outputs.values()):
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

    `features` fixes the order in which pooled embeddings enter the dense model. `tables` are those that are stored,
    the parts of `divided` ones among them.
    """

    model: Name
    tables: Annotated[tuple[TableSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_TABLES)
    features: Annotated[tuple[FeatureSpec, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_FEATURES)
    # Left out where there is none, so that releases that know none can read the model.
    divided: Annotated[tuple[DividedTable, ...], FAIL_FAST] = Field(
        default=(), max_length=MAX_TABLES, exclude_if=lambda tables: not tables
    )
    dense_inputs: DenseInputs = DenseInputs()
    dense_model: AnyDenseModel

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_duplicates("table", [table.name for table in self.tables])
        if sliced := [table.name for table in self.tables if table.column_dims]:
            stored = [table.name for table in self.stored_tables]
            if len(stored) > MAX_TABLES:
                raise ValueError(f"column_dims make {len(stored)} stored tables; at most {MAX_TABLES} are allowed")
            # A slice named like a sliced table would be told apart by nobody who reads a metric.
            _refuse_duplicates("table", [*stored, *sliced])
        _refuse_duplicates("divided table", [table.name for table in self.divided])
        _refuse_duplicates("part of a divided table", [part for table in self.divided for part in table.parts])
        for table in self.divided:
            if unknown_parts := sorted(set(table.parts) - self._tables.keys()):
                raise ValueError(f"divided table {table.name!r}: parts {unknown_parts} are no tables")
            if table.name in self._tables and table.parts != (table.name,):
                where = f"divided table {table.name!r}"
                raise ValueError(f"{where}: its name is that of a table which is not its only part")
            table.check_parts(self.parts(table))
        if isinstance(self.dense_model, ExportedModelSpec) and (projected := self.projections()):
            raise ValueError(f"projections of {sorted(projected)}: an exported program can't hold them")
        feature_names = [feature.name for feature in self.features]
        _refuse_duplicates("feature", feature_names)
        placed = [name for table in self.logical_tables for name in table.feature_names]
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

    def __copy__(self) -> Self:
        """Copy the fields alone: what was derived from them may not be true of a copy with other ones."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @property
    def logical_tables(self) -> tuple[AnyTable, ...]:
        """Return the tables as features see them: `tables`, with each divided one in the place of its first part."""
        return tuple(self._logical_by_first.values())

    @property
    def logical_by_first(self) -> Mapping[str, AnyTable]:
        """Return `logical_tables` by the name of the first table that is stored for each."""
        return self._logical_by_first

    # Private, since pydantic takes what is public in an instance's dict for its fields.
    @cached_property
    def _logical_by_first(self) -> dict[str, AnyTable]:
        tables: dict[str, AnyTable] = {}
        for table in self.tables:
            logical = self._divided_of.get(table.name, table)
            tables.setdefault(logical.name, logical)
        return {self.parts(table)[0].slices[0].name: table for table in tables.values()}

    def parts(self, table: AnyTable) -> tuple[TableSpec, ...]:
        """Return the tables that are stored for one, each perhaps in slices: its parts, or itself."""
        return tuple(self._tables[name] for name in table.parts) if isinstance(table, DividedTable) else (table,)

    def divided_of(self, table: str) -> DividedTable | None:
        """Return the divided table that a table is a part of, if it is of one."""
        return self._divided_of.get(table)

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return the shape [columns, embedding_dim] of each projection, by the name of its part."""
        return {
            part.name: (part.embedding_dim, table.embedding_dim)
            for table in self.divided
            for part in self.parts(table)
            if part.embedding_dim < table.embedding_dim
        }

    @cached_property
    def _tables(self) -> dict[str, TableSpec]:
        return {table.name: table for table in self.tables}

    @cached_property
    def _divided_of(self) -> dict[str, DividedTable]:
        return {part: table for table in self.divided for part in table.parts}

    @cached_property
    def _table_by_feature(self) -> dict[str, AnyTable]:
        return {name: table for table in self.logical_tables for name in table.feature_names}

    @cached_property
    def _feature_by_name(self) -> dict[str, FeatureSpec]:
        return {feature.name: feature for feature in self.features}

    def feature(self, name: str) -> FeatureSpec:
        """Return the feature of that name. Raises KeyError."""
        return self._feature_by_name[name]

    def table_of(self, feature_name: str) -> AnyTable:
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
    """The files of a stored table. File i has rows [i * rows_per_file, (i + 1) * rows_per_file), in bucket order.

    `vocabulary` and `access_counts`, which a table has once, are with its first slice; `vocabulary` and `row_classes`
    of a divided table with its first part. A table with keys has `num_keys` of them, and `missing_row` if its `missing`
    is `mean`, as `loader.keyed_rows` says.
    """

    table: Name
    rows_per_file: int = Field(ge=1, lt=2**63)
    rows: Annotated[tuple[FileEntry, ...], FAIL_FAST] = Field(min_length=1, max_length=MAX_ROW_FILES)
    vocabulary: FileEntry | None = None
    access_counts: FileEntry | None = None
    row_classes: FileEntry | None = Field(default=None, exclude_if=lambda entry: entry is None)
    num_keys: int | None = Field(default=None, ge=1, le=MAX_NUM_EMBEDDINGS, exclude_if=lambda count: count is None)
    missing_row: FileEntry | None = Field(default=None, exclude_if=lambda entry: entry is None)

    def num_rows(self, table: TableSpec) -> int:
        """Return how many rows the files have, of the table that they are of: one for each key, if it has keys."""
        return table.num_embeddings if self.num_keys is None else self.num_keys


class GoldenEntry(Frozen):
    """Requests with the float32 scores that training computed; `tolerance` bounds |served - expected|."""

    file: FileEntry
    tolerance: float = Field(gt=0)
    num_requests: int = Field(ge=1)
    num_candidates: int = Field(ge=1)


class Manifest(Frozen):
    """`manifest.json`: one immutable version of a model.

    `last_delta` is the last delta whose rows are in the tables already, of the stream that began with the version
    `delta_base`; None stands for none, and for this version. `plan` says which shard and card own which rows.
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
            where, logical = f"table {table.name!r}:", self.spec.logical_by_first.get(table.name)
            if (files.num_keys is not None) != (table.keys is not None) or files.num_rows(table) > table.num_embeddings:
                raise ValueError(f"{where} num_keys goes with keys, at most {table.num_embeddings}, and only with them")
            if (files.missing_row is not None) != (table.missing == "mean"):
                raise ValueError(f"{where} a row for missing keys goes with missing mean, and only with it")
            expected = -(-files.num_rows(table) // files.rows_per_file)
            if len(files.rows) != expected:
                raise ValueError(f"{where} {len(files.rows)} row files, expected {expected}")
            if table.bucketing != "range" and files.rows_per_file % (least := NUM_BUCKETS[table.bucketing]):
                raise ValueError(f"{where} rows_per_file must be a multiple of {least}")
            if files.rows_per_file & (files.rows_per_file - 1):
                raise ValueError(f"{where} rows_per_file must be a power of two")
            has_vocabulary = logical is not None and logical.id_mapping.kind == "vocabulary"
            if has_vocabulary != (files.vocabulary is not None):
                first = "" if logical is not None else ", and with the first slice or part"
                raise ValueError(f"{where} a vocabulary file goes with the vocabulary mapping, and only with it{first}")
            if files.access_counts is not None and table.name not in firsts:
                raise ValueError(f"{where} access counts go with the table's first slice")
            has_classes = isinstance(logical, DividedTable) and logical.num_classes > 1
            if has_classes != (files.row_classes is not None):
                raise ValueError(f"{where} row classes go with the first part of a table that is divided by popularity")
        if isinstance(self.spec.dense_model, ExportedModelSpec) != (self.dense.path == PROGRAM_PATH):
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
        """(delta_base, last_delta), with this version's number and 0 where the manifest does not say."""
        return self.delta_base or self.version, self.last_delta or 0

    def files(self) -> tuple[FileEntry, ...]:
        """Return every file of the snapshot but the manifest itself."""
        entries: list[FileEntry | None] = []
        for table in self.tables:
            entries += (*table.rows, table.vocabulary, table.access_counts, table.row_classes, table.missing_row)
        entries += (self.dense, None if self.golden is None else self.golden.file, self.plan)
        return tuple(entry for entry in entries if entry is not None)

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        return self.model_dump_json(indent=2) + "\n"


def _refuse_duplicates(what: str, names: list[Any]) -> None:
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"duplicate {what}: {duplicates[0]!r}")


def check_relative_path(where: str, relative_path: str) -> list[str]:
    """Return the parts of a path in a snapshot's folder `where`, which an error names. Raises as `snapshot_file`."""
    parts = relative_path.split("/")
    if "\\" in relative_path or any(ord(char) < 32 for char in relative_path) or not {"", ".", ".."}.isdisjoint(parts):
        raise SnapshotCorruptError(f"{where}: path {relative_path!r} is not a plain relative path")
    return parts


def snapshot_file(root: Path, relative_path: str) -> Path:
    """Return the plain file at `relative_path` ('/'-separated) in the snapshot's folder `root`.

    Raises SnapshotCorruptError if there is none, for an absolute path, an empty, '.' or '..' part, a backslash, a
    control character, or a link that leaves the folder.
    """
    path = root.joinpath(*check_relative_path(str(root), relative_path))
    try:
        with file_errors(path, "read"):
            real_path = path.resolve(strict=True)
            is_file = real_path.is_file()
    except (RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise SnapshotCorruptError(f"{path}: {error}") from error
    if not real_path.is_relative_to(root.resolve()):
        raise SnapshotCorruptError(f"{root}: path {relative_path!r} leaves the folder by a link")
    if not is_file:
        raise SnapshotCorruptError(f"{path}: not a plain file")
    return path


def manifest_texts(manifest: Manifest) -> dict[str, str]:
    """Return the two files' texts by name. The second is what `sha256sum --check` reads."""
    text = manifest.to_json()
    return {MANIFEST_NAME: text, CHECKSUM_NAME: checksum_line(hashlib.sha256(text.encode()).hexdigest())}


def read_manifest(root: Path) -> tuple[Manifest, str]:
    """Return the manifest of the snapshot in `root`, and its identity: the SHA-256 (hex) of `manifest.json`.

    Its checksum file is left to `check_manifest_checksum`. Raises SnapshotError as `snapshot_file` and
    `parse_manifest`.
    """
    path = snapshot_file(root, MANIFEST_NAME)
    content = read_bounded(path, MAX_MANIFEST_BYTES)
    return parse_manifest(str(path), content), hashlib.sha256(content).hexdigest()


def parse_manifest(where: str, content: bytes) -> Manifest:
    """Return the manifest in a text of `manifest.json`, by strict types; `where` names it in errors.

    Raises SnapshotCorruptError if it is not JSON, has an unknown format version, or is not what the schema says.
    """
    try:
        document = json.loads(content, object_pairs_hook=_bounded_object)
    except (ValueError, RecursionError) as error:
        raise SnapshotCorruptError(f"{where}: not JSON: {cut(error)}") from error
    if not isinstance(document, dict) or "format_version" not in document:
        raise SnapshotCorruptError(f"{where}: has no format_version")
    format_version = document["format_version"]
    if type(format_version) is not int or format_version != FORMAT_VERSION:
        stated = cut(repr(format_version))
        raise SnapshotCorruptError(f"{where}: format_version {stated}; this release reads only {FORMAT_VERSION}")
    with refused_as(SnapshotCorruptError, f"{where}: "):
        return Manifest.model_validate_json(content, strict=True)


def check_manifest_checksum(root: Path, identity: str) -> None:
    """Raise SnapshotCorruptError unless `manifest.json`, of SHA-256 `identity`, is byte for byte what was written."""
    if read_bounded(snapshot_file(root, CHECKSUM_NAME), 4096) != checksum_line(identity).encode():
        raise SnapshotCorruptError(f"{root / MANIFEST_NAME}: SHA-256 is not the one in {CHECKSUM_NAME}")


def _bounded_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object of {len(pairs)} keys; at most {MAX_OBJECT_KEYS} are allowed")
    return dict(pairs)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a small file. Raises SnapshotError if it can't be read or is longer."""
    with file_errors(path, "read"), path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise SnapshotCorruptError(f"{path}: larger than {max_bytes} bytes")
    return content


def checksum_line(digest: str) -> str:
    """Return the content of `manifest.json.sha256`: what `sha256sum` writes for that SHA-256 (hex)."""
    return f"{digest}  {MANIFEST_NAME}\n"
