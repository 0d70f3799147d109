"""TLS and tokens on the command line: real nodes and serving processes, what is refused, and what is warned about."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import httpx
import pytest

from serving.api.tokens import add_token, new_token
from serving.cli.settings import Protection, warn_if_open
from serving.client import Client
from serving.config import ServeConfig
from serving.training.trainer import train_version
from shard_node.wire.tls import TlsClientConfig, TlsConfig, client_context
from shardrank_testing.certificates import Authority, Pair, needs_openssl
from shardrank_testing.client_calls import rank_arguments
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.movielens import small_interactions
from shardrank_testing.otlp_receiver import collector
from shardrank_testing.processes import running, wait_until
from shardrank_testing.registered_fleet import publish, want
from shardrank_testing.registries import redis_server

QUICK = (*ANY_PORTS, "--shutdown-delay-s", "0")
REQUEST = {
    "context": {"sparse": {"user_id": [1], "history": [2, 3]}},
    "candidates": {"sparse": {"film_id": [4, 5], "genre": [[1], [2]]}},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    train_version(small_interactions(num_ratings=2000), folder, seed=0, epochs=1)
    return folder


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def node(ca: Authority) -> Pair:
    return ca.issue("node", uris=["shardrank:node"])


@pytest.fixture(scope="module")
def router(ca: Authority) -> Pair:
    return ca.issue("router", uris=["shardrank:router"])


def tls_flags(pair: Pair, ca: Authority) -> tuple[str, ...]:
    return ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(ca.cert))


def node_flags(pair: Pair, ca: Authority) -> tuple[str, ...]:
    return ("--node-ca", str(ca.cert), "--node-cert", str(pair.cert), "--node-key", str(pair.key))


@needs_openssl
def test_nodes_are_reached_over_mutual_tls_with_a_valid_certificate_only(
    store: Path, ca: Authority, node: Pair, router: Pair
) -> None:
    shard = ("--store", str(store), "--model", "films", "--shard", "0/1", "--listen", "127.0.0.1:0")
    with running("shard-node", *shard, *tls_flags(node, ca)) as node_program:
        address = node_program.read_until(r"listens on tcp://(\S+)")[1]
        serve = ("serve", "--store", str(store), "--model", "films", "--shard", address, *QUICK)
        with running(*serve, *node_flags(router, ca)) as program:
            assert len(program.rank("films", REQUEST).json()["scores"]) == 2
            assert program.stop() == 0
        with running(*serve, *node_flags(ca.issue("expired", days=-1), ca)) as program:
            program.read_until("version . of films waits: .*tls_expired_certificate")
        with running(*serve) as program:
            program.read_until("version . of films waits: .*node_unavailable")
        assert node_program.stop() == 0
    assert node_program.output.count("refused a connection from 127.0.0.1: tls_expired_certificate") == 1
    assert node_program.output.count("refused a connection from 127.0.0.1: tls_plain_text") == 1
    assert "Traceback" not in node_program.output


@needs_openssl
@pytest.mark.parametrize("command", ["serve", pytest.param("up", marks=pytest.mark.nightly)])
def test_every_port_needs_a_certificate_and_a_token(
    store: Path, ca: Authority, node: Pair, router: Pair, tmp_path: Path, command: str
) -> None:
    tokens = tmp_path / "tokens.json"
    token = shardrank("token", "new", "--name", "ops", "--scope", "admin", "--tokens", tokens).output.strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        admin = free.getsockname()[1]
    ports = (*ANY_PORTS, "--admin-port", str(admin))
    files = {"ca": ca.cert, "cert": router.cert, "key": router.key}
    with running(command, "--store", str(store), *ports, *tls_flags(node, ca), "--tokens", str(tokens)) as program:
        url, grpc_url = program.url, f"grpcs://{program.grpc_target}"
        assert url.startswith("https://")
        if command == "serve":
            program.read_until(f"probes and metrics: https://127.0.0.1:{admin}/metrics")
        context = client_context(TlsClientConfig(**files)).get()
        wait_until(lambda: httpx.get(f"{url}/readyz", verify=context).status_code == 200, "a version that is live")
        for address in (url, grpc_url):
            with Client(address, token=token, timeout_ms=20_000, **files) as client:
                assert len(client.rank("films", **rank_arguments(REQUEST)).scores) == 2
        with httpx.Client(base_url=f"https://127.0.0.1:{admin}", verify=context) as client:
            assert client.get("/metrics").status_code == 401
        assert program.stop() == 0
    assert "Traceback" not in program.output


@needs_openssl
def test_no_secret_of_a_fleet_is_logged_or_told(store: Path, ca: Authority, tmp_path: Path, monkeypatch) -> None:
    """A SAN, a token and a password in no log, metric, span or recording, of calls that pass and that are refused."""
    san, password, recorded, tokens = "san-5e8c", "password-77d1", tmp_path / "recorded", tmp_path / "tokens.json"
    token, entry = new_token("ops", "admin")
    add_token(tokens, entry)
    uris = {role: [f"shardrank:{role}", f"spiffe://{san}/{role}"] for role in ("node", "router", san)}
    node, router, stranger = (ca.issue(f"{role}-of-fleet", uris=shown) for role, shown in uris.items())
    listen = ("--shard", "0/1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    front = ("--tokens", str(tokens), "--record", str(recorded), "--record-share", "1")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'trace_sample_share = 1\ntls_role = ["node=spiffe://{san}/node"]\n')
    roles = ("--config", str(settings), *node_flags(router, ca))
    with redis_server(tmp_path, tcp=True, settings={"requirepass": password}) as redis, collector() as spans:
        publish(redis.url, store / "films" / "1")
        want(redis.url, "films", live=1, hold=(1,), serve=(1,))
        member = ("--registry", redis.url, "--store", str(store), "--trace-endpoint", spans.url)
        monkeypatch.setenv("SHARDRANK_TRACE_PROTOCOL", "http")
        with (
            running("--log-level", "debug", "shard-node", *member, *listen, *tls_flags(node, ca)) as node_program,
            running("--log-level", "debug", "serve", *member, *front, *QUICK, *roles) as program,
        ):
            metrics_url = node_program.read_until(r"metrics: (https://\S+)")[1]
            address = node_program.read_until(r"listens on tcp://(\S+)")[1]
            for shown, status in ((token, 200), (f"{token}-wrong", 401)):
                bearer, url = {"authorization": f"Bearer {shown}"}, f"{program.url}/v1/models/films:rank"
                assert httpx.post(url, json=REQUEST, headers=bearer, timeout=30).status_code == status
            named = ("--model", "films", "--version", 1, "--out", tmp_path / "counts")
            told = shardrank("counts", "--shard", address, *named, *node_flags(stranger, ca), code=1).output
            node_program.read_until("refused a connection from 127.0.0.1: tls_certificate_role")
            wrong_url = redis.url.replace(password, f"{password}-wrong")
            told += shardrank("versions", "--registry", wrong_url, code=1).output
            context = client_context(TlsClientConfig(ca=ca.cert, cert=router.cert, key=router.key)).get()
            told += httpx.get(metrics_url, verify=context).text
            nameless = client_context(TlsClientConfig(ca=ca.cert)).get()
            ready = httpx.get(metrics_url.replace("/metrics", "/readyz"), verify=nameless)
            assert (ready.status_code, ready.json()) == (200, {"ready": True})
            assert httpx.get(metrics_url, verify=nameless).json()["error"]["kind"] == "tls_missing_certificate"
            told += httpx.get(f"{program.url}/metrics", headers={"authorization": f"Bearer {token}"}).text
            assert (program.stop(), node_program.stop()) == (0, 0)
    written = b"".join(path.read_bytes() for path in recorded.glob("*.jsonl"))
    told += program.output + node_program.output + repr(spans.spans) + written.decode("latin-1")
    assert [part for part in ("schema_digest", "http rank", "shardrank.pool", "kind=") if part not in told] == []
    assert [secret for secret in (san, password, token) if secret in told] == []


@needs_openssl
@pytest.mark.parametrize("command", ["serve", "up", "shard-node"])
def test_a_file_that_can_t_be_used_is_named(store: Path, node: Pair, router: Pair, ca: Authority, command: str) -> None:
    more = ("--shard", "0/1", "--listen", "127.0.0.1:0") if command == "shard-node" else ANY_PORTS
    done = shardrank(command, "--store", store, *more, *tls_flags(Pair(node.cert, router.key), ca), code=1)
    assert f"{router.key}: must be a certificate and its private key" in done.output


@needs_openssl
def test_certificates_and_tokens_are_read_from_settings(
    ca: Authority, node: Pair, router: Pair, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.json"
    add_token(tokens, new_token("shop", "rank")[1])
    config = ServeConfig(tls_cert=node.cert, tls_key=node.key, tls_client_ca=ca.cert, tokens=tokens)
    protection = Protection.of(config)
    assert protection.tls == TlsConfig(cert=node.cert, key=node.key, client_ca=ca.cert)
    assert protection.node_tls == TlsClientConfig(ca=ca.cert, cert=node.cert, key=node.key)
    assert protection.tokens == tokens
    roles = (("node", "spiffe://fleet/node"),)
    private = {
        "node_ca": ca.cert,
        "node_cert": router.cert,
        "node_key": router.key,
        "tls_role": ("node=spiffe://fleet/node",),
    }
    shown = TlsClientConfig(ca=ca.cert, cert=router.cert, key=router.key, role_uris=roles)
    assert Protection.of(ServeConfig(**config.model_dump(include=config.model_fields_set), **private)).node_tls == shown
    assert Protection.of(ServeConfig()) == Protection(None, None, None)


CERTIFICATE = TlsConfig(cert=Path("c"), key=Path("k"))
MUTUAL = TlsConfig(cert=Path("c"), key=Path("k"), client_ca=Path("ca"))
TOKENS = Path("tokens.json")


@pytest.mark.parametrize(
    ("host", "tls", "tokens", "missing"),
    [
        ("127.0.0.1", None, None, None),
        ("localhost", None, None, None),
        ("::1", None, None, None),
        ("0.0.0.0", None, None, "without TLS (--tls-cert) and without tokens (--tokens) or client certificates"),
        ("::", None, TOKENS, "without TLS (--tls-cert):"),
        ("ranker.example", CERTIFICATE, None, "without tokens (--tokens) or client certificates (--tls-client-ca):"),
        ("0.0.0.0", CERTIFICATE, TOKENS, None),
        ("0.0.0.0", MUTUAL, None, None),
    ],
)
def test_apis_that_others_reach_unprotected_are_warned_about_once(
    host: str, tls: TlsConfig | None, tokens: Path | None, missing: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(host, Protection(tls, None, tokens))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (missing is not None)
    assert missing is None or (missing in warnings[0] and host in warnings[0])
