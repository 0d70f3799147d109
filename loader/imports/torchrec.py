"""Read TorchRec's checkpoints: tables as `loader.checkpoints` reads them, and keys of those without collisions.

What maps raw ids to rows is beside a table's rows, below `…_managed_collision_modules.<table>.`: of
MCHManagedCollisionModule `_mch_sorted_raw_ids` int64 [n], 2^63 - 1 where there is none, and
`_mch_remapped_ids_mapping` int64 [n], the row of each in the whole table, sharded or not; of
HashZchManagedCollisionModule `_hash_zch_identities` int64 [n, 1], the raw id of each row, -1 where there is none.

Source: meta-pytorch/torchrec, torchrec/modules/mc_modules.py and hash_mc_modules.py, distributed/mc_modules.py, of 1.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loader.checkpoints import Checkpoint, open_checkpoint
from loader.divided_rows import chosen_rows
from loader.imports.tables import refused
from loader.keyed_rows import first_twice, keys_in_file
from loader.snapshot.buckets import Int64Array
from loader.snapshot.row_source import RowSource

_MODULES = "_managed_collision_modules."
_SORTED, _ROWS_OF_SORTED, _IDENTITIES = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"
_COLLECTIONS = ("embedding_bags", "embeddings")
_BLOCK_IDS = 1 << 20


class _KeyedRows(NamedTuple):
    keys: Int64Array
    """Of the rows that have one, in the order of these."""
    has_key: npt.NDArray[np.bool_]


class TorchRecCheckpoint(Checkpoint):
    """A state dict's or a distributed checkpoint's tensors, without those of modules that map ids to rows."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises CheckpointError as `open_checkpoint`, and for tables whose rows are in a store of keys."""
        self._inner = open_checkpoint(path)
        names = self._inner.names()
        if kept := [name for name in names if name.endswith(".weight_id")]:
            refused(path, kept[0].removesuffix(".weight_id"), "rows by number", "rows of a key-value kernel")
        self._maps = {
            name: prefix
            for prefix in {name.rpartition(".")[0] for name in names if _MODULES in name}
            for name in names
            if _is_weight_of(name, prefix)
        }
        mapping = {name.rpartition(".")[0] for name in names if name.endswith((_SORTED, _IDENTITIES))}
        if lost := sorted(mapping - {*self._maps.values()}):
            refused(path, lost[0].rpartition(".")[2], f"its rows, which {lost[0]} maps ids to", "no such weight")
        super().__init__(path, {name: None for name in names if _MODULES not in name})
        self._keyed_rows = cache(self._read_keyed_rows)
        self.notes = [
            f"{name}: an id without a row gets zeros, or what `missing` says; TorchRec gives it another's row"
            for name in self._maps
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        self._entry(name)
        shape = self._inner.shape(name)
        return shape if (keyed := self._keyed_rows(name)) is None else (keyed.keys.size, *shape[1:])

    def tensor(self, name: str) -> torch.Tensor:
        return self._inner.tensor(name)

    def rows(self, name: str) -> RowSource:
        self._entry(name)
        rows, keyed = self._inner.rows(name), self._keyed_rows(name)
        return rows if keyed is None else chosen_rows(name, rows, keyed.has_key)

    def keys(self, name: str) -> Int64Array | None:
        return None if (keyed := self._keyed_rows(name)) is None else keyed.keys

    @property
    def tables(self) -> Mapping[str, str]:
        parts = {name: name.split(".") for name in self.names()}
        weights = [name for name, of in parts.items() if len(of) > 2 and of[-1] == "weight" and of[-3] in _COLLECTIONS]
        return dict.fromkeys(weights, "floats")

    def _read_keyed_rows(self, name: str) -> _KeyedRows | None:
        if (prefix := self._maps.get(name)) is None:
            return None
        given, num_rows = self._inner.names(), self._inner.shape(name)[0]
        ends = (_SORTED, _ROWS_OF_SORTED) if f"{prefix}.{_SORTED}" in given else (_IDENTITIES,)
        tensors = {end: self._inner.tensor(f"{prefix}.{end}").reshape(-1) for end in ends}
        size = tensors[ends[0]].numel()
        for end, tensor in tensors.items():
            if tensor.dtype != torch.int64 or tensor.numel() != size or size > num_rows:
                expected = f"{end}: torch.int64 [{min(size, num_rows)}], at most one for each row"
                refused(self.path, name, expected, f"{tensor.dtype} [{tensor.numel()}]")
        ids = tensors[ends[0]].numpy()
        rows_of = tensors[_ROWS_OF_SORTED].numpy() if _ROWS_OF_SORTED in ends else None
        by_row, has_key, count = keys_in_file(num_rows), np.zeros(num_rows, bool), 0
        for start in range(0, ids.size, _BLOCK_IDS):
            some = ids[start : start + _BLOCK_IDS]
            is_there = some != (-1 if rows_of is None else np.iinfo(np.int64).max)
            rows = start + np.flatnonzero(is_there) if rows_of is None else rows_of[start:][:_BLOCK_IDS][is_there]
            if rows.size and (rows.min() < 0 or rows.max() >= num_rows):
                refused(self.path, name, f"{_ROWS_OF_SORTED}: rows below {num_rows}", f"{rows.min()} to {rows.max()}")
            by_row[rows], has_key[rows] = some[is_there], True
            count += rows.size
        if (distinct := int(has_key.sum())) != count:
            refused(self.path, name, f"{_ROWS_OF_SORTED}: a row for each of {count} ids", f"{distinct} different rows")
        del ids, rows_of, tensors, tensor
        keys = np.compress(has_key, by_row, out=keys_in_file(count))
        if (twice := first_twice(keys)) is not None:
            refused(self.path, name, "each raw id once", f"{twice} twice")
        return _KeyedRows(keys, has_key)


def _is_weight_of(name: str, prefix: str) -> bool:
    """Say whether a tensor has the rows of the table whose ids the module at `prefix` maps."""
    module, _, table = prefix.partition(_MODULES)
    path = module.removesuffix("_managed_collision_collection.")
    return any(name == f"{path}_embedding_module.{of}.{table}.weight" for of in _COLLECTIONS)
