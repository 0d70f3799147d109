"""Whether a snapshot's files are, as bytes, those that its manifest names."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loader.errors import SnapshotCorruptError, SnapshotFormatError, file_error
from loader.manifest import FileEntry, Manifest
from loader.progress import Progress
from loader.tensor_files import hash_file


def check_folder_names(root: Path, manifest: Manifest) -> None:
    """Raises SnapshotFormatError for a snapshot copied under another name, which would be served as what it is not."""
    real = root.resolve()
    if (real.parent.name, real.name) != (manifest.spec.model, str(manifest.version)):
        raise SnapshotFormatError(
            f"{root}: the manifest is of model {manifest.spec.model!r} version {manifest.version}, "
            f"the folder says {real.parent.name!r} {real.name!r}"
        )


def check_sizes(paths: Mapping[str, Path], manifest: Manifest) -> None:
    """Raises SnapshotCorruptError for a file of another size than stated. `paths` are by the manifest's paths."""
    for entry in manifest.files():
        path = paths[entry.path]
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise file_error(path, "read", error) from error
        if size_bytes != entry.size_bytes:
            raise SnapshotCorruptError(f"{path}: {size_bytes} bytes, the manifest says {entry.size_bytes}")


def check_hashes(paths: Mapping[str, Path], entries: Sequence[FileEntry], threads: int, progress: Progress) -> None:
    """Raises SnapshotCorruptError for a file of another SHA-256 than stated; `threads` files are read at a time."""
    total = sum(entry.size_bytes for entry in entries)
    done = 0
    lock = threading.Lock()

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("checking SHA-256", done, total)

    def check(entry: FileEntry) -> None:
        path = paths[entry.path]
        try:
            found = hash_file(path, on_bytes)
        except OSError as error:
            raise file_error(path, "read", error) from error
        if found != entry.sha256:
            raise SnapshotCorruptError(f"{path}: SHA-256 is {found}, the manifest says {entry.sha256}")

    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            for _ in pool.map(check, entries):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
