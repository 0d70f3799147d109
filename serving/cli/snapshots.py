"""`shardrank train`, `inspect` and `verify`: snapshots are made, described and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loader.errors import ShardrankError
from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, print_document, print_json, progress_bars
from serving.cli.settings import snapshot_folder
from serving.config import FrontSettings

if TYPE_CHECKING:
    from loader.progress import Progress
    from loader.snapshot.reader import Snapshot, VerifyReport


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

    (print_json if as_json else print_document)(_inspection(Snapshot.open(snapshot_folder(**named), verify=False)))


def _inspection(snapshot: Snapshot) -> dict[str, Any]:
    """Return what `--json` prints: what features see as the manifest has it, and the tables that are stored.

    A table that is divided, or sliced by columns, is stored as several. `files` and `size_bytes` are of rows.
    """
    spec, manifest = snapshot.spec, snapshot.manifest
    stored = [
        table.model_dump(mode="json", include={"name", "num_embeddings", "embedding_dim", "dtype", "bucketing"})
        | {"files": len(files.rows), "size_bytes": sum(entry.size_bytes for entry in files.rows)}
        | {"access_counts": files.access_counts is not None}
        for table, files in zip(spec.stored_tables, manifest.tables, strict=True)
    ]
    return {
        "path": str(snapshot.path),
        "model": spec.model,
        "version": snapshot.version,
        "identity": snapshot.identity,
        "snapshot_bytes": snapshot.size_bytes,
        "float32_bytes": snapshot.float32_bytes,
        "tables": [table.model_dump(mode="json") for table in spec.logical_tables],
        "stored_tables": stored,
        **spec.model_dump(mode="json", include={"features", "dense_inputs", "dense_model"}),
        **manifest.model_dump(mode="json", include={"created_at", "golden", "metadata", "last_delta", "delta_base"}),
    }


@click.command(cls=WithExamples)
@opts.snapshot_options
@opts.setting_option(FrontSettings, "trust_exported")
@opts.json_flag("the result")
@click.pass_context
def verify(ctx: click.Context, /, trust_exported: bool, as_json: bool, **named: Any) -> None:
    """Check a snapshot in full.

    Exits with 0 if it may be served, with 1 and the reason if not. Checks the manifest, every file's size and
    SHA-256, dtypes and shapes, every row for NaN and inf, that the dense model can be built, and the golden requests:
    it compares their scores with those that training computed, with the dense model in float32, and then in narrower
    number formats of this machine until one is close enough to serve.

    Examples:
      shardrank verify --store models --model films
      shardrank verify --snapshot models/films/3 --json
    """
    folder = snapshot_folder(**named)
    with progress_bars() as bars:
        found = verify_as_server(folder, trust_exported=trust_exported, progress=bars)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        for check in found.checks:
            click.echo(f"ok: {check}")
        for problem in found.problems:
            click.echo(f"bad: {problem}")
        size = human_bytes(sum(file.size_bytes for file in found.files))
        where = found.path if found.model is None else f"{found.model} version {found.version} in {found.path}, {size}"
        click.echo(f"{where}: {'may be served' if found.ok else 'must not be served'}")
    ctx.exit(0 if found.ok else 1)


def verify_as_server(
    folder: Path, *, trust_exported: bool, may_be_unchecked: bool = False, progress: Progress
) -> VerifyReport:
    """Check files, then the dense model and scores. Raises nothing that says that it must not be served.

    With `may_be_unchecked`, an exported program that is not trusted is no problem: the last of the checks says so.
    """
    from loader.snapshot.reader import Snapshot, verify_snapshot

    report = verify_snapshot(folder, progress=progress)
    if not report.ok:
        return report
    snapshot = Snapshot.open(folder, verify=False)
    checks, found = list(report.checks), dict[str, Any]()
    try:
        if may_be_unchecked and snapshot.spec.dense_model.kind == "exported" and not trust_exported:
            checks.append("its exported program is run only with --trust-exported")
        else:
            found["golden_checked"] = snapshot.manifest.golden is not None
            checks += _scores_checks(snapshot, trust_exported=trust_exported)
    except ShardrankError as error:
        found |= {"ok": False, "problems": (f"{error.kind}: {error}",)}
    return report.model_copy(update={"checks": tuple(checks), **found})


def _scores_checks(snapshot: Snapshot, *, trust_exported: bool) -> Iterator[str]:
    """Load a version whose files were checked, score its golden requests, and yield what was compared.

    Of its rows, only those that the requests name are read. Raises as `load_served_model`.
    """
    from serving.embedded import ModelSource, load_served_model
    from serving.rank.service import RankingService

    entry, dense = snapshot.manifest.golden, snapshot.spec.dense_model
    with contextlib.closing(RankingService()) as service:
        options = {"verify": False, "rows_checked": True, "trust_exported": trust_exported}
        with contextlib.closing(load_served_model(ModelSource(snapshot=snapshot.path, **options), service)) as served:
            checked = served.checked
    yield f"dense model: {dense.kind} is built" + (f" and gives {list(dense.outputs)}" if dense.outputs else "")
    if entry is None:
        yield "there are no golden requests"
        return
    candidates = f"{entry.num_requests} with {entry.num_candidates} candidates"
    yield f"golden requests: {candidates}, every score within {entry.tolerance:g}"
    fallback = f"; {checked.fallback}" if checked.fallback else ""
    yield f"dense model in {checked.dtype}: golden scores differ by up to {checked.difference or 0:.3g}{fallback}"
    if checked.int8:
        yield f"dense model: {checked.int8}"
