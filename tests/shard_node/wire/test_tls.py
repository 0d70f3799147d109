"""The wire over TLS: real sockets on both event loops, certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

from shard_node.errors import (
    ExpiredCertificateError,
    MissingCertificateError,
    NodeUnavailableError,
    PlainTextError,
    TlsHandshakeError,
    UntrustedCertificateError,
)
from shard_node.wire.address import MAX_HANDSHAKES, Address, listen
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer
from shard_node.wire.tls import (
    ReloadingContext,
    TlsClientConfig,
    TlsConfig,
    client_context,
    server_context,
)
from shardrank_testing.certificates import Authority, Pair, needs_openssl
from shardrank_testing.nodes import (
    EVERY_PLACE,
    MODEL,
    NEVER_S,
    VERSION,
    RawPeer,
    connected,
    film_bags,
    reference_engine,
    serving,
    small_node,
    until,
)

pytestmark = needs_openssl
on_every_loop = pytest.mark.parametrize("place", EVERY_PLACE[0::2], ids=str)

EXPECTED = reference_engine().pool(film_bags([7]))[1]
ANY_PORT = Address.parse("127.0.0.1:0")


@dataclass(frozen=True)
class Papers:
    """A CA with a node and a router, and those that should not get in."""

    ca: Authority
    other_ca: Authority
    node: Pair
    router: Pair
    expired: Pair
    expired_node: Pair
    foreign: Pair
    elsewhere: Pair


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> Papers:
    ca = Authority(tmp_path_factory.mktemp("ca"))
    other = Authority(tmp_path_factory.mktemp("other"), "other-ca")
    return Papers(
        ca,
        other,
        ca.issue("node"),
        ca.issue("router"),
        ca.issue("expired", days=-1),
        ca.issue("expired-node", days=-1),
        other.issue("foreign"),
        ca.issue("elsewhere", host="elsewhere.example"),
    )


def node_context(papers: Papers, pair: Pair | None = None, **options):
    pair = pair or papers.node
    return server_context(TlsConfig(cert=pair.cert, key=pair.key, client_ca=papers.ca.cert), **options)


def router_context(papers: Papers, pair: Pair | None, ca: Authority | None = None, **options):
    shown = {} if pair is None else {"cert": pair.cert, "key": pair.key}
    return client_context(TlsClientConfig(ca=(ca or papers.ca).cert, **shown), **options)


async def ask(client: ShardClient) -> None:
    answer = await client.pool(MODEL, VERSION, film_bags([7]), time.monotonic() + NEVER_S)
    np.testing.assert_array_equal(answer.sums[1], EXPECTED)


async def refusal(client: ShardClient) -> NodeUnavailableError:
    with pytest.raises(NodeUnavailableError) as caught:
        await ask(client)
    return caught.value


@contextlib.asynccontextmanager
async def tls_serving(context: ReloadingContext) -> AsyncIterator[NodeServer]:
    """A node that speaks TLS on a free port."""
    server = NodeServer(small_node(), tls=context)
    await server.start([ANY_PORT])
    try:
        yield server
    finally:
        await server.close()


@on_every_loop
def test_both_sides_with_certificates_of_the_ca_understand_each_other(place, papers):
    async def scenario() -> None:
        async with (
            tls_serving(node_context(papers)) as server,
            connected(server.addresses[0], tls=router_context(papers, papers.router)) as client,
        ):
            assert server.addresses[0].port
            await asyncio.gather(*(ask(client) for _ in range(20)))
            assert client.connections == 1
            many = film_bags(*([row % 500 for row in range(300)] for _ in range(2000)))
            answer = await client.pool(MODEL, VERSION, many, time.monotonic() + NEVER_S)
            np.testing.assert_array_equal(answer.sums[1], reference_engine().pool(many)[1])
            assert await server.drain(NEVER_S)

    place.run(scenario())


@on_every_loop
@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        ("expired", ExpiredCertificateError),
        ("foreign", UntrustedCertificateError),
        (None, MissingCertificateError),
    ],
)
def test_a_client_that_must_not_get_in_is_told_why_and_the_node_takes_note(place, shown, kind, papers, caplog):
    context = node_context(papers)

    async def scenario() -> None:
        pair = None if shown is None else getattr(papers, shown)
        async with tls_serving(context) as server:
            for _ in range(3):
                async with connected(server.addresses[0], tls=router_context(papers, pair)) as client:
                    assert type(await refusal(client)) is kind
            async with connected(server.addresses[0], tls=router_context(papers, papers.router)) as client:
                await ask(client)

    with caplog.at_level(logging.INFO):
        place.run(scenario())
    assert context.refusals.counts == {kind.kind: 3}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "shard_node.wire.tls"]
    assert line.startswith(f"refused a connection from 127.0.0.1: {kind.kind}: ")
    assert [record for record in caplog.records if record.exc_info] == []


@on_every_loop
@pytest.mark.parametrize(
    ("shown", "ca", "kind"),
    [
        ("foreign", "ca", UntrustedCertificateError),
        ("node", "other_ca", UntrustedCertificateError),
        ("elsewhere", "ca", UntrustedCertificateError),
        ("expired_node", "ca", ExpiredCertificateError),
    ],
)
def test_a_router_does_not_talk_to_a_node_that_it_can_t_believe(place, shown, ca, kind, papers):
    async def scenario() -> None:
        async with (
            tls_serving(node_context(papers, getattr(papers, shown))) as server,
            connected(server.addresses[0], tls=router_context(papers, papers.router, getattr(papers, ca))) as client,
        ):
            error = await refusal(client)
            assert type(error) is kind
            assert str(server.addresses[0]) in str(error)
            assert server.num_connections == 0

    place.run(scenario())


@on_every_loop
def test_plain_text_on_a_tls_port_is_refused_and_counted(place, papers, caplog):
    context = node_context(papers)

    async def scenario() -> None:
        async with tls_serving(context) as server:
            async with connected(server.addresses[0]) as client:
                await refusal(client)
            peer = await RawPeer.connect(server.addresses[0])
            peer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await peer.read_end() == b""
            await peer.close()

    with caplog.at_level(logging.INFO):
        place.run(scenario())
    assert context.refusals.counts == {PlainTextError.kind: 2}
    assert [record for record in caplog.records if record.exc_info] == []


@on_every_loop
def test_tls_on_a_plain_port_is_told_by_both_sides(place, papers, caplog):
    async def scenario() -> None:
        async with (
            serving(ANY_PORT) as server,
            connected(server.addresses[0], tls=router_context(papers, papers.router)) as client,
        ):
            assert type(await refusal(client)) is PlainTextError

    with caplog.at_level(logging.WARNING):
        place.run(scenario())
    assert "it is a TLS handshake, and this address speaks plain text" in caplog.text


@on_every_loop
def test_a_unix_socket_never_speaks_tls(place, papers, tmp_path):
    async def scenario() -> None:
        server = NodeServer(small_node(), tls=node_context(papers))
        await server.start([Address(path=str(tmp_path / "node.sock"))])
        async with connected(server.addresses[0], tls=router_context(papers, papers.router)) as client:
            await ask(client)
        await server.close()

    place.run(scenario())


@on_every_loop
def test_renewed_certificates_and_another_ca_count_for_new_connections_and_open_ones_stay(place, papers, tmp_path):
    ca = Authority(tmp_path)
    node, router = ca.issue("node"), ca.issue("router")
    old_router = router_context(papers, papers.router)
    node.replace(papers.node)
    ca_file = tmp_path / "client-ca.crt"
    ca_file.write_bytes(papers.ca.cert.read_bytes())
    config = TlsConfig(cert=node.cert, key=node.key, client_ca=ca_file)
    context = server_context(config, interval_s=0.0)

    async def scenario() -> None:
        async with tls_serving(context) as server:
            async with connected(server.addresses[0], tls=old_router) as client:
                await ask(client)
                node.replace(ca.issue("renewed"))
                beside = tmp_path / "beside"
                beside.write_bytes(ca.cert.read_bytes())
                beside.replace(ca_file)
                new = client_context(TlsClientConfig(ca=ca.cert, cert=router.cert, key=router.key))
                async with connected(server.addresses[0], tls=new) as newcomer:
                    await ask(newcomer)
                await ask(client)
                assert client.connections == 1
            # The CA that was taken away is not believed any more.
            both = client_context(TlsClientConfig(ca=ca.cert, cert=papers.router.cert, key=papers.router.key))
            async with connected(server.addresses[0], tls=both) as client:
                assert type(await refusal(client)) is UntrustedCertificateError

    place.run(scenario())


@on_every_loop
def test_a_client_shows_its_renewed_certificate_when_it_connects_again(place, papers, tmp_path):
    mine = Pair(tmp_path / "mine.crt", tmp_path / "mine.key")
    mine.replace(papers.expired)
    context = router_context(papers, mine, interval_s=0.0)

    async def scenario() -> None:
        async with tls_serving(node_context(papers)) as server:
            async with connected(server.addresses[0], tls=context) as client:
                assert type(await refusal(client)) is ExpiredCertificateError
            mine.replace(papers.router)
            async with connected(server.addresses[0], tls=context) as client:
                await ask(client)

    place.run(scenario())


@on_every_loop
def test_with_tls_1_2_too_a_client_without_a_certificate_is_refused_and_told(place, papers):
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.load_verify_locations(papers.ca.cert)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    context = node_context(papers)

    async def scenario() -> None:
        async with tls_serving(context) as server, connected(server.addresses[0], tls=older) as client:
            error = await refusal(client)
            assert type(error) is TlsHandshakeError
            assert "HANDSHAKE_FAILURE" in str(error)

    place.run(scenario())
    assert context.refusals.counts == {MissingCertificateError.kind: 1}


@on_every_loop
def test_old_versions_of_tls_are_not_spoken(place, papers):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(papers.ca.cert)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.deprecated_call():
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1

    async def scenario() -> None:
        async with (
            tls_serving(node_context(papers)) as server,
            connected(server.addresses[0], tls=old) as client,
        ):
            assert type(await refusal(client)) is TlsHandshakeError

    place.run(scenario())


@on_every_loop
def test_those_who_connect_and_say_nothing_don_t_keep_others_out(place, papers):
    async def scenario() -> None:
        async with tls_serving(node_context(papers)) as server:
            address = server.addresses[0]
            silent = [await asyncio.open_connection(address.host, address.port) for _ in range(MAX_HANDSHAKES + 1)]
            # The oldest was ended to make room.
            assert await silent[0][0].read() == b""
            async with connected(address, tls=router_context(papers, papers.router)) as client:
                await ask(client)
            for _, writer in silent:
                writer.close()

    place.run(scenario())


@on_every_loop
def test_a_name_with_several_addresses_is_listened_to_at_each_and_all_are_let_go(place, papers):
    async def scenario() -> None:
        made: list[asyncio.BaseProtocol] = []
        listener = await listen(
            Address("localhost", 0), lambda: made.append(asyncio.Protocol()), tls=node_context(papers)
        )
        for address in listener.addresses:
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.close()
        listener.close()
        listener.close()
        for address in listener.addresses:
            await until(lambda address=address: _is_free(address))

    place.run(scenario())


def _is_free(address: Address) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        return probe.connect_ex((address.host, address.port)) != 0
