"""How long work tells its caller how far it is, without knowing who shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then during long work, by one thread at a time."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` rows or bytes of `what`; the last call for a `what` has done == total."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignores progress: the default."""
