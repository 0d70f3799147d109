"""A readers-writer lock for rows: any number of threads pool, or one changes rows, never both.

The writer first waits for a moment in which nobody pools; then those who come meanwhile need not wait for the slowest
of those who are there. Only when no such moment comes within `patience_s` are new readers kept out. Readers who wait
are let in before the next writer, so neither side starves.
"""

from __future__ import annotations

import threading

DEFAULT_PATIENCE_S = 0.002


class RowLock:
    """Begin and end must be paired, by try and finally. A reader's pair takes less than a microsecond if none writes.

    Args:
        patience_s: how long a writer waits before it keeps new readers out.
    """

    def __init__(self, patience_s: float = DEFAULT_PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._mutex = threading.Lock()
        self._may_read = threading.Condition(self._mutex)
        self._may_write = threading.Condition(self._mutex)
        self._writers = threading.Lock()
        self._readers = 0
        self._waiting_readers = 0
        self._closed = False
        self._writer_waits = False
        self._writes_ended = 0

    def begin_read(self) -> None:
        """Waits until no writer keeps readers out."""
        with self._mutex:
            if not self._closed:
                self._readers += 1
                return
            self._waiting_readers += 1
            before = self._writes_ended
            try:
                while self._writes_ended == before:
                    self._may_read.wait()
            except BaseException:  # KeyboardInterrupt: whoever gives up must not be waited for
                if self._writes_ended == before:
                    self._waiting_readers -= 1
                else:
                    self._leave()
                raise

    def end_read(self) -> None:
        """Ends what `begin_read` began."""
        with self._mutex:
            # As `_leave`, without a call: nearly all readers pass here.
            self._readers -= 1
            if self._writer_waits and not self._readers:
                self._closed = True
                self._may_write.notify()

    def begin_write(self) -> None:
        """Waits until nobody else writes and nobody reads; from then on nobody does either until `end_write`."""
        self._writers.acquire()
        try:
            with self._mutex:
                if self._readers:
                    self._wait_for_readers()
                self._closed = True
        except BaseException:
            self._writers.release()
            raise

    def end_write(self) -> None:
        """Ends what `begin_write` began; readers who waited are in."""
        with self._mutex:
            self._open()
        self._writers.release()

    def _leave(self) -> None:
        self._readers -= 1
        if not self._readers and self._writer_waits:
            # Closed on the writer's behalf: until it wakes up, the moment would be over.
            self._closed = True
            self._may_write.notify()

    def _wait_for_readers(self) -> None:
        self._writer_waits = True
        try:
            if not self._may_write.wait_for(self._nobody_reads, self._patience_s):
                self._closed = True
                self._may_write.wait_for(self._nobody_reads)
        except BaseException:
            self._open()
            raise
        finally:
            self._writer_waits = False

    def _nobody_reads(self) -> bool:
        return not self._readers

    def _open(self) -> None:
        self._closed = False
        self._writes_ended += 1
        self._readers += self._waiting_readers
        self._waiting_readers = 0
        self._may_read.notify_all()
