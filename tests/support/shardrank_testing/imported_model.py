"""One model as each of the systems that `shardrank import` reads saves it, and what it scores, in NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loader.imports.kinds import Kind
from serving.embedded import Ranker
from shardrank_testing.foreign_checkpoints import (
    Saved,
    saved_table,
    write_dynamicemb,
    write_hps,
    write_numpy,
    write_tfra,
    write_tzrec,
    zch_state,
)

TABLES = {"films": saved_table(1, 60, 8), "users": saved_table(2, 30, 4, extremes=False)}
_RNG = np.random.default_rng(3)
DENSE = {
    "mlp.layers.0.weight": _RNG.normal(size=(6, 12)).astype(np.float32),
    "mlp.layers.0.bias": _RNG.normal(size=6).astype(np.float32),
    "mlp.layers.1.weight": _RNG.normal(size=(1, 6)).astype(np.float32),
    "mlp.layers.1.bias": _RNG.normal(size=1).astype(np.float32),
}
"""Of an MLP over the pooled rows of `films`, then those of `users`."""
KERAS_NAMES = {
    "mlp.layers.0.weight": "dense.kernel",
    "mlp.layers.0.bias": "dense.bias",
    "mlp.layers.1.weight": "dense_1.kernel",
    "mlp.layers.1.bias": "dense_1.bias",
}
SIDES = {"films": "candidate", "users": "context"}
MODEL = {"kind": "mlp", "config": {"hidden": [6]}}
TFRA = "variables/TFRADynamicEmbedding"


def requests(count: int = 3) -> list[dict[str, Any]]:
    """Requests of keys that there are, and one that is not."""
    films, users = (TABLES[name].keys.tolist() for name in ("films", "users"))  # type: ignore[union-attr]
    made = [
        {
            "context": {"sparse": {"users": [users[n]]}},
            "candidates": {"sparse": {"films": [[one] for one in films[n::9]]}},
        }
        for n in range(count)
    ]
    made[0]["candidates"]["sparse"]["films"].append([987_654_321])
    return made


def pooled(tables: Mapping[str, Saved], name: str, keys: list[int]) -> np.ndarray:
    rows = tables[name].by_key()
    found = [np.frombuffer(rows[key], np.float32) for key in keys if key in rows]
    result: np.ndarray = np.sum(found, axis=0) if found else np.zeros(tables[name].rows.shape[1])
    return result


def scores_of(request: dict[str, Any], tables: Mapping[str, Saved] = TABLES) -> list[float]:
    """What training computes: by definition, in NumPy."""
    user = pooled(tables, "users", request["context"]["sparse"]["users"])
    scores = []
    for film in request["candidates"]["sparse"]["films"]:
        inputs = np.concatenate([pooled(tables, "films", film), user])
        hidden = np.maximum(DENSE["mlp.layers.0.weight"] @ inputs + DENSE["mlp.layers.0.bias"], 0)
        logit = DENSE["mlp.layers.1.weight"] @ hidden + DENSE["mlp.layers.1.bias"]
        scores.append(float(1 / (1 + np.exp(-logit[0]))))
    return scores


def write(folder: Path, kind: Kind, name: str = "saved", **more: Any) -> list[object]:
    """Write what a system of that kind saves; return the words of the command that say what and where it is."""
    at, words = folder / name, list[object]()
    match kind:
        case "dynamicemb":
            write_dynamicemb(at, TABLES, 2)
        case "tzrec":
            write_tzrec(at, {f"model.ebc.embedding_bags.{table}": one for table, one in TABLES.items()}, 2, **more)
        case "hps":
            write_hps(at, TABLES)
        case "tfra":
            write_tfra(at, {f"{table}-parameter": one for table, one in TABLES.items()}, 2)
        case "torchrec":
            without = {
                name: one._replace(keys=np.where(one.keys == 2**63 - 1, 5, one.keys)) for name, one in TABLES.items()
            }
            at, state = folder / f"{name.removesuffix('.pt')}.pt", dict[str, Any]()
            for name, saved in without.items():
                state |= zch_state(name, saved, 64, 2)
            torch.save(state | {f"over.{name}": torch.from_numpy(one) for name, one in DENSE.items()}, at)
            words += ["--dense-prefix", "over."]
        case "numpy":
            # As Keras saves kernels, [in, out].
            kernels = {theirs: DENSE[ours].T for ours, theirs in KERAS_NAMES.items()}
            write_numpy(at, TABLES, kernels)
            names: dict[str, Any] = {
                name: {"key": theirs, "transpose": True} if theirs.endswith("kernel") else theirs
                for name, theirs in KERAS_NAMES.items()
            }
            (folder / "names.json").write_text(json.dumps(names))
            words += ["--dense-map", folder / "names.json"]
    if kind not in ("torchrec", "numpy"):
        torch.save({name: torch.from_numpy(one) for name, one in DENSE.items()}, folder / "dense.pt")
        words += ["--checkpoint", folder / "dense.pt"]
    return [kind, at, *words]


def golden(folder: Path, tables: Mapping[str, Saved] = TABLES) -> tuple[object, ...]:
    (folder / "requests.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in requests()))
    np.save(folder / "scores.npy", np.concatenate([scores_of(one, tables) for one in requests()]))
    return ("--golden-from", folder / "requests.jsonl", "--scores", folder / "scores.npy")


def check_scores(path: Path, tables: Mapping[str, Saved] = TABLES, *, atol: float = 2e-5, **options: Any) -> None:
    """Assert that a version scores requests as training does."""
    with Ranker.open(path, dtype="float32", **options) as ranker:
        for request in requests():
            got = ranker.rank("shop", **request).scores
            np.testing.assert_allclose(got, scores_of(request, tables), atol=atol)
