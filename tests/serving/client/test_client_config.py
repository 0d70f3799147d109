"""Addresses and certificates that a client refuses when it is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader.errors import ConfigError
from shardrank import Client

SCHEMES = "must be http://, https://, grpc:// or grpcs:// and a host"


@pytest.mark.parametrize(
    ("address", "files", "field", "problem"),
    [
        ("localhost:8080", {}, "address", SCHEMES),
        ("ftp://localhost", {}, "address", SCHEMES),
        ("http://", {}, "address", SCHEMES),
        ("http://localhost:99999", {}, "address", "Port out of range"),
        ("http://localhost:port", {}, "address", "Port could not be cast"),
        ("grpc://localhost", {}, "address", "needs a port"),
        ("grpc://localhost:8081/path", {}, "address", "more than scheme, host and port"),
        ("http://user@localhost", {}, "address", "more than scheme, host and port"),
        ("http://localhost?a=b", {}, "address", "more than scheme, host and port"),
        ("http://localhost#a", {}, "address", "more than scheme, host and port"),
        (["http://localhost", "localhost"], {}, "address", SCHEMES),
        ([], {}, "address", "there is none"),
        ("http://localhost", {"ca": "ca.pem"}, "address", "has no TLS"),
        ("grpc://localhost:1", {"cert": "a.pem", "key": "a.key"}, "address", "has no TLS"),
        ("https://localhost", {"cert": "a.pem"}, "cert", "given together"),
        ("grpcs://localhost", {"key": "a.key"}, "cert", "given together"),
        ("https://localhost", {"ca": "missing.pem"}, "ca", "No such file"),
        ("grpcs://localhost", {"ca": "missing.pem"}, "ca", "No such file"),
    ],
)
def test_an_unfit_address_or_file_is_refused(
    address: str | list[str], files: dict[str, str], field: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        Client(address, **{name: str(tmp_path / file) for name, file in files.items()})
    assert caught.value.field == field
