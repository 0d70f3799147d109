"""Read folders of plain arrays: DynamicEmb, HugeCTR and HPS, TensorFlow Recommenders Addons, and NumPy.

All but NumPy's are little-endian numbers without a header, C order; a table's dim is what its files' sizes make it.

**dynamicemb**: `<table>_emb_keys.rank_R.world_size_W` int64 [n], `<table>_emb_values.rank_R.world_size_W` float32 [n,
dim], R from 0, in a folder for each collection, by its dotted module path; beside them `<table>_opt_args.json`. Source:
NVIDIA/recsys-examples, corelib/dynamicemb/dynamicemb/batched_dynamicemb_tables.py (`encode_checkpoint_file_path`),
key_value_table.py and dump_load.py, of 25.09 and later.

**hps**: a folder with `key` int64 [n] and `emb_vector` float32 [n, dim]. Source: NVIDIA-Merlin/HugeCTR,
HugeCTR/src/hps/modelloader.cpp (`RawModelLoader`), of 3.1 and later.

**tfra**: `<name>_mht_IofN_rankR_sizeS-keys` and `-values`, I from 1, R from 0; those of 0.5 have no `_rankR_sizeS`.
Source: tensorflow/recommenders-addons, dynamic_embedding/python/ops/dynamic_embedding_variable.py and
core/kernels/cuckoo_hashtable_op.cc.

**numpy**: `<table>.npy`, floats [n, dim], and of tables with keys `<table>.keys.npy`, whole numbers [n]; every other
array is the dense model's. Source: numpy.lib.format.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.checkpoints import Checkpoint
from loader.errors import CheckpointError, ExportError, TraceError, cut
from loader.imports.tables import KeyDtype, Part, TablesCheckpoint, ValueDtype, raw_part, refused
from loader.keyed_rows import as_keys, first_twice
from loader.snapshot.buckets import Int64Array
from loader.snapshot.row_source import ArrayRows, RowSource
from loader.traces import map_npy

_RANKED = re.compile(r"(?P<table>.+)_emb_(?P<kind>keys|values)\.rank_(?P<rank>\d+)\.world_size_(?P<size>\d+)")
_SHARDED = re.compile(
    r"(?P<table>.+)_mht_(?P<part>\d+)of(?P<parts>\d+)(_rank(?P<rank>\d+)_size(?P<size>\d+))?-(?P<kind>keys|values)"
)
_MAX_ARGUMENTS_BYTES = 1 << 20


def read_dynamicemb(path: Path, remainder: Checkpoint | None) -> TablesCheckpoint:
    """Open what `DynamicEmbDump` wrote; a table's name is its collection's path and its own, with a dot between.

    Raises CheckpointError, with file, table, what was expected and what found: a file of a rank is missing, sizes
    disagree, a key is there twice, or ranks keep keys by their number within the rank (dist_type `continuous`).
    """
    files = _files_by_table(path, _RANKED, lambda match: (int(match["rank"]), int(match["size"])))
    if not files:
        old = next(path.rglob("*_keys"), None)
        more = "" if old is None else f"; {old} is of DynamicEmb 25.08 or earlier: dump it with a later one"
        raise CheckpointError(f"{path}: no file <table>_emb_keys.rank_R.world_size_W{more}")
    tables = dict[str, list[Part]]()
    for name, by_rank in files.items():
        size = min(size for _, size in by_rank)
        expected = ((rank, size) for rank in range(size))
        parts = _in_order(name, by_rank, expected, "rank_{0}.world_size_{1}", "int64", "float32")
        arguments = parts[0].file.with_name(f"{name.rpartition('/')[2]}_opt_args.json")
        if size > 1 and _arguments(arguments, name).get("dist_type") == "continuous":
            scheme = "dist_type roundrobin or hash_roundrobin"
            refused(arguments, name, scheme, "continuous, whose keys are numbers within a rank")
        tables[name.replace("/", ".")] = parts
    return TablesCheckpoint(path, tables, remainder)


def read_hps(path: Path, remainder: Checkpoint | None, key_dtype: KeyDtype = "int64") -> TablesCheckpoint:
    """Open folders with `key` and `emb_vector`: `path`, or those below it, whose names are the tables'.

    Raises CheckpointError as `read_dynamicemb`.
    """
    folders = sorted({file.parent for name in ("key", "emb_vector") for file in path.rglob(name) if file.is_file()})
    if not folders:
        dumped = any(path.rglob("meta_data"))
        more = "; `meta_data` is of Model.embedding_dump, which is not read: save sparse models" if dumped else ""
        raise CheckpointError(f"{path}: neither it nor a folder below it has the files key and emb_vector{more}")
    tables = dict[str, list[Part]]()
    for folder in folders:
        name = ".".join(folder.relative_to(path).parts) or folder.resolve().name
        tables[name] = [raw_part(name, folder / "key", folder / "emb_vector", key_dtype)]
    return TablesCheckpoint(path, tables, remainder)


def read_tfra(
    path: Path, remainder: Checkpoint | None, key_dtype: KeyDtype = "int64", value_dtype: ValueDtype = "float32"
) -> TablesCheckpoint:
    """Open what `save_to_file_system` wrote; of a table's name the end `-parameter` is cut off.

    Tables of an optimizer's slots, which begin with another's name, are left out, and notes. Raises CheckpointError as
    `read_dynamicemb`.
    """
    if unfinished := sorted(path.rglob("*_mht_*.tmp")):
        raise CheckpointError(f"{unfinished[0]}: was not written to its end")
    numbers = ("part", "parts", "rank", "size")
    files = _files_by_table(path, _SHARDED, lambda match: tuple(int(match[key] or (key == "size")) for key in numbers))
    if not files:
        raise CheckpointError(f"{path}: no file <name>_mht_IofN_rankR_sizeS-keys")
    tables = dict[str, list[Part]]()
    for name, by_part in sorted(files.items()):
        _, parts, _, size = min(by_part)
        expected = ((part + 1, parts, rank, size) for rank in range(size) for part in range(parts))
        in_order = _in_order(name, by_part, expected, "{0}of{1}_rank{2}_size{3}", key_dtype, value_dtype)
        tables[name.removesuffix("-parameter").replace("/", ".")] = in_order
    return TablesCheckpoint(path, tables, remainder)


class NumpyFolder(Checkpoint):
    """Arrays in the `.npy` files of a folder and those below it, with dots for slashes in names; none is a pickle."""

    def __init__(self, path: Path) -> None:
        """Raise CheckpointError if there is none, one can't be read, or keys are of no table or of another size."""
        paths = sorted(path.rglob("*.npy"))
        files = {".".join(file.relative_to(path).with_suffix("").parts): file for file in paths}
        if len(files) < max(1, len(paths)):
            raise CheckpointError(f"{path}: {'no .npy files' if not paths else 'two files are one name with dots'}")
        of_keys = {name.removesuffix(".keys"): file for name, file in files.items() if name.endswith(".keys")}
        self._keys = {name: file for name, file in of_keys.items() if name in files}
        super().__init__(path, {name: file for name, file in files.items() if file not in self._keys.values()})
        for name, file in self._keys.items():
            if (shape := self._map(name, file).shape) != self.shape(name)[:1]:
                refused(file, name, f"{list(self.shape(name)[:1])} keys, as there are rows", list(shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._map(name, self._entry(name)).shape

    def tensor(self, name: str) -> torch.Tensor:
        array = self._map(name, self._entry(name))
        try:
            return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
        except TypeError as error:
            raise CheckpointError(f"{self._entry(name)}: {error}") from error

    def rows(self, name: str) -> RowSource:
        file = self._entry(name)
        try:
            return ArrayRows(self._map(name, file), file, name)
        except ExportError as error:
            raise CheckpointError(f"{file}: table {name!r}: {error}") from error

    def keys(self, name: str) -> Int64Array | None:
        if (file := self._keys.get(name)) is None:
            return None
        try:
            keys = as_keys(f"{file}: table {name!r}", "int64", self._map(name, file))
        except ExportError as error:
            raise CheckpointError(str(error)) from error
        if (twice := first_twice(keys)) is not None:
            refused(file, name, "each key once", f"{twice} twice")
        return keys

    @property
    def tables(self) -> Mapping[str, str]:
        return {name: str(self._map(name, self._entry(name)).dtype) for name in self._keys}

    def _map(self, name: str, file: Path) -> npt.NDArray[Any]:
        try:
            return map_npy(file)
        except TraceError as error:
            raise CheckpointError(f"table {name!r}: {error}") from error


def _files_by_table(
    path: Path, pattern: re.Pattern[str], numbers: Callable[[re.Match[str]], tuple[int, ...]]
) -> dict[str, dict[tuple[int, ...], dict[str, Path]]]:
    """Return the files whose names are of a pattern: by table, with its folder below `path`, by part and by kind."""
    files: dict[str, dict[tuple[int, ...], dict[str, Path]]] = defaultdict(lambda: defaultdict(dict))
    for file in sorted(path.rglob("*")):
        if (match := pattern.fullmatch(file.name)) is not None:
            table = (file.relative_to(path).parent / match["table"]).as_posix()
            files[table][numbers(match)][match["kind"]] = file
    return files


def _in_order(
    table: str,
    by_part: Mapping[tuple[int, ...], Mapping[str, Path]],
    expected: Iterable[tuple[int, ...]],
    text: str,
    key_dtype: str,
    value_dtype: str,
) -> list[Part]:
    """Return a table's parts. Refuse it if they are not exactly those that are expected, each with keys and values."""
    first, parts, seen = next(iter(next(iter(by_part.values())).values())), list[Part](), set()
    # Part by part: a name may say any number of them, and the first that is not there ends it.
    for at in expected:
        files = by_part.get(at, {})
        if missing := {"keys", "values"} - files.keys():
            reason = f"no {' and no '.join(sorted(missing))} beside {first.name}"
            refused(first.parent, table, f"keys and values of {text.format(*at)}", reason)
        seen.add(at)
        parts.append(raw_part(table, files["keys"], files["values"], key_dtype, value_dtype))
    if others := sorted(by_part.keys() - seen):
        refused(first.parent, table, f"no part {text.format(*others[0])}; write into an empty folder", "one")
    return parts


def _arguments(file: Path, table: str) -> Mapping[str, object]:
    """Return what a table's JSON says of it; {} if there is none. Raises CheckpointError."""
    try:
        with file.open("rb") as stream:
            arguments = json.loads(stream.read(_MAX_ARGUMENTS_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: table {table!r}: can't be read: {cut(error)}") from error
    if not isinstance(arguments, dict):
        refused(file, table, "an object", type(arguments).__name__)
    return arguments
