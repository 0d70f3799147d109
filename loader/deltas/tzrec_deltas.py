"""Publish the changed rows that TorchEasyRec dumps while it trains: Parquet files, in order of step, each once.

A dump is `<prefix>_step_<N>.parquet`, or of several ranks `step_<N>/<prefix>_step_<N>_rank_<R>_of_<W>.parquet`, put in
place whole by a rename. Its columns are `table_fqn` string, `key_id` int64, the row's number or its key, `embedding`
list of float32 [dim], or of uint8 [dim + 4] as in `loader.imports.tzrec`, and `global_step` int64. Deletions are not
expressed. Source: alibaba/TorchEasyRec, tzrec/utils/delta_embedding_dump.py, of 1.3.16.

How far each rank was published is on record in the registry, so whoever goes on does so behind it. Ranks dump by their
own clocks: a step of one may come when a later one of another was published already, whose rows are others.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaFormatError, RegistryRecordError, cut
from loader.imports.tables import HALF_PARAMETERS, widened
from loader.registry.registry import Registry
from loader.snapshot.buckets import Int64Array
from loader.snapshot.codecs import Float32Array, RowCodec
from loader.snapshot.manifest import ModelSpec

PUBLISHER: Final = "deltas-import"
"""Name of the publisher: of two that import for one stream, the first one is superseded."""
POLL_S: Final = 1.0
_BATCH_ROWS: Final = 1 << 16
_FILE: Final = re.compile(r".+_step_(\d+)(?:_rank_(\d+)_of_\d+)?\.parquet")
_COLUMNS: Final = ("table_fqn", "key_id", "embedding", "global_step")
_TYPES: Final = (r".*string.*", "int64", r"(large_)?list<.*: (float|uint8).*>", "int64")


class Imported(NamedTuple):
    """A file that was published: its step, its rank, how many rows it had, and which tables the model has not."""

    path: Path
    step: int
    rank: int
    rows: int
    unknown: tuple[str, ...]


async def import_deltas(
    folder: Path,
    registry: Registry,
    publisher: AsyncDeltaPublisher,
    *,
    follow: bool = False,
    from_step: int = 0,
    table_keys: Mapping[str, str] | None = None,
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
) -> AsyncIterator[Imported]:
    """Publish what a folder has that was not published yet, and yield each file; `follow` waits for more without end.

    Tables are found by the end of `table_fqn`; `table_keys` has the whole of it for others. Of tables with keys rows
    are upserted, of others written by number. Steps before `from_step` are passed over; those from it on, where it is
    above 0, are published whatever was published before. Rows before one that is refused may be published.

    Raises DeltaFormatError, with the file, for one that is not such a dump, or rows that are not the table's; else as
    `AsyncDeltaPublisher.publish`, and RegistryConflictError where another import takes the same stream.
    """
    await publisher.open()
    spec, names_of = publisher.spec, dict[str, str]()
    key, keyed = f"imports/{publisher.stream}", {table.name for table in spec.tables if table.keys is not None}
    max_width = max(table.embedding_dim for table in spec.logical_tables) + HALF_PARAMETERS
    while True:
        entry = await registry.get(key)
        revision, steps = (0, {}) if entry is None else (entry.revision, _steps(key, entry.value))
        steps = {} if from_step else steps
        pending = await asyncio.to_thread(_files, folder, dict(steps), from_step)
        from_step = 0
        for step, rank, path in pending:
            count, unknown, rows = 0, dict[str, None](), _rows(path, step, max_width)
            while (piece := await asyncio.to_thread(next, rows, None)) is not None:
                fqn, numbers, values = piece
                if (table := _table(fqn, spec, table_keys or {})) is None:
                    unknown[fqn] = None
                    continue
                try:
                    if (other := names_of.setdefault(table, fqn)) != fqn:
                        raise DeltaFormatError(f"{fqn!r} and {other!r} are both rows of table {table!r}")
                    await (publisher.upsert if table in keyed else publisher.publish)(table, numbers, values)
                except DeltaFormatError as error:
                    raise DeltaFormatError(f"{path}: {error}") from error
                count += numbers.size
            steps[str(rank)] = step
            revision = await registry.put(key, json.dumps(steps).encode(), revision)
            yield Imported(path, step, rank, count, tuple(unknown))
        if not follow:
            return
        if not pending:
            await sleep(POLL_S)


def _steps(key: str, value: bytes) -> dict[str, int]:
    """Return the last step of each rank that was published. Raises RegistryRecordError."""
    try:
        return {str(int(rank)): int(step) for rank, step in json.loads(value).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RegistryRecordError(f"{key}: expected the last step of each rank, got {cut(value)}") from error


def _files(folder: Path, steps: Mapping[str, int], from_step: int) -> list[tuple[int, int, Path]]:
    """Return step, rank and path of files that come behind these steps, in order. Raises OSError."""
    files = []
    for path in (*folder.glob("*.parquet"), *folder.glob("step_*/*.parquet")):
        if (named := _FILE.fullmatch(path.name)) is not None:
            step, rank = int(named[1]), int(named[2] or 0)
            if step > steps.get(str(rank), from_step - 1):
                files.append((step, rank, path))
    return sorted(files)


def _table(fqn: str, spec: ModelSpec, table_keys: Mapping[str, str]) -> str | None:
    """Return the table that a name of training's is of, None if the model has none."""
    by_key = {key: table for table, key in table_keys.items()}
    names = sorted({table.name for table in spec.logical_tables} - table_keys.keys(), key=len, reverse=True)
    return by_key.get(fqn) or next((name for name in names if fqn == name or fqn.endswith(f".{name}")), None)


