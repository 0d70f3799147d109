"""Expecting errors by their kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loader.errors import ShardrankError


@contextmanager
def raises_kind(kind: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[ShardrankError]]:
    """As `pytest.raises`, for an error of that `kind`."""
    with pytest.raises(ShardrankError, match=match) as caught:
        yield caught
    assert caught.value.kind == kind
