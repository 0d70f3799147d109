"""From `--store`, `--model` and `--version`, or `--snapshot`, to the folder of one snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """What the user named, as flags."""

    store: Path | None
    model: str | None
    version: int | None
    snapshot: Path | None

    def folder(self) -> Path:
        """The snapshot's folder; the latest version where none was named.

        Raises:
            click.UsageError: if the flags contradict each other or name nothing.
            SnapshotNotFoundError: if the store has no such model or version.
        """
        if self.snapshot is not None:
            if self.store is not None or self.model is not None or self.version is not None:
                raise click.UsageError("--snapshot names the folder itself: leave out --store, --model and --version.")
            return self.snapshot
        if self.store is None:
            raise click.UsageError(
                "Name a snapshot: --store FOLDER [--model NAME] [--version N], or --snapshot FOLDER."
            )
        from loader.store import Store

        store = Store(self.store)
        store.check_exists()
        model = self.model
        if model is None:
            models = store.models()
            if len(models) > 1:
                raise click.UsageError(f"--store {self.store} holds several models, name one with --model: {models}")
            model = models[0]
        return store.snapshot_path(model, self.version)
