"""Ends what a part of the GPU bench has started, with all that it started in turn."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Waits for a process that leads a session of its own; kills the whole of it if it does not end in time.

    Returns:
        Its exit code; None if it was killed for its time.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
