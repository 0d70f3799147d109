"""docs/client.md: its examples run as they stand there, against a server."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from pathlib import Path

import pytest

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.ranking import random_tensors
from shardrank_testing.serving_api import run, running_api
from shardrank_testing.snapshots import write_snapshot

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "client.md").read_text(encoding="utf-8")
# The one with certificates has none here; test_client_tls makes such a client.
EXAMPLES = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "client.pem" not in one]
SPEC = ModelSpec(
    model="films",
    tables=(
        TableSpec(name="users", num_embeddings=100, embedding_dim=4, feature_names=("user_id",)),
        TableSpec(name="films", num_embeddings=200, embedding_dim=8, feature_names=("film_id", "history")),
        TableSpec(name="genres", num_embeddings=19, embedding_dim=4, feature_names=("genre",)),
    ),
    features=(
        FeatureSpec(name="user_id", side="context"),
        FeatureSpec(name="history", side="context"),
        FeatureSpec(name="film_id", side="candidate"),
        FeatureSpec(name="genre", side="candidate", weighted=True),
    ),
    dense_model=DenseModelSpec(kind="mlp", config={"hidden": [4]}),
)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_runs(number, tmp_path, capsys):
    code = EXAMPLES[number]
    path, _ = write_snapshot(tmp_path, SPEC, 0, dense=random_tensors(SPEC, 0))

    async def main() -> None:
        with closing(RankingService()) as service:
            service.install(load_served_model(ModelSource(snapshot=path, dtype="float32", sharding="hash"), service))
            async with running_api(service) as api:
                here = code.replace("127.0.0.1:8081", f"127.0.0.1:{api.listening.grpc_port}")
                # 50 ms are enough in production, not on a machine that runs other tests too.
                here = here.replace("timeout_ms=50)", "timeout_ms=20_000)")
                await asyncio.to_thread(exec, compile("import numpy as np\n" + here, "client.md", "exec"), {})

    run(main())
    if "# invalid_id" in code:
        said = re.search(r"# (invalid_id .*)", code)
        assert said is not None
        assert capsys.readouterr().out.strip() == said[1]
