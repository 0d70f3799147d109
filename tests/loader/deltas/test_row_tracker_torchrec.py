"""The real TorchRec, where it is installed: what is published of its collections is what changed, on each rank."""

from __future__ import annotations

import asyncio
import os
import socket

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.deltas.row_tracker import RowTracker
from loader.registry import open_registry
from shardrank_testing.deltas import MODEL, export_state, published_rows, register_version
from shardrank_testing.foreign_checkpoints import import_torchrec
from shardrank_testing.snapshots import model_of, random_tables, table_of

pytestmark = pytest.mark.nightly
ROWS = {"user": 300, "item": 500}
SPEC = model_of([table_of(name, rows, 8, dtype="fp32") for name, rows in ROWS.items()], MODEL)


def train_rank(rank, ranks, port, folder, kind, optimizer):
    """Train a sharded collection on one of several ranks, tracked; save what the rank's rows were and are."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    features = {"user": ["u"], "item": ["i", "h"]}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features[name])
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
    sharder, model = EmbeddingBagCollectionSharder(), torch.nn.ModuleDict({"ebc": collection})
    divided = {
        name: row_wise() if kind == "row_wise" else table_wise(rank=number % ranks) for number, name in enumerate(ROWS)
    }
    of_module = construct_module_sharding_plan(collection, divided, sharder, ranks, ranks, "cpu")
    plan = ShardingPlan({"ebc": of_module})
    model = DistributedModelParallel(model, device=torch.device("cpu"), sharders=[sharder], plan=plan)

    def rows():
        found = {}
        for name, tensor in model.state_dict().items():
            table = name.split(".")[-2]
            for shard in tensor.local_shards():
                found[table] = (shard.metadata.shard_offsets[0], shard.tensor.detach().numpy().copy())
        return found

    before, draw = rows(), torch.Generator().manual_seed(rank)
    with (
        DeltaPublisher(folder / "registry", MODEL, 1) as publisher,
        RowTracker(model, publisher, every_steps=2) as tracker,
    ):
        for _ in range(5):
            ids = [torch.randint(ROWS[name], (size,), generator=draw) for name, size in (("user", 4), ("item", 8))]
            lengths = torch.tensor([1] * 4 + [2, 0, 1, 1, 1, 1, 2, 0])
            batch = KeyedJaggedTensor(keys=["u", "i", "h"], values=torch.cat(ids), lengths=lengths)
            model.module["ebc"](batch).wait().values().square().sum().backward()
            tracker.step()
    changed = {}
    for table, (first, after) in rows().items():
        numbers = np.flatnonzero((before[table][1] != after).any(axis=1))
        changed[table] = {int(row) + first: after[row] for row in numbers}
    torch.save(changed, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize(("kind", "ranks"), [("table_wise", 1), ("row_wise", 1), ("row_wise", 2), ("table_wise", 2)])
def test_each_rank_publishes_the_rows_that_it_has(tmp_path, kind, ranks, optimizer):
    import_torchrec()

    async def publish():
        registry = open_registry(tmp_path / "registry")
        await register_version(registry, export_state(tmp_path / "store", SPEC, random_tables(SPEC, 0), 1))
        await registry.close()

    asyncio.run(publish())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    mp.spawn(train_rank, (ranks, port, tmp_path, kind, optimizer), nprocs=ranks)
    told, changed = published_rows(tmp_path / "registry", ROWS), {name: {} for name in ROWS}
    for rank in range(ranks):
        for table, rows in torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False).items():
            changed[table] |= rows
    for table, rows in changed.items():
        assert rows
        assert told[table].keys() == rows.keys()
        assert all((told[table][row] == values).all() for row, values in rows.items())
