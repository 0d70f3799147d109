"""One budget of a process for the bytes that its connections make it hold. Belongs to one event loop.

While at least half of the budget is free, a connection may hold whatever it needs; then at most its equal share of
half the budget. If the other half is used up all the same, whoever holds most gives way, so that small messages always
find room: as packets are pushed out of the longest queue of a switch (Choudhury and Hahne, "Dynamic queue length
thresholds for shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, TypeAlias

from loader.errors import OverloadedError
from shard_node.engine.memory import total_memory_bytes

DEFAULT_BYTES = 256 << 20
SHARE_OF_MEMORY = 8
LARGEST_MESSAGES = 4
"""A budget has room for as many of the largest messages allowed."""

Cause: TypeAlias = Literal["share", "full", "evicted"]
"""A connection would hold more than its share; there is no room; it had to give way to a smaller one."""


def default_buffer_bytes(largest_message_bytes: int) -> int:
    """Return 256 MiB, or an eighth of the memory limit if that is less, but room for four of the largest messages."""
    return max(min(DEFAULT_BYTES, total_memory_bytes() // SHARE_OF_MEMORY), LARGEST_MESSAGES * largest_message_bytes)


def check_buffer_bytes(max_buffered_bytes: int, largest: str, largest_message_bytes: int) -> None:
    """Raise ValueError unless there is room for four of the largest messages; `largest` names their limit."""
    least = LARGEST_MESSAGES * largest_message_bytes
    if max_buffered_bytes < least:
        says = f"max_buffered_bytes {max_buffered_bytes} is less than {LARGEST_MESSAGES} times {largest}"
        raise ValueError(f"{says}, {least}")


class ByteBudget:
    """The bytes that all connections of a process may make it hold.

    `note` is called with the cause of each refusal. `buffered` bytes are held now, by the accounts `holders`.
    """

    def __init__(self, max_bytes: int, note: Callable[[Cause], object] = lambda cause: None) -> None:
        self.max_bytes = max_bytes
        self.buffered = 0
        self.note = note
        self.holders: set[ByteAccount] = set()

    def refusal(self, cause: Cause) -> OverloadedError:
        """Return the error of a message that is refused, and note it."""
        self.note(cause)
        return self.error(cause)

    def error(self, cause: Cause) -> OverloadedError:
        """Return the error of a message that is refused for this cause."""
        reasons = {
            "share": f"when bytes are scarce, one of {len(self.holders)} connections may hold its share of them",
            "full": "no connection that holds more can give way",
            "evicted": "this connection held most of them, and others need room",
        }
        limit = f"the limit max_buffered_bytes = {self.max_bytes}"
        return OverloadedError(
            f"{self.buffered} bytes of messages are buffered of {limit}: {reasons[cause]}", kind="buffer_full"
        )


class ByteAccount:
    """What one connection holds of a budget.

    `give_way` refuses the messages of the connection that are not complete yet, with the error that it is given, and
    refunds their bytes.
    """

    def __init__(self, budget: ByteBudget, give_way: Callable[[OverloadedError], object]) -> None:
        self._budget, self._give_way = budget, give_way
        self.held = 0

    def charge(self, num_bytes: int) -> None:
        """Count bytes of a message that came, or that it is expanded to. Raises OverloadedError: no room."""
        budget, half = self._budget, self._budget.max_bytes // 2
        if budget.buffered + num_bytes > half:
            if self.held + num_bytes > half // (len(budget.holders) + (self not in budget.holders)):
                raise budget.refusal("share")
            self._make_room(num_bytes)
        self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that can't be refused any more, such as those of an answer."""
        self._budget.buffered += num_bytes
        self.held += num_bytes
        if self.held:
            self._budget.holders.add(self)

    def refund(self, num_bytes: int) -> None:
        """Count bytes out again."""
        self._budget.buffered -= num_bytes
        self.held -= num_bytes
        if not self.held:
            self._budget.holders.discard(self)

    def close(self) -> None:
        """Count everything out, and nothing more: the connection is lost."""
        self.refund(self.held)
        self._budget, self._give_way = ByteBudget(sys.maxsize), lambda error: None

    def _make_room(self, num_bytes: int) -> None:
        budget = self._budget
        if budget.buffered + num_bytes <= budget.max_bytes:
            return
        larger = [account for account in budget.holders if account.held > self.held + num_bytes]
        for account in sorted(larger, key=lambda account: -account.held):
            account._give_way(budget.error("evicted"))
            if budget.buffered + num_bytes <= budget.max_bytes:
                budget.note("evicted")
                return
        raise budget.refusal("full")


class MessageBytes:
    """The bytes that one message, what it is expanded to, and its answer hold of a connection's account."""

    def __init__(self, account: ByteAccount) -> None:
        self._account = account
        self.held = 0

    def charge(self, num_bytes: int) -> None:
        """As `ByteAccount.charge`."""
        self._account.charge(num_bytes)
        self.held += num_bytes

    def hold(self, num_bytes: int) -> None:
        """As `ByteAccount.hold`."""
        self._account.hold(num_bytes)
        self.held += num_bytes

    def refund(self, num_bytes: int) -> None:
        """Count bytes out that are not held any more."""
        self._account.refund(num_bytes)
        self.held -= num_bytes

    def refund_all(self) -> None:
        """Count the whole message out: its answer was taken, or it is given up. Idempotent."""
        self.refund(self.held)
