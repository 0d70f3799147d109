"""The wire over TLS: real sockets on both event loops, certificates made here."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from router.shard_client import ShardClient
from shard_node.errors import (
    CertificateRoleError,
    NodeUnavailableError,
    TlsConfigError,
    TlsHandshakeError,
)
from shard_node.training.push import Push
from shard_node.wire.address import Address
from shard_node.wire.listening import MAX_HANDSHAKES
from shard_node.wire.server import NodeServer
from shard_node.wire.tls import (
    EXPIRED,
    MISSING,
    PLAIN_TEXT,
    UNTRUSTED,
    FileBacked,
    TlsClientConfig,
    TlsConfig,
    TlsContext,
    TlsPeers,
    client_context,
    server_context,
)
from shardrank_testing.certificates import Authority, Pair, needs_openssl
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import (
    MODEL,
    NEVER_S,
    VERSION,
    connected,
    expected_films,
    pool_films,
    raw_peer,
    serving,
    until,
)

pytestmark = needs_openssl

ANY_PORT = Address.parse("127.0.0.1:0")
ROLE = CertificateRoleError.kind


class Papers:
    """A CA, and certificates by name: those of a node and a router, and those that should not get in."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.other_ca = Authority(folder / "ca"), Authority(folder / "other", "other-ca")
        self.pairs = {name: self.ca.issue(name, uris=[f"shardrank:{name}"]) for name in ("node", "router", "client")}
        self.pairs["expired"] = self.ca.issue("expired", days=-1)
        self.pairs["foreign"] = self.other_ca.issue("foreign")
        self.pairs["elsewhere"] = self.ca.issue("elsewhere", host="elsewhere.example")

    def node_context(self, name: str = "node", **fields) -> TlsContext:
        pair = self.pairs[name]
        return server_context(TlsConfig(cert=pair.cert, key=pair.key, client_ca=self.ca.cert, **fields))

    def router_context(
        self, name: str | None = "router", ca: Authority | None = None, **fields
    ) -> FileBacked[TlsContext]:
        pair = {} if name is None else {"cert": self.pairs[name].cert, "key": self.pairs[name].key}
        return client_context(TlsClientConfig(ca=(ca or self.ca).cert, **pair, **fields))


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    for name in ("ca", "other"):
        (folder / name).mkdir()
    return Papers(folder)


async def ask(client: ShardClient) -> None:
    np.testing.assert_array_equal(await pool_films(client, [7]), expected_films([7]))


async def refusal(server: NodeServer, tls: FileBacked[TlsContext] | None) -> NodeUnavailableError:
    """What a client with these certificates gets."""
    async with connected(server.addresses[0], tls=tls) as client:
        with pytest.raises(NodeUnavailableError) as caught:
            await ask(client)
        return caught.value


async def test_certificates_of_the_ca_are_accepted(papers):
    async with (
        serving(ANY_PORT, tls=papers.node_context()) as server,
        connected(server.addresses[0], tls=papers.router_context()) as client,
    ):
        await asyncio.gather(*(ask(client) for _ in range(20)))
        assert client.num_connections == 1
        many = [[row % 500 for row in range(300)] for _ in range(500)]
        np.testing.assert_array_equal(await pool_films(client, *many), expected_films(*many))
        assert await server.drain(NEVER_S)


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        ("expired", EXPIRED),
        ("foreign", UNTRUSTED),
        (None, MISSING),
        ("client", ROLE),
        ("node", ROLE),
    ],
)
async def test_a_client_without_access_is_refused_and_counted(shown, kind, papers, caplog):
    context = papers.node_context()
    with caplog.at_level(logging.INFO):
        async with serving(ANY_PORT, tls=context) as server:
            for _ in range(3):
                assert (await refusal(server, papers.router_context(shown))).kind == kind
            async with connected(server.addresses[0], tls=papers.router_context()) as client:
                await ask(client)
    assert context.peers.refusals == {kind: 3}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "shard_node.wire.tls"]
    assert line.startswith(f"refused a connection from 127.0.0.1: {kind}: ")
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(
    ("shown", "ca", "kind"),
    [
        ("foreign", "ca", UNTRUSTED),
        ("node", "other_ca", UNTRUSTED),
        ("elsewhere", "ca", UNTRUSTED),
        ("expired", "ca", EXPIRED),
        ("router", "ca", ROLE),
        ("client", "ca", ROLE),
    ],
)
async def test_a_node_without_a_valid_certificate_is_not_used(shown, ca, kind, papers):
    tls = papers.router_context("router", getattr(papers, ca))
    async with (
        serving(ANY_PORT, tls=papers.node_context(shown)) as server,
        connected(server.addresses[0], tls=tls) as client,
    ):
        with pytest.raises(TlsHandshakeError, match=str(server.addresses[0])) as caught:
            await ask(client)
        assert caught.value.kind == kind
        await until(lambda: server.num_connections == 0)


