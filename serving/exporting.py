"""Take a trained model into a store: rows and dense weights are found in a checkpoint, and tried as a server does.

`export` is for a trainer that has the model in memory; the commands `export` and `import` come here with files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor, nn

from loader.checkpoints import Checkpoint, match_checkpoint, open_state_dict
from loader.description import ModelDescription
from loader.divided_rows import divide_rows
from loader.errors import CheckpointError, ExportError
from loader.keyed_rows import GivenKeys, as_keys
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ExportedModelSpec, ModelSpec
from loader.snapshot.program import Program
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.row_source import RowSource
from loader.snapshot.tables import refused_as
from loader.snapshot.writer import export_snapshot
from serving.errors import RankingModelError
from serving.models.exported import check_bindings, check_program, export_program
from serving.models.ranking_models import build_model, load_model, parse_dense_model

MAX_DESCRIPTION_BYTES = 16 << 20


class DenseName(NamedTuple):
    """Where a tensor of the dense model comes from, and whether it is the transpose, as of Keras' kernels."""

    name: str
    is_transposed: bool = False


Description: TypeAlias = ModelDescription | Mapping[str, Any] | str | Path


def read_description(given: Description) -> ModelDescription:
    """Return the model that a JSON file, or what is in one, describes. Raises ExportError: each field that is wrong."""
    if isinstance(given, ModelDescription):
        return given
    with refused_as(ExportError, "" if isinstance(given, Mapping) else f"{given}: ", ModelDescription):
        if isinstance(given, Mapping):
            return ModelDescription.model_validate(given)
        if (size := Path(given).stat().st_size) > MAX_DESCRIPTION_BYTES:
            raise ExportError(f"{given}: {size} bytes, at most {MAX_DESCRIPTION_BYTES} are read")
        return ModelDescription.model_validate_json(Path(given).read_bytes(), strict=True)


def compiled(
    where: str,
    described: ModelDescription,
    kept: Mapping[str, int] | None = None,
    num_keys: Mapping[str, int] | None = None,
) -> ModelSpec:
    """Return the model as it is stored, as `ModelDescription.compiled` says; `where` begins errors.

    Raises:
        ExportError: its parts do not fit each other, or no dense model of its kind is made from these.
    """
    with refused_as(ExportError, where, ModelSpec):
        spec = described.compiled(kept, num_keys)
    if isinstance(spec.dense_model, ExportedModelSpec):
        check_bindings(spec)
    else:
        parse_dense_model(spec)
    return spec


def match_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    dense_prefix: str | None = None,
    dense_names: Mapping[str, DenseName] | None = None,
    table_keys: Mapping[str, str] | None = None,
    program: Program | None = None,
) -> tuple[dict[str, RowSource], Mapping[str, Tensor] | Program]:
    """Return the tables' rows and the dense model of a checkpoint, tried as a server does.

    `dense_names` says where each of the dense model's tensors comes from; without it, names are the model's own, behind
    `dense_prefix`. `program` is the dense model of the kind `exported`. Raises ExportError, CheckpointError.
    """
    if (program is None) == (spec.dense_model.kind == "exported"):
        raise ExportError("--program goes with a dense_model of kind exported, and only with it")
    names, dense = checkpoint.names(), dict[str, Tensor]()
    try:
        rows, dense = match_checkpoint(checkpoint, spec, dense_prefix, table_keys, none_dense=dense_names is not None)
    except CheckpointError as error:
        if dense_prefix is None or any(name.startswith(dense_prefix) for name in names):
            raise
        raise CheckpointError(f"{error}{_suggested_prefix(spec, names, dense_prefix)}") from error
    if program is not None:
        check_program(spec, program)
        return rows, program
    for name, (theirs, is_transposed) in (dense_names or {}).items():
        tensor = checkpoint.tensor(theirs)
        dense[name] = tensor.T if is_transposed else tensor
    try:
        # As a server builds it.
        load_model(spec, dense)
    except RankingModelError as error:
        advice = _suggested_prefix(spec, names, dense_prefix) if dense_names is None else ""
        raise CheckpointError(f"{error}{advice}") from error
    return rows, dense


