"""`python -m shardrank_testing.process_state ...`: prints what it was started with, and stays until a signal."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import numpy as np
from prometheus_client import values

# 32 and 33: libc catches them once a process has begun a thread.
LIBC_SIGNALS = 0b11 << 31


def state() -> dict[str, object]:
    """What has to be the same in a process that was forked and in one that was run by exec."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "arguments": sys.argv[1:],
        "command": Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().split(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "first_path": sys.path[0],
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgrp()],
        "signals": {name: int(status[name], 16) & ~LIBC_SIGNALS for name in ("SigBlk", "SigIgn", "SigCgt")},
        "threads": threading.active_count(),
        "metric_values": values.ValueClass.__qualname__,
    }


def random_values() -> list[str]:
    """Draw from everything that draws."""
    drawn: list[object] = [random.random(), np.random.random(), secrets.token_hex(), uuid.uuid1(), uuid.uuid4()]
    return [*map(str, drawn), next(tempfile._get_candidate_names())]  # type: ignore[attr-defined]


if __name__ == "__main__":
    print(json.dumps({"state": state(), "random": random_values()}), flush=True)  # noqa: T201
    if "stay" in sys.argv:
        signal.pause()
    sys.exit(7)
