"""One request on its way, and what is asked of those who send it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from loadtest.load.recorder import NEVER
from loadtest.workloads.payloads import Payload


class PayloadPool(Protocol):
    """Encoded requests and how their answers are checked: `loadtest.workloads.payloads.Payloads`, or as good."""

    @property
    def path(self) -> str:
        """Of the POST, or the full name of the gRPC method."""

    def check(self, answer: bytes) -> int:
        """How many scores an answer has. Raises ShardrankError if it is none."""

    def __len__(self) -> int:
        """How many requests there are."""

    def __iter__(self) -> Iterator[Payload]:
        """The requests."""


class Outgoing:
    """A request whose turn has come.

    Attributes:
        number: of its payload.
        offset_s: when it was due, from the run's begin.
        intended: the same as CLOCK_MONOTONIC seconds, as all other times are.
        turn: when the process came to it.
        sent: when it was written to a connection; `NEVER` until then.
        over: whether it has its record; what comes for it later is dropped.
    """

    __slots__ = ("intended", "number", "offset_s", "over", "sent", "turn")

    def __init__(self, number: int, offset_s: float, intended: float, turn: float) -> None:
        self.number = number
        self.offset_s = offset_s
        self.intended = intended
        self.turn = turn
        self.sent = NEVER
        self.over = False


OnOver: TypeAlias = Callable[[Outgoing, float, int], None]
"""Takes a request, when it was over, and `OK` or the code of its failure."""


class Sender(Protocol):
    """Sends requests and reports each that is not given up, once."""

    @property
    def opened(self) -> int:
        """Connections that were opened so far."""

    def send(self, request: Outgoing) -> None:
        """Sends it at once, or as soon as a connection is free. Never waits."""

    def give_up(self, request: Outgoing) -> None:
        """Forgets a request that is `over`; its connection, if it has one, can't be used again."""

    async def close(self) -> None:
        """Ends all connections; nothing may be out."""
