"""The errors of load tests, comparisons and drills; what a drill finds is no error. What to change is a ConfigError."""

from __future__ import annotations

from loader.errors import ShardrankError


class LoadError(ShardrankError, kind="load"):
    """A measurement or a drill can't be run to its end: a process ended, was not ready in time, or gave other scores.

    Requests of an open loop that fail are no error but its result.
    """


class RequestFailedError(LoadError, kind="load_request"):
    """A request failed while a server was kept busy, or its answer holds no scores."""
