"""A store: a folder of models, each a folder of versions, each one snapshot. `<store>/<model>/<version>/`."""

from __future__ import annotations

import re
from pathlib import Path

from loader.errors import SnapshotNotFoundError

# The convention of TF-Serving and Triton: positive integers, no leading zeros. Anything else is not a version.
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
WORK_FOLDER_PREFIX = ".export-"
"""Before the version in the name of the folder in which an export works."""
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


class Store:
    """Finds snapshots by model and version. Holds nothing open and caches nothing: each call looks at the folder."""

    def __init__(self, path: str | Path) -> None:
        """A store at `path`, which needs not exist yet."""
        self.path = Path(path)

    def check_exists(self) -> None:
        """Raises SnapshotNotFoundError if there is no such folder, or no version of any model in it."""
        if not self.path.is_dir():
            raise SnapshotNotFoundError(f"store {self.path}: there is no such folder")
        if not self.models():
            raise SnapshotNotFoundError(f"store {self.path} has no model{self._told_unfinished()}")

    def unfinished(self) -> list[tuple[str, int]]:
        """(model, version) of each export that was interrupted, or is still running."""
        return [
            (model, int(version))
            for model in _folders(self.path)
            if _MODEL.fullmatch(model)
            for name in _folders(self.path / model)
            if _VERSION.fullmatch(version := name.removeprefix(WORK_FOLDER_PREFIX)) and version != name
        ]

    def models(self) -> list[str]:
        """Names of the models that have at least one version, sorted."""
        return [name for name in _folders(self.path) if _MODEL.fullmatch(name) and self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """Versions of a model, ascending; empty if the store has no such model. Unfinished exports do not count."""
        if not _MODEL.fullmatch(model):
            return []
        numbers = (int(name) for name in _folders(self.path / model) if _VERSION.fullmatch(name))
        return sorted(number for number in numbers if number < 2**63)

    def latest(self, model: str) -> int:
        """The highest version. Raises SnapshotNotFoundError if there is none."""
        versions = self.versions(model)
        if not versions:
            self.check_exists()
            raise SnapshotNotFoundError(
                f"store {self.path} has no model {model!r}; it has {self.models()}{self._told_unfinished(model)}"
            )
        return versions[-1]

    def next_version(self, model: str) -> int:
        """The first free version above all present ones; 1 for a new model."""
        return max(self.versions(model), default=0) + 1

    def snapshot_path(self, model: str, version: int | None = None) -> Path:
        """The folder of a version, by default the latest. Raises SnapshotNotFoundError, naming what exists."""
        latest = self.latest(model)
        if version is None:
            version = latest
        if version not in (versions := self.versions(model)):
            raise SnapshotNotFoundError(
                f"store {self.path} has no version {version} of model {model!r}; it has {versions}"
            )
        return self.path / model / str(version)

    def _told_unfinished(self, model: str | None = None) -> str:
        """The end of a message about what is not there."""
        names = [f"{name}/{version}" for name, version in self.unfinished() if model in (None, name)]
        if not names:
            return ""
        return f"; not finished: the export of {', '.join(names)}, which goes on when it is run again"


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []
