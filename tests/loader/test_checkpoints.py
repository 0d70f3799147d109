"""Every form of checkpoint, written by the library that owns it, becomes the same snapshot; unsafe ones are refused."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loader.checkpoints import check_chunks, match_checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import make_spec, random_tables

SPEC = make_spec()
TABLES = random_tables(SPEC, seed=21)
PREFIX = "model.sparse_arch.embedding_bag_collection.embedding_bags."
DENSE = {"model.over_arch.0.weight": torch.randn(4, 7), "model.over_arch.0.bias": torch.randn(4)}


def state_dict():
    return {f"{PREFIX}{name}.weight": torch.from_numpy(rows) for name, rows in TABLES.items()} | DENSE


def write_safetensors(folder):
    save_file(state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def write_sharded_safetensors(folder):
    tensors = list(state_dict().items())
    save_file(dict(tensors[:3]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[3:]), folder / "model-00002-of-00002.safetensors")
    return folder


def write_state_dict(folder):
    torch.save(state_dict(), folder / "model.pt")
    return folder / "model.pt"


def write_nested_state_dict(folder):
    nested = {name.removeprefix("model."): tensor for name, tensor in state_dict().items()}
    torch.save({"epoch": 3, "lr": [0.1], "model": nested}, folder / "model.pth")
    return folder / "model.pth"


def save_distributed(tensors, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is what we want
        import torch.distributed.checkpoint as dcp  # takes a second, and every worker imports this file

        dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def write_distributed(folder):
    return save_distributed(state_dict() | {"epoch": 3}, folder)


@pytest.mark.parametrize(
    "write",
    [write_safetensors, write_sharded_safetensors, write_state_dict, write_nested_state_dict, write_distributed],
)
def test_every_form_of_checkpoint_becomes_the_same_snapshot(tmp_path, write):
    checkpoint = open_checkpoint(write(tmp_path))
    assert checkpoint.names() == sorted(state_dict())
    rows, dense = match_checkpoint(checkpoint, SPEC)
    assert set(dense) == set(DENSE)
    path = export_snapshot(tmp_path / "store", SPEC, rows=rows, dense=dense, rows_per_file=256)
    snapshot = Snapshot.open(path)
    for table in SPEC.tables:
        expected = RowCodec(table.dtype, table.embedding_dim).encode(TABLES[table.name])
        np.testing.assert_array_equal(snapshot.read_rows(table.name, 0, table.num_embeddings), expected)
    read = snapshot.dense_tensors()
    assert all(torch.equal(read[name], tensor) for name, tensor in DENSE.items())


@pytest.mark.parametrize(
    ("split", "cuts", "offsets"),
    [
        ("rows", [(0, 400), (400, 800), (800, 1000)], [(0, 0), (400, 0), (800, 0)]),
        ("columns", [(0, 6), (6, 12), (12, 16)], [(0, 0), (0, 6), (0, 12)]),
    ],
)
def test_each_chunk_of_a_table_saved_by_ranks_is_read_once(tmp_path, split, cuts, offsets, monkeypatch):
    whole = TABLES["user"]  # 1000 x 16
    checkpoint = open_checkpoint(save_as_ranks(tmp_path, whole, split, cuts))
    assert torch.equal(checkpoint.tensor("w"), torch.from_numpy(whole))
    source = checkpoint.rows("w")
    read = []
    original = checkpoint.read_chunk

    def recorded(name, offsets, sizes):
        read.append(offsets)
        return original(name, offsets, sizes)

    monkeypatch.setattr(checkpoint, "read_chunk", recorded)
    blocks = [block for start in range(0, 1000, 64) for block in source.blocks(start, 64)]
    np.testing.assert_array_equal(np.concatenate(blocks), whole)
    assert read == offsets
    np.testing.assert_array_equal(next(source.blocks(390, 20)), whole[390:410])


def save_as_ranks(folder, whole, split, cuts):
    """A checkpoint of one table in chunks of rows or of columns, as if each had been saved by a rank of its own."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

    parts = {
        (start, 0) if split == "rows" else (0, start): whole[start:stop] if split == "rows" else whole[:, start:stop]
        for start, stop in cuts
    }
    path = save_distributed({str(offsets): torch.from_numpy(part.copy()) for offsets, part in parts.items()}, folder)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(part.shape)) for offsets, part in parts.items()]
    properties = next(iter(metadata.state_dict_metadata.values())).properties
    metadata.state_dict_metadata = {"w": TensorStorageMetadata(properties, torch.Size(whole.shape), chunks)}
    saved = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.storage_data = {
        MetadataIndex("w", torch.Size(offsets), number): saved[str(offsets)] for number, offsets in enumerate(parts)
    }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@pytest.mark.parametrize(
    ("split", "cuts", "message"),
    [
        ("rows", [(0, 400), (400, 800)], "its chunks hold 12800 of its 16000 elements"),
        ("rows", [(100, 400), (400, 1000)], "its chunks hold 14400 of its 16000 elements"),
        ("columns", [(0, 6), (7, 16)], "its chunks hold 15000 of its 16000 elements"),
        # As many elements as the table has, and yet row 0 to 99 twice and the last 100 rows never.
        ("rows", [(0, 400), (300, 800), (800, 900)], r"chunk at \[300, 0\] of size \[500, 16\] overlaps another one"),
        ("columns", [(0, 8), (4, 12)], r"chunk at \[0, 4\] of size \[1000, 8\] overlaps another one"),
    ],
)
def test_chunks_that_leave_a_gap_or_overlap_are_refused(tmp_path, split, cuts, message):
    checkpoint = open_checkpoint(save_as_ranks(tmp_path, TABLES["user"], split, cuts))
    for read in (checkpoint.rows, checkpoint.tensor):
        with pytest.raises(CheckpointError, match=f"tensor 'w'.*{message}"):
            read("w")


