"""What other training systems save, written as they do, with nothing of the readers of `shardrank import`.

Layouts are those of the systems' sources, which the docstrings in `loader/imports` cite.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

EXTREME_KEYS = (0, -1, 1, 2**63 - 1, -(2**63), 2**31, -(2**31), 2**32 + 5)
NO_RAW_ID = 2**63 - 1
"""What TorchRec writes into `_mch_sorted_raw_ids` where there is no id."""


class Saved(NamedTuple):
    """A table as training has it: rows float32 [n, dim], and the keys of these, int64 [n], if it has such."""

    rows: npt.NDArray[np.float32]
    keys: npt.NDArray[np.int64] | None = None

    def by_key(self) -> dict[int, bytes]:
        """Return the bytes of each key's row."""
        assert self.keys is not None
        return {key: row.tobytes() for key, row in zip(self.keys.tolist(), self.rows, strict=True)}


def saved_table(seed: int, rows: int, dim: int, *, with_keys: bool = True, extremes: bool = True) -> Saved:
    """Make up a table; its keys are of the whole range, the extremes among them if there is room."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, dim)).astype(np.float32)
    if not with_keys:
        return Saved(values)
    known = list(EXTREME_KEYS[:rows]) if extremes else []
    drawn = rng.integers(-(2**62), 2**62, 2 * rows + 8)
    keys = np.array(list(dict.fromkeys([*known, *drawn.tolist()]))[:rows], np.int64)
    return Saved(values, rng.permutation(keys))


def by_rank(saved: Saved, ranks: int) -> list[Saved]:
    """Divide a table as `roundrobin` does: a key is of rank key % ranks. Without keys, in stretches of rows."""
    if saved.keys is None:
        return [Saved(rows) for rows in np.array_split(saved.rows, ranks)]
    of = (saved.keys.view(np.uint64) % np.uint64(ranks)).astype(np.int64)
    return [Saved(saved.rows[of == rank], saved.keys[of == rank]) for rank in range(ranks)]


def write_dynamicemb(
    folder: Path, tables: Mapping[str, Saved], ranks: int = 1, dist_type: str = "roundrobin", collection: str = "model"
) -> Path:
    """Write what `DynamicEmbDump` does, with scores, optimizer state and counters that a reader has to pass over."""
    at = folder / collection
    at.mkdir(parents=True, exist_ok=True)
    for name, saved in tables.items():
        (at / f"{name}_opt_args.json").write_text(json.dumps({"opt_type": "adam", "lr": 0.1, "dist_type": dist_type}))
        for rank, part in enumerate(by_rank(saved, ranks)):
            assert part.keys is not None
            end = f".rank_{rank}.world_size_{ranks}"
            part.keys.astype("<i8").tofile(at / f"{name}_emb_keys{end}")
            part.rows.astype("<f4").tofile(at / f"{name}_emb_values{end}")
            np.arange(len(part.rows), dtype="<i8").tofile(at / f"{name}_emb_scores{end}")
            np.zeros((len(part.rows), 2 * part.rows.shape[1]), "<f4").tofile(at / f"{name}_emb_opt_values{end}")
            part.keys[:1].tofile(at / f"{name}_counter_keys{end}")
            np.ones(len(part.keys[:1]), "<i8").tofile(at / f"{name}_counter_frequencies{end}")
    return folder


def write_hps(folder: Path, tables: Mapping[str, Saved], key_dtype: str = "<i8") -> Path:
    """Write a folder for each table with `key`, `emb_vector`, and `slot_id`, which is of no use."""
    for name, saved in tables.items():
        assert saved.keys is not None
        (folder / name).mkdir(parents=True)
        saved.keys.astype(key_dtype).tofile(folder / name / "key")
        saved.rows.astype("<f4").tofile(folder / name / "emb_vector")
        np.zeros(len(saved.rows), "<i8").tofile(folder / name / "slot_id")
    return folder


def write_tfra(
    folder: Path,
    tables: Mapping[str, Saved],
    ranks: int = 1,
    parts: int = 1,
    key_dtype: str = "<i8",
    value_dtype: str = "<f4",
) -> Path:
    """Write what `save_to_file_system` does. A `value_dtype` of bfloat16 is the upper half of a float32."""
    at = folder / "variables" / "TFRADynamicEmbedding"
    at.mkdir(parents=True, exist_ok=True)
    for name, saved in tables.items():
        divided = by_rank(saved, ranks * parts)
        for number, part in enumerate(divided):
            assert part.keys is not None
            begin = f"{name}_mht_{number % parts + 1}of{parts}_rank{number // parts}_size{ranks}"
            part.keys.astype(key_dtype).tofile(at / f"{begin}-keys")
            rows = part.rows.view("<u4") >> 16 if value_dtype == "bfloat16" else part.rows
            rows.astype("<u2" if value_dtype == "bfloat16" else value_dtype).tofile(at / f"{begin}-values")
    return folder


def quantised(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantise rows as TorchEasyRec does: uint8 [n, dim + 4], of codes, float16 scale and float16 offset."""
    offset = rows.min(axis=1, keepdims=True).astype(np.float16)
    scale = ((rows.max(axis=1, keepdims=True) - offset.astype(np.float32)) / 255).astype(np.float16)
    scale[scale == 0] = 1
    codes = np.rint((rows - offset.astype(np.float32)) / scale.astype(np.float32)).clip(0, 255).astype(np.uint8)
    return np.concatenate([codes, scale.view(np.uint8), offset.view(np.uint8)], axis=1)


