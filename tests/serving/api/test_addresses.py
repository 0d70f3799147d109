from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.api.listening import FORGIVEN_S, MAX_REMEMBERED, Addresses, client_key
from serving.limits import RequestLimits

HOME, PROXY = "192.0.2.1", "10.1.2.3"
LIMITS = RequestLimits(
    max_connections_per_address=2, max_idle_work_ms=200, penalty_s=10.0, trusted_proxies=("10.0.0.0/8", "2001:db8:1::1")
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


def test_a_trusted_proxy_and_a_peer_without_an_address_have_as_many_as_they_like(addresses):
    for address in (PROXY, "", "2001:db8:1::1"):
        for _ in range(5):
            assert addresses.admit(address) is None
            addresses.opened(address)
        assert not addresses.spent(address, 100.0)
        addresses.punish(address)
        assert addresses.admit(address) is None


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


def test_connecting_anew_brings_no_new_budget(addresses):
    outcomes = []
    for _ in range(30):
        addresses.opened(HOME)
        outcomes.append(addresses.spent(HOME, 0.03))
        addresses.closed(HOME)
    assert outcomes.index(True) == 6


def test_completed_requests_make_work_good(addresses):
    addresses.opened(HOME)
    for _ in range(1000):
        assert not addresses.spent(HOME, 0.9 * FORGIVEN_S)
        addresses.completed(HOME)
    assert not addresses.spent(HOME, 0.19)


def test_a_little_work_now_and_then_is_free(addresses, clock):
    for _ in range(10_000):
        addresses.opened(HOME)
        assert not addresses.spent(HOME, 0.001)
        addresses.closed(HOME)
        clock.now += 0.1


def test_an_ipv6_client_is_its_network_and_a_mapped_address_is_itself():
    assert client_key("2001:db8::1") == client_key("2001:db8::ffff:1%eth0") == "2001:db8::/64"
    assert client_key("2001:db8:0:1::1") != client_key("2001:db8::1")
    assert client_key("::ffff:192.0.2.1") == HOME


def test_zero_turns_each_limit_off(clock):
    off = Addresses(RequestLimits(max_connections_per_address=0, max_idle_work_ms=0, penalty_s=0), clock)
    for _ in range(5000):
        off.opened(HOME)
    assert not off.spent(HOME, 1e6)
    off.punish(HOME)
    assert off.admit(HOME) is None


def test_what_is_remembered_of_those_who_left_is_bounded(addresses):
    for number in range(MAX_REMEMBERED + 100):
        addresses.punish(f"172.16.{number // 250}.{number % 250}")
    assert len(addresses) == MAX_REMEMBERED
    assert addresses.admit("172.16.0.0") is None
    assert addresses.admit(f"172.16.{MAX_REMEMBERED // 250}.{MAX_REMEMBERED % 250}")


def test_who_did_nothing_wrong_is_forgotten_at_once(addresses):
    for number in range(1000):
        addresses.opened(f"172.16.{number // 250}.{number % 250}")
        addresses.closed(f"172.16.{number // 250}.{number % 250}")
    assert len(addresses) == 0


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "::1"]), st.booleans())))
def test_connections_are_counted_as_they_come_and_go(steps):
    addresses, open_now = Addresses(RequestLimits(), Clock()), {"a": 0, "b": 0, "::1": 0}
    for address, is_opening in steps:
        name = {"a": "192.0.2.1", "b": "192.0.2.2"}.get(address, address)
        if is_opening:
            addresses.opened(name)
            open_now[address] += 1
        elif open_now[address]:
            addresses.closed(name)
            open_now[address] -= 1
        assert addresses.connections(name) == open_now[address]


def test_a_proxy_that_is_no_network_is_refused():
    with pytest.raises(ValidationError, match="does not appear to be"):
        RequestLimits(trusted_proxies=("proxy.example",))
