"""TLS and tokens on every port of a serving process: who gets in, who does not and is counted. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import re
import shutil
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from serving.api.documents import HIDDEN_PROBLEMS
from serving.api.grpc import wire as frames
from serving.api.tokens import Scope, TokenFile, new_token
from serving.client import RetryPolicy
from serving.config import ServeConfig
from serving.errors import PermissionDeniedError, UnauthenticatedError
from serving.limits import RequestLimits
from serving.proto.inference import open_inference_pb2 as inference
from serving.proto.shardrank.v1 import ranking_pb2, ranking_pb2_grpc
from serving.rank.service import RankingService
from serving.server import Listening, serve
from shard_node.wire import listening
from shard_node.wire.tls import TlsClientConfig, TlsConfig, client_context
from shardrank_testing.certificates import Authority, Pair, needs_openssl
from shardrank_testing.client_calls import CLIENTS, calling, rank_arguments
from shardrank_testing.http2_peer import Http2Peer
from shardrank_testing.serving_api import (
    MODEL,
    ApiModel,
    Gate,
    api_request,
    gated_service,
    rank_message,
    refused_call,
    served_service,
    until,
)

pytestmark = needs_openssl

ONCE = RetryPolicy(max_attempts=1)
RANK = f"/v1/models/{MODEL}:rank"
REQUEST = api_request(1)


@dataclass(frozen=True)
class Papers:
    """What the server shows and asks for, and what clients may show."""

    ca: Authority
    server: Pair
    client: Pair
    expired: Pair
    foreign: Pair
    tokens: Path
    token: dict[Scope, str]

    def context(self, shown: Pair | None, alpn: str = "http/1.1") -> ssl.SSLContext:
        pair = {} if shown is None else {"cert": shown.cert, "key": shown.key}
        context = client_context(TlsClientConfig(ca=self.ca.cert, **pair)).get()
        context.set_alpn_protocols([alpn])
        return context

    def https(self, port: int, shown: Pair | None = None, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=self.context(shown), **options)

    def channel(self, port: int, shown: Pair | None = None) -> grpc.aio.Channel:
        pair = (None, None) if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
        credentials = grpc.ssl_channel_credentials(self.ca.cert.read_bytes(), *pair)
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ca, other = Authority(folder), Authority(folder, "other")
    made = {scope: new_token(scope, scope) for scope in ("rank", "describe", "admin")}
    path = folder / "tokens.json"
    write_tokens(path, *(entry for _, entry in made.values()))
    return Papers(
        ca,
        ca.issue("server"),
        ca.issue("client"),
        ca.issue("expired", days=-1),
        other.issue("foreign"),
        path,
        {scope: token for scope, (token, _) in made.items()},
    )


def write_tokens(path: Path, *entries: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(TokenFile(tokens=entries).model_dump_json())
    beside.replace(path)


@contextlib.asynccontextmanager
async def protected(
    service: RankingService, papers: Papers, *, mutual: bool = True, tokens: bool = False, tls: bool = True
) -> AsyncIterator[Listening]:
    """A whole server, with its port for operators."""
    mine = TlsConfig(cert=papers.server.cert, key=papers.server.key, client_ca=papers.ca.cert if mutual else None)
    config = ServeConfig(
        http_port=0,
        grpc_port=0,
        admin_port=0,
        shutdown_delay_s=0,
        tokens=papers.tokens if tokens else None,
    )
    ready: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(service, config, partial(asyncio.sleep, 0), ready.set_result, mine if tls else None)
    )
    try:
        await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
        yield ready.result()
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def refused(service: RankingService) -> dict[tuple[str, str, str], int]:
    """What the metrics count, by API, method and kind, of connections and tokens."""
    line = r'^shardrank_errors_total\{api="(\w+)",kind="(\w+)",method="(connection|authorization)"\} (\d+)\.0$'
    found = re.findall(line, service.metrics.render().decode(), re.MULTILINE)
    return {(api, method, kind): int(count) for api, kind, method, count in found}


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """No defect and no traceback is logged."""
    with caplog.at_level(logging.INFO):
        yield caplog
    assert [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= 40] == []
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.fixture
def service(api_model: ApiModel) -> RankingService:
    """One that its server closes."""
    return served_service(api_model)


async def rank_over(channel: grpc.aio.Channel, token: str = "") -> Any:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel:
        return await ranking_pb2_grpc.RankingServiceStub(channel).Rank(
            rank_message(REQUEST), metadata=metadata, timeout=20
        )


async def test_a_certificate_and_a_token_open_every_port(service, papers, quiet):
    token = papers.token["admin"]
    async with protected(service, papers, tokens=True) as listening:
        http, at_grpc = f"https://127.0.0.1:{listening.http_port}", f"grpcs://127.0.0.1:{listening.grpc_port}"
        bearer = {"authorization": f"Bearer {token}"}
        async with papers.https(listening.http_port, papers.client, headers=bearer) as client:
            scores = (await client.post(RANK, json=REQUEST)).json()["scores"]
            for port in (listening.http_port, listening.admin_port):
                metrics = await client.get(f"https://127.0.0.1:{port}/metrics")
                assert (metrics.status_code, "shardrank_requests_total" in metrics.text) == (200, True)
        answer = await rank_over(papers.channel(listening.grpc_port, papers.client), token)
        assert list(answer.scores) == pytest.approx(scores)
        mine = {"ca": papers.ca.cert, "cert": papers.client.cert, "key": papers.client.key, "timeout_ms": 20_000}
        for kind, address in itertools.product(CLIENTS, (http, at_grpc)):
            async with calling(kind, address, token=token, **mine) as call:
                result = await call("rank", MODEL, **rank_arguments(REQUEST))
                assert list(result.scores) == pytest.approx(scores)
                assert (await call("describe", MODEL)).model == MODEL
            async with calling(kind, address, retry=ONCE, **mine) as call:
                with pytest.raises(UnauthenticatedError, match="a token is needed"):
                    await call("describe", MODEL)
            async with calling(kind, address, token=papers.token["describe"], retry=ONCE, **mine) as call:
                with pytest.raises(PermissionDeniedError, match="'rank' is needed here"):
                    await call("rank", MODEL, **rank_arguments(REQUEST))
    assert {key for key in refused(service) if key[1] == "connection"} == set()


@pytest.mark.parametrize("api", ["http", "grpc", "admin"])
@pytest.mark.parametrize(
    ("who", "kind"),
    [
        ("none", "tls_missing_certificate"),
        ("expired", "tls_expired_certificate"),
        ("foreign", "tls_untrusted_certificate"),
        ("plain text", "tls_plain_text"),
    ],
)
async def test_a_peer_without_its_papers_is_refused_and_counted(service, papers, quiet, api, who, kind):
    """By kind, logged once, and no other peer is kept out by it."""
    counted = ("grpc" if api == "grpc" else "http", "connection", kind)
    shown = {"none": None, "expired": papers.expired, "foreign": papers.foreign, "plain text": papers.client}[who]
    async with protected(service, papers) as listening:
        port = listening.http_port if api == "http" else listening.admin_port
        plain = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
        is_plain = who == "plain text"
        for _ in range(3):
            if api == "grpc":
                at_grpc = f"127.0.0.1:{listening.grpc_port}"
                shown_over = papers.channel(listening.grpc_port, shown)
                with refused_call(grpc.StatusCode.UNAVAILABLE):
                    await rank_over(grpc.aio.insecure_channel(at_grpc) if is_plain else shown_over)
                continue
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await (plain if is_plain else papers.https(port, shown)).get("/healthz")
        await until(lambda: refused(service).get(counted, 0) >= 3)
        async with papers.https(listening.http_port, papers.client) as client:
            assert (await client.get("/healthz")).status_code == 200
        assert set(refused(service)) == {counted}
    (line,) = [record.getMessage() for record in quiet.records if "refused" in record.getMessage()]
    assert line.startswith(f"refused a connection from 127.0.0.1: {kind}: ")


ADMIN = "admin port"
RIGHTS = [
    ("rank", "POST", RANK),
    ("rank", "POST", f"/v1/models/{MODEL}:lookup"),
    ("rank", "POST", f"/v2/models/{MODEL}/infer"),
    ("describe", "GET", "/v1/models"),
    ("describe", "GET", f"/v1/models/{MODEL}"),
    ("describe", "GET", "/v2"),
    ("describe", "GET", f"/v2/models/{MODEL}/config"),
    ("describe", "GET", f"/v2/models/{MODEL}/stats"),
    ("describe", "GET", f"/v2/models/{MODEL}/ready"),
    ("describe", "GET", f"/v2/models/{MODEL}/versions/7/ready"),
    ("describe", "POST", "/v2/repository/index"),
    ("describe", "GET", "/docs"),
    ("describe", "GET", "/openapi.json"),
    ("admin", "GET", "/metrics"),
    ("admin", "GET", ADMIN),
]


async def test_every_path_needs_its_right_and_refuses_other_tokens(service, papers):
    """401 without a known token, 403 with a narrower one."""
    counts: Counter[tuple[str, str, str]] = Counter()
    async with (
        protected(service, papers, mutual=False, tokens=True) as listening,
        papers.https(listening.http_port) as client,
    ):
        for right, method, path in RIGHTS:
            url = f"https://127.0.0.1:{listening.admin_port}/metrics" if path is ADMIN else path
            narrower = {"rank": "describe", "describe": "unknown", "admin": "rank"}[right]
            for scope in (None, "unknown", narrower, right):
                headers = {} if scope is None else {"authorization": f"Bearer {papers.token.get(scope, scope)}"}
                answer = await client.request(method, url, json=REQUEST if method == "POST" else None, headers=headers)
                if scope == right:
                    assert answer.status_code not in (401, 403), path
                    continue
                status, kind = (403, "permission_denied") if scope in papers.token else (401, "unauthenticated")
                assert answer.status_code == status, path
                assert status == 401 or f"'{right}' is needed here" in answer.text
                assert (answer.headers.get("shardrank-error-kind") or answer.json()["error"]["kind"]) == kind
                assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
                counts["http", "authorization", kind] += 1
        assert refused(service) == counts


async def grpc_status(call: Any) -> tuple[grpc.StatusCode, str]:
    with contextlib.suppress(grpc.RpcError):
        async for _ in call:
            """Whatever is answered."""
    return await call.code(), str(dict(await call.trailing_metadata()).get("shardrank-error-kind", ""))


async def test_over_grpc_a_missing_or_narrow_token_is_refused(service, papers):
    calls = {
        "/shardrank.v1.RankingService/Rank": rank_message(REQUEST),
        "/shardrank.v1.RankingService/GetModel": ranking_pb2.GetModelRequest(model=MODEL),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(
            list_services="*"
        ),
        "/inference.GRPCInferenceService/ModelReady": inference.ModelReadyRequest(name=MODEL),
    }
    code, tokens = grpc.StatusCode, papers.token
    none, narrow = (code.UNAUTHENTICATED, "unauthenticated"), (code.PERMISSION_DENIED, "permission_denied")
    fine = (code.OK, "")
    async with (
        protected(service, papers, mutual=False, tokens=True) as listening,
        papers.channel(listening.grpc_port) as channel,
    ):
        for token, expected in [
            (None, [none, none, none, none]),
            ("shardrank_unknown", [none, none, none, none]),
            (tokens["describe"], [narrow, fine, fine, fine]),
            (tokens["rank"], [fine, fine, fine, fine]),
            (tokens["admin"], [fine, fine, fine, fine]),
        ]:
            options = {"metadata": token and (("authorization", f"Bearer {token}"),), "timeout": 20}
            sent = [(path, message.SerializeToString()) for path, message in calls.items()]
            found = [await grpc_status(channel.unary_stream(path)(message, **options)) for path, message in sent]
            assert found == expected
        # Neither answered nor refused calls hold anything.
        await until(lambda: service.buffers.buffered == 0)
        assert refused(service) == {
            ("grpc", "authorization", "unauthenticated"): 8,
            ("grpc", "authorization", "permission_denied"): 1,
        }


async def test_probes_need_no_token(service, papers):
    async with protected(service, papers, mutual=False, tokens=True) as listening:
        async with papers.https(listening.http_port) as client:
            for port in (listening.http_port, listening.admin_port):
                for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
                    assert (await client.get(f"https://127.0.0.1:{port}{path}")).status_code == 200
        async with papers.channel(listening.grpc_port) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            for name in ("ServerLive", "ServerReady"):
                path = f"/inference.GRPCInferenceService/{name}"
                await channel.unary_unary(path)(b"", timeout=20)
        assert refused(service) == {}


async def test_without_a_token_readiness_names_nothing(papers):
    """Neither models nor the addresses of shards, at the API's port and that of operators."""
    service = RankingService(expected_models=[MODEL])
    async with protected(service, papers, tokens=True, tls=False) as listening:
        for port in (listening.http_port, listening.admin_port):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for token in ("unknown", papers.token["describe"]):
                    answer = await client.get("/readyz", headers={"authorization": f"Bearer {token}"})
                    problems = {"": HIDDEN_PROBLEMS} if token == "unknown" else {MODEL: "no live version"}
                    told = {"ready": False, "problems": problems, "degraded": {}}
                    assert (answer.status_code, answer.json()) == (503, told)
                assert (await client.get("/readyz")).json()["problems"] == {"": HIDDEN_PROBLEMS}
        assert refused(service) == {}


