"""Encode deltas of format 2: a commit that names its predecessor, and beside it the rows, by partition.

A row's partition follows from its bucket, so that a shard's followers read the parts they hold and no others. Each part
names the last part of its partition as well. A commit is MessagePack (https://msgpack.org), a part is flat; what lies
where is documented in docs/deltas.md. Numbers are little-endian; a digest is XXH3-128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from loader.deltas.batch import DIGEST_BYTES, MAX_BATCH_BYTES, DeltaBatch, digest_of
from loader.errors import NOT_DECODED, DeltaError, DeltaFormatError
from loader.snapshot.buckets import Int64Array, RowBuckets
from loader.snapshot.tables import RowDtype, TableSpec

MAGIC: Final = b"SRDELTA2"
FORMAT: Final = 2
NUM_PARTITIONS: Final = 256
HEADS_BYTES: Final = NUM_PARTITIONS * DIGEST_BYTES
NOTHING: Final = bytes(DIGEST_BYTES)
"""In place of a predecessor's digest where there is none, or where it is not known any more."""
_PART = np.dtype(
    [
        *(("digest", "V16"), ("format", "<u2"), ("partition", "<u2"), ("operation", "<u2"), ("zeros", "<u2")),
        *(("sequence", "<u8"), ("token", "<u8"), ("predecessor", "V16"), ("rows", "<u4"), ("more zeros", "<u4")),
    ]
)
_COMMIT_START = len(MAGIC) + DIGEST_BYTES
PART_BYTES: Final = _PART.itemsize
"""Bytes of a part beside its rows and row numbers."""
_REMAINDERS = np.arange(240)
# The remainder of 16 with its bits reversed, then those of 3 and 5.
_REVERSED = np.array([0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15])
_MIXED_PARTITION: Final = 15 * _REVERSED.take(_REMAINDERS % 16) + 5 * (_REMAINDERS % 3) + _REMAINDERS % 5
Heads = Mapping[int, bytes]
"""The digest of the last part of each partition that has one."""
Partitions = npt.NDArray[np.bool_]
"""Which partitions are meant, bool [256]."""


def partitions_of(table: TableSpec, rows: Int64Array) -> npt.NDArray[np.uint8]:
    """Return the partition of each row of a table, uint8 [n]."""
    buckets = RowBuckets.of(table)
    return partition_of_bucket(buckets).take(buckets.of_rows(rows))


def partition_of_bucket(buckets: RowBuckets) -> npt.NDArray[np.uint8]:
    """Return the partition of each bucket of a table, uint8 [buckets].

    In `range` order that is the bucket. Mixed buckets, as those of keys, are dealt to S shards by their remainder of S:
    those that share a partition have one remainder of 240, so each partition is of one shard for every S that divides
    240, and a shard's are neighbours if S is 2, 4, 8 or 16. The last 16 partitions stay empty.
    """
    numbers = np.arange(buckets.count)
    partitions = numbers if buckets.count <= NUM_PARTITIONS else _MIXED_PARTITION.take(numbers % _MIXED_PARTITION.size)
    return partitions.astype(np.uint8)


def is_commit(payload: bytes) -> bool:
    """Return whether an entry is of format 2; else it is a delta of format 1."""
    return payload[: len(MAGIC)] == MAGIC


