"""The client's side of TLS: it trusts who it is told to trust, shows its certificate, and refuses the others."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import grpc
import pytest

from serving.client import RetryPolicy, UnavailableError
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.client_calls import CLIENTS, calling
from shardrank_testing.serving_api import run

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
both_clients = pytest.mark.parametrize("kind", CLIENTS)
ONCE = RetryPolicy(max_attempts=1)


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass
class Files:
    """A certificate with its key."""

    cert: Path
    key: Path


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> dict[str, Files]:
    """Certificates of a CA, of a server and a client that it knows, and of another CA."""
    folder = tmp_path_factory.mktemp("tls")
    files = {
        name: Files(folder / f"{name}.crt", folder / f"{name}.key") for name in ("ca", "server", "client", "other")
    }
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl("req", "-x509", *key, "-subj", f"/CN={name}", "-keyout", files[name].key, "-out", files[name].cert)
    for name in ("server", "client"):
        request = folder / f"{name}.csr"
        extensions = folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", files[name].key, "-out", request)
        issuer = ("-CA", files["ca"].cert, "-CAkey", files["ca"].key, "-CAcreateserial", "-extfile", extensions)
        openssl("x509", "-req", "-in", request, *issuer, "-out", files[name].cert)
    return files


@pytest.fixture(scope="module")
def grpc_address(authority):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    answer = ranking_pb2.GetModelResponse(model="films", version=3).SerializeToString()
    methods = {"GetModel": grpc.unary_unary_rpc_method_handler(lambda request, context: answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("shardrank.v1.RankingService", methods),))
    own, ca = authority["server"], authority["ca"].cert.read_bytes()
    credentials = grpc.ssl_server_credentials([(own.key.read_bytes(), own.cert.read_bytes())], ca, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"grpcs://127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(scope="module")
def http_address(authority):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"model": "films", "version": 3}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority["ca"].cert))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(authority["server"].cert, authority["server"].key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@both_clients
@pytest.mark.parametrize("over", ["grpc_address", "http_address"])
def test_a_client_with_the_right_files_is_answered_and_no_other_one(authority, request, over, kind):
    address = request.getfixturevalue(over)
    ca, other, client = authority["ca"].cert, authority["other"], authority["client"]

    async def main() -> None:
        async with calling(kind, address, ca=ca, cert=client.cert, key=str(client.key)) as call:
            assert (await call("describe", "films")).version == 3
        for wrong in (
            {"ca": other.cert, "cert": client.cert, "key": client.key},
            {"cert": client.cert, "key": client.key},
            {"ca": ca},
            {"ca": ca, "cert": other.cert, "key": other.key},
        ):
            async with calling(kind, address, **wrong, timeout_ms=5000, retry=ONCE) as call:
                with pytest.raises(UnavailableError):
                    await call("describe", "films")
        async with calling(kind, address.replace("s://", "://"), timeout_ms=5000, retry=ONCE) as call:
            with pytest.raises(UnavailableError):
                await call("describe", "films")

    run(main())
