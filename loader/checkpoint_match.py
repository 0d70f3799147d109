"""Which tensor of a checkpoint is which table, and what is the dense model, told by TorchRec's key names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loader.errors import CheckpointError
from loader.manifest import ModelSpec, TableSpec
from loader.named_tensors import Checkpoint, shortened
from loader.row_source import RowSource

# TorchRec: EmbeddingBagCollection and EmbeddingCollection keep a table's rows under these, whatever wraps them.
_COLLECTIONS = ("embedding_bags", "embeddings")


def match_checkpoint(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dense_prefix: str | None = None,
    table_keys: Mapping[str, str] | None = None,
) -> tuple[dict[str, RowSource], dict[str, torch.Tensor]]:
    """Splits a checkpoint into the rows of every table and the dense model's state dict.

    A table's rows are looked for, behind any prefix, as `embedding_bags.<table>.weight` or `embeddings.<table>.weight`,
    and if there is neither, as `<table>.weight` or `tables.<table>`.

    Args:
        checkpoint: the opened checkpoint.
        spec: the tables to find.
        dense_prefix: take as the dense model only the keys that start with it, and cut it off. Without it, all keys
            that are no table, as they are.
        table_keys: for tables whose key is not found by the names above, their key.

    Returns:
        A row source for every table, and the dense tensors by name.

    Raises:
        CheckpointError: a table's key is missing or ambiguous (the message lists the candidates), a shape differs from
            the spec, the checkpoint has a table that the spec does not, or nothing starts with `dense_prefix`.
    """
    overrides = dict(table_keys or {})
    if unknown := sorted(set(overrides) - {table.name for table in spec.tables}):
        raise CheckpointError(f"table_keys: unknown tables {unknown}")
    names = checkpoint.names()
    keys: dict[str, str] = {}
    for table in spec.tables:
        key = overrides.get(table.name) or _key_of(checkpoint, table, names)
        if key in (taken := {found: name for name, found in keys.items()}):
            raise CheckpointError(f"{checkpoint.path}: tables {taken[key]!r} and {table.name!r} both match key {key!r}")
        _check_shape(checkpoint, table, key)
        keys[table.name] = key
    rest = [name for name in names if name not in set(keys.values())]
    dense = _dense_keys(checkpoint, rest, dense_prefix)
    return (
        {table: checkpoint.rows(key) for table, key in keys.items()},
        {name: checkpoint.tensor(key) for name, key in dense.items()},
    )


def _key_of(checkpoint: Checkpoint, table: TableSpec, names: list[str]) -> str:
    specific = [f"{collection}.{table.name}.weight" for collection in _COLLECTIONS]
    general = [f"{table.name}.weight", f"tables.{table.name}"]
    for suffixes in (specific, general):
        found = [name for name in names if any(name == end or name.endswith("." + end) for end in suffixes)]
        if len(found) > 1:
            raise CheckpointError(
                f"{checkpoint.path}: table {table.name!r}: ambiguous, may be any of {shortened(found)}"
            )
        if found:
            return found[0]
    shape = (table.num_embeddings, table.embedding_dim)
    candidates = [name for name in names if checkpoint.shape(name) == shape]
    raise CheckpointError(
        f"{checkpoint.path}: table {table.name!r}: no key ends in any of {specific + general}; "
        f"keys of its shape {list(shape)}: {shortened(candidates)}; all keys: {shortened(names)}"
    )


def _check_shape(checkpoint: Checkpoint, table: TableSpec, key: str) -> None:
    found, expected = checkpoint.shape(key), (table.num_embeddings, table.embedding_dim)
    if found != expected:
        raise CheckpointError(
            f"{checkpoint.path}: table {table.name!r}: {key!r} is {list(found)}, the spec says {list(expected)}"
        )


def _dense_keys(checkpoint: Checkpoint, rest: list[str], dense_prefix: str | None) -> dict[str, str]:
    """The dense model's keys in the checkpoint by their name in the snapshot."""
    if dense_prefix is not None:
        dense = {key.removeprefix(dense_prefix): key for key in rest if key.startswith(dense_prefix)}
        if not dense or "" in dense:
            raise CheckpointError(
                f"{checkpoint.path}: dense_prefix {dense_prefix!r}: no key below it; keys: {shortened(rest)}"
            )
        return dense
    for key in rest:
        parts = key.split(".")
        if len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in _COLLECTIONS:
            raise CheckpointError(
                f"{checkpoint.path}: {key!r} looks like a table, but the spec has none {parts[-2]!r}; "
                "add it to the spec, or say with dense_prefix which keys are the dense model"
            )
    return {key: key for key in rest}
