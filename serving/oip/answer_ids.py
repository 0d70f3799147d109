"""Ids of answers whose requests have none."""

from __future__ import annotations

import itertools
import secrets


class AnswerIds:
    """Ids that no other answer has: what sets this process apart, and a count. Thread-safe.

    Args:
        prefix: 16 hex digits; random by default. Asking the system for random bytes once for each answer costs more
            than the answer's whole head.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self._prefix = secrets.token_hex(8) if prefix is None else prefix
        self._count = itertools.count()

    def __call__(self) -> str:
        """32 hex digits."""
        return f"{self._prefix}{next(self._count):016x}"
