"""`shardrank export`: a checkpoint and a model description into a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.descriptions import read_description
from serving.cli.examples import WithExamples
from serving.cli.options import Assignment, FiniteRange
from serving.cli.output import human_bytes, progress_bars

if TYPE_CHECKING:
    from torch import Tensor

    from loader.golden import GoldenRequests
    from loader.manifest import ModelSpec
    from loader.row_source import RowSource
    from loader.vocabulary import Vocabulary


@click.command(cls=WithExamples)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True),
    required=True,
    metavar="PATH",
    help="A .safetensors file or a folder of them, a state_dict file (.pt, .pth, .bin, .ckpt), or a "
    "torch.distributed.checkpoint folder.",
)
@click.option(
    "--model",
    "description",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    metavar="FILE",
    help="The model description, JSON: tables, features, dense inputs, dense model.",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Where the snapshot goes: FOLDER/<model>/<version>/.",
)
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="The version; default: the next free one.")
@click.option(
    "--table-key",
    type=Assignment("TABLE=KEY"),
    multiple=True,
    metavar="TABLE=KEY",
    help="The checkpoint's key of a table that is not found by TorchRec's names. Repeatable.",
)
@click.option(
    "--dense-prefix",
    metavar="PREFIX",
    help="Take only keys with this prefix as the dense model, and cut it off. Default: every key that is no table.",
)
@click.option(
    "--vocabulary",
    type=Assignment("TABLE=FILE"),
    multiple=True,
    metavar="TABLE=FILE",
    help="The ids of a table with vocabulary mapping: a UTF-8 text file, line i is the id of row i. Repeatable.",
)
@click.option(
    "--access-counts",
    type=click.Path(path_type=Path, exists=True),
    metavar="PATH",
    help="How often rows are looked up, so that cards keep the hottest nearest: a folder of <table>.npy, or a "
    "safetensors file, for any of the tables.",
)
@click.option(
    "--golden",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Requests with the scores that training computed, safetensors as docs/snapshot-format.md says.",
)
@click.option(
    "--golden-tolerance",
    type=FiniteRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    metavar="X",
    help="Largest difference from a golden score that a server may accept.",
)
@click.option(
    "--metadata",
    type=Assignment("KEY=TEXT"),
    multiple=True,
    metavar="KEY=TEXT",
    help="Free text about the training run. Repeatable.",
)
@click.option(
    "--rows-per-file",
    type=click.IntRange(min=256),
    metavar="N",
    help="Rows of a full row file, a power of two; default: such that files have at most 256 MiB.",
)
def export(
    checkpoint: Path,
    description: Path,
    store: Path,
    version: int | None,
    table_key: tuple[tuple[str, str], ...],
    dense_prefix: str | None,
    vocabulary: tuple[tuple[str, str], ...],
    access_counts: Path | None,
    golden: Path | None,
    golden_tolerance: float,
    metadata: tuple[tuple[str, str], ...],
    rows_per_file: int | None,
) -> None:
    r"""Write a trained model into a store as the next version.

    Rows are quantised as the description says, in bounded memory; NaN and inf are refused by table and row. An
    export that was interrupted goes on where it stopped when it is run again. Nothing in the checkpoint is executed.

    Examples:
      shardrank export --checkpoint model.safetensors --model films.json --store models
      shardrank export --checkpoint epoch-3.pt --model films.json --store models \
          --table-key films=embedding.item.weight --dense-prefix over_arch. \
          --vocabulary users=user-ids.txt
    """
    from loader.access_counts import read_access_counts
    from loader.reader import Snapshot
    from loader.writer import export_snapshot

    spec = read_description(description)
    rows, dense = _match(checkpoint, spec, dense_prefix, table_key)
    with progress_bars() as bars:
        folder = export_snapshot(
            store,
            spec,
            rows=rows,
            dense=dense,
            vocabularies={table: _read_vocabulary(spec, table, Path(file)) for table, file in vocabulary},
            access_counts=None if access_counts is None else read_access_counts(access_counts, spec),
            golden=None if golden is None else _read_golden(golden),
            golden_tolerance=golden_tolerance,
            version=version,
            metadata=dict(metadata),
            rows_per_file=rows_per_file,
            progress=bars,
        )
    written = Snapshot.open(folder, verify=False)
    click.echo(f"wrote {folder}: {human_bytes(written.size_bytes)}, as float32 {human_bytes(written.float32_bytes)}")


def _match(
    path: Path, spec: ModelSpec, dense_prefix: str | None, table_keys: tuple[tuple[str, str], ...]
) -> tuple[dict[str, RowSource], dict[str, Tensor]]:
    """The tables' rows and a dense model that can be built. Raises ExportError, CheckpointError."""
    from loader.checkpoint import match_checkpoint, open_checkpoint
    from loader.errors import CheckpointError
    from serving.cli.dense_check import check_dense_model, suggested_prefix

    _check_tables("--table-key", spec, [table for table, _ in table_keys])
    opened = open_checkpoint(path)
    keys = opened.names()
    try:
        rows, dense = match_checkpoint(opened, spec, dense_prefix, dict(table_keys))
    except CheckpointError as error:
        if dense_prefix is None or any(key.startswith(dense_prefix) for key in keys):
            raise
        raise CheckpointError(f"{error}{suggested_prefix(spec, keys, dense_prefix)}") from error
    check_dense_model(spec, dense, keys, dense_prefix)
    return rows, dense


def _check_tables(flag: str, spec: ModelSpec, tables: Sequence[str]) -> None:
    """Raises ExportError for a flag that names a table which the description does not have."""
    from loader.errors import ExportError

    known = [table.name for table in spec.tables]
    for table in tables:
        if table not in known:
            raise ExportError(f"{flag}: no table {table!r}; the description's tables are {known}")


def _read_vocabulary(spec: ModelSpec, table: str, path: Path) -> Vocabulary:
    """The ids in a text file, one a line. Raises ExportError."""
    import numpy as np

    from loader.errors import ExportError
    from loader.vocabulary import id_type_is_string

    _check_tables("--vocabulary", spec, [table])
    of_table = next(one for one in spec.tables if one.name == table)
    try:
        # Not splitlines: a string id may hold a character that it takes for a line end.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path}: not UTF-8: {error}") from error
    if id_type_is_string(of_table):
        return lines
    for number, line in enumerate(lines, start=1):
        if not (line.isascii() and line.isdecimal() and int(line) < 2**63):
            raise ExportError(f"{path}, line {number}: {line!r:.40} is not a whole number below 2^63")
    return np.array([int(line) for line in lines], dtype=np.int64)


def _read_golden(path: Path) -> GoldenRequests:
    """Raises ExportError for a file that does not hold golden requests."""
    from loader.errors import ExportError, SnapshotCorruptError
    from loader.golden import GoldenRequests
    from loader.tensor_files import load_numpy

    try:
        return GoldenRequests.from_tensors(load_numpy(path))
    except SnapshotCorruptError as error:
        raise ExportError(str(error)) from error
