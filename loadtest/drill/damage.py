"""Ways to break a snapshot: damage that its checksums show, and forgeries whose checksums are right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME

DamageKind = Literal["truncated", "bit flipped"]
_NAN = struct.pack("<f", float("nan"))


@dataclass(frozen=True, slots=True)
class Damage:
    """One place of one file.

    Attributes:
        kind: the file ends at byte `offset`, or bit `bit` of that byte is the other one.
        path: of the file, relative to the snapshot's folder.
        offset: byte within the file.
        bit: 0 to 7; 0 for a truncation.
    """

    kind: DamageKind
    path: str
    offset: int
    bit: int = 0

    def __str__(self) -> str:
        at = f"at byte {self.offset}" if self.kind == "truncated" else f"in bit {self.bit} of byte {self.offset}"
        return f"{self.path} {self.kind} {at}"


def random_damages(folder: Path, kind: DamageKind, count: int, seed: int) -> list[Damage]:
    """Places drawn at random: first the file, each as likely as any other, so that small files get their share."""
    rng = np.random.default_rng(seed)
    sizes = [
        (path.relative_to(folder).as_posix(), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size
    ]
    found = []
    for _ in range(count):
        path, size = sizes[rng.integers(len(sizes))]
        bit = int(rng.integers(8)) if kind == "bit flipped" else 0
        found.append(Damage(kind, path, int(rng.integers(size)), bit))
    return found


@contextlib.contextmanager
def damaged(folder: Path, damage: Damage) -> Iterator[None]:
    """The damage is there while the block runs."""
    path = folder / damage.path
    with path.open("r+b") as file:
        file.seek(damage.offset)
        if damage.kind == "truncated":
            lost = file.read()
            file.truncate(damage.offset)
        else:
            lost = file.read(1)
            file.seek(damage.offset)
            file.write(bytes([lost[0] ^ 1 << damage.bit]))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(damage.offset)
            file.write(lost)


def forge_nan_row(folder: Path, table: str, row_offset: int) -> None:
    """Writes a NaN into the first row of a table's first file, and makes the checksums right again.

    Args:
        folder: the snapshot's.
        table: whose rows.
        row_offset: where in a stored row, in bytes; an int8 row's scale lies behind its codes.
    """
    document = _read_manifest(folder)
    files = next(files for files in document["tables"] if files["table"] == table)
    _forge(folder, document, files["rows"][0]["path"], lambda content: _with_nan(content, row_offset))


def forge_nan_weight(folder: Path) -> None:
    """Writes a NaN into the dense model's first weight, and makes the checksums right again."""
    document = _read_manifest(folder)
    _forge(folder, document, document["dense"]["path"], lambda content: _with_nan(content, 0))


def delete_table(folder: Path, table: str) -> None:
    """Deletes a table's files. The manifest still names them."""
    shutil.rmtree(folder / "tables" / table)


def forge_without_table(folder: Path, table: str) -> None:
    """Deletes a table with its features from the files and from the manifest, and makes its checksum right again."""
    document = _read_manifest(folder)
    spec = document["spec"]
    gone = {name for one in spec["tables"] if one["name"] == table for name in one["feature_names"]}
    spec["tables"] = [one for one in spec["tables"] if one["name"] != table]
    spec["features"] = [one for one in spec["features"] if one["name"] not in gone]
    document["tables"] = [files for files in document["tables"] if files["table"] != table]
    # Golden requests with features that the model has not would show it at once.
    document["golden"] = None
    delete_table(folder, table)
    _write_manifest(folder, document)


def _with_nan(content: bytes, offset: int) -> bytes:
    # A safetensors file: the header's length as uint64, the header, the data.
    place = 8 + struct.unpack_from("<Q", content)[0] + offset
    return content[:place] + _NAN + content[place + len(_NAN) :]


def _forge(folder: Path, document: dict[str, Any], path: str, edit: Callable[[bytes], bytes]) -> None:
    content = edit((folder / path).read_bytes())
    (folder / path).write_bytes(content)
    _restate(document, path, {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    _write_manifest(folder, document)


def _restate(node: Any, path: str, stated: dict[str, Any]) -> None:
    if isinstance(node, dict) and node.get("path") == path:
        node.update(stated)
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _restate(child, path, stated)


def _read_manifest(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    return document


def _write_manifest(folder: Path, document: dict[str, Any]) -> None:
    content = json.dumps(document).encode()
    (folder / MANIFEST_NAME).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (folder / CHECKSUM_NAME).write_text(f"{digest}  {MANIFEST_NAME}\n", encoding="utf-8")
