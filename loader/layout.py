"""Which bucket a row is in, and where in a file it lies: pure arithmetic, shared by writer, reader and planner.

Every table has 256 buckets. With bucketing `hash`, bucket = row mod 256; with `range`, bucket = row >> shift, where
shift is the smallest that leaves at most 256 buckets. Both are `(row >> shift) & 255`, with shift 0 for `hash`.

File i of a table holds rows [i * rows_per_file, (i + 1) * rows_per_file). Inside a `hash` file the rows of bucket 0
come first, then bucket 1, ...; inside a bucket they ascend. A `range` file is in row order, so its buckets are too.
A loader that wants some buckets therefore reads one contiguous run of each file per run of buckets.
"""

from __future__ import annotations

from loader.manifest import NUM_BUCKETS, Bucketing, TableSpec


def bucket_shift(bucketing: Bucketing, num_embeddings: int) -> int:
    """The shift s for which bucket = (row >> s) & 255."""
    if bucketing == "hash":
        return 0
    return max(0, (num_embeddings - 1).bit_length() - 8)


def num_buckets_used(table: TableSpec) -> int:
    """How many of the 256 buckets hold at least one row; they are the first ones."""
    if table.bucketing == "hash":
        return min(NUM_BUCKETS, table.num_embeddings)
    width = 1 << bucket_shift("range", table.num_embeddings)
    return -(-table.num_embeddings // width)


def rows_in_file(num_embeddings: int, rows_per_file: int, file_index: int) -> int:
    """Rows of file `file_index`; all files but the last are full."""
    return min(rows_per_file, num_embeddings - file_index * rows_per_file)


def bucket_start_in_file(table: TableSpec, rows_per_file: int, file_index: int, bucket: int) -> int:
    """Position, within file `file_index`, of the first row of `bucket` (0..256; 256 gives the file's row count)."""
    rows = rows_in_file(table.num_embeddings, rows_per_file, file_index)
    if table.bucketing == "hash":
        return bucket * (rows // NUM_BUCKETS) + min(bucket, rows % NUM_BUCKETS)
    first_row = file_index * rows_per_file
    return min(max((bucket << bucket_shift("range", table.num_embeddings)) - first_row, 0), rows)
