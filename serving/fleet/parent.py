"""No orphans: a child process that ends when the process that supervises it ends, however that happens."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import MutableMapping

PARENT_PID_VARIABLE = "SHARDRANK_PARENT_PID"
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def die_with_parent(environment: MutableMapping[str, str]) -> None:
    """Asks the kernel to kill this process when its supervisor dies; does nothing outside a fleet.

    The supervisor names itself in `SHARDRANK_PARENT_PID`. The child asks for itself, rather than the parent between
    fork and exec, because code in that gap can deadlock in a process with threads. The variable is taken out of the
    environment, so that a grandchild does not look for the wrong parent.

    Args:
        environment: where to look, `os.environ`.

    Raises:
        SystemExit: with code 1, if the supervisor is gone already.
    """
    parent = environment.pop(PARENT_PID_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        logger.warning("prctl(PR_SET_PDEATHSIG) failed: %s", os.strerror(ctypes.get_errno()))
    # The parent may have died before the request reached the kernel; then no signal will ever come.
    if str(os.getppid()) != parent:
        logger.error("the supervisor (process %s) is gone; not starting", parent)
        raise SystemExit(1)