def entry_digest(payload: bytes) -> bytes:
    """Return what the next commit has to name, of an entry of either format."""
    return payload[len(MAGIC) : _COMMIT_START] if is_commit(payload) else digest_of(payload)


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a stream ends: its last number (0 for none), that entry's digest, and those of the last parts.

    `heads` has 16 bytes for each partition, zeros for one without a part.
    """

    sequence: int = 0
    digest: bytes = NOTHING
    heads: bytes = bytes(HEADS_BYTES)


class Commit(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """What an entry of format 2 says of its rows, which lie beside it.

    Attributes:
        previous, predecessor: number and digest of the entry before; 0 and zeros for the first.
        token: of the publisher, higher than that of any publisher that began earlier.
        parts_digest: of the parts' digests, one behind the other.
        sizes: bytes of each partition's part, uint32 [256]; 0 for one without.
        digest: its own; not in what is encoded.
        delta_base, base_version, published_at, table, column_dims: as of `DeltaBatch`.
    """

    model: str
    delta_base: int
    base_version: int
    sequence: int
    previous: int
    predecessor: bytes
    published_at: float
    token: int
    table: str
    dtype: RowDtype
    embedding_dim: int
    row_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BATCH_BYTES)]
    column_dims: tuple[int, ...]
    parts_digest: bytes
    sizes: Annotated[bytes, msgspec.Meta(min_length=4 * NUM_PARTITIONS, max_length=4 * NUM_PARTITIONS)]
    digest: bytes = b""

    @classmethod
    def decode(cls, payload: bytes) -> Commit:
        """Read a commit. Raises DeltaFormatError if it is not what was published."""
        digest, content = payload[len(MAGIC) : _COMMIT_START], memoryview(payload)[_COMMIT_START:]
        if not is_commit(payload) or digest_of(content) != digest:
            raise DeltaFormatError(
                f"{len(payload)} bytes that begin with {payload[:8]!r} are no commit, or not of the digest they state"
            )
        try:
            return msgspec.structs.replace(msgspec.msgpack.decode(content, type=cls), digest=digest)
        except NOT_DECODED as error:
            raise DeltaFormatError(f"a commit of a delta can't be read: {error}") from error

    @property
    def part_bytes(self) -> npt.NDArray[np.uint32]:
        """Bytes of each partition's part, uint32 [256]."""
        return np.frombuffer(self.sizes, "<u4")

    @property
    def rows_bytes(self) -> int:
        """Bytes of all parts: what lies beside them in the entry's rows, the heads, begins there."""
        return int(self.part_bytes.sum(dtype=np.int64))

    def ranges(self, partitions: Partitions) -> list[tuple[int, int]]:
        """Return which bytes [begin, end) of the entry's rows are the parts of these partitions, neighbours joined."""
        sizes = self.part_bytes.astype(np.int64)
        ends, wanted = np.cumsum(sizes), np.flatnonzero(partitions & (sizes > 0))
        begins, ends = (ends - sizes)[wanted], ends[wanted]
        # A run of neighbours ends where the next one does not begin.
        breaks = np.flatnonzero(begins[1:] != ends[:-1])
        firsts, lasts = begins[np.append(0, breaks + 1)[: wanted.size]], ends[np.append(breaks, -1)[: wanted.size]]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def decode_parts(
        self, partitions: Partitions, pieces: Sequence[bytes], heads: Heads
    ) -> tuple[DeltaBatch | None, dict[int, bytes]]:
        """Read the parts of some partitions from the bytes of their `ranges`.

        `heads` are the digests of what came last in each partition, as far as they are known. Returns the rows, None
        if there are none, and what of the heads is known afterwards: not those of parts that were not read. Raises
        DeltaFormatError for bytes that are not what was published, DeltaError of kind `delta_fork` for a part that
        another one comes before, `delta_gap` for bytes that are not there any more.
        """
        data, wanted = b"".join(pieces), np.flatnonzero(partitions & (self.part_bytes > 0))
        sizes = self.part_bytes[wanted].astype(np.int64)
        ends, where = np.cumsum(sizes), f"delta {self.sequence} of {self.model!r} from {self.delta_base}"
        if len(data) != sizes.sum():
            raise DeltaError(f"{where}: {len(data)} of {sizes.sum()} bytes are there", kind="delta_gap")
        known = {number: head for number, head in heads.items() if not self.part_bytes[number]}
        if not wanted.size:
            return None, known
        begins, numbers, view = ends - sizes, wanted.tolist(), memoryview(data)
        if sizes.min() < PART_BYTES:
            raise DeltaFormatError(f"{where}: a part of {sizes.min()} bytes; at least {PART_BYTES} are needed")
        headers = np.frombuffer(data, np.uint8)[begins[:, None] + np.arange(PART_BYTES)].view(_PART)[:, 0]
        contents = map(view.__getitem__, map(slice, (begins + DIGEST_BYTES).tolist(), ends.tolist()))
        digests = list(map(digest_of, contents))
        for number, digest, stated in zip(numbers, digests, headers["digest"].tolist(), strict=True):
            if digest != stated:
                raise DeltaFormatError(f"{where}, partition {number}: it does not have the checksum that it states")
        counts = headers["rows"].astype(np.int64)
        operation = int(headers["operation"][0])
        fits = (headers["format"] == FORMAT) & (headers["partition"] == wanted) & (headers["operation"] == operation)
        fits &= (headers["sequence"] == self.sequence) & (headers["token"] == self.token)
        fits &= sizes == PART_BYTES + counts * (8 + self.row_bytes)
        if not fits.all():
            raise DeltaFormatError(
                f"{where}, partition {numbers[int(fits.argmin())]}: format, partition, sequence, token or operation "
                f"are not {FORMAT}, this one, {self.sequence}, {self.token}, {operation}, or bytes lack"
            )
        for number, before in zip(numbers, headers["predecessor"].tolist(), strict=True):
            if heads.get(number, before) != before:
                raise DeltaError(
                    f"{where}, partition {number}: it follows {before.hex()}, {heads[number].hex()} was applied",
                    kind="delta_fork",
                )
        firsts = (begins + PART_BYTES).tolist()
        middles = (begins + PART_BYTES + 8 * counts).tolist()
        rows = np.frombuffer(b"".join(map(view.__getitem__, map(slice, firsts, middles))), "<i8")
        stored = np.frombuffer(b"".join(map(view.__getitem__, map(slice, middles, ends.tolist()))), np.uint8)
        order = rows.argsort()
        batch = DeltaBatch(
            **{name: getattr(self, name) for name in _OF_BATCH},
            rows=rows.take(order),
            stored=stored.reshape(rows.size, self.row_bytes).take(order, axis=0),
            operation=operation,
        )
        batch.check()
        return batch, known | dict(zip(numbers, digests, strict=True))


