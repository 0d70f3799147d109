"""Where a load test ran, and with what."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from loadtest.load.result import Machine

LIBRARIES = ("shardrank", "uvloop", "httptools", "grpcio", "hdrhistogram")


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(
        name=platform.node() or "unnamed",
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
    )


def versions() -> dict[str, str]:
    """Of Python and of the libraries that the generator sends with."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **found}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
