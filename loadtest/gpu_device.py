"""What the GPU bench ran on: device, driver, versions, and the kernels' own fingerprint."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import shard_node.cuda
from shard_node.cuda.cards import Cards

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "triton", "pydantic")
_ASKED = "name,driver_version,memory.total,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
_LIMIT_S = 20


def describe(cards: Cards) -> dict[str, Any]:
    """All that a reader needs to judge the figures, or to measure again."""
    device = cards.cards[0].torch_device
    kernels = Path(shard_node.cuda.__file__).with_name("kernels.cu")
    return {
        "cards": cards.name,
        "num_cards": len(cards.cards),
        "peer_access": cards.peer_access,
        "device": _properties(device) if device.type == "cuda" else {"name": f"emulated, {platform.machine()}"},
        "nvidia_smi": _nvidia_smi(),
        "versions": _versions(),
        "kernels_sha256": hashlib.sha256(kernels.read_bytes()).hexdigest(),
    }


def _properties(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": getattr(found, "L2_cache_size", None),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _nvidia_smi() -> dict[str, str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    lines = answer.strip().splitlines()
    return dict(zip(_ASKED.split(","), map(str.strip, lines[0].split(",")), strict=False)) if lines else None