@given(shape=st.lists(st.integers(0, 6), max_size=3).map(tuple), data=st.data())
def test_chunks_pass_only_if_every_element_is_in_exactly_one(shape, data):
    def part(size):
        return st.integers(0, size).flatmap(lambda start: st.tuples(st.just(start), st.integers(0, size - start)))

    drawn = data.draw(st.lists(st.tuples(*map(part, shape)), max_size=4))
    if data.draw(st.booleans()) and shape:  # a split in two along one dim: the case that must pass
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, shape[dim]))
        whole = [(0, size) for size in shape]
        drawn = [(*whole[:dim], half, *whole[dim + 1 :]) for half in ((0, at), (at, shape[dim] - at))]
    count = np.zeros(shape, int)
    for spans in drawn:
        count[tuple(slice(start, start + size) for start, size in spans)] += 1
    chunks = [(tuple(start for start, _ in spans), tuple(size for _, size in spans)) for spans in drawn]
    if (count == 1).all():
        check_chunks("w", shape, chunks)
    else:
        with pytest.raises(CheckpointError, match="w"):
            check_chunks("w", shape, chunks)


@pytest.mark.parametrize("chunk", [((0, 0), (4, 3)), ((-1, 0), (3, 2)), ((0, 0), (-3, -2)), ((0,), (3,))])
def test_a_chunk_outside_of_its_tensor_is_refused(chunk):
    with pytest.raises(CheckpointError, match=r"w: chunk at .* is not inside its shape \[3, 2\]"):
        check_chunks("w", (3, 2), [chunk])


class RunsCode:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_pickled_object_in_a_state_dict_is_not_run(tmp_path):
    torch.save({"w": torch.zeros(2), "extra": RunsCode(tmp_path / "ran")}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model.pt: holds objects other than tensors"):
        open_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()


def points_outside(path):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (lambda path: pickle.dumps(RunsCode(path / "ran")), r"\.metadata: .*mkdir is no part of checkpoint metadata"),
        (lambda path: b"\x80\x04nonsense", "not the metadata"),
        (points_outside, r"'../elsewhere.distcp' is not a plain file name"),
    ],
)
def test_distributed_metadata_that_is_none_is_refused(tmp_path, metadata, message):
    """And no code of a pickled object is run."""
    path = write_distributed(tmp_path)
    (path / ".metadata").write_bytes(metadata(path))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
    assert not (path / "ran").exists()


