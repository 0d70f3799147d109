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
from loader.snapshot.buckets import Int64Array
from loader.snapshot.row_source import RowSource

_MODULES = "_managed_collision_modules."
_SORTED, _ROWS_OF_SORTED, _IDENTITIES = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"
_COLLECTIONS = ("embedding_bags", "embeddings")


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
            refused(
                path, kept[0].removesuffix(".weight_id"), "rows by number", "rows of a key-value kernel, whose ids move"
            )
        self._maps = {
            name: prefix
            for prefix in {name.rpartition(".")[0] for name in names if _MODULES in name}
            for name in names
            if _is_weight_of(name, prefix)
        }
        super().__init__(path, {name: None for name in names if _MODULES not in name})
        self._keyed_rows = cache(self._read_keyed_rows)
        self.told = [
            f"{name}: an id without a row gets zeros, or what `missing` says; TorchRec gives it its shard's last row"
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
        ids_name = f"{prefix}.{_SORTED if f'{prefix}.{_SORTED}' in given else _IDENTITIES}"
        ids = self._inner.tensor(ids_name).reshape(-1).numpy()
        if ids.dtype != np.int64 or ids.size > num_rows:
            refused(
                self.path,
                name,
                f"{ids_name}: at most {num_rows} raw ids int64, one for each row",
                f"{ids.dtype} [{ids.size}]",
            )
        if ids_name.endswith(_SORTED):
            is_there = ids != np.iinfo(np.int64).max
            rows = self._inner.tensor(f"{prefix}.{_ROWS_OF_SORTED}").numpy()[is_there]
        else:
            is_there = ids != -1
            rows = np.flatnonzero(is_there)
        has_key = np.zeros(num_rows, bool)
        if rows.size and (rows.min() < 0 or rows.max() >= num_rows):
            refused(self.path, name, f"{_ROWS_OF_SORTED}: rows 0 to {num_rows - 1}", f"{rows.min()} to {rows.max()}")
        has_key[rows] = True
        if (distinct := int(has_key.sum())) != rows.size:
            refused(
                self.path, name, f"{_ROWS_OF_SORTED}: a row for each of {rows.size} ids", f"{distinct} different rows"
            )
        keys = ids[is_there]
        return _KeyedRows(keys if ids_name.endswith(_IDENTITIES) else keys[np.argsort(rows)], has_key)


def _is_weight_of(name: str, prefix: str) -> bool:
    """Say whether a tensor has the rows of the table whose ids the module at `prefix` maps."""
    module, _, table = prefix.partition(_MODULES)
    path = module.removesuffix("_managed_collision_collection.")
    return any(name == f"{path}_embedding_module.{of}.{table}.weight" for of in _COLLECTIONS)
