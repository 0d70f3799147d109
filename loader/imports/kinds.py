"""The kinds of `shardrank import`: which reader opens each, and what a description of it can say already."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loader.errors import CheckpointError

if TYPE_CHECKING:
    from loader.checkpoints import Checkpoint

Kind = Literal["dynamicemb", "tzrec", "torchrec", "hps", "tfra", "numpy"]
_TODO_SIDE = "TODO: context or candidate"
_TODO_KIND = "TODO: mlp, dlrm, dcn_v2, target_attention or exported, and its config"


def open_import(
    kind: Kind, path: Path, remainder: Checkpoint | None = None, key_dtype: str = "int64", value_dtype: str = "float32"
) -> Checkpoint:
    """Open what another system saved. Raises CheckpointError, also for dtypes that a kind does not have.

    `remainder` has what else the model has, of kinds whose files are of tables alone.
    """
    from loader.imports import raw_files, torchrec, tzrec

    dtypes = {"key_dtype": key_dtype, "value_dtype": value_dtype}
    accepted = {"tfra": ["key_dtype", "value_dtype"], "hps": ["key_dtype"]}.get(kind, [])
    for name, usual in (("key_dtype", "int64"), ("value_dtype", "float32")):
        if name not in accepted and dtypes[name] != usual:
            raise CheckpointError(f"--{name.replace('_', '-')} {dtypes[name]}: of kind {kind} it is {usual}")
    if kind in ("torchrec", "numpy"):
        if remainder is not None:
            raise CheckpointError(f"--checkpoint: kind {kind} has all of the model in PATH")
        return torchrec.TorchRecCheckpoint(path) if kind == "torchrec" else raw_files.NumpyFolder(path)
    read = {
        "dynamicemb": raw_files.read_dynamicemb,
        "tzrec": tzrec.read_tzrec,
        "hps": raw_files.read_hps,
        "tfra": raw_files.read_tfra,
    }[kind]
    opened: Checkpoint = read(path, remainder, **{name: dtypes[name] for name in accepted})
    return opened


def describe(checkpoint: Checkpoint, kind: Kind, model: str) -> dict[str, Any]:
    """Return a description as JSON has it, of what was found: tables, rows, dims. What a person has to say is a TODO.

    Of NumPy's arrays every matrix may be a table: take those away that are not.
    """
    names = [*checkpoint.tables]
    if kind == "numpy":
        names = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    tables, features = [], []
    short = [_table_name(kind, key) for key in names]
    for key, table in zip(names, short, strict=True):
        name = re.sub(r"[^A-Za-z0-9_.\-]", "_", table if short.count(table) == 1 else key.removesuffix(".weight"))
        rows, dim = checkpoint.shape(key)
        size: dict[str, Any] = {"num_embeddings": rows}
        if checkpoint.keys(key) is not None:
            size = {"keys": "int64", "capacity": "auto", "missing": "zeros"}
        tables.append({"name": name, **size, "embedding_dim": dim, "feature_names": [name]})
        features.append({"name": name, "side": _TODO_SIDE})
    return {
        "model": re.sub(r"[^A-Za-z0-9_.\-]", "_", model),
        "tables": tables,
        "features": features,
        "dense_inputs": {"context": 0, "candidate": 0},
        "dense_model": {"kind": _TODO_KIND},
    }


def _table_name(kind: Kind, key: str) -> str:
    """Return what a table is called without the path of its module."""
    if kind in ("torchrec", "tzrec"):
        return re.split(r"(?:^|\.)(?:embedding_bags|embeddings)\.", key)[-1].removesuffix(".weight")
    return key.rpartition(".")[2] if kind in ("dynamicemb", "tfra") else key
