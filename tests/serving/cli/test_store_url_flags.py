"""`--store URL`: a version is published, checked and served from S3 by the commands that take a folder."""

from __future__ import annotations

import json
from pathlib import Path

from serving.embedded import Ranker
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.processes import running
from shardrank_testing.s3_server import Bucket
from shardrank_testing.serving_api import MODEL, ApiModel, api_request


def test_a_version_at_a_url_is_served_as_from_its_folder(api_model: ApiModel, bucket: Bucket, tmp_path: Path) -> None:
    where = ("--store", bucket.url, "--store-cache", tmp_path / "cache", "--store-cache-gb", 0.5)
    registry = ("--registry", tmp_path / "registry")
    report = json.loads(shardrank("publish", api_model.path, *where, *registry, "--json").stdout)
    assert (report["folder"], report["copied"], report["is_new"]) == (f"{bucket.url}/{MODEL}/1", True, True)
    again = shardrank("publish", f"{bucket.url}/{MODEL}/1", *where[2:], *registry)
    assert f"lies in {bucket.url}/{MODEL}/1" in again.output
    assert "may be served" in shardrank("verify", *where).output
    flags = ("--shutdown-delay-s", "0", "--dtype", "float32")
    request = api_request(1)
    with (
        running("serve", *map(str, where), *flags, *ANY_PORTS) as program,
        Ranker.open(api_model.path, dtype="float32") as ranker,
    ):
        assert program.rank(MODEL, request).json()["scores"] == ranker.rank(request)["scores"]
        assert program.stop() == 0
