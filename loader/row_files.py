"""One table's row files: streamed from a source, encoded, and laid in bucket order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from loader.codecs import ByteArray, Float32Array, RowCodec, codec_for
from loader.errors import ExportError, NonFiniteRowError
from loader.export_folder import ExportFolder
from loader.layout import rows_in_file
from loader.manifest import FileEntry, TableSpec
from loader.progress import Progress
from loader.row_order import row_positions
from loader.row_source import RowSource

# float32 bytes asked of a source at a time.
BLOCK_BYTES = 16 << 20


def rows_paths(table: TableSpec, rows_per_file: int) -> list[str]:
    """Where a table's row files lie in the snapshot, in order."""
    num_files = -(-table.num_embeddings // rows_per_file)
    return [f"tables/{table.name}/rows-{index:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]


def write_row_files(
    folder: ExportFolder, table: TableSpec, source: RowSource, rows_per_file: int, progress: Progress
) -> dict[str, FileEntry]:
    """Writes the row files that are not finished yet, one after the other, and gives all by path.

    Memory is bounded by one file plus a few blocks of `BLOCK_BYTES`.

    Raises:
        NonFiniteRowError: a row holds NaN or inf, or values that its dtype can't hold.
        ExportError: the source does not give what it announced.
    """
    entries = {}
    for file_index, path in enumerate(rows_paths(table, rows_per_file)):

        def produce(path: Path, file_index: int = file_index) -> None:
            rows = _encode_file(table, source, rows_per_file, file_index, progress)
            safetensors.numpy.save_file({"rows": rows}, path)

        if folder.is_finished(path):
            done = min((file_index + 1) * rows_per_file, table.num_embeddings)
            progress(f"table {table.name}", done, table.num_embeddings)
        entries[path] = folder.write(path, produce)
    return entries


def _encode_file(
    table: TableSpec, source: RowSource, rows_per_file: int, file_index: int, progress: Progress
) -> ByteArray:
    """All stored rows of one file, uint8 [rows, row_bytes], in bucket order."""
    codec = codec_for(table.dtype, table.embedding_dim)
    first_row = file_index * rows_per_file
    num_rows = rows_in_file(table.num_embeddings, rows_per_file, file_index)
    block_rows = max(1, BLOCK_BYTES // (4 * table.embedding_dim))
    stored = np.empty((num_rows, codec.row_bytes), np.uint8)
    for start in range(0, num_rows, block_rows):
        position, stop = start, min(start + block_rows, num_rows)
        for block in source.blocks(first_row + start, stop - start):
            _check_block(table, block, stop - position)
            encoded = _encode_block(table, codec, block, first_row + position)
            local_rows = np.arange(position, position + len(block), dtype=np.int64)
            stored[row_positions(table, rows_per_file, file_index, local_rows)] = encoded
            position += len(block)
        if position != stop:
            raise ExportError(f"table {table.name!r}: the source ended at row {first_row + position}")
        progress(f"table {table.name}", first_row + stop, table.num_embeddings)
    return stored


def _check_block(table: TableSpec, block: Float32Array, max_rows: int) -> None:
    fits = block.ndim == 2 and block.shape[1] == table.embedding_dim and len(block) <= max_rows
    if not fits or block.dtype != np.float32:
        raise ExportError(
            f"table {table.name!r}: the source gave a block {block.dtype} {list(block.shape)}, "
            f"expected float32 [at most {max_rows}, {table.embedding_dim}]"
        )


def _encode_block(table: TableSpec, codec: RowCodec, block: Float32Array, first_row: int) -> ByteArray:
    finite = np.isfinite(block)
    if not finite.all():
        row = first_row + int(np.argmin(finite.all(axis=1)))
        raise NonFiniteRowError(f"table {table.name!r}, row {row}: holds NaN or inf")
    encoded = codec.encode(block)
    if (bad := codec.first_non_finite(encoded)) is not None:
        raise NonFiniteRowError(
            f"table {table.name!r}, row {first_row + bad}: values from {block[bad].min()} to {block[bad].max()} "
            f"overflow as {table.dtype}"
        )
    return encoded
