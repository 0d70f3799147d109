"""Say which bucket a row is in and where in a file it lies: arithmetic shared by writer, reader and planner.

Every table has 256 buckets. With bucketing `hash`, bucket = row mod 256; with `range`, bucket = row >> shift, where
shift is the smallest that leaves at most 256 buckets. Both are `(row >> shift) & 255`, with shift 0 for `hash`.

File i of a table holds rows [i * rows_per_file, (i + 1) * rows_per_file). Inside a `hash` file the rows of bucket 0
come first, then bucket 1, ...; inside a bucket they ascend. A `range` file is in row order, so its buckets are too.
A loader that wants some buckets therefore reads one contiguous run of each file per run of buckets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import NUM_BUCKETS, Bucketing, TableSpec


def bucket_shift(bucketing: Bucketing, num_embeddings: int) -> int:
    """Returns the shift s for which bucket = (row >> s) & 255."""
    if bucketing == "hash":
        return 0
    return max(0, (num_embeddings - 1).bit_length() - 8)


def num_buckets_used(table: TableSpec) -> int:
    """Returns how many of the 256 buckets hold at least one row; they are the first ones."""
    if table.bucketing == "hash":
        return min(NUM_BUCKETS, table.num_embeddings)
    width = 1 << bucket_shift("range", table.num_embeddings)
    return -(-table.num_embeddings // width)


def rows_in_file(num_embeddings: int, rows_per_file: int, file_index: int) -> int:
    """Returns the rows of file `file_index`; all files but the last are full."""
    return min(rows_per_file, num_embeddings - file_index * rows_per_file)


def bucket_start_in_file(table: TableSpec, rows_per_file: int, file_index: int, bucket: int) -> int:
    """Finds the position, in file `file_index`, of the first row of `bucket` (0..256; 256: how many rows it has)."""
    rows = rows_in_file(table.num_embeddings, rows_per_file, file_index)
    if table.bucketing == "hash":
        return bucket * (rows // NUM_BUCKETS) + min(bucket, rows % NUM_BUCKETS)
    first_row = file_index * rows_per_file
    return min(max((bucket << bucket_shift("range", table.num_embeddings)) - first_row, 0), rows)


# 256 MiB: large enough for few files, small enough to hold one in memory and to redo after an interruption.
MAX_DEFAULT_FILE_BYTES = 256 << 20


def row_positions(
    table: TableSpec, rows_per_file: int, file_index: int, local_rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Finds the positions in file `file_index` of its rows `local_rows`, in row order from the file's first row.

    The closed form of `bucket_start_in_file` plus the number of earlier rows of the same bucket: since a file of a
    `hash` table starts at a multiple of 256, local row r is the (r >> 8)-th of bucket r & 255.

    `local_rows` and what is returned are int64 [n], each at least 0 and below the rows of that file.
    """
    if table.bucketing == "range":
        return local_rows
    rows = rows_in_file(table.num_embeddings, rows_per_file, file_index)
    buckets = local_rows & (NUM_BUCKETS - 1)
    starts = buckets * (rows // NUM_BUCKETS) + np.minimum(buckets, rows % NUM_BUCKETS)
    positions: npt.NDArray[np.int64] = starts + (local_rows >> 8)
    return positions


def default_rows_per_file(num_embeddings: int, row_bytes: int) -> int:
    """Picks the largest power of two whose rows fit 256 MiB; at least 256, at most what one file of all rows needs."""
    largest = 1 << max(8, (MAX_DEFAULT_FILE_BYTES // row_bytes).bit_length() - 1)
    needed = 1 << max(8, (num_embeddings - 1).bit_length())
    return min(largest, needed)


def row_at_position(table: TableSpec, rows_per_file: int, file_index: int, position: int) -> int:
    """Finds the row number of what lies at `position` in file `file_index`: the reverse of `row_positions`."""
    return int(rows_at_positions(table, rows_per_file, file_index, position, position + 1)[0])


def rows_at_positions(
    table: TableSpec, rows_per_file: int, file_index: int, begin: int, end: int
) -> npt.NDArray[np.int64]:
    """Finds the row numbers, int64 [end - begin], of what lies at positions [begin, end) in file `file_index`."""
    first_row = file_index * rows_per_file
    rows: npt.NDArray[np.int64] = np.arange(begin, end, dtype=np.int64)
    if table.bucketing == "range":
        rows += first_row
        return rows
    starts = np.array([bucket_start_in_file(table, rows_per_file, file_index, one) for one in range(NUM_BUCKETS + 1)])
    bucket_rows = np.diff(np.clip(starts, begin, end))
    # The k-th row of bucket b is b + 256 k.
    first = np.arange(NUM_BUCKETS, dtype=np.int64) - starts[:-1] * NUM_BUCKETS + first_row
    rows *= NUM_BUCKETS
    rows += np.repeat(first, bucket_rows)
    return rows
