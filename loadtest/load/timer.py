"""A timer for an event loop that is right to some microseconds; the loop's own is right to a millisecond."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class PreciseTimer:
    """Linux's timerfd (timerfd_create(2)) as an event of the running loop.

    libuv and asyncio hand whole milliseconds to epoll, which would be added to each latency that counts from the
    intended time.

    Args:
        on_time: called when the time has come; a time that is set before that replaces the one before.

    Raises:
        OSError: no more file descriptors.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _last_error()
        self._setting = _Setting()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)

    def set(self, when: float) -> None:
        """Arms it for an absolute time of CLOCK_MONOTONIC in seconds; one that has passed comes at once."""
        # All zero would disarm it.
        whole, rest = divmod(max(int(when * 1e9), 1), 1_000_000_000)
        self._setting.value.seconds, self._setting.value.nanoseconds = whole, rest
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._setting), None):
            raise _last_error()

    def close(self) -> None:
        """Takes it out of the loop. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            # It was set anew between the event and this call.
            return
        self._on_time()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"timerfd: {os.strerror(number)}")
