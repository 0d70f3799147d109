"""The errors of load tests, comparisons and drills; what a drill finds is no error.

ShardrankError
    ConfigError                   400  of the kinds `workload`, `load_config`, `load_result`, `compare_store` and
                                       `report_comparison`: an option, a file or results to change
    LoadError                     500  a measurement can't be run to its end
        RequestFailedError        500  a request failed, or its answer is none
"""

from __future__ import annotations

from loader.errors import ShardrankError


class LoadError(ShardrankError, kind="load"):
    """A measurement can't be run to its end. Requests of an open loop that fail are no error but its result.

    `load_generator`: a process of the measurement ended by itself, or did not answer in time. `load_server`: a
    measured server did, and the message has the end of its log. `load_scores`: a server's scores are not the expected
    ones, and a figure of wrong answers says nothing. `drill`: a drill can't be run to its end.
    """


class RequestFailedError(LoadError, kind="load_request"):
    """A request failed while a server was kept busy: its cost would be that of errors.

    `workload_answer`: its answer arrived with success but holds no scores.
    """