def check_blocks(spec: ModelSpec, given: Collection[str], classes: Collection[str]) -> None:
    """Raise ExportError for a table that training divided, of which nobody says how: counts could only guess it."""
    for table in spec.divided:
        is_given = table.name not in given and set(table.parts) <= set(given)
        if is_given and table.num_classes > 1 and table.name not in classes:
            raise ExportError(
                f"table {table.name!r}: the checkpoint has rows of its parts {list(table.parts)}; which block training "
                f"gave each row, row_classes, or --blocks {table.name}=FILE, have to say"
            )


def export(
    model: nn.Module | Mapping[str, Any],
    description: Description,
    golden: GoldenRequests | None,
    store: str | Path,
    *,
    program: nn.Module | Program | None = None,
    keys: Mapping[str, GivenKeys] | None = None,
    access_counts: Mapping[str, npt.NDArray[Any]] | None = None,
    row_classes: Mapping[str, RowClasses] | None = None,
    table_keys: Mapping[str, str] | None = None,
    dense_prefix: str | None = None,
    **options: Any,
) -> Path:
    """Write a model that is being trained into a store as its next version, and return the snapshot's folder.

    Args:
        model: the module, or its state dict: tables are found in it by TorchRec's names, as `shardrank export` does.
        description: of the model: a file, or the object in one.
        golden: requests with the scores that training computed; None for none.
        store: the store's folder.
        program: the dense model of a description of the kind `exported`: a module, exported here, or a program.
        keys: of tables with keys, those of their rows.
        access_counts: how often each row was looked up: of tables that are divided by popularity.
        row_classes: the part that each row is in, of tables that training divided.
        table_keys: as --table-key of `shardrank export`.
        dense_prefix: as its --dense-prefix.
        options: more of `export_snapshot`: `vocabularies`, `version`, `metadata`, `last_delta`, `delta_base`, ...

    Raises ExportError and CheckpointError for what does not fit the description, else as `export_snapshot`.
    """
    if "://" in str(store):
        raise ExportError(f"store: {store} is no folder; `shardrank publish` puts what is in one up to a URL")
    described, checkpoint = read_description(description), open_state_dict(model)
    kinds = {table.name: table.keys for table in described.tables}
    arrays = {
        table: as_keys(f"table {table!r}: keys", kinds.get(table), given) for table, given in (keys or {}).items()
    }
    spec = compiled("", described, None, {table: of_table.size for table, of_table in arrays.items()})
    if isinstance(program, nn.Module):
        program = export_program(spec, program)
    rows, dense = match_model(checkpoint, spec, dense_prefix=dense_prefix, table_keys=table_keys, program=program)
    check_blocks(spec, rows, row_classes or {})
    counts = access_counts or {}
    seen = {table.name for table in spec.logical_tables}
    made = divide_rows(
        spec, rows, {table: of_table for table, of_table in counts.items() if table in seen}, row_classes=row_classes
    )
    counted = {table: of_table for table, of_table in counts.items() if table not in seen} | dict(made.access_counts)
    more = {"keys": arrays, "access_counts": counted, "row_classes": made.row_classes, "golden": golden, **options}
    return export_snapshot(store, spec, rows=made.rows, dense=dense, **more)


def _suggested_prefix(spec: ModelSpec, keys: Collection[str], dense_prefix: str | None) -> str:
    """End a message: which `--dense-prefix` would find every tensor; "" if none would, or it was given."""
    with torch.device("meta"):
        names = list(build_model(spec).state_dict())
    prefixes = set.intersection(*({key[: -len(name)] for key in keys if key.endswith(name)} for name in names))
    fitting = sorted(prefix for prefix in prefixes if prefix != dense_prefix)
    if not fitting or ("" in fitting and dense_prefix is None):
        return ""
    if "" in fitting:
        return "; the names fit without --dense-prefix"
    return f"; the names fit with --dense-prefix {' or '.join(fitting)}"
