"""Paths that come from a manifest are not trusted: each must name a plain file inside the snapshot's folder."""

from __future__ import annotations

from pathlib import Path

from loader.errors import SnapshotCorruptError, SnapshotPathError, file_error


def snapshot_file(root: Path, relative_path: str) -> Path:
    """The plain file at `relative_path` ('/'-separated) in the snapshot's folder `root`.

    Raises:
        SnapshotPathError: absolute, with an empty, '.' or '..' part, a backslash or a control character, or a link
            whose end lies outside the folder.
        SnapshotCorruptError: there is no such plain file.
    """
    parts = relative_path.split("/")
    if "\\" in relative_path or any(ord(char) < 32 for char in relative_path) or not {"", ".", ".."}.isdisjoint(parts):
        raise SnapshotPathError(f"{root}: path {relative_path!r} is not a plain relative path")
    path = root.joinpath(*parts)
    try:
        real_path = path.resolve(strict=True)
        is_file = real_path.is_file()
    except OSError as error:
        raise file_error(path, "read", error) from error
    except (RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise SnapshotCorruptError(f"{path}: {error}") from error
    if not real_path.is_relative_to(root.resolve()):
        raise SnapshotPathError(f"{root}: path {relative_path!r} leaves the folder by a link")
    if not is_file:
        raise SnapshotCorruptError(f"{path}: not a plain file")
    return path
