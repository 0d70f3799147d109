"""What every form of a checkpoint is: named tensors, and rows read in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from loader.errors import CheckpointError
from loader.row_source import RowSource


class Checkpoint(ABC):
    """Named tensors that are read only when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it. Raises CheckpointError if there is no such tensor."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in memory. Raises CheckpointError if there is none or it can't be read."""

    @abstractmethod
    def rows(self, name: str) -> RowSource:
        """A matrix of floats as a source of rows. Raises CheckpointError if it is not one."""

    def _unknown(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: has no tensor {name!r}; it has {shortened(self.names())}")


def shortened(names: list[str], limit: int = 20) -> str:
    """The first names as text, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}"