CLIENT_ROLES = "shardrank:operator or shardrank:router or shardrank:trainer"
ROLE_URIS = (("router", "spiffe://fleet/serve"), ("operator", "spiffe://fleet/ops"), ("node", "spiffe://fleet/node"))


@pytest.mark.parametrize("uri", ["shardrank:operator", "spiffe://fleet/ops"])
async def test_an_operator_gets_status_and_counts_but_no_rows(uri, papers):
    papers.pairs["operator"] = papers.ca.issue("operator", uris=["shardrank:node", uri])
    async with (
        serving(ANY_PORT, tls=papers.node_context(role_uris=ROLE_URIS)) as server,
        connected(server.addresses[0], tls=papers.router_context("operator")) as client,
    ):
        assert await client.counts(MODEL, VERSION, NEVER_S) == {}
        with pytest.raises(CertificateRoleError, match="frame type 1 is for shardrank:router"):
            await ask(client)
        assert (await client.info()).versions


@pytest.mark.parametrize(
    ("uris", "is_let"),
    [
        (["shardrank:trainer"], True),
        (["shardrank:router", "shardrank:trainer"], True),
        (["shardrank:router"], False),
        (["shardrank:operator"], False),
        ([], False),
    ],
)
async def test_gradients_are_pushed_by_trainers_alone(uris, is_let, papers):
    """Not even by those without a role, who may do all else."""
    papers.pairs["trainer"] = papers.ca.issue("trainer", uris=uris)
    async with (
        serving(ANY_PORT, tls=papers.node_context()) as server,
        connected(server.addresses[0], tls=papers.router_context("trainer")) as client,
    ):
        # The node does not train, which it says to a trainer only.
        with raises_kind("not_training" if is_let else "tls_certificate_role"):
            await client.push(MODEL, VERSION, Push(0, 1, {}), NEVER_S)
        if uris == ["shardrank:trainer"]:
            with raises_kind("tls_certificate_role", match="frame type 1 is for shardrank:router"):
                await ask(client)
        elif uris != ["shardrank:operator"]:
            await ask(client)


@pytest.mark.parametrize(
    ("client", "node", "warnings"),
    [
        ([], [], ["shardrank:node", "shardrank:operator or shardrank:router or shardrank:trainer"]),
        (
            ["spiffe://elsewhere/serve"],
            ["shardrank:node"],
            ["shardrank:operator or shardrank:router or shardrank:trainer"],
        ),
        (["spiffe://fleet/serve"], ["spiffe://fleet/node"], []),
        (["shardrank:client", "shardrank:router"], ["shardrank:node", "shardrank:router"], []),
    ],
)
async def test_a_peer_without_a_role_is_warned_about_once(client, node, warnings, papers, caplog):
    """And taken, as one with a role, or with a URI that stands for one."""
    papers.pairs |= {"taken": papers.ca.issue("taken", uris=client), "peer": papers.ca.issue("peer", uris=node)}
    mine, its = papers.router_context("taken", role_uris=ROLE_URIS), papers.node_context("peer", role_uris=ROLE_URIS)
    async with serving(ANY_PORT, tls=its) as server:
        for _ in range(2):
            async with connected(server.addresses[0], tls=mine) as connection:
                await ask(connection)
    assert sorted(re.findall(r"has no role: .*\(subjectAltName\) (.*)", caplog.text)) == warnings


