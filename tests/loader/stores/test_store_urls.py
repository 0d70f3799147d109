"""Which texts are stores, and that a URL costs nothing until one is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loader.errors import StoreError
from loader.snapshot.store import Store
from loader.stores import open_store
from loader.stores.cache import DEFAULT_CACHE_BYTES, StoreUrl, store_place


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("models", "models"),
        ("/var/a b", "/var/a b"),
        ("file:///var/a%20b", "/var/a b"),
        ("file://localhost/var/models", "/var/models"),
    ],
)
def test_paths_and_file_urls_are_folders(text: str, path: str) -> None:
    assert store_place(text) == Path(path)
    assert type(open_store(text)) is Store


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/pre/fix.d", "gs://bucket/prefix", "az://container/prefix"])
def test_urls_of_clouds_are_stores_with_a_cache(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = store_place(f"{url}/")
    assert place == StoreUrl(url=url, cache=tmp_path / "shardrank" / "stores", cache_bytes=DEFAULT_CACHE_BYTES)
    assert open_store(place).name == url


@pytest.mark.parametrize(
    "text",
    [
        "s3://", "s3:///prefix", "s3://Bucket", "s3://bucket/a//b", "s3://bucket/../other", "s3://bucket/p?x=1",
        "s3://key:secret@bucket/p", "az://container/p?sv=2024&sig=secret", "file://host/p?secret", "http://bucket/p",
        "file://host/p", "file:///p?x=1", "://x",
    ],
)  # fmt: skip
def test_everything_else_is_refused_and_no_secret_is_repeated(text: str) -> None:
    with pytest.raises(StoreError, match="file:///PATH, or a path") as refused:
        store_place(text)
    assert "secret" not in str(refused.value)
    assert (refused.value.kind, refused.value.http_status) == ("store_url", 400)


def test_folders_import_no_client_and_urls_name_the_extra() -> None:
    program = """
import sys
sys.modules["obstore"] = None
from loader.errors import StoreError
from loader.stores import open_store
open_store("models")
assert "loader.stores.remote" not in sys.modules
try:
    open_store("s3://bucket")
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'shardrank[stores]'" in done.stdout
