"""Collections that TorchRec itself trained, saved and imported: each id has the row that TorchRec looks up for it.

TorchRec is no dependency; where it is not installed, these are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.checkpoints import Checkpoint
from loader.imports.kinds import open_import
from shardrank_testing.foreign_checkpoints import import_torchrec

ROWS, DIM, STEPS = 64, 8, 12


@pytest.fixture(scope="module")
def torchrec() -> Any:
    # Not only if it is not there: an installation for another PyTorch can't be loaded.
    return import_torchrec()


def bags_of(torchrec: Any, ids: list[int]) -> Any:
    """Return a batch of one id a sample of the feature `film`."""
    values, lengths = torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64)
    return torchrec.KeyedJaggedTensor(keys=["film"], values=values, lengths=lengths)


def collection_of(torchrec: Any) -> Any:
    config = torchrec.EmbeddingBagConfig(
        name="films", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["film"]
    )  # fmt: skip
    return torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))


def trained(module: torch.nn.Module, torchrec: Any, ids: np.ndarray) -> None:
    """Take a few steps on random batches of some ids."""
    optimizer, rng = torch.optim.SGD(module.parameters(), lr=0.1), np.random.default_rng(0)
    for _ in range(STEPS):
        output = module(bags_of(torchrec, rng.choice(ids, 40).tolist()))
        pooled = output[0] if isinstance(output, tuple) else output
        (pooled.values() - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def looked_up(module: torch.nn.Module, torchrec: Any, ids: list[int]) -> np.ndarray:
    module.eval()
    with torch.no_grad():
        output = module(bags_of(torchrec, ids))
    values: np.ndarray = (output[0] if isinstance(output, tuple) else output).values().numpy()
    return values


def imported(folder: Path, module: torch.nn.Module) -> tuple[Checkpoint, str, np.ndarray]:
    torch.save(module.state_dict(), folder / "model.pt")
    checkpoint = open_import("torchrec", folder / "model.pt")
    (name,) = checkpoint.tables
    (rows,) = checkpoint.rows(name).blocks(0, ROWS)
    return checkpoint, name, rows


@pytest.mark.nightly
def test_rows_of_a_collection_are_those_that_it_looks_up(tmp_path: Path, torchrec: Any) -> None:
    collection = collection_of(torchrec)
    trained(collection, torchrec, np.arange(ROWS))
    checkpoint, name, rows = imported(tmp_path, collection)
    assert (name, checkpoint.keys(name)) == ("embedding_bags.films.weight", None)
    np.testing.assert_array_equal(rows, looked_up(collection, torchrec, list(range(ROWS))))


def managed(torchrec: Any, make: Callable[[torch.device], Any]) -> Any:
    """Return a collection whose raw ids a module of that kind maps to rows."""
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import ManagedCollisionCollection

    bags = collection_of(torchrec)
    collection = ManagedCollisionCollection({"films": make(torch.device("cpu"))}, bags.embedding_bag_configs())
    return ManagedCollisionEmbeddingBagCollection(bags, collection)


def zch_module(device: torch.device) -> Any:
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

    return MCHManagedCollisionModule(
        zch_size=ROWS, device=device, eviction_policy=LFU_EvictionPolicy(), eviction_interval=2
    )  # fmt: skip


def mpzch_module(device: torch.device) -> Any:
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    return HashZchManagedCollisionModule(
        zch_size=ROWS, device=device, total_num_buckets=1, max_probe=ROWS, input_hash_size=0
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("num_ids", [40, 90])
def test_keys_of_a_collection_without_collisions_have_the_rows_that_it_looks_up(
    tmp_path: Path, torchrec: Any, num_ids: int
) -> None:
    """Also where there are more ids than rows, and some were evicted or never had one."""
    collection, ids = managed(torchrec, zch_module), np.random.default_rng(1).integers(0, 2**62, num_ids)
    trained(collection, torchrec, ids)
    checkpoint, name, rows = imported(tmp_path, collection)
    keys = checkpoint.keys(name)
    assert keys is not None
    assert set(keys.tolist()) <= set(ids.tolist())
    assert len(keys) == len(set(keys.tolist())) > min(num_ids, ROWS) // 2
    np.testing.assert_array_equal(rows, looked_up(collection, torchrec, keys.tolist()))


@pytest.mark.nightly
def test_keys_of_a_hashed_collection_have_the_rows_that_they_are_named_at(tmp_path: Path, torchrec: Any) -> None:
    """Its ids get rows in training, which FBGEMM does on GPUs alone: they are given theirs here."""
    collection = managed(torchrec, mpzch_module)
    ids, at = np.random.default_rng(1).integers(0, 2**62, 40), np.random.default_rng(2).permutation(ROWS)[:40]
    state = collection.state_dict()
    (identities,) = (tensor for key, tensor in state.items() if key.endswith("_hash_zch_identities"))
    (weight,) = (tensor for key, tensor in state.items() if key.endswith("embedding_bags.films.weight"))
    assert (identities.dtype, tuple(identities.shape), set(identities.flatten().tolist())) == (
        torch.int64, (ROWS, 1), {-1}
    )  # fmt: skip
    identities[torch.from_numpy(at), 0] = torch.from_numpy(ids)
    checkpoint, name, rows = imported(tmp_path, collection)
    keys = checkpoint.keys(name)
    assert keys is not None
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == dict(
        zip(ids.tolist(), weight[torch.from_numpy(at)].tolist(), strict=True)
    )
