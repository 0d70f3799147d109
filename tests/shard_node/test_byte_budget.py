"""What connections may make a process hold, together and each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import OverloadedError
from shard_node.byte_budget import ByteAccount, ByteBudget, default_buffer_bytes
from shardrank_testing.errors import raises_kind

MAX_BYTES = 1000


class Sender:
    """Sends one message after the other: what is not complete gives way."""

    def __init__(self, budget: ByteBudget) -> None:
        self.account = ByteAccount(budget, self._give_way)
        self.is_complete, self.errors = False, list[OverloadedError]()

    def _give_way(self, error: OverloadedError) -> None:
        if not self.is_complete:
            self.errors.append(error)
            self.account.refund(self.account.held)


@pytest.fixture
def causes() -> Counter[str]:
    return Counter()


@pytest.fixture
def budget(causes: Counter[str]) -> ByteBudget:
    return ByteBudget(MAX_BYTES, lambda cause: causes.update([cause]))


def test_a_connection_may_hold_half_while_the_rest_is_free(budget, causes):
    first, second = Sender(budget), Sender(budget)
    first.account.charge(500)
    second.account.charge(250)
    with raises_kind("buffer_full", match=r"750 bytes .* of the limit max_buffered_bytes = 1000"):
        second.account.charge(1)
    assert (budget.buffered, causes) == (750, {"share": 1})
    second.account.refund(250)
    assert (budget.buffered, budget.holders) == (500, {first.account})


def test_who_holds_most_gives_way_to_a_small_message(budget, causes):
    greedy = [Sender(budget) for _ in range(4)]
    for sender, size in zip(greedy, (500, 250, 166, 50), strict=True):
        sender.account.charge(size)
    small = Sender(budget)
    small.account.charge(40)
    assert [len(sender.errors) for sender in greedy] == [1, 0, 0, 0]
    assert (budget.buffered, small.account.held, causes) == (506, 40, {"evicted": 1})


def test_complete_messages_do_not_give_way(budget, causes):
    greedy = [Sender(budget) for _ in range(4)]
    for sender, size in zip(greedy, (500, 250, 166, 84), strict=True):
        sender.account.hold(size)
        sender.is_complete = True
    with raises_kind("buffer_full", match="no connection that holds more can give way"):
        Sender(budget).account.charge(40)
    assert (budget.buffered, causes["full"]) == (1000, 1)


def test_answers_are_counted_though_they_can_not_be_refused(budget):
    sender = Sender(budget)
    sender.account.hold(MAX_BYTES + 1)
    assert budget.buffered == MAX_BYTES + 1
    with raises_kind("buffer_full"):
        sender.account.charge(1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400)), max_size=60))
def test_no_more_is_ever_held_and_small_messages_find_room(charges):
    budget = ByteBudget(MAX_BYTES)
    senders = [Sender(budget) for _ in range(6)]
    for number, size in charges:
        try:
            senders[number].account.charge(size)
        except OverloadedError:
            senders[number].account.refund(senders[number].account.held)
        assert budget.buffered == sum(sender.account.held for sender in senders) <= MAX_BYTES
    Sender(budget).account.charge(MAX_BYTES // 2 // 7)


def test_a_budget_has_room_for_four_of_the_largest_messages():
    assert default_buffer_bytes(1 << 30) == 4 << 30
    assert 4096 <= default_buffer_bytes(1024) <= 256 << 20
