"""Spare time: how much of an event loop's time may go to work that a thread could do as well."""

from __future__ import annotations


class SpareTime:
    """A share of the time that passes, saved up to a bound and spent on work that is done where it arrives.

    Handing work to a thread and its result back costs two switches, which take longer than a small batch's rows. A loop
    that does the work itself answers sooner, but nobody else meanwhile. With this it does so while it has time to
    spare; under a load that would take more than its share, work goes to the threads, and to all cores.

    Args:
        share: of the time, within 0..1.
        saved_s: most that is saved up, in seconds: what may be spent at once after a pause.
        now: monotonic seconds.
    """

    def __init__(self, share: float, saved_s: float, now: float) -> None:
        self._share = share
        self._most_s = saved_s
        self._saved_s = saved_s
        self._as_of = now

    def is_left(self, now: float) -> bool:
        """Whether any is left at this time, in monotonic seconds."""
        self._saved_s = min(self._most_s, self._saved_s + (now - self._as_of) * self._share)
        self._as_of = now
        return self._saved_s > 0

    def spend(self, seconds: float) -> None:
        """Counts what work took. It may be more than was left: then the next has to wait for longer."""
        self._saved_s -= seconds
