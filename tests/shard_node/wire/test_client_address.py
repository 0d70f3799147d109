from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.errors import AddressError
from shard_node.wire.address import Address


@pytest.mark.parametrize(
    ("text", "expected", "normal"),
    [
        ("tcp://shard-0.local:7000", Address("shard-0.local", 7000), "tcp://shard-0.local:7000"),
        ("10.0.0.3:0", Address("10.0.0.3", 0), "tcp://10.0.0.3:0"),
        ("tcp://[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535), "tcp://[fe80::1%eth0]:65535"),
        ("[::1]:80", Address("::1", 80), "tcp://[::1]:80"),
        ("unix:/run/node.sock", Address(path="/run/node.sock"), "unix:/run/node.sock"),
        ("unix:///run/a b/node", Address(path="/run/a b/node"), "unix:/run/a b/node"),
    ],
)
def test_an_address_is_parsed_and_written_back(text, expected, normal):
    address = Address.parse(text)
    assert address == expected
    assert str(address) == normal
    assert Address.parse(str(address)) == address
    assert address.is_unix == bool(expected.path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node",
        "node:",
        ":7000",
        "node:port",
        "node:65536",
        "node:-1",
        "::1:80",
        "http://node:80",
        "tcp://node:80/path",
        "tcp://user@node:80",
        "no de:80",
        "unix:",
        "unix:relative",
        "unix://host/path",
        "unix:/",
        "unix:/folder/",
        "unix:////run/x",
        "unix:/" + "x" * 107,
        "unix:/" + "ü" * 54,
    ],
)
def test_a_wrong_address_is_refused_by_its_text(text):
    with pytest.raises(AddressError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_an_address_error(text):
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.parse(str(address)) == address
