"""One call of an API: what is known of it while it is handled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from serving.version_stats import VersionCounter


@dataclass(slots=True)
class Call:
    """One call of an API while it is handled.

    Attributes:
        api: `http`, `grpc`, `oip_http`, `oip_grpc` or `embedded`.
        method: `rank`, `lookup` or `model`.
        began: monotonic seconds.
        model: name of the served model, once it is known; never what a client made up.
        version: the version that answers it, once that is chosen; 0 until then.
        counter: of that version.
        received: when its request had come in full, monotonic seconds; 0 until then.
        leased: when the version was chosen, monotonic seconds.
        parsed: when its request was parsed, monotonic seconds.
        admitted: whether it is complete and counts towards `max_in_flight`; until then towards `max_receiving`.
        ended: whether it was counted out. A parser on another thread may still be at work for it.
    """

    api: str
    method: str
    began: float
    model: str = ""
    version: int = 0
    counter: VersionCounter | None = None
    received: float = 0.0
    leased: float = 0.0
    parsed: float = 0.0
    admitted: bool = False
    ended: bool = False


class CallScope:
    """What happens in a `with` block is one call. A class, because every request enters one: a generator costs thrice.

    Args:
        call: given to the block.
        count_in: called on entering; what it raises ends the call before it began.
        count_out: called on leaving, with the error that left the block, or None.
    """

    __slots__ = ("_call", "_count_in", "_count_out")

    def __init__(
        self,
        call: Call,
        count_in: Callable[[Call], None],
        count_out: Callable[[Call, BaseException | None], None],
    ) -> None:
        self._call = call
        self._count_in = count_in
        self._count_out = count_out

    def __enter__(self) -> Call:
        self._count_in(self._call)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count_out(self._call, error)
