"""An import's memory does not grow with its tables: it holds one file's rows, and what it reads is page cache."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.imports.kinds import Kind
from loader.snapshot.reader import Snapshot
from shardrank_testing.foreign_checkpoints import NO_RAW_ID

ROWS, DIM, BLOCK_ROWS = 20_000_000, 16, 1 << 20
MAX_BYTES = 512 << 20
STEP = 0x1E3779B97F4A7C15
"""An odd number: its multiples are different keys."""


def write_rows(file: Path, rows: int, *, header: bool = False) -> None:
    block = np.random.default_rng(0).standard_normal((BLOCK_ROWS, DIM), np.float32)
    with file.open("wb") as stream:
        if header:
            np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (rows, DIM)})
        for start in range(0, rows, BLOCK_ROWS):
            stream.write(block[: rows - start].data)


def keys_of(first: int, count: int, step: int = 1) -> np.ndarray:
    with np.errstate(over="ignore"):
        result: np.ndarray = np.arange(first, first + step * count, step, dtype=np.int64) * np.int64(STEP)
        return result


def write(folder: Path, kind: Kind) -> list[object]:
    """Write a table `films` as a kind has it; return the words that name it."""
    dense = {"mlp.layers.0.weight": torch.ones(1, DIM), "mlp.layers.0.bias": torch.ones(1)}
    match kind:
        case "dynamicemb":
            for rank in (0, 1):
                end = f".rank_{rank}.world_size_2"
                keys_of(rank, ROWS // 2, 2).tofile(folder / f"films_emb_keys{end}")
                write_rows(folder / f"films_emb_values{end}", ROWS // 2)
            torch.save(dense, folder / "dense.pt")
            return [kind, folder, "--checkpoint", folder / "dense.pt"]
        case "numpy":
            write_rows(folder / "films.npy", ROWS, header=True)
            for name, tensor in dense.items():
                np.save(folder / f"{name}.npy", tensor.numpy())
            return [kind, folder]
        case _:
            write_rows(folder / "rows", ROWS)
            module = "_managed_collision_collection._managed_collision_modules.films."
            ids = torch.from_numpy(keys_of(1, ROWS)).sort().values
            ids[-1] = NO_RAW_ID
            weight = torch.from_file(str(folder / "rows"), shared=True, size=ROWS * DIM).view(ROWS, DIM)
            state = {
                f"{module}_mch_sorted_raw_ids": ids,
                f"{module}_mch_remapped_ids_mapping": torch.arange(ROWS).flip(0),
            }
            torch.save(dense | state | {"_embedding_module.embedding_bags.films.weight": weight}, folder / "m.pt")
            return [kind, folder / "m.pt"]


def peak_of(process: subprocess.Popen[Any]) -> int:
    """Return the most anonymous and shared memory, bytes, that a process has until it ends."""
    peak, ended, status = 0, threading.Event(), Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        kilobytes = [int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields]
        peak = max(peak, 1024 * sum(kilobytes))
        ended.wait(0.02)
    return peak


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["dynamicemb", "numpy", "torchrec"])
def test_twenty_million_rows_are_imported_in_bounded_memory(tmp_path: Path, kind: Kind) -> None:
    words = write(tmp_path, kind)
    size = {"num_embeddings": ROWS} if kind == "numpy" else {"keys": "int64", "capacity": "auto"}
    table = {"name": "films", "embedding_dim": DIM, "feature_names": ["film"], "dtype": "fp32", **size}
    described = {
        "model": "m",
        "tables": [table],
        "features": [{"name": "film", "side": "candidate"}],
        "dense_model": {"kind": "mlp", "config": {"hidden": []}},
    }
    (tmp_path / "m.json").write_text(json.dumps(described))
    more = [*words, "--model", tmp_path / "m.json", "--store", tmp_path / "models"]
    command = [sys.executable, "-m", "serving.cli", "import", *map(str, more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        peak = peak_of(process)
        printed = process.stdout.read() if process.stdout is not None else ""
    assert process.returncode == 0, printed
    (files,) = Snapshot.open(tmp_path / "models/m/1", verify=False).manifest.tables
    assert files.num_keys == {"dynamicemb": ROWS, "numpy": None, "torchrec": ROWS - 1}[kind]
    assert peak <= MAX_BYTES, f"{peak / 2**20:.0f} MiB"