async def test_plain_text_and_tls_on_the_wrong_port_are_refused(papers, caplog):
    context = papers.node_context()
    with caplog.at_level(logging.INFO):
        async with serving(ANY_PORT, tls=context) as server:
            await refusal(server, None)
            async with raw_peer(server.addresses[0]) as peer:
                peer.write(b"GET / HTTP/1.1\r\n\r\n")
                assert await peer.read_end() == b""
        async with serving(ANY_PORT) as plain:
            assert (await refusal(plain, papers.router_context())).kind == PLAIN_TEXT
    assert context.peers.refusals == {PLAIN_TEXT: 2}
    assert [record for record in caplog.records if record.exc_info] == []
    assert "it is a TLS handshake, and this address speaks plain text" in caplog.text


async def test_a_unix_socket_never_speaks_tls(papers, tmp_path):
    async with (
        serving(Address(path=str(tmp_path / "node.sock")), tls=papers.node_context()) as server,
        connected(server.addresses[0], tls=papers.router_context()) as client,
    ):
        await ask(client)


async def test_renewed_files_count_for_new_connections(papers, tmp_path):
    """Certificates of both sides, and the CA that the node trusts; open connections stay."""
    ca = Authority(tmp_path)
    node, router = ca.issue("node"), ca.issue("router")
    node.replace(papers.pairs["node"])
    router.replace(papers.pairs["expired"])
    ca_file = tmp_path / "client-ca.crt"
    ca_file.write_bytes(papers.ca.cert.read_bytes())
    context = server_context(TlsConfig(cert=node.cert, key=node.key, client_ca=ca_file), interval_s=0.0)
    mine = client_context(TlsClientConfig(ca=papers.ca.cert, cert=router.cert, key=router.key), interval_s=0.0)

    async with serving(ANY_PORT, tls=context) as server:
        assert (await refusal(server, mine)).kind == EXPIRED
        router.replace(papers.pairs["router"])
        async with connected(server.addresses[0], tls=mine) as client:
            await ask(client)
            renewed = ca.issue("renewed")
            node.replace(renewed)
            ca_file.write_bytes(ca.cert.read_bytes())
            new = client_context(TlsClientConfig(ca=ca.cert, cert=renewed.cert, key=renewed.key))
            async with connected(server.addresses[0], tls=new) as newcomer:
                await ask(newcomer)
            await ask(client)
            assert client.num_connections == 1
        # The CA that was removed is not trusted any more.
        assert (await refusal(server, papers.router_context("router", ca))).kind == UNTRUSTED


async def test_silent_connections_keep_nobody_out(papers):
    async with serving(ANY_PORT, tls=papers.node_context()) as server:
        address = server.addresses[0]
        silent = [await asyncio.open_connection(address.host, address.port) for _ in range(MAX_HANDSHAKES + 1)]
        # The oldest was ended to make room.
        assert await silent[0][0].read() == b""
        async with connected(address, tls=papers.router_context()) as client:
            await ask(client)
        for _, writer in silent:
            writer.close()


async def test_a_name_with_several_addresses_listens_at_each(papers):
    def is_free(address: Address) -> bool:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family) as probe:
            return probe.connect_ex((address.host, address.port)) != 0

    async with serving(Address("localhost", 0), tls=papers.node_context()) as server:
        for address in server.addresses:
            async with connected(address, tls=papers.router_context()) as client:
                await ask(client)
    for address in server.addresses:
        await until(lambda address=address: is_free(address))