_OF_BATCH = sorted({field.name for field in fields(DeltaBatch)} & set(Commit.__struct_fields__))


def encode_commit(
    batch: DeltaBatch, partitions: npt.NDArray[np.uint8], tail: Tail, token: int
) -> tuple[bytes, bytes, Tail]:
    """Encode a delta that follows `tail`; `partitions`, uint8 [n], are those of its rows.

    Returns the commit, what lies beside it (the parts, then the heads), and the stream's new end. Raises
    DeltaFormatError if no reader would accept it.
    """
    batch.check()
    order = partitions.argsort(kind="stable")
    counts = np.bincount(partitions, minlength=NUM_PARTITIONS)
    row_bytes, heads, pieces = batch.stored.shape[1], bytearray(tail.heads), list[bytes]()
    numbers = memoryview(batch.rows.astype("<i8", copy=False).take(order).tobytes())
    stored = memoryview(batch.stored.take(order, axis=0).tobytes())
    present = np.flatnonzero(counts)
    headers = np.zeros(present.size, _PART)
    headers["format"], headers["partition"], headers["operation"] = FORMAT, present, batch.operation
    headers["sequence"], headers["token"], headers["rows"] = batch.sequence, token, counts[present]
    headers["predecessor"] = np.frombuffer(tail.heads, f"V{DIGEST_BYTES}")[present]
    begin = 0
    for partition, header in zip(present.tolist(), headers, strict=True):
        end = begin + int(counts[partition])
        rows_of_part = numbers[8 * begin : 8 * end], stored[row_bytes * begin : row_bytes * end]
        content = b"".join((header.tobytes()[DIGEST_BYTES:], *rows_of_part))
        digest = digest_of(content)
        heads[DIGEST_BYTES * partition : DIGEST_BYTES * (partition + 1)] = digest
        pieces += (digest, content)
        begin = end
    content = msgspec.msgpack.encode(
        Commit(
            **{name: getattr(batch, name) for name in _OF_BATCH},
            previous=tail.sequence,
            predecessor=tail.digest,
            token=token,
            row_bytes=row_bytes,
            parts_digest=digest_of(b"".join(pieces[::2])),
            sizes=np.where(counts, PART_BYTES + counts * (8 + row_bytes), 0).astype("<u4").tobytes(),
        )
    )
    digest = digest_of(content)
    return MAGIC + digest + content, b"".join((*pieces, heads)), Tail(batch.sequence, digest, bytes(heads))
