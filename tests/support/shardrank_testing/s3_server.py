"""A real S3 server on a socket (moto's), and a bucket in it as stores at URLs find it: by the environment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import obstore
import pytest
from obstore.store import S3Store

_numbers = itertools.count()


@dataclass(frozen=True)
class Bucket:
    """One bucket, asked past any proxy."""

    port: int
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/pre/fix"

    @property
    def _store(self) -> S3Store:
        endpoint = f"http://127.0.0.1:{self.port}"
        return S3Store(self.name, prefix="pre/fix", endpoint=endpoint, client_options={"allow_http": True})

    def put(self, path: str, content: bytes) -> None:
        obstore.put(self._store, path, content)

    def delete(self, path: str) -> None:
        obstore.delete(self._store, path)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of the server that all tests of this process share."""
    # Only who uses it pays for its import.
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket that clients of this process, and of its children, find."""
    name, endpoint = f"bucket-{next(_numbers)}", f"http://127.0.0.1:{s3_port}"
    httpx.put(f"{endpoint}/{name}").raise_for_status()
    for key, value in (
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(key, value)
    return Bucket(s3_port, name)
