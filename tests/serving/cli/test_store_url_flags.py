"""`--store URL`: a version is published, checked and served from S3 by the commands that take a folder."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from serving.cli import main
from serving.embedded import Ranker
from shardrank_testing.processes import running
from shardrank_testing.s3_server import Bucket
from shardrank_testing.serving_api import MODEL, ApiModel, api_request


def shardrank(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)


def test_a_version_is_published_checked_and_served_from_a_url_as_from_its_folder(
    api_model: ApiModel, bucket: Bucket, tmp_path: Path
) -> None:
    where = ("--store", bucket.url, "--store-cache", tmp_path / "cache", "--store-cache-gb", 0.5)
    registry = ("--registry", tmp_path / "registry")
    report = json.loads(shardrank("publish", api_model.path, *where, *registry, "--json").stdout)
    assert (report["folder"], report["copied"], report["is_new"]) == (f"{bucket.url}/{MODEL}/1", True, True)
    again = shardrank("publish", f"{bucket.url}/{MODEL}/1", *where[2:], *registry)
    assert f"lies in {bucket.url}/{MODEL}/1" in again.output
    assert "may be served" in shardrank("verify", *where).output
    own = ("--http-port", "0", "--grpc-port", "0", "--shutdown-delay-s", "0", "--dtype", "float32")
    request = api_request(1)
    with running("serve", *map(str, where), *own) as program, Ranker.open(api_model.path, dtype="float32") as ranker:
        url = program.read_until(r"HTTP: (http://127.0.0.1:\d+)")[1]
        answer = httpx.post(f"{url}/v1/models/{MODEL}:rank", json=request).raise_for_status().json()
        assert answer["scores"] == ranker.rank(request)["scores"]
        assert program.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("publish", "FOLDER", "--store", "s3://bucket/p"), "--registry URL is needed: no registry lies in a store"),
        (("up", "--store", "s3://bucket/p"), "--registry URL is needed"),
        (("serve", "--store", "s3://key:secret@bucket/p"), "credentials are taken from the environment"),
        (("verify", "--store", "FOLDER", "--store-cache-gb", "1"), "--store-cache-gb: only with a --store at a URL"),
        (("publish", "s3://bucket/p/films", "--registry", "r"), "URL/MODEL/VERSION"),
    ],
)
def test_what_can_not_be_is_refused_by_name(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = shardrank(*(tmp_path if one == "FOLDER" else one for one in arguments))
    assert result.exit_code != 0
    assert message in result.output
    assert "secret" not in result.output
