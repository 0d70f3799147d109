"""`shardrank train`, `inspect` and `verify`: snapshots are made, described and checked; and descriptions are read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, print_document, print_json, progress_bars
from serving.cli.settings import config_of, flags, snapshot_folder
from serving.config import FrontSettings

if TYPE_CHECKING:
    from torch import Tensor

    from loader.description import ModelDescription
    from loader.progress import Progress
    from loader.snapshot.manifest import ModelSpec
    from loader.snapshot.reader import Snapshot, VerifyReport
    from loader.snapshot.tables import AnyTable

MAX_DESCRIPTION_BYTES = 16 << 20


@click.command(cls=WithExamples)
@opts.out_store_option
@opts.films_options
@opts.option("--model NAME", "The model's name.", default="films")
@opts.choice("--kind", ["target_attention", "dlrm", "dcn_v2", "mlp"], "The ranking model.")
@opts.choice("--dtype", ["int8", "int4", "fp16", "fp32"], "Number format of the rows.")
@opts.count("--dim", "Width of every table.", 2, 512, 16)
@opts.switch("--profile", "Also use age, occupation, zip code, and two dense inputs of a film.")
@opts.switch("--crosses", "Also use pairs: user and genre, occupation and film, age and genre, zip code and film.")
@opts.assignments(
    "--table NAME=JSON",
    "What a table's description has instead: `num_embeddings`, `id_mapping`, `blocks`, `dtype`, `project_to`, ... "
    "A new name takes the `feature_names` that it is given from other tables.",
)
@opts.switch("--prune", "Drop rows that training never looked up; their ids get one row together.")
@opts.option("--keep-share X", "With --prune, keep the hottest rows that have this share of the lookups.", opts.PART)
@opts.option(
    "--pruned-row", "With --prune: what ids of dropped rows get; default: their mean.", click.Choice(["mean", "zeros"])
)
@opts.choice("--bucketing", ["mixed", "range"], "Order of rows in their files: --sharding range needs range.")
def train(
    store: Path,
    movielens: Path | None,
    ratings: int,
    epochs: int | None,
    seed: int,
    dim: int,
    prune: bool,
    keep_share: float | None,
    pruned_row: str | None,
    table: Sequence[tuple[str, str]],
    bucketing: Literal["mixed", "range"],
    **described: Any,
) -> None:
    """Train the demo's model and write it into a store.

    It becomes the model's next version. The same data, flags and seed give the same model. The last lines say where
    the snapshot lies and how well the float32 model ranks the ratings that were held out.

    Examples:
      shardrank train --store models
      shardrank train --store models --movielens ml-100k --kind dcn_v2 --profile
      shardrank train --store models --prune --table 'films={"project_to": 16, "embedding_dim": 8}'
    """
    from serving.training.dataset import FilmsOptions
    from serving.training.trainer import Pruning, expectation, read_interactions, train_version

    given = {"keep_share": keep_share, "pruned_row": pruned_row}
    if not prune and (unused := [name for name, value in given.items() if value is not None]):
        raise click.UsageError(f"{flags(unused)}: only with --prune")
    pruning = config_of(Pruning, given) if prune else None
    tables = {name: _json_object(f"--table {name}", text) for name, text in table}
    films = config_of(FilmsOptions, described, embedding_dim=dim, tables=tables)
    interactions = read_interactions(movielens, ratings, seed)
    with progress_bars() as bars:
        version = train_version(
            interactions,
            store,
            seed=seed,
            epochs=epochs,
            options=films,
            pruning=pruning,
            bucketing=bucketing,
            progress=bars,
        )
    quality = expectation(version)
    click.echo(f"AUC {quality.auc_fp32:.4f} (each film by its mean label: {quality.auc_item_mean:.4f})")
    click.echo(f"wrote {version.folder}")


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{flag}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError(f"{flag}: {text!r:.80} is not a JSON object")
    return found


def read_description(path: Path) -> ModelDescription:
    """Return the model that a JSON file describes. Raises ExportError naming each field that is wrong."""
    from pydantic import ValidationError

    from loader.description import ModelDescription
    from loader.errors import ExportError
    from loader.snapshot.tables import schema_errors

    if (size := path.stat().st_size) > MAX_DESCRIPTION_BYTES:
        raise ExportError(f"{path}: {size} bytes, at most {MAX_DESCRIPTION_BYTES} are read")
    try:
        return ModelDescription.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise ExportError(f"{path}: {'; '.join(map(str, schema_errors(error, [ModelDescription])))}") from error


def compiled(path: Path, described: ModelDescription, kept: Mapping[str, int] | None = None) -> ModelSpec:
    """Return the model as it is stored, `kept` rows of tables that are pruned; `path` names it in errors.

    Raises:
        ExportError: its parts do not fit each other, or no dense model of its kind is made from these.
    """
    from pydantic import ValidationError

    from loader.errors import ExportError
    from loader.snapshot.manifest import ExportedModelSpec, ModelSpec
    from loader.snapshot.tables import schema_errors
    from serving.models.exported import check_bindings
    from serving.models.ranking_models import parse_dense_model

    try:
        spec = described.compiled(kept)
    except ValidationError as error:
        raise ExportError(f"{path}: {'; '.join(map(str, schema_errors(error, [ModelSpec])))}") from error
    if isinstance(spec.dense_model, ExportedModelSpec):
        check_bindings(spec)
    else:
        parse_dense_model(spec)
    return spec


def check_dense_model(
    spec: ModelSpec, tensors: Mapping[str, Tensor], keys: Collection[str], dense_prefix: str | None = None
) -> None:
    """Build the dense model from its tensors, as a server will; `keys` are all of the checkpoint or snapshot.

    Raises CheckpointError; where all missing names are there behind a prefix, its message says which.
    """
    from loader.errors import CheckpointError
    from serving.errors import RankingModelError
    from serving.models.ranking_models import load_model

    try:
        load_model(spec, tensors)
    except RankingModelError as error:
        raise CheckpointError(f"{error}{suggested_prefix(spec, keys, dense_prefix)}") from error


def suggested_prefix(spec: ModelSpec, keys: Collection[str], dense_prefix: str | None) -> str:
    """End a message: which `--dense-prefix` would find every tensor; "" if none would, or it was given."""
    import torch

    from serving.models.ranking_models import build_model

    with torch.device("meta"):
        names = list(build_model(spec).state_dict())
    prefixes = set.intersection(*({key[: -len(name)] for key in keys if key.endswith(name)} for name in names))
    fitting = sorted(prefix for prefix in prefixes if prefix != dense_prefix)
    if not fitting or ("" in fitting and dense_prefix is None):
        return ""
    if "" in fitting:
        return "; the names fit without --dense-prefix"
    return f"; the names fit with --dense-prefix {' or '.join(fitting)}"


@click.command(cls=WithExamples)
@opts.snapshot_options
@opts.json_flag("the description")
def inspect(as_json: bool, **named: Any) -> None:
    """Show what a snapshot holds.

    Tables, features, dense model and sizes. Reads the manifest and the headers of the files; `shardrank verify`
    checks their bytes.

    Examples:
      shardrank inspect --store models
      shardrank inspect --store models --model films --version 3 --json
      shardrank inspect --snapshot models/films/3
    """
    from loader.snapshot.reader import Snapshot

    found = _inspection(Snapshot.open(snapshot_folder(**named), verify=False))
    (print_json if as_json else print_document)(found)


def _inspection(snapshot: Snapshot) -> dict[str, Any]:
    """Return what `--json` prints.

    Tables are those that features see. `files` and `size_bytes` are of a table's row files, those of all slices and
    parts together. `access_counts` says whether it has them, `column_dims` how many columns each slice has, of a table
    stored in some, and `parts` which tables it is stored as, `divided_by` what, of one that is divided.
    """
    spec, manifest = snapshot.spec, snapshot.manifest
    tables = [_table_inspection(snapshot, table) for table in spec.logical_tables]
    features = [
        feature.model_dump(include={"name", "side"})
        | {"table": spec.table_of(feature.name).name, "pooling": spec.pooling_of(feature.name)}
        | {"weighted": feature.weighted}
        for feature in spec.features
    ]
    return {
        "path": str(snapshot.path),
        "model": spec.model,
        "version": snapshot.version,
        "identity": snapshot.identity,
        "created_at": manifest.created_at,
        "snapshot_bytes": snapshot.size_bytes,
        "float32_bytes": snapshot.float32_bytes,
        "tables": tables,
        "features": features,
        "dense_inputs": spec.dense_inputs.model_dump(mode="json"),
        "dense_model": spec.dense_model.model_dump(mode="json"),
        "golden": None if manifest.golden is None else manifest.golden.model_dump(mode="json"),
        "metadata": manifest.metadata,
    }


def _table_inspection(snapshot: Snapshot, table: AnyTable) -> dict[str, Any]:
    from loader.snapshot.tables import DividedTable
    from serving.description import stored_dtypes

    spec, stored = snapshot.spec, {files.table: files for files in snapshot.manifest.tables}
    parts = spec.parts(table)
    files = [stored[one.name] for part in parts for one in part.slices]
    shown = {"name", "num_embeddings", "embedding_dim", "dtype"}
    found = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": stored_dtypes(spec, table),
        "pooling": table.pooling,
        "id_mapping": table.id_mapping.kind,
        "unknown_id": table.unknown_id,
        "bucketing": parts[0].bucketing,
        "files": sum(len(one.rows) for one in files),
        "size_bytes": sum(entry.size_bytes for one in files for entry in one.rows),
        "access_counts": files[0].access_counts is not None,
        "column_dims": parts[0].column_dims,
    }
    if isinstance(table, DividedTable):
        found |= {
            "divided_by": table.by,
            "combine": table.combine,
            "pruned": table.pruned,
            "parts": [
                part.model_dump(include=shown)
                | {"size_bytes": sum(entry.size_bytes for entry in stored[part.name].rows)}
                for part in parts
            ],
        }
    return found


@click.command(cls=WithExamples)
@opts.snapshot_options
@opts.option("--golden/--no-golden", "Re-score its golden requests through the path that serves.", default=True)
@opts.hash_threads_option
@opts.setting_option(FrontSettings, "trust_exported")
@opts.json_flag("the result")
@click.pass_context
def verify(
    ctx: click.Context, /, golden: bool, threads: int, trust_exported: bool, as_json: bool, **named: Any
) -> None:
    """Check a snapshot in full.

    Exits with 0 if it may be served, with 1 and the reason if not. Checks the manifest, every file's size and
    SHA-256, dtypes and shapes, every row for NaN and inf, that the dense model can be built, and the golden requests:
    it loads the version in this process and compares its scores with those that training computed, with the dense
    model in float32, and then in each narrower number format that this machine has.

    Examples:
      shardrank verify --store models --model films
      shardrank verify --snapshot models/films/3 --no-golden --json
    """
    folder = snapshot_folder(**named)
    with progress_bars() as bars:
        found, scored = _verify(folder, golden=golden, threads=threads, trust_exported=trust_exported, progress=bars)
    if as_json:
        print_json(found.model_dump(mode="json") | {"golden_checked": scored})
    else:
        for check in found.checks:
            click.echo(f"ok: {check}")
        for problem in found.problems:
            click.echo(f"bad: {problem}")
        size = human_bytes(sum(file.size_bytes for file in found.files))
        where = found.path if found.model is None else f"{found.model} version {found.version} in {found.path}, {size}"
        click.echo(f"{where}: {'may be served' if found.ok else 'must not be served'}")
    ctx.exit(0 if found.ok else 1)


def _verify(
    folder: Path, *, golden: bool, threads: int, trust_exported: bool, progress: Progress
) -> tuple[VerifyReport, bool]:
    """Check files, then scores; tell also whether golden requests were scored. Raises nothing."""
    from loader.errors import CheckpointError, ShardrankError, SnapshotError
    from loader.snapshot.manifest import ExportedModelSpec
    from loader.snapshot.reader import Snapshot, verify_snapshot
    from serving.models.exported import load_exported
    from serving.rank.service import RankingService
    from serving.versions.loading import ModelSource, load_served_model

    report = verify_snapshot(folder, threads=threads, progress=progress)
    if not report.ok:
        return report, False

    def with_check(text: str) -> VerifyReport:
        return report.model_copy(update={"checks": (*report.checks, text)})

    def refused(problem: str) -> VerifyReport:
        return report.model_copy(update={"ok": False, "problems": (problem,)})

    snapshot = Snapshot.open(folder, verify=False)
    tensors, described = snapshot.dense_tensors(), snapshot.spec.dense_model
    try:
        if isinstance(described, ExportedModelSpec):
            load_exported(snapshot.spec, snapshot.program_path, trusted=trust_exported)
            built = f"takes {list(described.inputs)} and gives {list(described.outputs)}"
        else:
            check_dense_model(snapshot.spec, tensors, tensors.keys())
            built = f"is built from its {len(tensors)} tensors"
    except CheckpointError as error:
        return refused(f"{SnapshotError.kind}: {snapshot.manifest.dense.path}: {error}"), False
    except ShardrankError as error:
        return refused(f"{error.kind}: {error}"), False
    report = with_check(f"dense model: {described.kind} {built}")
    entry = snapshot.manifest.golden
    if not golden:
        return report, False
    if entry is None:
        return with_check("there are no golden requests"), False
    service = RankingService()
    try:
        # In float32, so that what is measured is the rows' quantisation alone; a server checks its own dtype as well.
        source = ModelSource(snapshot=folder, verify=False, dtype="float32", trust_exported=trust_exported)
        served = load_served_model(source, service, progress)
        try:
            differences = served.golden_differences(snapshot)
        finally:
            served.close()
    except ShardrankError as error:
        return refused(f"{error.kind}: {error}"), True
    finally:
        service.close()
    scored = f"golden requests: {entry.num_requests} with {entry.num_candidates} candidates"
    scored += f" and outputs {list(described.outputs)}" if described.outputs else ""
    report = with_check(f"{scored}, every score within {entry.tolerance:g}")
    for number_format, difference in differences.items():
        serves = "" if difference <= entry.tolerance else ": a server falls back to a wider format"
        report = with_check(f"dense model in {number_format}: golden scores differ by up to {difference:.3g}{serves}")
    return report, True