def _rows(path: Path, step: int, max_width: int) -> Iterator[tuple[str, Int64Array, Float32Array]]:
    """Yield rows of a file by table: its name, numbers or keys int64 [n], values float32 [n, dim]."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DeltaFormatError(f"{path}: Parquet needs pyarrow: pip install 'shardrank[parquet]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, groups = file.schema_arrow, [file.metadata.row_group(at) for at in range(file.num_row_groups)]
            kinds = [str(schema.field(name).type) for name in _COLUMNS]
            if not all(map(re.fullmatch, _TYPES, kinds)):
                raise DeltaFormatError(f"{path}: expected {[*_COLUMNS]} of types {[*_TYPES]}, found {kinds}")
            leaves = [group.column(at) for group in groups for at in range(group.num_columns)]
            values = sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.startswith("embedding"))
            if values > file.metadata.num_rows * max_width:
                raise DeltaFormatError(
                    f"{path}: expected embeddings of at most {max_width} values, found {values} in all"
                )
            for batch in file.iter_batches(_BATCH_ROWS, columns=[*_COLUMNS]):
                yield from _rows_of_batch(path, step, *(batch.column(name) for name in _COLUMNS))
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise DeltaFormatError(f"{path}: can't be read as rows with {[*_COLUMNS]}: {cut(error)}") from error


def _rows_of_batch(
    path: Path, step: int, names: Any, keys: Any, embeddings: Any, steps: Any
) -> Iterator[tuple[str, Int64Array, Float32Array]]:
    if any(column.null_count for column in (names, keys, embeddings, steps)):
        raise DeltaFormatError(f"{path}: expected no nulls in {[*_COLUMNS]}, found some")
    if ((of_steps := steps.to_numpy()) != step).any():
        raise DeltaFormatError(f"{path}: expected rows of step {step}, found {np.unique(of_steps)[:8].tolist()}")
    coded = names if hasattr(names, "dictionary") else names.dictionary_encode()
    table_of_row = coded.indices.to_numpy()
    # Of each table together, in their order.
    order = np.argsort(table_of_row, kind="stable")
    numbers, embeddings = keys.to_numpy()[order], embeddings.take(order)
    edges = np.flatnonzero(np.diff(table_of_row[order], prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(edges):
        fqn, rows = coded.dictionary[int(table_of_row[order[begin]])].as_py(), embeddings.slice(begin, end - begin)
        lengths, values = np.unique(rows.value_lengths().to_numpy(zero_copy_only=False)), rows.flatten()
        least = HALF_PARAMETERS + 1 if values.type == "uint8" else 1
        if lengths.size != 1 or values.null_count or lengths[0] < least:
            expected = f"embeddings of {values.type}, all as wide, at least {least}"
            raise DeltaFormatError(f"{path}: table {fqn!r}: expected {expected}, found widths {lengths[:8].tolist()}")
        block = values.to_numpy(zero_copy_only=False).reshape(end - begin, -1)
        if values.type == "uint8":
            block = RowCodec("int8", block.shape[1] - HALF_PARAMETERS).decode(widened(block))
        yield fqn, numbers[begin:end], block