def test_damaged_or_missing_distributed_files_are_refused(tmp_path):
    path = write_distributed(tmp_path)
    data = next(path.glob("*.distcp"))
    for damage in (lambda: os.truncate(data, data.stat().st_size // 50), data.unlink):
        damage()
        with pytest.raises(CheckpointError, match="can't be read"):
            open_checkpoint(path).tensor(f"{PREFIX}user.weight")


def write_list(path):
    torch.save([torch.zeros(1)], path)


def write_old_format(path):
    torch.save({"w": torch.zeros(1)}, path, _use_new_zipfile_serialization=False)


def write_twice(path):
    path.mkdir()
    for name in ("a", "b"):
        save_file({"w": torch.zeros(1)}, path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("absent", lambda path: None, "no such file or folder"),
        ("bare", Path.mkdir, "neither .safetensors files"),
        ("twice", write_twice, "is in both"),
        ("a.safetensors", lambda path: path.write_text("text"), "can't be read as safetensors"),
        ("a.pt", lambda path: path.write_text("text"), "zip format"),
        ("list.pt", write_list, "holds a list"),
        ("old.pt", write_old_format, "zip format"),
        ("a.onnx", Path.touch, "must end in one of .safetensors, .pt"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    "key",
    [
        "embedding_bags.{}.weight",
        "module.model.ec.embeddings.{}.weight",
        "{}.weight",
        "net.{}.weight",
        "tables.{}",
        "net.tables.{}",
    ],
)
def test_keys_of_torchrec_and_of_plain_modules_are_understood(tmp_path, key):
    tensors = {key.format(name): torch.from_numpy(rows) for name, rows in TABLES.items()}
    save_file(tensors | {"head.weight": torch.zeros(2)}, tmp_path / "m.safetensors")
    rows, dense = match_checkpoint(open_checkpoint(tmp_path / "m.safetensors"), SPEC)
    assert {name: (source.num_embeddings, source.embedding_dim) for name, source in rows.items()} == {
        name: table.shape for name, table in TABLES.items()
    }
    assert list(dense) == ["head.weight"]


WITHOUT_USER = {f"{PREFIX}user.weight": None}


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (WITHOUT_USER, {}, r"table 'user': no key ends in any of .*keys of its shape \[1000, 16\]: \[\]"),
        (WITHOUT_USER | {"x": torch.zeros(1000, 16)}, {}, r"table 'user': .*keys of its shape \[1000, 16\]: \['x'\]"),
        ({"other.embeddings.user.weight": torch.zeros(1000, 16)}, {}, "table 'user': ambiguous, may be any of"),
        ({f"{PREFIX}user.weight": torch.zeros(1001, 16)}, {}, r"is \[1001, 16\], the spec says \[1000, 16\]"),
        ({f"{PREFIX}more.weight": torch.zeros(3, 2)}, {}, "looks like a table, but the spec has none 'more'"),
        ({}, {"dense_prefix": "absent."}, "dense_prefix 'absent.': no key below it"),
        ({}, {"table_keys": {"absent": "x"}}, r"table_keys: unknown tables \['absent'\]"),
        ({}, {"table_keys": {"user": "x"}}, "has no tensor 'x'"),
        ({}, {"table_keys": {"film": f"{PREFIX}user.weight"}}, "tables 'user' and 'film' both match"),
    ],
)
def test_tables_without_one_key_of_their_shape_are_refused(tmp_path, changes, arguments, message):
    tensors = {name: tensor for name, tensor in (state_dict() | changes).items() if tensor is not None}
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=message):
        match_checkpoint(open_checkpoint(tmp_path / "m.safetensors"), SPEC, **arguments)
