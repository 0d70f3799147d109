"""Files of TLS: what is refused at the start, what happens when they change, and how much is logged of refusals."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from pydantic import ValidationError

from shard_node.errors import PlainTextError, TlsConfigError
from shard_node.wire.tls import (
    MAX_LINES_PER_MINUTE,
    Refusals,
    TlsClientConfig,
    TlsConfig,
    client_context,
    server_context,
)
from shardrank_testing.certificates import Authority, Pair, needs_openssl


@pytest.fixture(scope="module")
def ca(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def node(ca) -> Pair:
    return ca.issue("node")


@pytest.fixture(scope="module")
def router(ca) -> Pair:
    return ca.issue("router")


@pytest.fixture(scope="module")
def encrypted(ca) -> Path:
    return ca.encrypted_key("encrypted")


@needs_openssl
def test_a_half_written_file_keeps_the_certificate_before_it_and_warns_once(ca, node, router, tmp_path, caplog):
    mine = Pair(tmp_path / "mine.crt", tmp_path / "mine.key")
    mine.replace(node)
    config = TlsConfig(cert=mine.cert, key=mine.key)
    context = server_context(config, interval_s=0.0)
    whole = node.cert.read_bytes()

    def serial() -> str:
        """Of the certificate that a new handshake shows, by way of two ends in memory."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context(TlsClientConfig(ca=ca.cert)).wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):
            for end in (client, server):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        return str(client.getpeercert()["serialNumber"])

    first = serial()
    mine.cert.write_bytes(whole[: len(whole) // 2])
    assert [serial(), serial(), serial()] == [first] * 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(mine.cert) in warning
    assert "stays in use" in warning
    # The certificate is whole, its key not there yet: one more state of the files, one more line.
    mine.cert.write_bytes(router.cert.read_bytes())
    assert [serial(), serial()] == [first] * 2
    assert "the key does not belong" in caplog.records[1].getMessage()
    mine.key.write_bytes(router.key.read_bytes())
    assert serial() != first
    assert len(caplog.records) == 2


@needs_openssl
@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ({"cert": "missing"}, "missing", "No such file"),
        ({"key": "missing"}, "missing", "No such file"),
        ({"client_ca": "missing"}, "missing", "No such file"),
        ({"cert": "rubbish"}, "rubbish", "no usable certificate"),
        ({"key": "rubbish"}, "rubbish", "no usable private key"),
        ({"client_ca": "rubbish"}, "rubbish", "no usable certificate"),
        ({"client_ca": "empty"}, "empty", "no usable certificate"),
        ({"client_ca": "leaf"}, "leaf", "none of its certificates is of a CA"),
        ({"key": "router_key"}, "router_key", "does not belong to the certificate"),
        ({"key": "encrypted"}, "encrypted", "the key is encrypted"),
        ({"cert": "folder"}, "folder", "directory"),
        ({"cert": "long"}, "long", "longer than 1048576 bytes"),
    ],
)
def test_files_that_do_not_fit_are_refused_at_the_start_by_name(
    change, named, message, ca, node, router, encrypted, tmp_path
):
    (tmp_path / "rubbish").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "long").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "leaf").write_bytes(node.cert.read_bytes())
    (tmp_path / "router_key").write_bytes(router.key.read_bytes())
    (tmp_path / "encrypted").write_bytes(encrypted.read_bytes())
    good = {"cert": node.cert, "key": node.key, "client_ca": ca.cert}
    config = TlsConfig(**good | {name: tmp_path / file for name, file in change.items()})
    with pytest.raises(TlsConfigError, match=message) as caught:
        server_context(config)
    assert str(tmp_path / named) in str(caught.value)


@needs_openssl
def test_a_client_has_a_certificate_and_its_key_or_neither(ca, router):
    with pytest.raises(ValidationError, match="both, or none"):
        TlsClientConfig(ca=ca.cert, cert=router.cert)


def test_of_many_refusals_few_are_logged_and_all_are_counted(caplog):
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for number in range(5000):
        refusals.add(f"10.0.{number % 50}.1", PlainTextError("no TLS"))
    assert refusals.counts == {"tls_plain_text": 5000}
    assert len(caplog.records) == MAX_LINES_PER_MINUTE
    now[0] = 61.0
    for number in range(5000):
        refusals.add(f"10.0.{number % 5}.1", PlainTextError("no TLS"))
    # Those five were told a minute ago.
    assert len(caplog.records) == MAX_LINES_PER_MINUTE
    now[0] = 700.0
    refusals.add("10.0.0.1", PlainTextError("no TLS"))
    assert len(caplog.records) == MAX_LINES_PER_MINUTE + 1