async def test_a_changed_file_of_tokens_counts_for_open_connections(service, papers, tmp_path):
    new, entry = new_token("new", "rank")
    papers = dataclasses.replace(papers, tokens=shutil.copy(papers.tokens, tmp_path / "tokens.json"))

    async with (
        protected(service, papers, tokens=True, tls=False) as listening,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.http_port}") as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{listening.grpc_port}") as channel,
    ):
        stub = ranking_pb2_grpc.RankingServiceStub(channel)

        async def over_http(token: str) -> bool:
            answer = await client.post(RANK, json=REQUEST, headers={"authorization": f"Bearer {token}"})
            return answer.status_code == 200

        async def over_grpc(token: str) -> bool:
            metadata = (("authorization", f"Bearer {token}"),)
            try:
                await stub.Rank(rank_message(REQUEST), metadata=metadata, timeout=20)
            except grpc.RpcError:
                return False
            return True

        for asks in (over_http, over_grpc):
            assert (await asks(papers.token["rank"]), await asks(new)) == (True, False)
        write_tokens(papers.tokens, entry)
        for asks in (over_http, over_grpc):
            while not await asks(new):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert not await asks(papers.token["rank"])


async def serial_number(port: int, context: ssl.SSLContext) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return found


async def test_a_renewed_certificate_is_shown_and_connections_go_on(service, papers):
    async with (
        protected(service, papers) as listening,
        papers.https(listening.http_port, papers.client) as client,
        papers.channel(listening.grpc_port, papers.client) as channel,
    ):
        stub = ranking_pb2_grpc.RankingServiceStub(channel)
        connections = set()

        async def ask() -> None:
            answer = await client.post(RANK, json=REQUEST)
            assert answer.status_code == 200
            connections.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
            await stub.Rank(rank_message(REQUEST), timeout=20)

        await ask()
        over = [(listening.http_port, "http/1.1"), (listening.grpc_port, "h2"), (listening.admin_port, "http/1.1")]
        contexts = {port: papers.context(papers.client, alpn=alpn) for port, alpn in over}
        before = {port: await serial_number(port, context) for port, context in contexts.items()}
        assert len(set(before.values())) == 1
        over_h2 = await asyncio.open_connection("127.0.0.1", listening.grpc_port, ssl=contexts[listening.grpc_port])
        old = Http2Peer(*over_h2)
        old.begin()
        papers.server.replace(papers.ca.issue("renewed"))
        for port, context in contexts.items():
            while await serial_number(port, context) == before[port]:
                await ask()
                await asyncio.sleep(0.05)
        await ask()
        assert len(connections) == 1
        old.send(frames.frame(frames.PING, 0, 0, b"12345678"))
        while (told := await old.read()) is not None and told.kind != frames.PING:
            """What it said before."""
        assert told is not None
        assert bytes(told.payload) == b"12345678"
        old.close()
        assert len({await serial_number(port, context) for port, context in contexts.items()}) == 1