def test_a_half_written_file_keeps_the_certificate_before(papers, tmp_path, caplog):
    """And warns once for each state of the files."""
    caplog.set_level("INFO", logger="shard_node")
    node, router = papers.pairs["node"], papers.pairs["router"]
    mine = Pair(tmp_path / "mine.crt", tmp_path / "mine.key")
    mine.replace(node)
    context = server_context(TlsConfig(cert=mine.cert, key=mine.key), interval_s=0.0)
    content = node.cert.read_bytes()

    def serial() -> str:
        """Return that of the certificate that a new handshake shows, of two ends in memory."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        trusting = client_context(TlsClientConfig(ca=papers.ca.cert)).get()
        client = trusting.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):
            for end in (client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return str(client.getpeercert()["serialNumber"])

    first = serial()
    mine.cert.write_bytes(content[: len(content) // 2])
    assert [serial(), serial(), serial()] == [first] * 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(mine.cert) in warning
    assert "stays in use" in warning
    mine.cert.write_bytes(router.cert.read_bytes())
    assert [serial(), serial()] == [first] * 2
    assert "MISMATCH" in caplog.records[1].getMessage()
    mine.key.write_bytes(router.key.read_bytes())
    assert serial() != first
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    assert "read again" in caplog.records[2].getMessage()


@pytest.mark.parametrize(
    ("field", "file", "message"),
    [
        ("cert", "missing", "No such file"),
        ("key", "missing", "No such file"),
        ("client_ca", "missing", "No such file"),
        ("cert", "rubbish", "must be a certificate and its private key"),
        ("key", "rubbish", "must be a certificate and its private key"),
        ("client_ca", "rubbish", "must be certificates of CAs"),
        ("client_ca", "empty", "must be certificates of CAs"),
        ("client_ca", "leaf", "none of its certificates is of a CA"),
        ("key", "router_key", "MISMATCH"),
        ("key", "encrypted", "not encrypted"),
        ("cert", "folder", "directory"),
    ],
)
def test_unusable_files_are_refused_by_name(field, file, message, papers, tmp_path):
    node = papers.pairs["node"]
    (tmp_path / "rubbish").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "leaf").write_bytes(node.cert.read_bytes())
    (tmp_path / "router_key").write_bytes(papers.pairs["router"].key.read_bytes())
    (tmp_path / "encrypted").write_bytes(papers.ca.encrypted_key("encrypted").read_bytes())
    config = TlsConfig(**{"cert": node.cert, "key": node.key, "client_ca": papers.ca.cert} | {field: tmp_path / file})
    with pytest.raises(TlsConfigError, match=message) as caught:
        server_context(config)
    assert str(tmp_path / file) in str(caught.value)


def test_a_client_has_a_certificate_and_its_key_or_neither(papers):
    with pytest.raises(ValidationError, match="both, or none"):
        TlsClientConfig(ca=papers.ca.cert, cert=papers.pairs["router"].cert)


def test_one_refusal_a_minute_is_logged_and_all_are_counted(caplog):
    now = [0.0]
    peers = TlsPeers(clock=lambda: now[0])
    for number in range(5000):
        peers.refuse(f"10.0.{number % 50}.1", TlsHandshakeError("no TLS", kind=PLAIN_TEXT))
    peers.refuse("", TlsHandshakeError("old TLS"))
    assert peers.refusals == {PLAIN_TEXT: 5000, "tls_handshake": 1}
    now[0] = 60.0
    peers.refuse("10.0.0.1", TlsHandshakeError("no TLS", kind=PLAIN_TEXT))
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from 10.0.0.1: tls_plain_text: no TLS (1 so far)",
        "refused a connection: tls_handshake: old TLS (1 so far)",
        "refused a connection from 10.0.0.1: tls_plain_text: no TLS (5001 so far)",
    ]
