"""The server's context where a library listens: uvicorn, and plain `loop.create_server`, on both event loops."""

from __future__ import annotations

import asyncio
import ssl

import httpx
import pytest
import uvicorn
import uvloop

from shard_node.tls import TlsClientConfig, TlsConfig, client_context, server_context
from shardrank_testing.certificates import Authority, needs_openssl
from shardrank_testing.nodes import NEVER_S

pytestmark = needs_openssl
on_every_loop = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


async def app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@on_every_loop
def test_uvicorn_shows_the_certificate_that_lies_in_the_file_now(loop, tmp_path):
    ca = Authority(tmp_path)
    shown, client = ca.issue("shown"), ca.issue("client")
    context = server_context(
        TlsConfig(cert=shown.cert, key=shown.key, client_ca=ca.cert), alpn=("http/1.1",), interval_s=0.0
    )
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, ssl_context_factory=lambda *_: context)
    mine = client_context(TlsClientConfig(ca=ca.cert, cert=client.cert, key=client.key))
    nobody = client_context(TlsClientConfig(ca=ca.cert))

    async def scenario() -> None:
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"https://127.0.0.1:{port}/"
        async with httpx.AsyncClient(verify=mine) as http:
            assert (await http.get(url)).text == "https"
            before = await certificate(port, mine)
            shown.replace(ca.issue("renewed"))
            assert await certificate(port, mine) != before
            assert (await http.get(url)).text == "https"
        async with httpx.AsyncClient(verify=nobody) as http:
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
                await http.get(url)
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://127.0.0.1:{port}/")
        server.should_exit = True
        await running

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), NEVER_S))
    assert context.refusals.counts == {"tls_missing_certificate": 1, "tls_plain_text": 1}


async def certificate(port: int, context: ssl.SSLContext) -> object:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("peercert")
    writer.close()
    del reader
    return found["serialNumber"]


@on_every_loop
def test_a_protocol_is_agreed_on_and_an_alert_says_why_a_client_is_refused(loop, tmp_path):
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    server, client, foreign = ca.issue("server"), ca.issue("client"), other.issue("foreign")
    context = server_context(TlsConfig(cert=server.cert, key=server.key, client_ca=ca.cert), alpn=("h2",))

    async def scenario() -> None:
        listening = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
        port = listening.sockets[0].getsockname()[1]
        good = client_context(TlsClientConfig(ca=ca.cert, cert=client.cert, key=client.key), alpn=("h2",))
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=good)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()
        bad = client_context(TlsClientConfig(ca=ca.cert, cert=foreign.cert, key=foreign.key), alpn=("h2",))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=bad)
        with pytest.raises(ssl.SSLError, match="UNKNOWN_CA"):
            await reader.read()
        writer.close()
        listening.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), NEVER_S))
    assert context.refusals.counts == {"tls_untrusted_certificate": 1}
