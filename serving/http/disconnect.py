"""How a handler learns that its client has gone."""

from __future__ import annotations

from collections.abc import Callable


class Disconnect:
    """Tells of the end of a connection, once."""

    __slots__ = ("_callback", "disconnected")

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None
        self.disconnected = False

    def watch_client(self, callback: Callable[[], None]) -> None:
        """Sets what is called when the client goes: at once, if it has gone already."""
        self._callback = callback
        if self.disconnected:
            callback()

    def gone(self) -> None:
        """The connection has ended."""
        self.disconnected = True
        if self._callback is not None:
            self._callback()
