"""A serving process of its own, without the command line: `python -m ... SNAPSHOT HTTP_PORT GRPC_PORT`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.config import ServeConfig
from serving.embedded import ModelSource, load_served_model
from serving.fleet.process import run_until_signalled
from serving.rank.service import RankingService
from serving.server import Listening, serve
from shardrank_testing.processes import Process, start_module


@dataclass
class ServingProcess:
    """A process that listens."""

    process: Process
    http_port: int
    grpc_port: int
    has_otel_sdk: bool


@contextmanager
def serving_process(
    snapshot: Path, http_port: int = 0, grpc_port: int = 0, metrics_folder: Path | None = None
) -> Iterator[ServingProcess]:
    """Starts one and waits until it listens; kills it at the end at the latest."""
    with pytest.MonkeyPatch.context() as patch:
        if metrics_folder is not None:
            patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(metrics_folder))
        process = start_module(__name__, str(snapshot), str(http_port), str(grpc_port))
    try:
        assert process.stdout is not None
        yield ServingProcess(process, **json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def _say(listening: Listening) -> None:
    told = {"http_port": listening.http_port, "grpc_port": listening.grpc_port}
    sys.stdout.write(json.dumps({**told, "has_otel_sdk": "opentelemetry.sdk" in sys.modules}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    service = RankingService(expected_models=[Path(sys.argv[1]).parent.name])
    source = ModelSource(snapshot=Path(sys.argv[1]), dtype="float32")
    config = ServeConfig(http_port=int(sys.argv[2]), grpc_port=int(sys.argv[3]))

    async def load() -> None:
        service.install(await asyncio.to_thread(load_served_model, source, service))

    run_until_signalled(lambda: serve(service, config, load, _say))
