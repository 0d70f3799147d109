"""Format 2: what a commit and its parts say, which bytes a follower reads, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.deltas.batch import digest_of
from loader.deltas.chain import (
    DIGEST_BYTES,
    MAGIC,
    NOTHING,
    NUM_PARTITIONS,
    Commit,
    Tail,
    encode_commit,
    entry_digest,
    is_commit,
    partition_of_bucket,
    partitions_of,
)
from loader.errors import DeltaError, DeltaFormatError
from loader.snapshot.buckets import RowBuckets
from shardrank_testing.deltas import delta_spec, heads_of, make_batch

SPEC = delta_spec(rows=5000)
ALL = np.ones(NUM_PARTITIONS, np.bool_)


def make_delta(rows, sequence=1, table="int8", seed=0):
    """A delta of some rows, and their partitions."""
    of_table = next(one for one in SPEC.tables if one.name == table)
    values = np.random.default_rng(seed).standard_normal((len(rows), of_table.embedding_dim))
    batch = make_batch(SPEC, table, sequence, np.array(rows), values)
    return batch, partitions_of(of_table, batch.rows)


def read(commit, beside, partitions, heads):
    """What a follower of these partitions reads, bytes as a registry would give them."""
    pieces = [beside[begin:end] for begin, end in commit.ranges(partitions)]
    return commit.decode_parts(partitions, pieces, heads)


def test_a_partition_is_of_one_shard():
    in_range, mixed = (RowBuckets.of(table) for table in SPEC.tables[:2])
    np.testing.assert_array_equal(partition_of_bucket(in_range), np.arange(256))
    partitions, numbers = partition_of_bucket(mixed), np.arange(mixed.count)
    assert np.unique(partitions).tolist() == list(range(240))
    for num_shards in (2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 24, 48):
        read = [np.unique(partitions[numbers % num_shards == shard]) for shard in range(num_shards)]
        assert sum(map(len, read)) == 240, num_shards
        if num_shards in (2, 4, 8, 16):
            assert all(of_shard[-1] - of_shard[0] == len(of_shard) - 1 for of_shard in read)
    rows = np.arange(5000)
    np.testing.assert_array_equal(partitions_of(SPEC.tables[1], rows), partitions[mixed.of_rows(rows)])


@given(
    rows=st.sets(st.integers(0, 4999), min_size=1, max_size=300).map(sorted),
    table=st.sampled_from(["int8", "int4", "fp32"]),
    chosen=st.sets(st.integers(0, NUM_PARTITIONS - 1)),
)
def test_followers_of_some_partitions_read_their_rows_and_only_these(rows, table, chosen):
    batch, partitions = make_delta(rows, sequence=7, table=table)
    tail = Tail(4, b"p" * DIGEST_BYTES)
    payload, beside, after = encode_commit(batch, partitions, tail, token=3)
    commit = Commit.decode(payload)
    assert is_commit(payload)
    assert (commit.sequence, commit.previous, commit.predecessor) == (7, 4, tail.digest)
    assert (after.sequence, after.digest, entry_digest(payload)) == (7, commit.digest, commit.digest)
    assert beside[commit.rows_bytes :] == after.heads
    wanted = np.isin(np.arange(NUM_PARTITIONS), list(chosen))
    heads = dict[int, bytes]()
    for part in (wanted, ~wanted):
        decoded, digests = read(commit, beside, part, {})
        heads |= digests
        here = part[partitions]
        assert (decoded is None) == (not here.any())
        if decoded is not None:
            np.testing.assert_array_equal(decoded.rows, batch.rows[here])
            np.testing.assert_array_equal(decoded.stored, batch.stored[here])
            fields = "model", "delta_base", "base_version", "sequence", "published_at", "table", "dtype"
            assert all(getattr(decoded, name) == getattr(batch, name) for name in fields)
        assert sum(end - begin for begin, end in commit.ranges(part)) == int(commit.part_bytes[part].sum())
    assert heads == heads_of(after)


def test_neighbouring_parts_are_one_range():
    batch, partitions = make_delta(range(0, 5000, 7))
    payload, beside, _ = encode_commit(batch, partitions, Tail(), token=1)
    commit = Commit.decode(payload)
    assert commit.ranges(ALL) == [(0, commit.rows_bytes)]
    half = np.arange(NUM_PARTITIONS) < NUM_PARTITIONS // 2
    assert len(commit.ranges(half)) == len(commit.ranges(~half)) == 1
    assert len(beside) - commit.rows_bytes == NUM_PARTITIONS * DIGEST_BYTES
    assert commit.ranges(~ALL) == []


def test_each_part_names_the_last_one_of_its_partition():
    first, second = make_delta([1, 2, 3], 1), make_delta([2], 2, seed=1)
    _, _, tail = encode_commit(*first, Tail(), token=1)
    payload, beside, after = encode_commit(*second, tail, token=1)
    commit, (partition,) = Commit.decode(payload), set(second[1].tolist())
    assert commit.predecessor == tail.digest
    assert read(commit, beside, ALL, heads_of(tail))[1] == {partition: heads_of(after)[partition]}
    # Not known, as after a load: it is believed. Another one: the stream has forked.
    assert read(commit, beside, ALL, {})[0] is not None
    other = {partition: NOTHING}
    with pytest.raises(DeltaError, match=f"partition {partition}: it follows") as refused:
        read(commit, beside, ALL, other)
    assert refused.value.kind == "delta_fork"
    assert heads_of(after).keys() == heads_of(tail).keys()


@pytest.mark.parametrize("at", [0, 9, 30, 200, -1])
def test_a_commit_with_a_wrong_byte_is_refused(at):
    payload = bytearray(encode_commit(*make_delta([1, 2, 3]), Tail(), token=1)[0])
    payload[at] ^= 1
    with pytest.raises(DeltaFormatError):
        Commit.decode(bytes(payload))
    with pytest.raises(DeltaFormatError):
        Commit.decode(bytes(payload[:-1]))


@pytest.mark.parametrize(("at", "more"), [(3, b"\xa1\xff"), (None, b"\x91" * 9999)], ids=["no UTF-8", "arrays"])
def test_a_commit_that_no_publisher_wrote_is_refused(at, more):
    """One more element than a commit has, by a right digest."""
    content = bytearray(encode_commit(*make_delta([1, 2, 3]), Tail(), token=1)[0][24:])
    assert content[:3] == b"\xdc\x00\x10"
    content[2] += 1
    at = at or len(content)
    content[at:at] = more
    with pytest.raises(DeltaFormatError, match="can't be read"):
        Commit.decode(MAGIC + digest_of(content) + content)


@pytest.mark.parametrize("row_bytes", [-8, 2**63])
def test_a_commit_of_rows_of_no_length_is_refused(row_bytes):
    commit = Commit.decode(encode_commit(*make_delta([1, 2, 3]), Tail(), token=1)[0])
    content = msgspec.msgpack.encode(msgspec.structs.replace(commit, row_bytes=row_bytes))
    with pytest.raises(DeltaFormatError, match=r"can't be read: Expected `int` [<>]= "):
        Commit.decode(MAGIC + digest_of(content) + content)


def test_parts_that_are_not_the_commits_are_refused():
    payload, beside, _ = encode_commit(*make_delta([1, 2, 3]), Tail(), token=1)
    commit = Commit.decode(payload)
    damaged = bytearray(beside)
    damaged[100] ^= 1
    with pytest.raises(DeltaFormatError, match="does not have the checksum"):
        read(commit, bytes(damaged), ALL, {})
    # The same rows of another number, or by another publisher, at the same place.
    for batch, token in ((make_delta([1, 2, 3], 2), 1), (make_delta([1, 2, 3]), 2)):
        with pytest.raises(DeltaFormatError, match="format, partition, sequence, token"):
            read(commit, encode_commit(*batch, Tail(), token=token)[1], ALL, {})
    with pytest.raises(DeltaError, match=r"0 of .* bytes are there") as gone:
        read(commit, b"", ALL, {})
    assert gone.value.kind == "delta_gap"


def test_what_no_reader_would_accept_is_not_encoded():
    batch, partitions = make_delta([1, 2, 3])
    with pytest.raises(DeltaFormatError, match="ascend"):
        encode_commit(replace(batch, rows=batch.rows[::-1].copy()), partitions, Tail(), token=1)
