"""What was worked out for requests of one form is kept for the next ones: clients repeat the same shapes."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

# Of one parser of one model version.
MAX_BYTES = 16 * 2**20
# An entry of less is counted as this much: what it is found by takes memory too.
_MIN_ENTRY_BYTES = 2**10


class Sized(Protocol):
    """What is kept."""

    @property
    def size_bytes(self) -> int:
        """Of memory, with what it is found by. Python's objects count too: of small forms they are nearly all."""
        ...


Form = TypeVar("Form", bound=Hashable)
Known = TypeVar("Known", bound=Sized)


class FormCache(Generic[Form, Known]):
    """A map that forgets what came first when it is full. Thread-safe; finding takes no lock.

    Args:
        max_bytes: of all that is kept. What is larger than a quarter of it is not kept.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: dict[Form, Known] = {}
        self._size_bytes = 0
        # A lookup is one step of the interpreter, whoever adds meanwhile.
        self.find = self._known.get

    @property
    def size_bytes(self) -> int:
        """Of all that is kept."""
        return self._size_bytes

    def add(self, form: Form, known: Known) -> bool:
        """Keeps what was worked out for a form, in place of what there is already. Returns whether it is kept."""
        size = _size_of(known)
        if size > self._max_bytes // 4:
            return False
        with self._lock:
            before = self._known.get(form)
            self._known[form] = known
            self._size_bytes += size - (0 if before is None else _size_of(before))
            while self._size_bytes > self._max_bytes:
                self._size_bytes -= _size_of(self._known.pop(next(iter(self._known))))
        return True


def _size_of(known: Sized) -> int:
    return max(known.size_bytes, _MIN_ENTRY_BYTES)