def of_quantised(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of rows that `quantised` made, float32 [n, dim]."""
    scale, offset = (stored[:, begin:][:, :2].copy().view(np.float16).astype(np.float32) for begin in (-4, -2))
    codes = stored[:, :-4].astype(np.float32)
    result: npt.NDArray[np.float32] = codes * scale + offset
    return result


def write_tzrec(
    folder: Path, tables: Mapping[str, Saved], ranks: int = 1, *, is_quantised: bool = False, states: bool = True
) -> Path:
    """Write the folder `sparse` of a distributed export; names are the tables' full ones."""
    at = folder / "sparse"
    at.mkdir(parents=True, exist_ok=True)
    divided = {name: by_rank(saved, ranks) for name, saved in tables.items()}
    for rank in range(ranks):
        static, dynamic, stated = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for name, parts in divided.items():
            rows, keys = parts[rank]
            values = quantised(rows) if is_quantised else rows
            if keys is None:
                static[name] = values
            elif len(keys):
                scores = np.arange(len(keys), dtype=np.int64)
                dynamic |= {f"{name}.keys": keys, f"{name}.values": values, f"{name}.scores": scores}
            stated[name] = {
                "feat_name_impl": name, "dense": False, "is_dynamic": keys is not None, "dtype": str(values.dtype),
                "dimension": rows.shape[1], "memory": values.nbytes, "shape": [len(rows), rows.shape[1]],
            }  # fmt: skip
        write_npz(at / f"sparse_embeddings-{rank:02d}-of-{ranks:02d}.npz", static)
        if dynamic:
            write_npz(at / f"sparse_dynamic_embedding-{rank:02d}-of-{ranks:02d}.npz", dynamic)
        if states:
            (at / f"sparse_embeddings-{rank:02d}-of-{ranks:02d}.json").write_text(json.dumps(stated))
    return folder


def write_npz(file: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays as a stream that can't go back: sizes are behind the data, those in front of it zeros."""
    with file.open("wb") as raw, zipfile.ZipFile(_OneWay(raw), "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.save(entry, array)


class _OneWay:
    # ZipFile takes what can't seek for a pipe.

    def __init__(self, raw: Any) -> None:
        self.write, self.flush = raw.write, raw.flush


def write_numpy(folder: Path, tables: Mapping[str, Saved], dense: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write `.npy` files, of tables, their keys, and all other arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, saved in tables.items():
        np.save(folder / f"{name}.npy", saved.rows)
        if saved.keys is not None:
            np.save(folder / f"{name}.keys.npy", saved.keys)
    for name, array in dense.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def zch_state(
    table: str, saved: Saved, num_rows: int, ranks: int = 1, prefix: str = "ebc.", *, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the state of a table with MCHManagedCollisionModule, whose keys have random rows of `num_rows`.

    Each rank has an equal stretch of the rows, and the last of each is of no key.
    """
    assert saved.keys is not None
    assert num_rows % ranks == 0
    rng, each = np.random.default_rng(seed), num_rows // ranks
    free = np.array([row for row in range(num_rows) if row % each != each - 1])
    rows_of = rng.permutation(free)[: len(saved.keys)]
    weight = rng.normal(size=(num_rows, saved.rows.shape[1])).astype(np.float32)
    weight[rows_of] = saved.rows
    ids, remapped = np.full(num_rows, NO_RAW_ID), np.arange(num_rows)
    for rank in range(ranks):
        of_rank = np.flatnonzero(rows_of // each == rank)
        order = of_rank[np.argsort(saved.keys[of_rank])]
        begin = rank * each
        ids[begin : begin + order.size], remapped[begin : begin + order.size] = saved.keys[order], rows_of[order]
        others = np.setdiff1d(np.arange(begin, begin + each), rows_of[order])
        remapped[begin + order.size : begin + each] = others
    module = f"{prefix}_managed_collision_collection._managed_collision_modules.{table}."
    return {
        f"{module}_mch_sorted_raw_ids": torch.from_numpy(ids),
        f"{module}_mch_remapped_ids_mapping": torch.from_numpy(remapped),
        f"{module}_mch_counts": torch.ones(num_rows, dtype=torch.int64),
        f"{module}_output_segments_tensor": torch.tensor([0, num_rows]),
        f"{module}_current_iter_tensor": torch.tensor([7]),
        f"{prefix}_embedding_module.embedding_bags.{table}.weight": torch.from_numpy(weight),
    }


def mpzch_state(
    table: str, saved: Saved, num_rows: int, prefix: str = "ec.", *, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the state of a table with HashZchManagedCollisionModule, in an EmbeddingCollection."""
    assert saved.keys is not None
    rng = np.random.default_rng(seed)
    rows_of = rng.permutation(num_rows)[: len(saved.keys)]
    weight = rng.normal(size=(num_rows, saved.rows.shape[1])).astype(np.float32)
    identities = np.full((num_rows, 1), -1)
    weight[rows_of], identities[rows_of, 0] = saved.rows, saved.keys
    module = f"{prefix}_managed_collision_collection._managed_collision_modules.{table}."
    return {
        f"{module}_hash_zch_identities": torch.from_numpy(identities),
        f"{module}_hash_zch_metadata": torch.ones(num_rows, 1, dtype=torch.int32),
        f"{prefix}_embedding_module.embeddings.{table}.weight": torch.from_numpy(weight),
    }


def save_distributed(folder: Path, state: Mapping[str, torch.Tensor], ranks: int = 1) -> Path:
    """Save as `torch.distributed.checkpoint` does where each rank has an equal stretch of every tensor's rows."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

    chunks: dict[str, tuple[str, int, torch.Tensor]] = {}
    for name, tensor in state.items():
        begin = 0
        for rank, part in enumerate(tensor.chunk(ranks) if len(tensor) >= ranks else [tensor]):
            chunks[f"{name}@{rank}"] = (name, begin, part.clone())
            begin += len(part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is what we want
        dcp.save({key: part for key, (_, _, part) in chunks.items()}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = {index.fqn: info for index, info in metadata.storage_data.items()}
    described, metadata.state_dict_metadata, metadata.storage_data = metadata.state_dict_metadata, {}, {}
    for key, (name, begin, part) in chunks.items():
        offsets = torch.Size([begin, *[0] * (part.ndim - 1)])
        entry = metadata.state_dict_metadata.setdefault(
            name, TensorStorageMetadata(described[key].properties, state[name].shape, [])
        )
        entry.chunks.append(ChunkStorageMetadata(offsets, part.shape))
        metadata.storage_data[MetadataIndex(name, offsets, len(entry.chunks) - 1)] = stored[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def import_torchrec() -> Any:
    """The real TorchRec. Where NEEDS_TORCHREC is set it has to be there, else the test is skipped without it."""
    if os.environ.get("NEEDS_TORCHREC"):
        return importlib.import_module("torchrec")
    return pytest.importorskip("torchrec", reason="TorchRec is not installed", exc_type=ImportError)
