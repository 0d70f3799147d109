"""The CUDA engine measured on a GPU: `python -m loadtest.gpu --json FILE [--quick]`.

`pooling`: the kernel against random reads of the same rows, logical cards and nn.EmbeddingBag. `ranking`: one request
end to end in local mode. Every answer is compared with a reference before it is timed. The file is complete
after each row, whatever ends the run. Exit code 1 if a part failed.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

import shard_node.cuda
from loadtest.gpu.pooling import measure_pooling
from loadtest.gpu.ranking import measure_ranking
from loadtest.gpu.rows import QUICK, BenchSize, Results, Row
from shard_node.cuda.card_set import DeviceChoice, open_cards

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards

PARTS = ("pooling", "ranking")
PACKAGES = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "triton")
NVIDIA_SMI = "name,driver_version,memory.total,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def open_device(device: str, num_cards: int) -> Cards:
    """Open logical cards on a device."""
    cards = open_cards(DeviceChoice.parse(device), num_cards)
    if cards is None:
        raise click.UsageError(f"--device {device}: the bench needs a CUDA device, such as cuda:0")
    return cards


def describe(cards: Cards) -> Row:
    """Return what a reader needs to judge the figures, or to measure again."""
    machine: Row = {
        "cards": cards.name,
        "peer_access": cards.peer_access,
        "python": platform.python_version(),
        "packages": {each.name: each.version for each in metadata.distributions() if each.name in PACKAGES},
        "kernels_sha256": hashlib.sha256(Path(shard_node.cuda.__path__[0], "kernels.cu").read_bytes()).hexdigest(),
    }
    if cards.cards[0].torch_device.type == "cuda":
        machine["device"] = str(torch.cuda.get_device_properties(cards.cards[0].torch_device))
        machine["nvidia_smi"] = subprocess.getoutput(f"nvidia-smi --query-gpu={NVIDIA_SMI} --format=csv")
    return machine


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here.")
@click.option("--quick", is_flag=True, help="2 GB of rows and few configurations: does it work? Some 2 minutes.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only this; repeatable.")
@click.option("--device", default="cuda:0", show_default=True, help="Of all logical cards.")
@click.option("--table-gb", type=click.FloatRange(min=0.001), help="int8 GB of rows; by default 10, or 2 if quick.")
@click.option("--dim", "dims", type=click.IntRange(4, 512), multiple=True, help="Instead of 128 and 64; repeatable.")
@click.option("--hotness", type=click.IntRange(1, 1000), multiple=True, help="Rows of a bag, likewise.")
@click.option("--batch", "batches", type=click.IntRange(1, 1 << 20), multiple=True, help="Bags of a launch, likewise.")
def main(
    json_path: Path | None, quick: bool, parts: tuple[str, ...], device: str, table_gb: float | None, **sizes: Any
) -> None:
    """Run the bench."""
    chosen: dict[str, Any] = {name: value for name, value in sizes.items() if value}
    if table_gb is not None:
        chosen["table_bytes"] = int(table_gb * 1e9)
    size = replace(QUICK if quick else BenchSize(), **chosen)
    head: Row = {
        "benchmark": "gpu",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "loadtest.gpu", *sys.argv[1:]]),
        "machine": describe(open_device(device, 1)),
    }
    results = Results(json_path, head)
    for part in parts or PARTS:
        with results.part(part):
            if part == "pooling":
                measure_pooling(results, open_device(device, 1), size)
            else:
                measure_ranking(results, partial(open_device, device), size)
    sys.exit(1 if any(status.startswith("failed") for status in results.status.values()) else 0)


if __name__ == "__main__":
    main()
