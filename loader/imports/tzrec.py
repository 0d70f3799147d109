"""Read what TorchEasyRec exports for distributed serving: the arrays of `sparse/*.npz`, mapped where they lie.

`sparse_embeddings-RR-of-WW.npz` has the tables whose ids are rows, `<fqn>` of floats [n, dim], and
`sparse_dynamic_embedding-RR-of-WW.npz` those with keys, `<fqn>.keys` int64 [n] and `<fqn>.values`; RR counts from 00.
Beside each rank's files its JSON says how many rows it has of which. A quantised row is uint8 [dim + 4]: dim codes,
float16 scale, float16 offset, a value is code * scale + offset: the int8 row of `loader.snapshot.codecs`, but for the
width of its two parameters, so its codes stay as they are.

Source: alibaba/TorchEasyRec, tzrec/utils/export_util.py, npz_util.py and quant_util.py, of 1.3.16; by names short of
the fqn, as of 1.3.1, tables are found as well.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.checkpoints import Checkpoint
from loader.errors import CheckpointError, cut
from loader.imports.tables import HALF_PARAMETERS, Part, TablesCheckpoint, refused
from loader.memory import map_array

_KINDS = ("embeddings", "dynamic_embedding")
_NAME = re.compile(rf"sparse_({'|'.join(_KINDS)})-\d+-of-(\d+)\.npz")
_ENTRY = re.compile(r"(?P<table>.+?)(\.(?P<what>keys|values|scores|default_value))?\.npy")
_LOCAL_HEADER_BYTES = 30
_MAX_STATED_BYTES = 64 << 20


def read_tzrec(path: Path, remainder: Checkpoint | None) -> TablesCheckpoint:
    """Open an export's folder, or its folder `sparse`.

    Raises CheckpointError, with file, table, what was expected and what found: a file of a rank is missing or can't be
    read, arrays are not as the layout says, sizes disagree with each other or with the JSON, a key is there twice.
    """
    folder = path / "sparse" if (path / "sparse").is_dir() else path
    named = [match.groups() for file in folder.glob("*.npz") if (match := _NAME.fullmatch(file.name))]
    kinds, sizes = {kind for kind, _ in named}, {size for _, size in named}
    if not named:
        raise CheckpointError(f"{folder}: no file sparse_embeddings-RR-of-WW.npz")
    if len(sizes) > 1:
        raise CheckpointError(f"{folder}: expected files of one number of ranks, found those of {sorted(sizes)}")
    (size,) = sizes
    tables: dict[str, list[Part]] = defaultdict(list)
    notes: list[str] = []
    for rank in range(int(size)):
        static, dynamic = (folder / f"sparse_{kind}-{rank:02d}-of-{size}.npz" for kind in _KINDS)
        needed = [static] if static.with_suffix(".json").is_file() or _KINDS[1] not in kinds else [static, dynamic]
        if missing := [file.name for file in needed if not file.is_file()]:
            raise CheckpointError(f"{folder}: expected files of ranks 0 to {int(size) - 1}, found no {missing[0]}")
        parts = _parts(static, notes) | (_parts(dynamic, notes) if dynamic.is_file() else {})
        _check_stated(static.with_suffix(".json"), parts, dynamic)
        for table, part in parts.items():
            tables[table].append(part)
    return TablesCheckpoint(path, tables, remainder, notes)


def _parts(file: Path, notes: list[str]) -> dict[str, Part]:
    """Return the tables of one file; what to tell of them is added to `notes`. Raises CheckpointError."""
    arrays: dict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
    for name, array in _mapped(file).items():
        if (entry := _ENTRY.fullmatch(name)) is None:
            raise CheckpointError(f"{file}: expected arrays named .npy, found {cut(name)}")
        is_dynamic = file.name.startswith("sparse_dynamic")
        table, what = (entry["table"], entry["what"]) if is_dynamic else (name.removesuffix(".npy"), "rows")
        arrays[table][what or "rows"] = array
    parts = {}
    for table, of in arrays.items():
        if "rows" in of and len(of) == 1:
            parts[table] = Part(file, of["rows"])
            continue
        if missing := {"keys", "values"} - of.keys():
            refused(file, table, "keys and values", f"no {' and no '.join(sorted(missing))}")
        if "default_value" in of:
            notes.append(f"{table}: a key without a row gets what `missing` says; training has a row for such")
        keys, values = of["keys"], of["values"]
        if keys.dtype != np.int64 or keys.ndim != 1 or len(values) != keys.size:
            refused(file, table, f"keys int64 [{len(values)}], one for each row", f"{keys.dtype} {list(keys.shape)}")
        parts[table] = Part(file, values, keys)
    return parts


def _check_stated(file: Path, parts: dict[str, Part], dynamic: Path) -> None:
    """Refuse parts of a rank that its JSON has otherwise, if there is one."""
    try:
        with file.open("rb") as stream:
            stated = json.loads(stream.read(_MAX_STATED_BYTES))
        shapes = {table: (int(of["shape"][0]), int(of["shape"][1])) for table, of in stated.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file}: can't be read as tables and their shapes: {cut(error)}") from error
    for table in sorted(shapes.keys() | parts.keys()):
        if table not in shapes:
            refused(file, table, "the shapes of all tables of its rank", "none of this one")
        if (part := parts.get(table)) is None:
            if shapes[table][0]:
                where = dynamic if stated[table].get("is_dynamic") else file.with_suffix(".npz")
                refused(where, table, f"rows {list(shapes[table])}, as {file.name} says", "none")
            continue
        shape = part.rows.shape[0], part.rows.shape[-1] - HALF_PARAMETERS * (part.rows.dtype == np.uint8)
        if shape != shapes[table]:
            refused(part.file, table, f"rows {list(shapes[table])}, as {file.name} says", list(shape))


def _mapped(file: Path) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of an .npz file that is not compressed. Raises CheckpointError."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise CheckpointError(
                        f"{file}: expected arrays that are not compressed, found {cut(entry.filename)}"
                    )
                raw.seek(entry.header_offset)
                header = raw.read(_LOCAL_HEADER_BYTES)
                # Its own sizes may be zeros; those of name and extra field count.
                start = raw.tell() + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                raw.seek(start)
                version = np.lib.format.read_magic(raw)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, is_fortran, dtype = read(raw)
                length = raw.tell() - start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
                if dtype.hasobject or is_fortran or not shape or length != entry.file_size:
                    array = f"{dtype} {list(shape)}, of {entry.file_size} bytes"
                    raise CheckpointError(
                        f"{file}: {cut(entry.filename)}: expected an array of numbers, row by row, found {array}"
                    )
                if 0 in shape:
                    arrays[entry.filename] = np.zeros(shape, dtype)
                else:
                    arrays[entry.filename] = map_array(file, raw.tell(), shape, dtype, copy_on_write=True)
    except CheckpointError:
        raise
    except Exception as error:  # NumPy evaluates a header as Python, whose parser raises more than it says.
        raise CheckpointError(f"{file}: can't be read as an .npz file: {cut(error)}") from error
    return arrays
