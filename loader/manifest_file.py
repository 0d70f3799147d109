"""`manifest.json` on disk, and the checksum beside it that guards what the manifest itself says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from loader.errors import SnapshotCorruptError, SnapshotFormatError
from loader.manifest import FORMAT_VERSION, Manifest
from loader.snapshot_paths import snapshot_file

MANIFEST_NAME = "manifest.json"
CHECKSUM_NAME = "manifest.json.sha256"
MAX_MANIFEST_BYTES = 64 << 20


def manifest_texts(manifest: Manifest) -> dict[str, str]:
    """The two files' texts by name. The second is what `sha256sum --check` reads."""
    text = manifest.to_json()
    return {MANIFEST_NAME: text, CHECKSUM_NAME: _checksum_line(text.encode())}


def read_manifest(root: Path) -> Manifest:
    """The manifest of the snapshot in `root`; its checksum is left to `check_manifest_checksum`.

    Raises:
        SnapshotCorruptError: there is none, or it is too large.
        SnapshotPathError: it is a link that leaves the folder.
        SnapshotFormatError: not JSON, an unknown format version, or not what the schema says.
    """
    path = snapshot_file(root, MANIFEST_NAME)
    content = _read_bounded(path, MAX_MANIFEST_BYTES)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SnapshotFormatError(f"{path}: not JSON: {error}") from error
    _check_format_version(path, document)
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise SnapshotFormatError(f"{path}: {error}") from error


def check_manifest_checksum(root: Path) -> None:
    """Raises SnapshotCorruptError unless `manifest.json` is byte for byte what was written."""
    path = snapshot_file(root, MANIFEST_NAME)
    content = _read_bounded(path, MAX_MANIFEST_BYTES)
    stated = _read_bounded(snapshot_file(root, CHECKSUM_NAME), 4096)
    if stated != _checksum_line(content).encode():
        raise SnapshotCorruptError(f"{path}: SHA-256 is not the one in {CHECKSUM_NAME}")


def _check_format_version(path: Path, document: Any) -> None:
    if not isinstance(document, dict) or "format_version" not in document:
        raise SnapshotFormatError(f"{path}: has no format_version")
    found = document["format_version"]
    if type(found) is not int or found != FORMAT_VERSION:
        raise SnapshotFormatError(f"{path}: format_version {found!r}; this release reads only {FORMAT_VERSION}")


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise SnapshotCorruptError(f"{path}: can't be read: {error}") from error
    if len(content) > max_bytes:
        raise SnapshotCorruptError(f"{path}: larger than {max_bytes} bytes")
    return content


def _checksum_line(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST_NAME}\n"