async def test_what_is_in_flight_over_tls_is_answered_at_the_end(api_model, papers):
    gate, request = Gate(), api_request(1) | {"timeout_ms": 20_000}

    with gated_service(api_model, gate) as service:
        server = contextlib.AsyncExitStack()
        listening = await server.enter_async_context(protected(service, papers))
        async with (
            papers.https(listening.http_port, papers.client, timeout=20) as client,
            papers.channel(listening.grpc_port, papers.client) as channel,
        ):
            silent = socket.create_connection(("127.0.0.1", listening.http_port))
            asked = [asyncio.create_task(client.post(RANK, json=request)) for _ in range(4)]
            stub = ranking_pb2_grpc.RankingServiceStub(channel)
            told = [stub.Rank(rank_message(request), timeout=20) for _ in range(4)]
            await gate.wait_until_busy()
            await until(lambda: service.in_flight == len(asked) + len(told))
            stopping = asyncio.create_task(server.aclose())
            await until(lambda: bool(service.watch.problems()))
            gate.open.set()
            assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * len(asked)
            assert [len(one.scores) > 0 for one in await asyncio.gather(*told)] == [True] * len(told)
            await stopping
            silent.close()


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_of_many_unfinished_handshakes_the_oldest_is_ended(api_model, papers, quiet, api, monkeypatch):
    monkeypatch.setattr(listening, "MAX_HANDSHAKES", 3)
    service = served_service(api_model, RequestLimits(receive_timeout_s=600))
    async with protected(service, papers) as server:
        port = server.http_port if api == "http" else server.grpc_port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert await silent[0][0].read() == b""
        assert refused(service) == {(api, "connection", "tls_unfinished"): 1}
        async with papers.https(server.http_port, papers.client) as client:
            assert (await client.post(RANK, json=REQUEST)).status_code == 200
        for _, writer in silent:
            writer.close()
