"""`manifest.json` on disk, and the checksum beside it that guards what the manifest itself says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from loader.errors import SnapshotCorruptError, SnapshotFormatError, cut, file_error
from loader.manifest import FORMAT_VERSION, Manifest
from loader.snapshot_paths import snapshot_file

MANIFEST_NAME = "manifest.json"
CHECKSUM_NAME = "manifest.json.sha256"
MAX_MANIFEST_BYTES = 16 << 20
# Keys of one JSON object: bounds how many errors the schema can find in one.
MAX_OBJECT_KEYS = 4096
_QUOTED_ERRORS = 5


def manifest_texts(manifest: Manifest) -> dict[str, str]:
    """The two files' texts by name. The second is what `sha256sum --check` reads."""
    text = manifest.to_json()
    return {MANIFEST_NAME: text, CHECKSUM_NAME: _checksum_line(hashlib.sha256(text.encode()).hexdigest())}


def read_manifest(root: Path) -> tuple[Manifest, str]:
    """The manifest of the snapshot in `root`, and its identity: the SHA-256 (hex) of `manifest.json` as it lies.

    The checksum beside it is left to `check_manifest_checksum`.

    Raises:
        SnapshotCorruptError: there is none, or it is too large.
        SnapshotPathError: it is a link that leaves the folder.
        SnapshotFormatError: not JSON, an unknown format version, or not what the schema says.
    """
    path = snapshot_file(root, MANIFEST_NAME)
    content = _read_bounded(path, MAX_MANIFEST_BYTES)
    return parse_manifest(str(path), content), hashlib.sha256(content).hexdigest()


def parse_manifest(where: str, content: bytes) -> Manifest:
    """The manifest in a text of `manifest.json`, by strict types; `where` names it in errors.

    Raises:
        SnapshotFormatError: not JSON, an unknown format version, or not what the schema says.
    """
    try:
        document = json.loads(content, object_pairs_hook=_bounded_object)
    except (ValueError, RecursionError) as error:
        raise SnapshotFormatError(f"{where}: not JSON: {cut(error)}") from error
    _check_format_version(where, document)
    try:
        return Manifest.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise SnapshotFormatError(f"{where}: {quoted_errors(error)}") from error


def check_manifest_checksum(root: Path, identity: str) -> None:
    """Raises SnapshotCorruptError unless `manifest.json`, of SHA-256 `identity`, is byte for byte what was written."""
    stated = _read_bounded(snapshot_file(root, CHECKSUM_NAME), 4096)
    if stated != _checksum_line(identity).encode():
        raise SnapshotCorruptError(f"{root / MANIFEST_NAME}: SHA-256 is not the one in {CHECKSUM_NAME}")


def quoted_errors(error: ValidationError) -> str:
    """The first errors of a document that does not fit its schema, each with its place, in bounded length."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    quoted = [
        f"{cut('.'.join(map(str, one['loc'])) or 'document')}: {cut(one['msg'], 300)}" for one in found[:_QUOTED_ERRORS]
    ]
    more = f"; and {len(found) - _QUOTED_ERRORS} more" if len(found) > _QUOTED_ERRORS else ""
    return "; ".join(quoted) + more


def _bounded_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object of {len(pairs)} keys; at most {MAX_OBJECT_KEYS} are allowed")
    return dict(pairs)


def _check_format_version(where: str, document: Any) -> None:
    if not isinstance(document, dict) or "format_version" not in document:
        raise SnapshotFormatError(f"{where}: has no format_version")
    found = document["format_version"]
    if type(found) is not int or found != FORMAT_VERSION:
        stated = cut(repr(found))
        raise SnapshotFormatError(f"{where}: format_version {stated}; this release reads only {FORMAT_VERSION}")


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise file_error(path, "read", error) from error
    if len(content) > max_bytes:
        raise SnapshotCorruptError(f"{path}: larger than {max_bytes} bytes")
    return content


def _checksum_line(digest: str) -> str:
    return f"{digest}  {MANIFEST_NAME}\n"
