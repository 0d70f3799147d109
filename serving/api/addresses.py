"""Who is connected from where, what that has cost, and who has to wait: one account for each address."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from serving.limits import RequestLimits

FORGIVEN_S = 0.02
"""Work that a completed request makes good: more than one of the largest allowed size takes at a front."""
UNTAKEN_S = 0.05
"""What an answer costs that its client does not take: more than making it, so that an address can't have many."""
HANDSHAKE_S = 0.001
"""What a TLS handshake costs the event loop; none is charged to a connection that completes a request."""
FREE_SHARE = 0.02
"""Of one core, that an address may use for nothing for ever: monitors that only connect do it."""
MAX_REMEMBERED = 16_384
_IPV6_BITS = 64


@dataclass(slots=True)
class _Account:
    is_trusted: bool
    connections: int = 0
    debt_s: float = 0.0
    at: float = 0.0
    until: float = 0.0


class Addresses:
    """Accounts of the addresses that connect, for all fronts of a process together. Belongs to one thread.

    An IPv6 client is its /64 network, since it may choose any address in there. Memory is bounded: besides addresses
    that are connected, at most `MAX_REMEMBERED` are kept; those that left first are forgotten first.
    """

    def __init__(self, limits: RequestLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._trusted = [ipaddress.ip_network(proxy, strict=False) for proxy in limits.trusted_proxies]
        self._connected: dict[str, _Account] = {}
        self._left: dict[str, _Account] = {}

    def admit(self, address: str) -> str | None:
        """Say why an address may not open one more connection; None if it may. "" is a peer that has none, who may."""
        account = self._find(client_key(address))
        if account is None or account.is_trusted:
            return None
        wait_s = account.until - self._clock()
        if wait_s > 0:
            return f"this address caused work without completing a request; it may connect again in {wait_s:.0f} s"
        allowed = self._limits.max_connections_per_address
        if allowed and account.connections >= allowed:
            return f"this address has as many connections as max_connections_per_address = {allowed} allows"
        return None

    def is_waiting(self, address: str) -> bool:
        """Say whether an address was punished and its time is not over."""
        account = self._find(client_key(address))
        return account is not None and account.until > self._clock()

    def owner(self, address: str) -> str:
        """Name the account of an address; "" for a trusted one, which stands for many."""
        key = client_key(address)
        account = self._find(key)
        return "" if account is not None and account.is_trusted else key

    def connections(self, address: str) -> int:
        """Count the open connections of an address."""
        account = self._connected.get(client_key(address))
        return 0 if account is None else account.connections

    def opened(self, address: str) -> None:
        """Count a connection in; `closed` must follow."""
        key = client_key(address)
        account = self._connected.get(key)
        if account is None:
            account = self._left.pop(key, None) or _Account(self._is_trusted(key))
            self._connected[key] = account
        account.connections += 1

    def closed(self, address: str) -> None:
        """Count a connection out."""
        key = client_key(address)
        account = self._connected[key]
        account.connections -= 1
        if not account.connections:
            del self._connected[key]
            if account.debt_s or account.until:
                self._remember(key, account)

    def spent(self, address: str, seconds: float) -> bool:
        """Charge work, in seconds of processor time, that no completed request accounts for yet.

        Returns whether the address is over `max_idle_work_ms`. It is punished then, and a connection of it that has
        completed nothing is to be ended. Never for a trusted proxy.
        """
        account = self._account(client_key(address))
        if account.is_trusted:
            return False
        now = self._clock()
        account.debt_s = max(0.0, account.debt_s - FREE_SHARE * (now - account.at)) + seconds
        account.at = now
        allowed_s = self._limits.max_idle_work_ms / 1000
        if not allowed_s or account.debt_s <= allowed_s:
            return False
        account.until = now + self._limits.penalty_s
        # So that it is not more than a penalty's worth of good behaviour away from being welcome again.
        account.debt_s = min(account.debt_s, 2 * allowed_s)
        return True

    def completed(self, address: str, count: int = 1) -> None:
        """Make work good, by requests that were answered."""
        account = self._connected.get(client_key(address))
        if account is not None and account.debt_s:
            account.debt_s = max(0.0, account.debt_s - FORGIVEN_S * count)

    def punish(self, address: str) -> None:
        """Let an address open no connection for `penalty_s`. Never a trusted proxy."""
        account = self._account(client_key(address))
        if not account.is_trusted:
            account.until = self._clock() + self._limits.penalty_s

    def __len__(self) -> int:
        return len(self._connected) + len(self._left)

    def _find(self, key: str) -> _Account | None:
        return self._connected.get(key) or self._left.get(key)

    def _account(self, key: str) -> _Account:
        account = self._find(key)
        if account is None:
            account = _Account(self._is_trusted(key))
            self._remember(key, account)
        return account

    def _remember(self, key: str, account: _Account) -> None:
        if len(self._left) >= MAX_REMEMBERED:
            del self._left[next(iter(self._left))]
        self._left[key] = account

    def _is_trusted(self, key: str) -> bool:
        if not key:
            return True
        network = ipaddress.ip_network(key)
        return any(proxy.version == network.version and network.overlaps(proxy) for proxy in self._trusted)


def client_key(address: str) -> str:
    """Turn an address into what its account is called: itself, or the /64 network of an IPv6 one."""
    return _network(address) if ":" in address else address


@lru_cache(4096)
def _network(address: str) -> str:
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_BITS), strict=False))
