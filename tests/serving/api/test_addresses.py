from __future__ import annotations

import pytest

from serving.api.listening import MAX_REMEMBERED, Addresses
from serving.limits import RequestLimits
from shardrank_testing.waiting import Clock

HOME = "192.0.2.1"
LIMITS = RequestLimits(max_connections_per_address=2, max_idle_work_ms=200, penalty_s=10.0)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def addresses(clock) -> Addresses:
    return Addresses(LIMITS, clock)


def test_an_address_has_so_many_connections_and_not_one_more(addresses):
    for _ in range(2):
        assert addresses.admit(HOME) is None
        addresses.opened(HOME)
    assert "max_connections_per_address = 2" in addresses.admit(HOME)
    assert addresses.admit("192.0.2.2") is None
    addresses.closed(HOME)
    assert addresses.admit(HOME) is None
    assert addresses.connections(HOME) == 1


def test_who_works_for_nothing_has_to_wait_and_is_welcome_again(addresses, clock):
    addresses.opened(HOME)
    assert not addresses.spent(HOME, 0.15)
    assert addresses.spent(HOME, 0.06)
    assert addresses.is_waiting(HOME)
    assert "again in 10 s" in addresses.admit(HOME)
    addresses.closed(HOME)
    assert addresses.admit(HOME)
    clock.now += 10.1
    assert addresses.admit(HOME) is None


def test_what_is_remembered_of_those_who_left_is_bounded(addresses):
    for number in range(MAX_REMEMBERED + 100):
        addresses.punish(f"172.16.{number // 250}.{number % 250}")
    assert len(addresses) == MAX_REMEMBERED
    assert addresses.admit("172.16.0.0") is None
    assert addresses.admit(f"172.16.{MAX_REMEMBERED // 250}.{MAX_REMEMBERED % 250}")
